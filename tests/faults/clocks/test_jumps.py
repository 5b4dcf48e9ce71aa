"""Daemons whose clocks jump: the wall clock at every reading, the monotonic one by hours, and one that stands
still because the daemon was stopped. Clients lose nothing that they keep, and read nothing wrong."""

import ast
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest
from kvtier import Doorbell, Lookup, Reason

from tests.faults.campaigns.content import compare, hashes_of
from tests.faults.campaigns.engine import PlainEngine
from tests.support.length import rounds
from tests.support.process import DEADLINE_S, Daemon, until

ROUNDS = rounds(4, 60)
STOPS = rounds(1, 12)
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
REPO = Path(__file__).resolve().parents[3]
JUMPING = Path(__file__).parent / "jumping"
BATCH = 32
LEASE_TTL_S = 4.0
SILENCE_S = 5.0
"""A jump counts as a second at most: heartbeats have time to come before the next one."""
STOPPED_S = 5.5
"""Longer than everything that ends by silence."""
DAY_S = 86_400.0
SETTINGS = {
    "limits__lease_ttl_s": LEASE_TTL_S,
    "server__session_silence_s": SILENCE_S,
    "server__heartbeat_interval_s": 0.2,
    "pool__size": "258MiB",
}

pytestmark = [pytest.mark.faults, pytest.mark.timeout(STOPS * 30 + 300)]


class Keeper:
    """A client that holds a lease and a gated store over whatever happens to its daemon."""

    def __init__(self, engine: PlainEngine, count: Counter[str]) -> None:
        self.engine = engine
        self._count = count
        self._turns = 0
        self._known: list[list[bytes]] = []
        engine.wait_ready()

    @property
    def epoch(self) -> int | None:
        return self.engine.client.status.epoch

    def over(self, disturb: Callable[[], None], *, gated: bool) -> None:
        """Holds things, has the daemon disturbed, and finds that it holds them still."""
        engine, client = self.engine, self.engine.client
        engine.wait_ready()
        self._turns += 1
        hashes = hashes_of(f"turn-{self._turns}", BATCH)
        first, second = list(range(BATCH)), list(range(BATCH, 2 * BATCH))
        engine.fill(first, hashes)
        assert engine.store(hashes, first).wait(DEADLINE_S).done
        self._known.append(hashes)
        held = engine.lookup(hashes, lease=True)
        assert held.lease is not None
        waiting = hashes_of(f"waiting-{self._turns}", BATCH)
        engine.fill(second, waiting)
        store = client.store(waiting, second, doorbell=Doorbell(0, self._turns)) if gated else None
        epoch = self.epoch

        disturb()
        engine.wait_ready()
        assert self.epoch == epoch, "its session has ended"
        if store is not None:
            client.ring(0, self._turns)
            assert store.wait(DEADLINE_S).fenced
            if store.outcome.done:
                self._known.append(waiting)
        self.load(held, hashes)

    def load(self, held: Lookup, hashes: list[bytes]) -> None:
        into = list(range(2 * BATCH, 2 * BATCH + held.hits))
        self.engine.wipe(into)
        outcome = self.engine.load(held, into).wait(DEADLINE_S)
        assert outcome.done, f"a lease that was kept is worth nothing: {outcome}"
        compare(self.engine.read(into), hashes[: held.hits], self._count)

    def check(self) -> None:
        """Every block that it has seen DONE."""
        self.engine.wait_ready()
        for hashes in self._known:
            held = self.engine.lookup(hashes, lease=True)
            self._count["lost_blocks"] += len(hashes) - held.hits
            assert held.hits == len(hashes)
            self.load(held, hashes)


@pytest.fixture
def offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Daemons that are started from now on have jumping clocks; `offset(s)` sets the monotonic one, which
    only ever goes on, as the kernel's does."""
    file = tmp_path / "clock"
    file.write_text("0")
    monkeypatch.setenv("KVTIER_TEST_CLOCK", str(file))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(JUMPING), os.environ.get("PYTHONPATH", "")]))

    def jump_to(seconds: float) -> None:
        half = file.with_suffix(".new")
        half.write_text(str(seconds))
        half.rename(file)

    return jump_to


def reads_the_clock(daemon: Daemon) -> bool:
    """Whether a daemon has the jumping clocks: the times in its log are wrong."""
    lines = [json.loads(line) for line in daemon.log().splitlines() if line.startswith("{")]
    times_s = [datetime.fromisoformat(line["time"]).timestamp() for line in lines]
    return max(abs(said_s - time.time()) for said_s in times_s) > DAY_S


