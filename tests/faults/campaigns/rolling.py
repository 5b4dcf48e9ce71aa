"""Clients that never stop while one daemon after another is drained for a restart, or killed."""

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier import Transfer

from tests.faults.campaigns.content import compare, hashes_of
from tests.faults.campaigns.engine import PlainEngine
from tests.support.process import DEADLINE_S, Daemon, until

LOOPERS = 2
BATCH = 16
STORES_PER_LIFE = 12
"""Of one client while one daemon lives: the pool has room for all, so that none is evicted."""
SECONDS_PER_RESTART = 20
"""For timeouts of tests."""
KVTIERCTL = Path(sys.executable).with_name("kvtierctl")

Drain = Callable[[Daemon], int]
"""Drains a daemon for a restart, waits for its end, and returns how many blocks it said are kept."""


class Looper:
    """A client that stores, looks up, loads and compares for ever; what it does not get, it goes on without.

    Its *requests* are the calls that an engine makes: a store, a lookup, a load. None of them may raise, and
    every transfer has to end, fenced, within a deadline. What may happen to them is a miss, for that is what
    an engine makes of it: a lookup finds nothing, or a transfer is reported as failed and fenced, because the
    daemon is away (`outcomes` counts these). All else is a failed request, and is in `error`: an exception, a
    transfer without an end, a wrong byte.
    """

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
            found = self._engine.lookup(hashes, lease=True)
            self._count["lost_blocks"] += BATCH - found.hits
            assert found.hits == BATCH, f"{BATCH - found.hits} blocks seen DONE are lost"
            self._engine.wipe(into)
            outcome = self._engine.load(found, into).wait(DEADLINE_S)
            assert outcome.done, outcome
            compare(self._engine.read(into), hashes, self._count)

    @property
    def has_loaded(self) -> bool:
        """Or has failed, which is told elsewhere."""
        return self.outcomes["load done"] > 0 or self.error is not None

    def wait_ready(self) -> None:
        self._engine.wait_ready()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2 * DEADLINE_S)
        assert not self._thread.is_alive(), "it hangs"

    def close(self) -> None:
        self._engine.close()


def drain_as_operators_do(daemon: Daemon) -> int:
    """`kvtierctl drain --for-restart`."""
    command = [str(KVTIERCTL), "drain", "--for-restart", f"--socket={daemon.socket}", "--json"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False)
    assert said.returncode == 0, said.stderr
    assert daemon.wait() == 0
    progress = json.loads(said.stdout)
    assert (progress["state"], progress["transfers_active"]) == ("stopping", 0)
    return int(progress["kept_blocks"])


def restart_again_and_again(
    start: Callable[..., Daemon], restarts: Sequence[Drain | None], seed: int, count: Counter[str]
) -> str:
    """Restarts the daemon once for each of `restarts`, drained as that says or (None) killed with -9, under
    LOOPERS clients. Fails if a request of theirs fails (`Looper` says what that is), if a block is lost whose
    DONE one of them had seen before, or if a byte is wrong. Returns what was proved."""
    chance = random.Random(seed)
    pool_mib = 64 + len(restarts) * LOOPERS * (STORES_PER_LIFE + 1) * BATCH // 64 * 5 // 4
    settings = {"pool__size": f"{pool_mib}MiB", "pool__extent_size": "4MiB"}
    daemon = start(**settings)
    loopers = [Looper(daemon, number, chance.randrange(1 << 30), count) for number in range(LOOPERS)]
    try:
        for drain in restarts:
            time.sleep(0.05 + chance.random() * 0.3)
            if drain is None:
                seen = [len(looper.done) for looper in loopers]
                daemon.kill()
                count["daemon_kills"] += 1
                daemon = start(**settings)
                assert daemon.status().pool.recovered_blocks >= BATCH * sum(seen)
            else:
                kept = drain(daemon)
                count["planned_restarts"] += 1
                daemon = start(**settings)
                pool = daemon.status().pool
                assert pool.recovered_blocks == kept
                assert (pool.discarded_slots, pool.quarantined_slots) == (0, 0), "nothing was under way"
            for looper in loopers:
                looper.wait_ready()
                looper.stores_left = STORES_PER_LIFE
            assert [looper.error for looper in loopers] == [None] * LOOPERS
        until(lambda: any(looper.has_loaded for looper in loopers), "one of them has loaded")
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
    assert outcomes["load done"]
    kills = sum(drain is None for drain in restarts)
    return (
        f"{len(restarts) - kills} planned restarts and {kills} kills -9 under {LOOPERS} clients that went on:"
        f" all {done} blocks seen DONE were found again, no request failed beyond a miss,"
        f" {count['blocks_compared']} blocks compared, {count['wrong_bytes']} wrong bytes; {dict(outcomes)}"
        f" (KVTIER_SEED={seed})"
    )
