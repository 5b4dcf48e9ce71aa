"""Store and load through a real kvtierd: client, front, copy worker, pool, every byte compared.

An engine without torch stores its whole cache in transfers of `transfer_mib`, all submitted at once, and
loads it back into other blocks. `gb_per_s` runs from the first call to the last outcome; a store's outcome
means that the blocks are committed, checksums and all; `lane_gb_per_s` is of the time that the lane
copied. `ratio` is to the ceiling of the same way. `first` is
the first use of that part of the pool, which the worker registers meanwhile. Rows `registered` say how long
it takes until all of the pool is registered, by a worker with nothing else to do. The last rows are of a
restart: kill -9, a new daemon on the same pool, the same client; from the kill to the first load.
"""

from __future__ import annotations

import time

import numpy as np
from kvtier import Client

from tests.gpu.parts.bench import GIB, KIB, MIB, Bench, gb_per_s
from tests.gpu.parts.ceilings import BOTH, ceilings
from tests.gpu.parts.device import Device, open_device
from tests.gpu.parts.engine_rig import (
    DEADLINE_S,
    EngineCache,
    connected,
    finish,
    hashes_of,
    place_for_a_daemon,
    running_daemon,
)
from tests.gpu.parts.loops import D2H, H2D
from tests.support.process import Daemon

SHAPES = ((1, 2 * MIB), (32, 64 * KIB), (80, 8 * KIB), (61, 18 * KIB), (4, 512 * KIB))
"""Planes, and bytes of a fragment: large ones; eight heads of one layer; one head of each of 80 layers, as
with tensor parallelism; the latents of 61 layers, as DeepSeek has; medium ones."""
TRANSFERS = (128 * MIB, 32 * MIB)
"""The second with the second of the shapes only."""
SEAL_THREADS = (1, 2, 8, 12)
"""Compared with the default."""
STORE, LOAD = "store", "load"
QUIET_S = 2.0
"""Registration that has not grown for so long is over."""


