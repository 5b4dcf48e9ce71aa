"""Engines stopped by SIGSTOP in the middle of copies, with leases and a store that waits for its doorbell:
what they hold runs out as it is said to, nobody else notices, and who is continued comes back by itself."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from kvtier.v1 import admin_pb2

from tests.faults.campaigns.content import compare, hashes_of
from tests.faults.campaigns.engine import PlainEngine
from tests.faults.campaigns.sleeper import BATCH, GATED
from tests.support.length import rounds
from tests.support.process import Daemon

ROUNDS = rounds(1, 12)
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
DEADLINE_S = 60.0
LEASE_TTL_S = 3.0
"""A witness that is kept from the processor for a second or two keeps its leases."""
SILENCE_S = 10.0
WITNESS_BLOCKS = 64
KINDS = (
    "until its leases expire",
    "until its session ends",
    "until its session ends, then killed",
    "and killed",
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(ROUNDS * 60 + 300)]


class Sleeper:
    """A child that is stopped."""

    def __init__(self, socket: Path, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.campaigns.sleeper", str(socket), name],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started = 0
        self.stored: list[int] = []
        self.refused: list[str] = []
        self.epochs: list[int] = []
        """Of each turn."""
        self.compared = self.wrong = self.holds = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith("\n"):  # killed in the middle of it
                return
            what, *rest = line.split()
            match what:
                case "STARTED":
                    self.started += 1
                case "STORED":
                    self.stored.append(int(rest[0]))
                case "REFUSED":
                    self.refused.append(rest[0])
                case "TURN":
                    self.compared, self.wrong, self.holds = (int(number) for number in rest[1:])
                    self.epochs.append(int(rest[0]))

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, f"{self.name} has ended by itself; {what}"
            assert time.monotonic() < deadline_s, f"{self.name}: still not: {what}"
            time.sleep(0.0005)

    def stop(self, chance: random.Random) -> None:
        """In the middle of a turn, with a part STARTED a moment ago."""
        self.until(lambda: self.holds, "it has stored, and holds a lease")
        seen = self.started
        self.until(lambda: self.started > seen, "a part of its is being copied")
        time.sleep(chance.random() * 0.004)
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        ended = self.process.poll()
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert ended in (None, -signal.SIGKILL), f"{self.name} has ended by itself"


class Witness:
    """Somebody else, whose loads have to work all the time."""

    def __init__(self, engine: PlainEngine, count: Counter[str]) -> None:
        self._engine = engine
        self._count = count
        self._own = hashes_of("witness", WITNESS_BLOCKS)
        engine.wait_ready()
        ids = list(range(WITNESS_BLOCKS))
        engine.fill(ids, self._own)
        assert engine.store(self._own, ids).wait(DEADLINE_S).done

    def load(self, hashes: list[bytes], complete: bool) -> None:
        """Loads what is found, compares every byte; `complete`: all of it must be found."""
        found = self._engine.lookup(hashes, lease=True)
        self._count["lost_blocks"] += len(hashes) - found.hits if complete else 0
        assert not complete or found.hits == len(hashes), f"{len(hashes) - found.hits} blocks are lost"
        if not found.hits:
            return
        into = list(range(found.hits))
        self._engine.wipe(into)
        assert self._engine.load(found, into).wait(DEADLINE_S).done
        compare(self._engine.read(into), hashes[: found.hits], self._count)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Goes on loading meanwhile."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"still not: {what}"
            self.load(self._own, complete=True)
            time.sleep(0.05)

    def check(self, sleeper: Sleeper) -> None:
        """What it has seen DONE is there, and what may be there is right."""
        for turn in sleeper.stored[-2:]:
            self.load(hashes_of(sleeper.name, BATCH, first=turn * BATCH), complete=True)
        last = max(sleeper.stored, default=0) + 1
        self.load(hashes_of(sleeper.name, BATCH, first=last * BATCH), complete=False)
        self.load(hashes_of(f"{sleeper.name}-gated", GATED, first=last * GATED), complete=False)


def seen(daemon: Daemon, name: str) -> admin_pb2.InstanceStatus | None:
    """An instance as Status tells it."""
    found = [instance for instance in daemon.status().instances if instance.instance == name]
    return found[0] if found else None


def gone(daemon: Daemon, name: str) -> bool:
    return seen(daemon, name) is None


def held(daemon: Daemon, name: str) -> int:
    instance = seen(daemon, name)
    return 0 if instance is None else instance.leased_blocks


def test_what_a_stopped_engine_holds_runs_out_and_it_comes_back_by_itself(
    start: Callable[..., Daemon],
    monkeypatch: pytest.MonkeyPatch,
    proved: Callable[[str], None],
    count: Counter[str],
) -> None:
    print(f"KVTIER_SEED={SEED}, {ROUNDS} rounds")
    chance = random.Random(SEED)
    monkeypatch.setenv("KVTIER_TEST_WORKER_FAULT", "slow-copy:3")  # so that a stop meets a part being copied
    daemon = start(
        pool__size="514MiB",
        limits__lease_ttl_s=LEASE_TTL_S,
        server__session_silence_s=SILENCE_S,
        server__heartbeat_interval_s=0.2,
    )
    with PlainEngine(daemon.socket, "witness", num_blocks=WITNESS_BLOCKS) as engine:
        witness = Witness(engine, count)
        for number in range(ROUNDS):
            sleepers = [Sleeper(daemon.socket, f"sleeper-{number}-{kind}") for kind in range(len(KINDS))]
            try:
                one_round(daemon, witness, sleepers, chance, count)
            finally:
                for sleeper in sleepers:
                    sleeper.kill()
            witness.until(lambda: len(daemon.status().instances) == 1, "the others are gone")
            for sleeper in sleepers:
                witness.check(sleeper)
                count["blocks_compared"] += sleeper.compared
                count["wrong_bytes"] += sleeper.wrong
                assert not sleeper.wrong
    status = daemon.status()
    assert (status.leases, status.transfers_active, status.blocks.writing) == (0, 0, 0)
    assert status.counters.integrity_failures == 0
    assert daemon.stop() == 0
    proved(
        f"{count['client_stops']} engines stopped in the middle of copies, with leases and a gated store:"
        " leases expired, sessions ended, who was continued came back by itself;"
        f" {count['blocks_compared']} blocks compared, {count['wrong_bytes']} wrong bytes"
        f" (KVTIER_SEED={SEED})"
    )


def one_round(
    daemon: Daemon, witness: Witness, sleepers: list[Sleeper], chance: random.Random, count: Counter[str]
) -> None:
    """Four of them, stopped one after another; together they wait for what has to come."""
    lease, silent, silent_killed, killed = sleepers
    for sleeper in sleepers:
        sleeper.stop(chance)
        count["client_stops"] += 1
    before = [len(sleeper.epochs) for sleeper in sleepers]
    killed.kill()

    witness.until(lambda: not held(daemon, lease.name), "its leases have expired")
    instance = seen(daemon, lease.name)
    assert instance is not None, "its session is over before its time"
    lease.go_on()
    lease.until(lambda: len(lease.epochs) > before[0] + 1, "it goes on")
    assert lease.epochs[-1] == lease.epochs[0] == instance.epoch, "it has lost more than its leases"
    assert set(lease.refused) <= {"LEASE_EXPIRED", "UNKNOWN_LEASE"}
    assert lease.refused, "a lease that has expired is worth something"

    for sleeper in (silent, silent_killed, killed):
        witness.until(partial(gone, daemon, sleeper.name), "its session has ended")
    silent_killed.kill()
    silent.go_on()
    silent.until(lambda: len(silent.epochs) > before[1] + 2, "it has come back")
    assert silent.epochs[-1] != silent.epochs[0], "a new epoch"
    instance = seen(daemon, silent.name)
    assert instance is not None
    assert instance.epoch == silent.epochs[-1]
