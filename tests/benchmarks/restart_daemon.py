"""A real daemon killed with SIGKILL and started again on the same pool: seconds until it serves, and until a
plain client has loaded its first block.

Pools are filled through a client's stores, then daemons are killed and started on them in turns, so that no
size profits from a quiet machine. After each start every block must have been recovered, and the block loaded
must have its bytes.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvtier import Client, SharedBuffer
from kvtierd.core.blocks.slots import PoolGeometry

from tests.benchmarks.rig import DEADLINE_S, connected
from tests.support.process import Daemon

REPETITIONS = 3
ENGINE_BYTES = 64 << 20
"""The engine's cache that all blocks are stored from: the same again and again, under other hashes."""
BATCH_BLOCKS_MAX = 8_192
POLL_S = 0.001
SPARE_BYTES = 2 << 30
"""Memory left to everybody else while pools are there."""


@dataclass(frozen=True)
class Shape:
    """A pool full of blocks of one size."""

    name: str
    blocks: int
    planes: int
    fragment_bytes: int
    extent_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.planes * self.fragment_bytes

    @property
    def engine_blocks(self) -> int:
        return min(ENGINE_BYTES // self.block_bytes, BATCH_BLOCKS_MAX)

    @property
    def pool_bytes(self) -> int:
        """With no more extents than the blocks need."""
        per_extent = PoolGeometry(1, self.extent_bytes, 2 << 20).slots_per_extent(self.block_bytes)
        return (2 << 20) + max(2, -(-self.blocks // per_extent)) * self.extent_bytes


@dataclass(frozen=True)
class Started:
    """Seconds of one start, from the exec on but for `recovering_s`, which is the pool's part of it."""

    recovering_s: float
    serving_s: float
    first_hit_s: float


class Pool:
    """A pool file with the blocks of one shape in it, left behind by a killed daemon."""

    def __init__(self, shape: Shape, folder: Path, wrap: Sequence[str] = ()) -> None:
        """`wrap`: words before the daemon's command."""
        self.shape = shape
        self._wrap = wrap
        self._run = folder / "run"
        self._run.mkdir(mode=0o700)
        self._shm = Path(tempfile.mkdtemp(prefix="kvtier-test-bench-", dir="/dev/shm"))
        random = np.random.default_rng(1)
        self._hashes = random.integers(0, 256, (shape.blocks, 32), np.uint8)
        self._bytes = random.integers(0, 256, ENGINE_BYTES, np.uint8)

    def fill(self) -> None:
        """Stores everything through a client, then kills the daemon."""
        daemon = self._start()
        try:
            daemon.wait_whole()
            with self._client(daemon) as (client, memory):
                memory.array[:] = self._bytes[: len(memory.array)]
                batch = self.shape.engine_blocks
                ids = np.arange(batch)
                for first in range(0, self.shape.blocks, batch):
                    hashes = self._hashes[first : first + batch]
                    outcome = client.store(hashes, ids[: len(hashes)]).wait(DEADLINE_S)
                    if not outcome.done:
                        raise RuntimeError(f"{self.shape.name}: a store failed: {outcome}")
                daemon.kill()
        finally:
            daemon.kill()

    def start(self, turn: int) -> Started:
        """One timed start, first load included; the daemon is killed again."""
        began_s = time.perf_counter()
        daemon = self._start()
        serving_s = time.perf_counter() - began_s
        try:
            with self._client(daemon) as (client, memory):
                if self.shape.blocks:
                    self._load_one(client, memory, turn)
                first_hit_s = time.perf_counter() - began_s
                recovered = daemon.status().pool
                if recovered.recovered_blocks != self.shape.blocks:
                    raise RuntimeError(
                        f"{self.shape.name}: {recovered.recovered_blocks} of {self.shape.blocks} recovered"
                    )
                daemon.kill()
            return Started(recovered.recovery_s, serving_s, first_hit_s)
        finally:
            daemon.kill()

    def remove(self) -> None:
        shutil.rmtree(self._shm, ignore_errors=True)

    def _start(self) -> Daemon:
        pool = self._shm / "pool"
        shape = self.shape
        sizes = {"pool__size": shape.pool_bytes, "pool__extent_size": shape.extent_bytes}
        return Daemon(self._run, pool, wrap=self._wrap, **sizes)

    @contextmanager
    def _client(self, daemon: Daemon) -> Iterator[tuple[Client, SharedBuffer]]:
        shape = self.shape
        with connected(daemon.socket, "bench", shape.engine_blocks, shape.planes, shape.fragment_bytes) as it:
            yield it

    def _load_one(self, client: Client, memory: SharedBuffer, turn: int) -> None:
        """Another block every time: the first load of a block is the one that compares its checksum."""
        block = self.shape.blocks * (2 * turn + 1) // (2 * REPETITIONS)
        found = client.lookup(self._hashes[block : block + 1], lease=True, timeout_s=DEADLINE_S)
        if found.hits != 1:
            raise RuntimeError(f"{self.shape.name}: a block that was stored does not hit")
        outcome = client.load(found, [0]).wait(DEADLINE_S)
        loaded = self._block(memory.array, 0)
        stored = self._block(self._bytes, block % self.shape.engine_blocks)
        if not outcome.done or not np.array_equal(loaded, stored):
            raise RuntimeError(f"{self.shape.name}: the first load failed: {outcome}")

    def _block(self, cache: npt.NDArray[np.uint8], block: int) -> npt.NDArray[np.uint8]:
        plane_bytes = self.shape.engine_blocks * self.shape.fragment_bytes
        planes = cache[: self.shape.planes * plane_bytes].reshape(self.shape.planes, plane_bytes)
        first = block * self.shape.fragment_bytes
        return planes[:, first : first + self.shape.fragment_bytes].copy()


def measure(shapes: Sequence[Shape]) -> dict[str, dict[str, float]]:
    """Medians by shape, measured in turns; a shape that memory has no room for is left out, aloud."""
    pools: list[Pool] = []
    with tempfile.TemporaryDirectory(prefix="kvt-", dir="/tmp") as folder:
        try:
            for shape in shapes:
                if (free := memory_free()) < shape.pool_bytes + SPARE_BYTES:
                    print(
                        f"{shape.name}: skipped, {free >> 20} MiB of memory are free",
                        file=sys.stderr,
                        flush=True,
                    )
                    continue
                place = Path(folder, shape.name)
                place.mkdir()
                pools.append(Pool(shape, place))
                pools[-1].fill()
            starts: dict[str, list[Started]] = {pool.shape.name: [] for pool in pools}
            for turn in range(REPETITIONS):
                for pool in pools if turn % 2 == 0 else reversed(pools):
                    starts[pool.shape.name].append(pool.start(turn))
        finally:
            for pool in pools:
                pool.remove()
    return {name: medians(taken) for name, taken in starts.items()}


def medians(taken: Sequence[Started]) -> dict[str, float]:
    return {
        "recovering_s": statistics.median(each.recovering_s for each in taken),
        "serving_s": statistics.median(each.serving_s for each in taken),
        "first_hit_s": statistics.median(each.first_hit_s for each in taken),
    }


def memory_free() -> int:
    """Bytes that a pool could take: of memory, and of /dev/shm."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return min(available, shutil.disk_usage("/dev/shm").free)
