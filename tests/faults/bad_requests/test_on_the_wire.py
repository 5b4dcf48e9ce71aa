"""Damaged messages to a real daemon, by every way in: each is refused with a reason or ends only its own
session, a bystander is served, and nothing is left of them."""

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.bad_requests.attackers import MESSAGE_BYTES_MAX, Attacker, SideAttacker, flood
from tests.faults.campaigns.content import compare, hashes_of
from tests.faults.campaigns.engine import PlainEngine
from tests.support.length import rounds
from tests.support.process import Daemon, until

REQUESTS = rounds(1_000, 20_000)
PACKETS = rounds(200, 4_000)
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
DEADLINE_S = 60.0
BLOCKS = 64
UNARY, STREAM, HELLOS, SIDE = 160, 8, 4, 6
"""Of one round: calls, messages on each of as many streams, streams with a bad Hello, side connections."""

WARM_ROUNDS = 3
GROWTH_BYTES_MAX = 16 << 20
"""Of the front's own memory in all rounds after these: a kilobyte kept of each request would be more."""
SETTINGS = {
    "server__message_bytes_max": MESSAGE_BYTES_MAX,
    "limits__lookup_hashes_max": 1024,
    "limits__transfer_blocks_max": 256,
    "limits__gate_deadline_s": 0.5,
}
"""Messages and gates are soon too large and too late."""

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300 + REQUESTS // 10)]


def open_files(pid: int) -> Counter[str]:
    """What a process has open, by kind."""
    kinds: Counter[str] = Counter()
    for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
        try:
            kinds[os.readlink(entry).split(":")[0]] += 1
        except FileNotFoundError:
            pass
    return kinds


def resident_bytes(pid: int) -> int:
    """Memory of its own that a process uses."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "RssAnon" in line]
    return int(line.split()[1]) << 10


def mapped(pid: int) -> int:
    """Mappings of clients' memory."""
    return sum("kvtier-test-client" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


class Bystander:
    """A plain engine whose blocks have to stay what they are."""

    def __init__(self, engine: PlainEngine, count: Counter[str]) -> None:
        self._engine = engine
        self._count = count
        self._known = hashes_of("bystander", BLOCKS)
        engine.wait_ready()
        engine.fill(list(range(BLOCKS)), self._known)
        assert engine.store(self._known, range(BLOCKS)).wait(DEADLINE_S).done

    def check(self) -> None:
        engine, into = self._engine, list(range(BLOCKS))
        found = engine.lookup(self._known, lease=True)
        self._count["lost_blocks"] += BLOCKS - found.hits
        assert found.hits == BLOCKS
        engine.wipe(into)
        assert engine.load(found, into).wait(DEADLINE_S).done
        compare(engine.read(into), self._known, self._count)


def test_damaged_messages_harm_only_who_sends_them(
    start: Callable[..., Daemon], tmp_path: Path, proved: Callable[[str], None], count: Counter[str]
) -> None:
    print(f"KVTIER_SEED={SEED}, {REQUESTS} requests, {PACKETS} packets")
    chance = random.Random(SEED)
    daemon = start(**SETTINGS, disk__paths=tmp_path, disk__size="10MiB")
    [worker] = [worker for worker in daemon.status().workers if worker.device == "cpu"]
    with PlainEngine(daemon.socket, "bystander", num_blocks=BLOCKS) as engine:
        bystander = Bystander(engine, count)
        until(lambda: len(daemon.status().instances) == 1, "nobody else is there")
        before = {pid: open_files(pid) for pid in (daemon.pid, worker.pid)}
        mapped_before = mapped(worker.pid)
        number = 0
        while count["bad_requests_on_the_wire"] < REQUESTS or count["bad_packets_on_the_side"] < PACKETS:
            number += 1
            attacker = Attacker(daemon.socket, f"attacker-{number}", chance, count)
            try:
                attacker.unary(UNARY)
                for _ in range(STREAM):
                    attacker.stream(STREAM)
                for _ in range(HELLOS):
                    attacker.hello()
            finally:
                attacker.close()
            for _ in range(SIDE):
                SideAttacker(daemon.socket, chance, count).run(number=12)
            if number % 8 == 1:
                flood(daemon.side_socket)
            bystander.check()
            if number == WARM_ROUNDS:
                resident = resident_bytes(daemon.pid)
        until(lambda: len(daemon.status().instances) == 1, "all attackers are gone")
        assert [one.respawns for one in daemon.status().workers] == [0, 0], "both workers have survived"
        until(lambda: mapped(worker.pid) == mapped_before, "their memory is unmapped")
        for pid, kinds in before.items():
            until(
                lambda pid=pid, kinds=kinds: open_files(pid) <= kinds,
                f"{pid} has closed all that they opened",
            )
        grown = resident_bytes(daemon.pid) - resident
        assert grown < GROWTH_BYTES_MAX, f"{grown >> 20} MiB more than after {WARM_ROUNDS} rounds of {number}"
        bystander.check()
        status = daemon.status()
        assert (status.counters.integrity_failures, status.transfers_active) == (0, 0)
    assert daemon.stop() == 0
    proved(
        f"{count['bad_requests_on_the_wire']:,} damaged requests and {count['bad_packets_on_the_side']:,} bad"
        f" packets on the side socket were refused ({count['mutants_accepted']:,} were right after all); the"
        " daemon and its copy worker have lived and leaked nothing, a bystander was served:"
        f" {count['blocks_compared']:,} blocks compared, {count['wrong_bytes']} wrong bytes"
        f" (KVTIER_SEED={SEED})"
    )
