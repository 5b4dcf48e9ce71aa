"""Addresses of fragments as a block table scatters them, as the arrays that a batched copy takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]


def scattered(base: int, region_bytes: int, fragment_bytes: int, count: int, rng: np.random.Generator) -> U64:
    """Addresses of `count` different fragments of a region, in no order."""
    chosen = rng.permutation(region_bytes // fragment_bytes)[:count]
    if len(chosen) < count:
        raise ValueError(
            f"{region_bytes} bytes hold {len(chosen)} fragments of {fragment_bytes}, not {count}"
        )
    return (np.uint64(base) + chosen.astype(np.uint64) * np.uint64(fragment_bytes)).astype(np.uint64)


def blocks_in_runs(
    num_blocks: int, count: int, run_blocks: int, rng: np.random.Generator
) -> npt.NDArray[np.uint32]:
    """`count` different block ids in ascending runs of `run_blocks`, the runs in no order."""
    starts = rng.permutation(num_blocks // run_blocks)[: count // run_blocks]
    if len(starts) * run_blocks < count:
        raise ValueError(f"{num_blocks} blocks hold no {count} in runs of {run_blocks}")
    return (starts[:, None] * run_blocks + np.arange(run_blocks)).reshape(-1).astype(np.uint32)


def sizes_of(count: int, fragment_bytes: int) -> U64:
    return np.full(count, fragment_bytes, np.uint64)
