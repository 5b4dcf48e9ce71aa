"""The native core by itself: copies against one large memcpy, and the block table at 4 M entries.

    python -m tests.benchmarks.kernels [--json]

A `_ratio` is the time of libc's memcpy over the time of the copy, the median of pairs taken one after the
other: 1 is as fast, more is faster. Memory is shared 4 KiB pages, as an engine's mapping and the pool are,
and every repetition picks other blocks and slots. Lookups are of random keys, cold in the cache.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PAGE_BYTES, BlockTable, CopyPlan, copy_variants

REGION_BYTES = 1 << 30
PLANES, BLOCKS = 64, 64
SMALL_FRAGMENT_BYTES, SMALL_COUNTS, SMALL_TIMES = 16 << 10, (1, 2, 4, 10), 2_000
"""One block with so many planes, as few tokens of a small model."""
FRAGMENTS = {"4k": (4 << 10, 31), "16k": (16 << 10, 21), "64k": (64 << 10, 9)}  # bytes, repetitions

ENTRIES = 4 << 20
BLOCK_PAGES = 128  # of 512 KiB
FILL_BATCH, BATCH = 8192, 64
TIMED_BLOCKS = 1 << 18
LOOKUPS = {1: 2000, 64: 1000, 1024: 200, 8192: 60}

U8 = npt.NDArray[np.uint8]

libc = ctypes.CDLL(None)
libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
libc.memcpy.restype = ctypes.c_void_p


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def region() -> U8:
    """Shared memory, every page of it present."""
    array = np.frombuffer(mmap.mmap(-1, REGION_BYTES), np.uint8)
    array[:] = 1
    return array


def copies() -> dict[str, float]:
    mapping, pool = region(), region()
    random = np.random.default_rng(1)
    figures = {}
    for name, (fragment_bytes, repetitions) in FRAGMENTS.items():
        engine_blocks = REGION_BYTES // PLANES // fragment_bytes
        bases = np.arange(PLANES, dtype=np.uint64) * np.uint64(engine_blocks * fragment_bytes)
        same = np.full(PLANES, fragment_bytes, np.uint64)
        plan = CopyPlan(mapping, bases, same, same, engine_blocks)
        slot_pages = plan.slot_bytes // PAGE_BYTES
        pool_slots = (REGION_BYTES // PAGE_BYTES - 1) // slot_pages
        total = BLOCKS * plan.slot_bytes
        sums = np.zeros(BLOCKS, np.uint64)

        def reference(total: int = total) -> None:
            to, start = random.integers(0, (REGION_BYTES - total) // PAGE_BYTES + 1, 2) * PAGE_BYTES
            libc.memcpy(pool.ctypes.data + int(to), mapping.ctypes.data + int(start), total)

        ratios: dict[str, list[float]] = {"gather": [], "scatter": [], "gather_checksum": []}
        for _ in range(repetitions):
            ids = random.permutation(engine_blocks)[:BLOCKS].astype(np.uint32)
            slots = (1 + slot_pages * random.permutation(pool_slots)[:BLOCKS]).astype(np.uint32)
            calls: dict[str, Callable[[], object]] = {
                "gather": partial(plan.gather, ids, pool, slots),
                "scatter": partial(plan.scatter, ids, pool, slots),
                "gather_checksum": partial(plan.gather, ids, pool, slots, sums),
            }
            for kind, call in calls.items():
                before = seconds(reference)
                ratios[kind].append(before / seconds(call))
        for kind, values in ratios.items():
            figures[f"{kind}_{name}_ratio"] = statistics.median(values)
    return figures


def small_copies() -> dict[str, float]:
    """One block at a time, at places that are not in the cache, against one memcpy of as many bytes."""
    mapping, pool = region(), region()
    random = np.random.default_rng(3)
    figures = {}
    for planes in SMALL_COUNTS:
        blocks = REGION_BYTES // planes // SMALL_FRAGMENT_BYTES
        bases = np.arange(planes, dtype=np.uint64) * np.uint64(blocks * SMALL_FRAGMENT_BYTES)
        same = np.full(planes, SMALL_FRAGMENT_BYTES, np.uint64)
        plan = CopyPlan(mapping, bases, same, same, blocks)
        slot_pages = plan.slot_bytes // PAGE_BYTES
        pool_slots = (REGION_BYTES // PAGE_BYTES - 1) // slot_pages
        sums = np.zeros(1, np.uint64)
        kinds = ("memcpy", "gather", "scatter", "gather_checksum")
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(SMALL_TIMES):
            block = np.array([random.integers(blocks)], np.uint32)
            slot = np.array([1 + slot_pages * random.integers(pool_slots)], np.uint32)
            to, start = int(slot[0]) * PAGE_BYTES, int(block[0]) * plan.slot_bytes
            calls: tuple[Callable[[], object], ...] = (
                partial(libc.memcpy, pool.ctypes.data + to, mapping.ctypes.data + start, plan.slot_bytes),
                partial(plan.gather, block, pool, slot),
                partial(plan.scatter, block, pool, slot),
                partial(plan.gather, block, pool, slot, sums),
            )
            turn = number % len(kinds)  # each at places of its own, which no other has fetched
            taken[kinds[turn]].append(seconds(calls[turn]))
        typical = {kind: statistics.median(times) for kind, times in taken.items()}
        for kind in kinds[1:]:
            figures[f"{kind}_{planes}_of_16k_ratio"] = typical["memcpy"] / typical[kind]
    return figures


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def index() -> dict[str, float]:
    random = np.random.default_rng(2)
    hashes = random.integers(0, 256, (ENTRIES, 32), np.uint8)
    slots = (1 + BLOCK_PAGES * random.permutation(ENTRIES)).astype(np.uint32).reshape(ENTRIES, 1)
    before = resident_bytes()
    table = BlockTable(ENTRIES, 1 + BLOCK_PAGES * ENTRIES, seed=1)

    def store(start: int, count: int) -> None:
        entries, _ = table.insert(1, 0, hashes[start : start + count])
        table.attach_slots(entries, slots[start : start + count])
        table.commit(entries)

    timed_from = ENTRIES - TIMED_BLOCKS
    for start in range(0, timed_from, FILL_BATCH):
        store(start, FILL_BATCH)

    def store_in_small_batches() -> None:
        for start in range(timed_from, ENTRIES, BATCH):
            store(start, BATCH)

    figures = {"table_insert_commit_blocks_per_s": TIMED_BLOCKS / seconds(store_in_small_batches)}
    figures["index_bytes_per_entry"] = (resident_bytes() - before) / ENTRIES
    if table.count(1) != ENTRIES:
        raise RuntimeError(f"the table holds {table.count(1)} of {ENTRIES} blocks")

    times: dict[int, list[float]] = {size: [] for size in LOOKUPS}
    touches: list[float] = []
    for turn in range(max(LOOKUPS.values())):
        for size, repetitions in LOOKUPS.items():
            if turn < repetitions:
                batch = hashes[random.integers(0, ENTRIES, size)]
                times[size].append(seconds(partial(table.lookup, 1, batch)))
        if turn < LOOKUPS[8192]:
            entries = random.permutation(ENTRIES)[:8192].astype(np.uint32)
            touches.append(seconds(partial(table.touch, entries)))
    figures |= {f"index_lookup_{size}_us": statistics.median(taken) * 1e6 for size, taken in times.items()}
    figures["table_touch_8192_us"] = statistics.median(touches) * 1e6
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.kernels")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    figures = copies() | small_copies() | index()
    if arguments.json:
        print(json.dumps(figures))
        return
    print(f"copies: {copy_variants()[0]}; block table: {ENTRIES:,} entries, blocks of {BLOCK_PAGES} pages")
    for name, value in figures.items():
        print(f"{name:<36} {value:>14,.2f}")


if __name__ == "__main__":
    main()
