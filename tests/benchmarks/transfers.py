"""Stores and loads end to end through a real daemon: from the call to DONE, and bytes per second.

    python -m tests.benchmarks.transfers [--json]

Blocks of 160 KiB in 10 planes (a small Llama's 32 tokens), as an engine's cache holds them. `store` ends when
the blocks are committed and findable; `load` when they are in the engine's memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np

from tests.benchmarks.rig import DEADLINE_S, Rig, hashes_of, rig

PLANES = 10
FRAGMENT_BYTES = 16 * 1024
BLOCK_BYTES = PLANES * FRAGMENT_BYTES
SIZES = {1: 60, 64: 30, 1_024: 6}
"""Blocks in one transfer, and how often it is measured."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Stores and loads through a real daemon.")
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    arguments = parser.parse_args()
    most = max(SIZES)
    pool_size = "4GiB"
    with rig(num_blocks=most, planes=PLANES, fragment_bytes=FRAGMENT_BYTES, pool_size=pool_size) as running:
        running.memory.array[:] = np.random.default_rng(1).integers(
            0, 256, len(running.memory.array), np.uint8
        )
        figures = measure(running)
    if not arguments.json:
        for name, value in figures.items():
            print(f"{name:<44} {value:>12,.2f}")
    print(json.dumps(figures))
    return 0


def measure(running: Rig) -> dict[str, float]:
    """Latencies of each size, throughput of the largest, and one memcpy of as many bytes in the same run."""
    figures: dict[str, float] = {}
    client = running.client
    for blocks, times in SIZES.items():
        stores, loads = [], []
        ids = list(range(blocks))
        for i in range(times):
            hashes = hashes_of(f"{blocks}/{i}", blocks)
            start = time.perf_counter()
            outcome = client.store(hashes, ids).wait(DEADLINE_S)
            stores.append(time.perf_counter() - start)
            found = client.lookup(hashes, lease=True, timeout_s=DEADLINE_S)
            if not outcome.done or found.hits != blocks:
                raise RuntimeError(f"a store failed: {outcome}, {found.hits} hits")
            start = time.perf_counter()
            outcome = client.load(found, ids).wait(DEADLINE_S)
            loads.append(time.perf_counter() - start)
            if not outcome.done:
                raise RuntimeError(f"a load failed: {outcome}")
        for name, taken in (("store_commit", stores), ("load", loads)):
            figures[f"{name}_{blocks}_blocks_p50_us"] = float(np.median(taken)) * 1e6
        if blocks == max(SIZES):
            size = blocks * BLOCK_BYTES
            figures["store_gb_per_s"] = size / float(np.median(stores)) / 1e9
            figures["load_gb_per_s"] = size / float(np.median(loads)) / 1e9
    copies = []
    source = running.memory.array
    target = np.empty_like(source)
    for _ in range(SIZES[max(SIZES)]):
        start = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - start)
    figures["memcpy_gb_per_s"] = len(source) / float(np.median(copies)) / 1e9
    return figures


if __name__ == "__main__":
    sys.exit(main())
