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
from pathlib import Path
from typing import Any

import numpy as np
from kvtierd.tiers.store.drivers import open_driver

from tests.support import mooncake
from tests.support.mooncake import MIB, Mooncake

HEAD_BYTES = 4_096
BUFFER_BYTES = 256 * MIB
DEADLINE_S = 60.0
CASES = [(1, 8, 1), (2, 8, 1), (1, 1, 1), (2, 1, 1), (1, 8, 4), (2, 8, 4), (2, 1, 4)]
"""Blocks of so many MiB, so many in a pack, so many packs at once."""
Turn = Callable[[str], Awaitable[None]]


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
        whole = b"".join(parts)
        ranges = [(HEAD_BYTES + at * block_mib * MIB, block_mib * MIB) for at in range(blocks)]
        buffers = [np.zeros(len(whole), np.uint8) for _ in range(at_once)]
        for each in buffers:
            library.register_buffer(each.ctypes.data, len(each))

        async def own(call: Callable[[int], Any], expected: Any, at_once: int = at_once) -> None:
            found = await asyncio.gather(*(loop.run_in_executor(pool, call, at) for at in range(at_once)))
            assert all(each == expected for each in found), found

        async def put(tag: str, at_once: int = at_once, parts: list[memoryview] = parts) -> None:
            assert all(await asyncio.gather(*(store.put(f"b/{tag}{at}", parts) for at in range(at_once))))

        async def read(tag: str, at_once: int = at_once, ranges: list[tuple[int, int]] = ranges) -> None:
            await asyncio.gather(*(store.read_ranges(f"b/{tag}{at}", ranges) for at in range(at_once)))

        async def own_put(tag: str, whole: bytes = whole) -> None:
            await own(lambda one: library.put(f"own/{tag}{one}", whole), 0)

        async def own_get(tag: str, size: int = len(whole)) -> None:
            await own(lambda one: len(library.get(f"own/{tag}{one}")), size)

        async def own_get_into(tag: str, size: int = len(whole), buffers: list[Any] = buffers) -> None:
            await own(lambda one: library.get_into(f"own/{tag}{one}", buffers[one].ctypes.data, size), size)

        puts: dict[str, Turn] = {"put": put, "own put": own_put}
        reads: dict[str, Turn] = {"read": read, "own get": own_get, "own get_into": own_get_into}
        took_s: dict[str, list[float]] = {name: [] for name in (*puts, *reads)}
        for _ in range(rounds):
            tag = secrets.token_hex(4)
            for turns in (puts, reads):
                for name, turn in random.sample(sorted(turns.items()), len(turns)):
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
