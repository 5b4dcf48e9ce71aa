"""A daemon with disks, one after another in one place, and a client that knows what has to be on them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.faults.campaigns.content import compare, hashes_of
from tests.faults.campaigns.engine import PlainEngine
from tests.faults.campaigns.place import Place
from tests.support.process import DEADLINE_S, Daemon

BATCH = 32
"""Blocks, 512 KiB."""
POOL = {"pool__size": "8MiB", "pool__extent_size": "1MiB"}
"""Room for eleven batches: most loads come from a disk."""


class Tier(Place):
    """Directories for disks, and what is to go wrong with them."""

    def __init__(self, disks: int = 1, size: str = "66MiB", **settings: object) -> None:
        """`settings` of section disk."""
        super().__init__()
        self.root = self._folder("kvt-disks-", Path("/tmp"))
        self.paths = [self.root / str(number) for number in range(disks)]
        for path in self.paths:
            path.mkdir()
        self._control = self.root / "faults.json"
        self._settings: dict[str, object] = POOL | {
            "disk__paths": ":".join(map(str, self.paths)),
            "disk__size": size,
            "disk__extent_size": "1MiB",
            "disk__write_mode": "through",
            "disk__probe_after_s": 0.3,
            "disk__start_deadline_s": DEADLINE_S,
        }
        self._settings |= {f"disk__{name}": value for name, value in settings.items()}

    def start_tier(self, *, wrap: Sequence[str] = (), **settings: Any) -> Daemon:
        """A daemon that has all of them; it may complain, because somebody is going to break something."""
        wrap = (*wrap, "env", f"KVTIER_DISK_FAULTS={self._control}")
        daemon = self.start(wrap=wrap, **(self._settings | settings))
        daemon.may_complain = True
        return daemon

    def fail(self, **faults: object) -> None:
        """From now on this goes wrong, as kvtierd.workers.disk.faults says it; nothing: nothing more."""
        fresh = self._control.with_suffix(".new")
        fresh.write_text(json.dumps(faults))
        fresh.rename(self._control)

    def slab(self, number: int = 0) -> Path:
        return self.paths[number] / "kvtier.slab"

    def lose_pool(self) -> None:
        """As a reboot of the host does."""
        (self._shm / "pool").unlink()


def until(condition: Callable[[], object], what: str) -> None:
    """As `process.until`, at longer intervals: each look at a daemon's status costs some milliseconds."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"still not: {what}"
        time.sleep(0.04)


def disks_live(daemon: Daemon) -> bool:
    return all(disk.state == "live" for disk in daemon.status().disks)


def wait_live(daemon: Daemon) -> None:
    until(lambda: disks_live(daemon), "all disks are live")


def disk_workers(daemon: Daemon) -> list[int]:
    """Pids of those that live."""
    workers = daemon.status().workers
    return [worker.pid for worker in workers if worker.device.startswith("disk-") and worker.state == "live"]


def on_disks(daemon: Daemon) -> int:
    """Blocks that can be read from a disk."""
    return sum(disk.blocks for disk in daemon.status().disks)


def being_written(daemon: Daemon) -> int:
    """Bytes on their way to a disk."""
    return sum(disk.writing_bytes for disk in daemon.status().disks)


def signal_if_there(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class Owner:
    """An engine that stores batches, and what it knows of them. It outlives daemons."""

    def __init__(self, engine: PlainEngine, count: Counter[str]) -> None:
        self.engine = engine
        self.count = count
        self.settled: list[list[bytes]] = []
        """Batches seen on a disk, which has room for all there are: none of them may ever be lost."""
        self.others: list[list[bytes]] = []
        """Batches that may be there."""
        self._batches = 0

    def next_batch(self) -> list[bytes]:
        self._batches += 1
        return hashes_of(f"batch-{self._batches}", BATCH)

    def settle(self, daemon: Daemon) -> list[bytes]:
        """Stores a batch, and returns when a disk has all of it."""
        hashes = self.next_batch()
        before = on_disks(daemon)
        self.engine.fill(list(range(BATCH)), hashes)
        assert self.engine.store(hashes, range(BATCH)).wait(DEADLINE_S).done
        # What is on its way there may be somebody else's as well.
        until(
            lambda: on_disks(daemon) >= before + BATCH and not being_written(daemon),
            "the batch is on the disks",
        )
        self.settled.append(hashes)
        return hashes

    def load(self, hashes: list[bytes], *, complete: bool) -> int:
        """Loads what is found, compares every byte. `complete`: all of it has to come, with as many lookups
        as that takes."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            found = self.engine.lookup(hashes, lease=True)
            if found.hits == len(hashes) or not complete:
                break
            found.release()
            if time.monotonic() > deadline_s:
                self.count["lost_blocks"] += len(hashes) - found.hits
                raise AssertionError(f"{len(hashes) - found.hits} blocks that were on a disk are lost")
            time.sleep(0.01)
        self.count["lost_blocks"] += 0
        if not found.hits or found.lease is None:
            return 0
        into = list(range(2 * BATCH, 2 * BATCH + found.hits))
        self.engine.wipe(into)
        outcome = self.engine.client.load(found, into).wait(DEADLINE_S)
        assert outcome.fenced, outcome
        if complete:
            assert outcome.done, outcome
        if outcome.done:
            compare(self.engine.read(into), hashes[: found.hits], self.count)
        return found.hits if outcome.done else 0


def owner_engine(socket: Path, name: str = "owner") -> PlainEngine:
    return PlainEngine(socket, name, num_blocks=4 * BATCH)
