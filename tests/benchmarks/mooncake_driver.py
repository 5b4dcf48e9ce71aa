"""The driver of Mooncake Store beside the library's own put and get of the same bytes, in one run, in turns.

    python -m tests.benchmarks.mooncake_driver [ROUNDS]

It starts a master and a client with the memory on loopback, over TCP. Each line has the GB/s of the median
or the best tenth of the rounds, and how much of the library's speed the driver has: what is not lost to its
threads and, for puts, its log of names.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from kvtierd.tiers.store.drivers import open_driver
from kvtierd.tiers.store.objects import ObjectStore

from tests.support import mooncake
from tests.support.mooncake import MIB, Mooncake

HEAD_BYTES = 4_096
BUFFER_BYTES = 256 * MIB
DEADLINE_S = 60.0
CASES = [(1, 8, 1), (2, 8, 1), (1, 1, 1), (2, 1, 1), (1, 8, 4), (2, 8, 4), (2, 1, 4)]
"""Blocks of so many MiB, so many in a pack, so many packs at once."""
Turn = Callable[[str], Awaitable[None]]


@dataclass(frozen=True)
class Turns:
    """What is timed: packs, as many at once as there are buffers."""

    store: ObjectStore
    library: Any
    loop: asyncio.AbstractEventLoop
    pool: ThreadPoolExecutor
    at_once: int
    parts: list[memoryview]
    ranges: list[tuple[int, int]]
    buffers: list[Any]

    @cached_property
    def whole(self) -> bytes:
        """What a pack has."""
        return b"".join(self.parts)

    async def put(self, tag: str) -> None:
        calls = (self.store.put(f"b/{tag}{one}", self.parts) for one in range(self.at_once))
        assert all(await asyncio.gather(*calls))

    async def read(self, tag: str) -> None:
        calls = (self.store.read_ranges(f"b/{tag}{one}", self.ranges) for one in range(self.at_once))
        await asyncio.gather(*calls)

    async def own_put(self, tag: str) -> None:
        await self._own(lambda one: self.library.put(f"own/{tag}{one}", self.whole), 0)

    async def own_get(self, tag: str) -> None:
        await self._own(lambda one: len(self.library.get(f"own/{tag}{one}")), len(self.whole))

    async def own_get_into(self, tag: str) -> None:
        size = len(self.whole)
        places = [each.ctypes.data for each in self.buffers]
        await self._own(lambda one: self.library.get_into(f"own/{tag}{one}", places[one], size), size)

    async def _own(self, call: Callable[[int], Any], expected: int) -> None:
        calls = (self.loop.run_in_executor(self.pool, call, one) for one in range(self.at_once))
        found = await asyncio.gather(*calls)
        assert all(each == expected for each in found), found


def best_tenth(all_s: list[float]) -> float:
    """What a tenth of the rounds were faster than."""
    return sorted(all_s)[len(all_s) // 10]


async def measure(cluster: Mooncake, library: Any, rounds: int) -> None:
    """Prints a line for each case."""
    store = open_driver(cluster.url("bench"), {}, DEADLINE_S)
    pool = ThreadPoolExecutor(max(at_once for _, _, at_once in CASES))
    loop = asyncio.get_running_loop()
    for block_mib, blocks, at_once in CASES:
        parts = [memoryview(os.urandom(HEAD_BYTES))]
        parts += [memoryview(os.urandom(block_mib * MIB)) for _ in range(blocks)]
        ranges = [(HEAD_BYTES + at * block_mib * MIB, block_mib * MIB) for at in range(blocks)]
        buffers = [np.zeros(sum(map(len, parts)), np.uint8) for _ in range(at_once)]
        for each in buffers:
            library.register_buffer(each.ctypes.data, len(each))
        turns = Turns(store, library, loop, pool, at_once, parts, ranges, buffers)
        puts: dict[str, Turn] = {"put": turns.put, "own put": turns.own_put}
        reads: dict[str, Turn] = {
            "read": turns.read,
            "own get": turns.own_get,
            "own get_into": turns.own_get_into,
        }
        took_s: dict[str, list[float]] = {name: [] for name in (*puts, *reads)}
        for _ in range(rounds):
            tag = secrets.token_hex(4)
            for some in (puts, reads):
                for name, turn in random.sample(sorted(some.items()), len(some)):
                    began_s = time.perf_counter()
                    await turn(tag)
                    took_s[name].append(time.perf_counter() - began_s)
            for at in range(at_once):
                library.remove(f"own/{tag}{at}", True)
                library.remove(f"bench/objects/b/{tag}{at}", True)
        for each in buffers:
            library.unregister_buffer(each.ctypes.data)
        gb = at_once * blocks * block_mib * MIB / 1e9
        for how, of in (("median", statistics.median), ("best tenth", best_tenth)):
            one = {name: gb / of(each) for name, each in took_s.items()}
            print(
                f"{at_once} of {blocks} x {block_mib} MiB, {how}: "
                + ", ".join(f"{name} {value:.2f}" for name, value in one.items())
                + f"; {one['put'] / one['own put']:.2f} of put, {one['read'] / one['own get']:.2f} of get, "
                f"{one['read'] / one['own get_into']:.2f} of get_into",
                flush=True,
            )


def main() -> None:
    """Measures, and ends the process at once, because the library takes seconds to end."""
    if why := mooncake.why_not():
        sys.exit(why)
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    library: Any = importlib.import_module("mooncake.store")
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    with tempfile.TemporaryDirectory() as folder:
        cluster = Mooncake(Path(folder), memory_bytes=1_024 * MIB, lease_s=10)
        try:
            own = library.MooncakeDistributedStore()
            setup = ("127.0.0.1", "P2PHANDSHAKE", 0, BUFFER_BYTES, "tcp", "", cluster.master)
            assert own.setup(*setup) == 0
            asyncio.run(measure(cluster, own, rounds))
        finally:
            cluster.stop()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
