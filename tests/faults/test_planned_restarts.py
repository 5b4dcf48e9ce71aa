"""Upgrade after upgrade under clients that never stop: drained for a restart, and now and then kill -9."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import grpc
import pytest
from kvtier import Transfer
from kvtier.v1 import admin_pb2, admin_pb2_grpc

from tests.faults.campaigns.content import compare, hashes_of
from tests.faults.campaigns.engine import PlainEngine
from tests.support.process import DEADLINE_S, Daemon

RESTARTS = 100 if os.environ.get("KVTIER_FAULTS_LONG") == "1" else 6
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
KILLED = 0.3
"""The share of restarts that nobody planned."""
LOOPERS = 2
BATCH = 16
STORES_PER_LIFE = 12
"""Of one client while one daemon lives: the pool has room for all, so that none is evicted."""
POOL_SIZE = f"{64 + RESTARTS * LOOPERS * (STORES_PER_LIFE + 1) * BATCH // 64 * 5 // 4}MiB"

pytestmark = [pytest.mark.faults, pytest.mark.timeout(RESTARTS * 20 + 60)]


class Looper:
    """A client that stores and loads for ever; what it does not get, it goes on without."""

    def __init__(self, daemon: Daemon, number: int, seed: int, count: Counter[str]) -> None:
        self._engine = PlainEngine(daemon.socket, f"looper-{number}", num_blocks=2 * BATCH)
        self._name = f"looper-{number}"
        self._chance = random.Random(seed)
        self._count = count
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self._name)
        self._batches = 0
        self.stores_left = STORES_PER_LIFE
        self.done: list[list[bytes]] = []
        """Batches whose DONE it has seen; only ever appended to."""
        self.error: BaseException | None = None
        self.outcomes: Counter[str] = Counter()
        self._engine.wait_ready()
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if self.stores_left and self._chance.random() < 0.5:
                    self._store()
                elif self.done:
                    self._load(self._chance.choice(self.done))
                time.sleep(self._chance.random() * 0.01)
        except BaseException as error:
            self.error = error

    def _ended(self, what: str, transfer: Transfer) -> bool:
        outcome = transfer.wait(DEADLINE_S)
        assert outcome.fenced, f"{what}: after {DEADLINE_S:g} s it is not over: {outcome}"
        self.outcomes[f"{what} done" if outcome.done else f"{what} missed"] += 1
        return bool(outcome.done)

    def _store(self) -> None:
        self._batches += 1
        hashes = hashes_of(f"{self._name}/{self._batches}", BATCH)
        self._engine.fill(list(range(BATCH)), hashes)
        if self._ended("store", self._engine.client.store(hashes, range(BATCH))):
            self.stores_left -= 1
            self.done.append(hashes)

    def _load(self, hashes: list[bytes]) -> None:
        found = self._engine.client.lookup(hashes, lease=True, timeout_s=1)
        if not found.hits:
            self.outcomes["lookup missed"] += 1
            return
        into = list(range(BATCH, BATCH + found.hits))
        self._engine.wipe(into)
        if self._ended("load", self._engine.client.load(found, into)):
            compare(self._engine.read(into), hashes[: found.hits], self._count)

    def check(self, batches: list[list[bytes]]) -> None:
        """Every block of them is found and right. Only while it does not run."""
        into = list(range(BATCH))
        for hashes in batches:
            found = self._engine.client.lookup(hashes, lease=True, timeout_s=DEADLINE_S)
            self._count["lost_blocks"] += BATCH - found.hits
            assert found.hits == BATCH, f"{BATCH - found.hits} blocks seen DONE are lost"
            self._engine.wipe(into)
            outcome = self._engine.client.load(found, into).wait(DEADLINE_S)
            assert outcome.done, outcome
            compare(self._engine.read(into), hashes, self._count)

    def wait_ready(self) -> None:
        self._engine.wait_ready()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2 * DEADLINE_S)
        assert not self._thread.is_alive(), "it hangs"

    def close(self) -> None:
        self._engine.close()


def drain_for_restart(daemon: Daemon) -> int:
    """Returns how many blocks it says are kept."""
    request = admin_pb2.DrainRequest(for_restart=True, timeout_ms=int(DEADLINE_S * 1000))
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        *_, last = admin_pb2_grpc.AdminStub(channel).Drain(request, timeout=2 * DEADLINE_S)
    assert (last.state, last.transfers_active) == ("stopping", 0)
    assert daemon.wait() == 0
    return int(last.kept_blocks)


def drain_by_hand(daemon: Daemon) -> int:
    """The same, as an operator does it."""
    command = [sys.executable, "-m", "kvtierd.ctl", "drain", f"--socket={daemon.socket}", "--for-restart"]
    said = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False
    )
    assert said.returncode == 0, said.stderr
    assert daemon.wait() == 0
    progress = json.loads(said.stdout)
    assert (progress["state"], progress["transfers_active"]) == ("stopping", 0)
    return int(progress["kept_blocks"])


def test_no_upgrade_loses_a_block_or_fails_a_request(
    start: Callable[..., Daemon], proved: Callable[[str], None], count: Counter[str]
) -> None:
    print(f"KVTIER_SEED={SEED}, {RESTARTS} restarts")
    chance = random.Random(SEED)
    settings = {"pool__size": POOL_SIZE, "pool__extent_size": "4MiB"}
    daemon = start(**settings)
    loopers = [Looper(daemon, number, chance.randrange(1 << 30), count) for number in range(LOOPERS)]
    try:
        unplanned = chance.sample(range(RESTARTS), round(RESTARTS * KILLED))
        for number in range(RESTARTS):
            time.sleep(0.05 + chance.random() * 0.3)
            if number in unplanned:
                seen = [len(looper.done) for looper in loopers]
                daemon.kill()
                count["daemon_kills"] += 1
                daemon = start(**settings)
                assert daemon.status().pool.recovered_blocks >= BATCH * sum(seen)
            else:
                kept = drain_for_restart(daemon) if count["planned_restarts"] else drain_by_hand(daemon)
                count["planned_restarts"] += 1
                daemon = start(**settings)
                pool = daemon.status().pool
                assert pool.recovered_blocks == kept
                assert (pool.discarded_slots, pool.quarantined_slots) == (0, 0), "nothing was under way"
            for looper in loopers:
                looper.wait_ready()
                looper.stores_left = STORES_PER_LIFE
            assert [looper.error for looper in loopers] == [None] * LOOPERS
    finally:
        for looper in loopers:
            looper.stop()
    try:
        assert [looper.error for looper in loopers] == [None] * LOOPERS
        for looper in loopers:
            looper.check(looper.done)
    finally:
        for looper in loopers:
            looper.close()
    assert daemon.status().counters.integrity_failures == 0
    assert daemon.stop() == 0
    done = BATCH * sum(len(looper.done) for looper in loopers)
    outcomes = sum((looper.outcomes for looper in loopers), Counter())
    assert count["planned_restarts"] > count["daemon_kills"] > 0
    assert outcomes["load done"]
    proved(
        f"{count['planned_restarts']} planned restarts and {count['daemon_kills']} kills -9 under {LOOPERS}"
        f" clients that went on: all {done} blocks seen DONE were found again, {count['blocks_compared']}"
        f" compared, {count['wrong_bytes']} wrong bytes; {dict(outcomes)} (KVTIER_SEED={SEED})"
    )