def run(bench: Bench) -> None:
    cache_bytes = bench.pick(GIB, 4 * MIB)
    sizes = bench.pick((8 * GIB, 64 * MIB), (66 * MIB, MIB))  # of the pool, of an extent
    shapes = bench.pick(SHAPES, ((2, 16 * KIB),))
    with open_device() as device, place_for_a_daemon() as place:
        ceiling = ceilings(bench, device)
        with running_daemon(*place, *sizes) as daemon:
            begin = time.perf_counter()
            daemon.wait_whole()
            bench.row(what="populated", when="start", mib=sizes[0] / MIB, seconds=time.perf_counter() - begin)
            for planes, fragment in shapes:
                # The first is large enough that the beginning and the end of it all do not count.
                n = cache_bytes * bench.pick(3 if (planes, fragment) == shapes[0] else 1, 1)
                cache = EngineCache(device, n // planes // fragment, planes, fragment)
                with connected(daemon, cache, f"engine-{fragment}") as client:
                    if (planes, fragment) == shapes[0]:
                        registered(bench, daemon, begin, "start")
                    transfers = TRANSFERS if (planes, fragment) in shapes[1:2] else TRANSFERS[:1]
                    for transfer_bytes in bench.pick(transfers, (512 * KIB,)):
                        through = Through(bench, ceiling, daemon, client, cache, transfer_bytes)
                        through.all()
                    if (planes, fragment) == shapes[-1]:
                        begin = time.perf_counter()
                        daemon.kill()
                        with running_daemon(*place, *sizes) as successor:
                            through.after_restart(begin, successor)
                            registered(bench, successor, begin, "restart")
                cache.close()
        sealing(bench, device, ceiling, cache_bytes, (sizes[0] // 2 + 2 * sizes[1], sizes[1]), shapes[0])


def sealing(
    bench: Bench,
    device: Device,
    ceiling: dict[str, float],
    cache_bytes: int,
    sizes: tuple[int, int],
    shape: tuple[int, int],
) -> None:
    """Stores with other numbers of threads that compute checksums."""
    planes, fragment = shape
    for threads in bench.pick(SEAL_THREADS, SEAL_THREADS[:1]):
        if bench.left_s() < 12:
            return
        with (
            place_for_a_daemon() as place,
            running_daemon(*place, *sizes, workers__seal_threads=str(threads)) as daemon,
        ):
            daemon.wait_whole()
            cache = EngineCache(device, cache_bytes // planes // fragment, planes, fragment)
            with connected(daemon, cache, f"sealed-{threads}") as client:
                through = Through(bench, ceiling, daemon, client, cache, TRANSFERS[0])
                for turn in ("first", "again", "again"):
                    through.store(turn, seal_threads=threads)
            cache.close()


def registered(bench: Bench, daemon: Daemon, begin: float, when: str) -> None:
    """Waits until the pool's registration with the driver stands still."""
    known, changed = -1, time.perf_counter()
    while (now := time.perf_counter()) < changed + bench.pick(QUIET_S, 0.3) and bench.left_s() > 10:
        total = sum(worker.registered_bytes for worker in daemon.status().workers)
        if total != known:
            known, changed = total, now
        time.sleep(0.01)
    bench.row(what="registered", when=when, mib=known / MIB, seconds=changed - begin)


class Through:
    """One cache, one size of transfers."""

    def __init__(
        self,
        bench: Bench,
        ceiling: dict[str, float],
        daemon: Daemon,
        client: Client,
        cache: EngineCache,
        transfer_bytes: int,
    ) -> None:
        self._bench, self._ceiling, self._client, self._cache = bench, ceiling, client, cache
        self._daemon = daemon
        self._lanes: dict[str, tuple[float, float]] = {STORE: (0.0, 0.0), LOAD: (0.0, 0.0)}
        self._per_transfer = max(1, transfer_bytes // cache.block_bytes)
        self._sums = cache.fill()
        self._known: str | None = None

    def all(self) -> None:
        count = self._cache.num_blocks
        for turn in ("first", "again", "again"):
            if self._bench.left_s() < 10:
                return
            family, ids = self.store(turn)
            self._cache.wipe()
            elsewhere = np.random.default_rng().permutation(count).tolist()
            taken_s = self._load(family, elsewhere)
            sums = self._cache.checksums()
            wrong = int(np.count_nonzero(sums[elsewhere] != self._sums[ids]))
            self._row(LOAD, turn, taken_s, count, wrong)
            assert wrong == 0, f"{wrong} of {count} blocks have wrong bytes after the load"
            self._sums = sums
            self._known = family
        self._both(family)

    def store(self, turn: str, **more: object) -> tuple[str, list[int]]:
        """Stores every block; returns the family of their names, and their order."""
        count = self._cache.num_blocks
        family = f"{turn}/{time.monotonic_ns()}"
        ids = np.random.default_rng().permutation(count).tolist()
        taken_s = self._store(family, ids)
        self._row(STORE, turn, taken_s, count, 0, **more)
        return family, ids

    def after_restart(self, begin: float, daemon: Daemon) -> None:
        """The daemon was killed at `begin`, and this is its successor on the same pool: how long until
        something is loaded from it."""
        if self._known is None:
            self._bench.row(what="restart", left_out="nothing was stored before: no time was left")
            return
        family = self._known
        count = self._per_transfer
        hashes = hashes_of(family, count)
        while True:
            found = self._client.lookup(hashes, lease=True, timeout_s=1.0)
            if found.hits == count:
                break
            assert time.perf_counter() < begin + DEADLINE_S, f"{found.hits} hits; {daemon.log()[-2_000:]}"
            time.sleep(0.005)
        finish([self._client.load(found, list(range(count)))])
        self._bench.row(what="restart", when="first load", blocks=count, seconds=time.perf_counter() - begin)

    def _store(self, family: str, ids: list[int]) -> float:
        hashes = hashes_of(family, len(ids))
        begin = time.perf_counter()
        finish([self._client.store(hashes[part], ids[part]) for part in self._parts(len(ids))])
        return time.perf_counter() - begin

    def _load(self, family: str, ids: list[int]) -> float:
        hashes = hashes_of(family, len(ids))
        leases = [
            self._client.lookup(hashes[part], lease=True, timeout_s=DEADLINE_S)
            for part in self._parts(len(ids))
        ]
        begin = time.perf_counter()
        finish(
            [
                self._client.load(lease, ids[part])
                for lease, part in zip(leases, self._parts(len(ids)), strict=True)
            ]
        )
        return time.perf_counter() - begin

    def _both(self, family: str) -> None:
        """Loads what was stored into one half of the cache while the other half is stored under new names."""
        half = self._cache.num_blocks // 2
        hashes = hashes_of(family, half)
        leases = [
            self._client.lookup(hashes[part], lease=True, timeout_s=DEADLINE_S) for part in self._parts(half)
        ]
        new = hashes_of(f"{family}/both", half)
        begin = time.perf_counter()
        transfers = []
        for lease, part in zip(leases, self._parts(half), strict=True):
            transfers.append(self._client.load(lease, list(range(half))[part]))
            transfers.append(self._client.store(new[part], list(range(half, 2 * half))[part]))
        finish(transfers)
        self._row(BOTH, "again", time.perf_counter() - begin, 2 * half, None)

    def _parts(self, count: int) -> list[slice]:
        return [slice(first, first + self._per_transfer) for first in range(0, count, self._per_transfer)]

    def _lane(self, what: str) -> dict[str, float]:
        """The rate of the lane while it copied, since the last call."""
        if what == BOTH:
            return {}
        metrics = self._daemon.metrics()
        now = tuple(metrics.get(f"kvtier_copy_{name}_total.{what}", 0.0) for name in ("bytes", "seconds"))
        copied, seconds = (end - begin for end, begin in zip(now, self._lanes[what], strict=True))
        self._lanes[what] = (now[0], now[1])
        return {"lane_gb_per_s": gb_per_s(int(copied), seconds)} if seconds else {}

    def _row(
        self, what: str, turn: str, taken_s: float, blocks: int, wrong: int | None, **more: object
    ) -> None:
        cache = self._cache
        rate = gb_per_s(blocks * cache.block_bytes, taken_s)
        self._bench.row(
            what=what,
            turn=turn,
            fragment_bytes=cache.fragment_bytes,
            planes=cache.planes,
            transfer_mib=self._per_transfer * cache.block_bytes / MIB,
            blocks=blocks,
            gb_per_s=rate,
            ratio=rate / self._ceiling[{STORE: D2H, LOAD: H2D, BOTH: BOTH}[what]],
            wrong_blocks=wrong,
            **self._lane(what),
            **more,
        )
