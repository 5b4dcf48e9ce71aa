"""The same blocks, handed to the driver in different shapes.

`loop`, `batch` and `rows` (2D copies, one per constant stride) for 128 blocks of 32 planes each, blocks in no
order; then blocks of one plane in runs of 1, 4 and 16 that are contiguous on both sides, which planning makes
one descriptor each. `plan_us` is what planning costs, `submit_us` the calls, `total_us` runs until the last
byte has landed; medians. `ratio` is to the ceiling of the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PAGE_BYTES, DevicePlan
from kvtier_kernels.cuda import Copies, CopyMethod

from tests.gpu.parts.bench import GIB, KIB, MIB, Bench, gb_per_s
from tests.gpu.parts.ceilings import ceilings
from tests.gpu.parts.fragments import blocks_in_runs
from tests.gpu.parts.loops import D2H, H2D
from tests.gpu.parts.region import Region, open_region

PLANES, BLOCKS = 32, 128
FRAGMENTS = (8 * KIB, 64 * KIB, 16 * KIB, 24 * KIB, 4 * KIB, 32 * KIB, 256 * KIB)
"""The most telling first."""
RUN_FRAGMENTS = (16 * KIB, 64 * KIB)
RUNS = (1, 4, 16)
RUN_BLOCKS = 4_096

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


def run(bench: Bench) -> None:
    with open_region(bench.pick(2 * GIB, 16 * MIB)) as region:
        ceiling = ceilings(bench, region.device)
        rng = np.random.default_rng()
        for fragment in bench.pick(FRAGMENTS, (4 * KIB,)):
            blocks = bench.pick(BLOCKS, 8)
            plan = planes_plan(region, PLANES, fragment)
            ids = blocks_in_runs(plan.num_blocks, blocks, 1, rng)
            for shape in ("batch", "loop", "rows"):
                measured(bench, region, ceiling, plan, ids, 1, shape, rng)
        for fragment in bench.pick(RUN_FRAGMENTS, (4 * KIB,)):
            plan = planes_plan(region, 1, fragment)
            for run_blocks in RUNS:
                ids = blocks_in_runs(plan.num_blocks, bench.pick(RUN_BLOCKS, 64), run_blocks, rng)
                measured(bench, region, ceiling, plan, ids, run_blocks, "batch", rng)


def planes_plan(region: Region, planes: int, fragment: int) -> DevicePlan:
    """Planes one after another, each with as many blocks as the region holds."""
    num_blocks = region.n // planes // fragment
    bases = np.uint64(region.address) + np.arange(planes, dtype=np.uint64) * np.uint64(num_blocks * fragment)
    same = np.full(planes, fragment, np.uint64)
    return DevicePlan(bases, same, same, num_blocks)


def slots_in_runs(
    region: Region, plan: DevicePlan, count: int, run_blocks: int, rng: np.random.Generator
) -> U32:
    """Slots for `count` blocks, contiguous in runs."""
    pages = -(-plan.slot_bytes // PAGE_BYTES)
    # Page 0 is no slot of a pool.
    places = blocks_in_runs(region.n // (pages * PAGE_BYTES) - 1, count, run_blocks, rng)
    return (places * np.uint32(pages) + np.uint32(1)).astype(np.uint32)


def measured(
    bench: Bench,
    region: Region,
    ceiling: dict[str, float],
    plan: DevicePlan,
    ids: U32,
    run_blocks: int,
    shape: str,
    rng: np.random.Generator,
) -> None:
    """Both ways; a row each."""
    copies = Copies(region.device.driver, CopyMethod.LOOP if shape == "loop" else None)
    slots = slots_in_runs(region, plan, len(ids), run_blocks, rng)
    for way in (H2D, D2H):
        if bench.left_s() < 4:
            return
        to_device = way == H2D
        describe = plan.describe_rows if shape == "rows" else plan.describe
        planned = partial(describe, ids, region.host.address, region.n, slots, to_device)
        taken = [
            once(region, planned, submitter(copies, shape, to_device, region.stream))
            for _ in range(bench.pick(6, 2))
        ]
        plan_s, submit_s, total_s = np.median(np.array(taken[1:]), axis=0).tolist()
        n = len(ids) * plan.slot_bytes
        rate = gb_per_s(n, total_s)
        on_device, in_host, sizes = plan.describe(ids, region.host.address, region.n, slots, to_device)
        bench.row(
            shape=shape,
            way=way,
            fragment_bytes=plan.slot_bytes // plan.planes,
            planes=plan.planes,
            blocks=len(ids),
            run_blocks=run_blocks,
            descriptors=len(planned()[0]),
            plan_us=plan_s * 1e6,
            submit_us=submit_s * 1e6,
            total_us=total_s * 1e6,
            gb_per_s=rate,
            ratio=rate / ceiling[way],
            checked_mib=region.check(on_device, in_host, sizes) / MIB,
        )


def submitter(copies: Copies, shape: str, to_device: bool, stream: int) -> Callable[[tuple[U64, ...]], None]:
    """Hands a plan to the driver."""

    def submit(arrays: Any) -> None:
        if shape == "rows":
            (copies.rows_to_device if to_device else copies.rows_to_host)(*(*arrays, stream))
        elif to_device:
            copies.to_device(*(*arrays, stream))
        else:
            on_device, in_host, sizes = arrays
            copies.to_host(in_host, on_device, sizes, stream)

    return submit


def once(
    region: Region, planned: Callable[[], tuple[U64, ...]], submit: Callable[[tuple[U64, ...]], None]
) -> tuple[float, float, float]:
    """Seconds of planning, submitting, and of submitting until all has landed."""
    begin = time.perf_counter()
    arrays = planned()
    ready = time.perf_counter()
    submit(arrays)
    submitted = time.perf_counter()
    region.device.driver.stream_synchronize(region.stream)
    return ready - begin, submitted - ready, time.perf_counter() - ready
