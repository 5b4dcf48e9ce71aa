"""What the host's own tier costs with a shared store that is dead from the start, against no store.

    python -m tests.benchmarks.dead_store [--json]

Two daemons, one of which has a bucket of S3 at an address where nobody listens, take turns, so that each call
with the store has one without it beside it. `store` and `load` move 1,024 blocks of 160 KiB; lookups are of
1,024 hashes: a hit over gRPC, the same with a lease that is given back, and a miss, which the index page
answers. `..._ratio` is the median of the calls with the store divided by that of the calls without it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from kvtier import Lookup

from tests.benchmarks.rig import DEADLINE_S, Rig, hashes_of, rig
from tests.support.process import until

PLANES, FRAGMENT_BYTES = 10, 16 * 1024
BLOCKS = 1_024
ROUNDS, WARM_UP = 60, 20
MISSES = 100
"""Of one measurement, because one takes hardly longer than looking at the clock."""
POOL = "3GiB"
NOBODY: dict[str, Any] = {
    "store__url": "s3://nobody/there",
    "store__options": "endpoint=http://127.0.0.1:9,region=none,access_key_id=nobody,secret_access_key=none",
    "store__deadline_s": 1,
}
MEASURED = ("store", "lookup", "leased_lookup", "load", "miss")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    arguments = parser.parse_args()
    shape: dict[str, Any] = {"num_blocks": BLOCKS, "planes": PLANES, "fragment_bytes": FRAGMENT_BYTES}
    with rig(**shape, pool_size=POOL) as without, rig(**shape, pool_size=POOL, **NOBODY) as dead:
        figures = measure(without, dead)
    if not arguments.json:
        for name, value in figures.items():
            print(f"{name:<36} {value:>10,.3f}")
    print(json.dumps(figures))
    return 0


def measure(without: Rig, dead: Rig) -> dict[str, float]:
    """The ratios, and the throughput and times behind them."""
    rigs = (without, dead)
    for each in rigs:
        each.memory.array[:] = 7
        until(partial(_sees_misses, each), "the index page is complete")
    taken: dict[str, list[list[float]]] = {what: [[], []] for what in MEASURED}
    for number in range(WARM_UP + ROUNDS):
        # Each is first in every other round.
        for which in (0, 1) if number % 2 else (1, 0):
            for what, took_s in calls(rigs[which], number):
                if number >= WARM_UP:
                    taken[what][which].append(took_s)
    figures = {}
    for what, both in taken.items():
        alone_s, beside_s = (float(np.median(each)) for each in both)
        figures[f"dead_store_{what}_ratio"] = beside_s / alone_s
        figures[f"dead_store_{what}_us"] = beside_s * 1e6
    return figures


def _sees_misses(running: Rig) -> bool:
    return running.client.known_run(hashes_of("none", 1)) is not None


def calls(running: Rig, number: int) -> list[tuple[str, float]]:
    """One round: what was called, and how long it took, in seconds."""
    client, ids = running.client, list(range(BLOCKS))
    hashes, others = hashes_of(f"stored/{number}", BLOCKS), hashes_of(f"missing/{number}", BLOCKS)
    leases: list[Lookup] = []

    def store() -> bool:
        return client.store(hashes, ids).wait(DEADLINE_S).done

    def lookup() -> bool:
        return client.lookup(hashes, timeout_s=DEADLINE_S).hits == BLOCKS

    def leased_lookup() -> bool:
        found = client.lookup(hashes, lease=True, timeout_s=DEADLINE_S)
        found.release()
        return found.hits == BLOCKS

    def lease() -> bool:
        leases.append(client.lookup(hashes, lease=True, timeout_s=DEADLINE_S))
        return leases[-1].hits == BLOCKS

    def load() -> bool:
        return client.load(leases[-1], ids).wait(DEADLINE_S).done

    def miss() -> bool:
        return all(client.known_run(others) == 0 for _ in range(MISSES))

    steps: tuple[Callable[[], bool], ...] = (store, lookup, leased_lookup, lease, load, miss)
    took = []
    for step in steps:
        start = time.perf_counter()
        if not step():
            raise RuntimeError(f"{step.__name__} failed in round {number}")
        took.append((step.__name__, time.perf_counter() - start))
    return [(what, took_s) for what, took_s in took if what in MEASURED]


if __name__ == "__main__":
    sys.exit(main())
