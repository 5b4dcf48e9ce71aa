"""kill -9 of a plain client, again and again, each time with a part of its being copied."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.campaigns.content import compare, hashes_of
from tests.faults.campaigns.engine import PlainEngine
from tests.support.length import rounds
from tests.support.process import Daemon, readable

KILLS = rounds(12, 220)
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
RELEASE_S = 1.0
"""The promise: session, leases and mapping of a dead client are gone within a second."""
SLACK = 5
START_S = 60.0
WITNESS_BLOCKS = 128
BATCH = 64

pytestmark = [pytest.mark.faults, pytest.mark.timeout(KILLS * 15 + 60)]


class Victim:
    """A child that stores and loads, until it is killed."""

    def __init__(self, socket: Path, number: int) -> None:
        self.family = f"victim-{number}"
        command = [
            sys.executable,
            "-m",
            "tests.faults.campaigns.victim",
            str(socket),
            self.family,
            self.family,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.stored: list[bytes] = []
        self.started_parts = 0

    def run(self, parts: int) -> None:
        """Until this many reports of a STARTED part have come, the last of them just now."""
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + START_S
        while self.started_parts < parts:
            ready = readable(self.process.stdout.fileno(), deadline_s - time.monotonic())
            line = self.process.stdout.readline().split() if ready else []
            assert line, f"the victim ended early or hung: {self.process.poll()}"
            if line[0] == "STARTED":
                self.started_parts += 1
            else:
                self.stored += hashes_of(self.family, BATCH, first=int(line[1]) * BATCH)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(START_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def seconds_until_forgotten(daemon: Daemon, before: dict[str, float]) -> float:
    """Time until nothing of the victim is left in the metrics."""
    killed_s = time.monotonic()
    watched = ("kvtier_sessions", "kvtier_leases", "kvtier_leased_blocks", "kvtier_transfers_active")
    while True:
        now = daemon.metrics()
        left = {
            name: value
            for name, value in now.items()
            if name.startswith(("kvtier_client_mapped_bytes", *watched)) and value > before.get(name, 0)
        }
        elapsed_s = time.monotonic() - killed_s
        if not left:
            return elapsed_s
        assert elapsed_s < RELEASE_S * SLACK, (
            f"{elapsed_s:.1f} s after its death the client still holds {left}"
        )
        time.sleep(0.01)


def test_a_killed_client_is_forgotten_and_nobody_else_is_harmed(
    start: Callable[..., Daemon],
    monkeypatch: pytest.MonkeyPatch,
    proved: Callable[[str], None],
    count: Counter[str],
) -> None:
    print(f"KVTIER_SEED={SEED}, {KILLS} kills")
    chance = random.Random(SEED)
    monkeypatch.setenv("KVTIER_TEST_WORKER_FAULT", "slow-copy:3")  # so that a kill meets a part being copied
    daemon = start(pool__size="192MiB")
    checked = 0
    slowest_s = 0.0
    with PlainEngine(daemon.socket, "witness", num_blocks=2 * WITNESS_BLOCKS) as witness:
        witness.wait_ready()
        own = hashes_of("witness", WITNESS_BLOCKS)
        ids = list(range(WITNESS_BLOCKS))
        witness.fill(ids, own)
        assert witness.store(own, ids).wait(START_S).done
        targets = list(range(WITNESS_BLOCKS, 2 * WITNESS_BLOCKS))

        def load(hashes: list[bytes]) -> int:
            """Loads what is found of these, checks every byte; returns how many there were."""
            found = witness.lookup(hashes, lease=True)
            if not found.hits:
                return 0
            into = targets[: found.hits]
            witness.wipe(into)
            outcome = witness.load(found, into).wait(START_S)
            assert outcome.done, outcome
            compare(witness.read(into), hashes[: found.hits], count)
            return int(found.hits)

        before = daemon.metrics()
        for number in range(KILLS):
            victim = Victim(daemon.socket, number)
            try:
                victim.run(parts=chance.randrange(1, 6))
                time.sleep(chance.random() * 0.003)
            finally:
                victim.kill()
            count["client_kills"] += 1
            slowest_s = max(slowest_s, seconds_until_forgotten(daemon, before))
            stored = victim.stored[-BATCH:]
            assert load(stored) == len(stored), "blocks whose store was DONE are gone"
            unfinished = hashes_of(victim.family, BATCH, first=len(victim.stored))
            checked += len(stored) + load(unfinished)
            assert load(own[: len(targets)]) == len(targets), "the witness lost blocks"
    status = daemon.status()
    assert status.counters.integrity_failures == 0
    assert status.counters.ended_epochs >= KILLS
    assert daemon.stop() == 0
    proved(
        f"{KILLS} clients were killed with -9 while a part of theirs was being copied: each was forgotten"
        f" within {slowest_s:.2f} s, {checked} of their blocks and all of a bystander's were loaded,"
        f" 0 wrong bytes (KVTIER_SEED={SEED})"
    )