def test_jumping_clocks_end_nothing_that_is_kept_and_lose_nothing_over_a_kill(
    start: Callable[..., Daemon],
    offset: Callable[[float], None],
    proved: Callable[[str], None],
    count: Counter[str],
) -> None:
    print(f"KVTIER_SEED={SEED}")
    chance = random.Random(SEED)
    daemon = start(**SETTINGS)
    assert reads_the_clock(daemon)
    now_s = 0.0

    def jump() -> None:
        nonlocal now_s
        now_s += chance.uniform(0.1, 10) * 3_600
        offset(now_s)
        count["clock_jumps"] += 1
        time.sleep(chance.uniform(0.3, 0.6))

    with PlainEngine(daemon.socket, "keeper", num_blocks=3 * BATCH) as engine:
        keeper = Keeper(engine, count)
        for number in range(ROUNDS):
            keeper.over(jump, gated=False)
            if number == ROUNDS // 2:
                assert daemon.status().counters.expired_leases == 0
                daemon.kill()
                daemon = start(**SETTINGS)
                assert daemon.status().pool.start == "warm"
        keeper.check()
        # What is not kept ends all the same.
        held = engine.lookup(hashes_of("turn-1", BATCH), lease=True)
        assert held.lease is not None
    until(lambda: not daemon.status().instances, "its session has ended with it")
    assert daemon.status().counters.integrity_failures == 0
    assert daemon.stop() == 0
    proved(
        f"{count['clock_jumps']} jumps of the daemon's clocks by hours, its wall clock off by decades at each"
        f" reading: no lease and no session ended, {count['blocks_compared']} blocks compared,"
        f" {count['wrong_bytes']} wrong bytes (KVTIER_SEED={SEED})"
    )


def test_a_daemon_stopped_for_longer_than_every_deadline_has_ended_nothing_when_it_goes_on(
    start: Callable[..., Daemon], count: Counter[str]
) -> None:
    chance = random.Random(SEED)
    daemon = start(**SETTINGS)

    def stop() -> None:
        [worker] = daemon.status().workers
        pids = [daemon.pid, worker.pid] if chance.random() < 0.5 else [daemon.pid]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        count["daemon_stops"] += 1
        time.sleep(STOPPED_S + chance.random())
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    with (
        PlainEngine(daemon.socket, "keeper", num_blocks=3 * BATCH) as engine,
        PlainEngine(daemon.socket, "other", num_blocks=3 * BATCH) as other,
    ):
        keeper, bystander = Keeper(engine, count), Keeper(other, count)
        other_epoch = bystander.epoch
        for _ in range(STOPS):
            keeper.over(stop, gated=True)
        other.wait_ready()
        assert bystander.epoch == other_epoch
        assert daemon.status().counters.expired_leases == 0
        for one in (keeper, bystander):
            one.over(lambda: None, gated=True)
            one.check()
        # It lives on as it should: who is silent now is ended in time.
        held = engine.lookup(hashes_of("turn-1", BATCH), lease=True)
        assert held.lease is not None
        epoch = keeper.epoch
    until(lambda: not daemon.status().instances, "both are gone")
    with PlainEngine(daemon.socket, "keeper", num_blocks=3 * BATCH) as engine:
        engine.wait_ready()
        assert engine.client.status.epoch != epoch
        outcome = engine.client.load(held, range(BATCH)).wait(DEADLINE_S)
        assert outcome.refused
        assert outcome.error is not None
        assert outcome.error.reason in (Reason.UNKNOWN_LEASE, Reason.LEASE_EXPIRED)
    assert daemon.status().counters.integrity_failures == 0
    assert daemon.stop() == 0


WALL = {("time", name) for name in ("time", "time_ns", "ctime", "CLOCK_REALTIME")}
WALL |= {("datetime", name) for name in ("now", "utcnow", "today")} | {("date", "today")}


def wall_clock_readings(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (owner, node.attr) in WALL:
                yield f"{source.relative_to(REPO)}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (
                f"{source.relative_to(REPO)}:{node.lineno}"
                for name in node.names
                if ("time", name.name) in WALL
            )


READ_IT = {
    "clients/kvtier_engine/weights.py": 1,
    "daemon/kvtierd/events/serving.py": 1,
    "daemon/kvtierd/tiers/store/collector.py": 1,
    "daemon/kvtierd/tiers/store/mooncake_names.py": 1,
    "daemon/kvtierd/tiers/store/packed.py": 1,
}
"""How often each of these reads the wall clock: file systems take the times of changes from it, routers are
told by it when something happened, and hosts that share a store have no other clock in common, by which to
name what they put there and to see how old that is."""


def test_nothing_of_ours_reads_the_wall_clock() -> None:
    """But for the time stamps of log lines, which Python's logging makes, the age of files, and the names of
    packs."""
    sources = [
        *(REPO / "daemon").rglob("*.py"),
        *(REPO / "clients").rglob("*.py"),
        *(REPO / "kernels").rglob("*.py"),
    ]
    assert len(sources) > 100
    found = Counter(at.split(":")[0] for source in sources for at in wall_clock_readings(source))
    assert found == READ_IT
    native = [file for kind in ("cpp", "hpp", "h", "cc") for file in (REPO / "kernels").rglob(f"*.{kind}")]
    assert native
    for file in native:
        text = file.read_text()
        assert not any(
            word in text for word in ("system_clock", "CLOCK_REALTIME", "gettimeofday", "std::time(")
        )
