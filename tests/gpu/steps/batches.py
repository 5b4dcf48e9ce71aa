"""Batched copies by fragment size and count: the daemon's own way of copying, scattered on both sides.

`submit_us` is what the call costs the lane, `total_us` runs until the last byte has landed; medians. `order`
is what the driver is told about when it may read the source, `overlap_hint` the flag that asks for overlap
with computation: loads are told ANY and stores STREAM, without the hint, and the other combinations are
measured at 1,024 fragments. `ratio` is to the ceiling of the same way. Some of the fragments of every case
are compared at both ends (`checked_mib`). At the end both ways at once, on two streams.
"""

from __future__ import annotations

import time

import numpy as np
from kvtier_kernels.cuda import Copies

from tests.gpu.parts.bench import GIB, KIB, MIB, Bench, gb_per_s
from tests.gpu.parts.ceilings import BOTH, ceilings
from tests.gpu.parts.fragments import scattered, sizes_of
from tests.gpu.parts.loops import D2H, H2D, CopyLoop
from tests.gpu.parts.region import Region, open_region

SIZES = tuple(2 * KIB << power for power in range(11))  # 2 KiB … 2 MiB
COUNTS = (1_024, 4_096, 64)
ANY, STREAM = "any", "stream"
USUAL = {H2D: ANY, D2H: STREAM}
BOTH_SIZES = (64 * KIB, 512 * KIB, 2 * MIB)


def run(bench: Bench) -> None:
    n = bench.pick(2 * GIB, 8 * MIB)
    with open_region(n) as region:
        ceiling = ceilings(bench, region.device)
        counts = COUNTS if not bench.fake else (16, 64)
        for count in counts:
            for size in SIZES:
                for way in (H2D, D2H):
                    if count * size > n or bench.left_s() < 8:
                        continue
                    case(bench, region, ceiling, way, size, count, USUAL[way], False)
                    if count == counts[0]:
                        other = STREAM if USUAL[way] == ANY else ANY
                        case(bench, region, ceiling, way, size, count, other, False)
                        case(bench, region, ceiling, way, size, count, USUAL[way], True)
        for size in BOTH_SIZES:
            if bench.left_s() > 3:
                both(bench, region, ceiling, size)


def case(
    bench: Bench,
    region: Region,
    ceiling: dict[str, float],
    way: str,
    size: int,
    count: int,
    order: str,
    overlap: bool,
) -> None:
    """One row."""
    driver, rng = region.device.driver, np.random.default_rng()
    copies = Copies(driver, prefer_overlap=overlap)
    stream, sizes = region.stream, sizes_of(count, size)
    # Which of the two calls it is decides the order that the driver is told; where the bytes go follows from
    # the addresses.
    submit = copies.to_device if order == ANY else copies.to_host
    submits, totals = [], []
    times = bench.pick(5 if count * size < 256 * MIB else 3, 1)
    for _ in range(times + 1):
        on_device = scattered(region.address, region.n, size, count, rng)
        in_host = scattered(region.host.address, region.n, size, count, rng)
        target, source = (on_device, in_host) if way == H2D else (in_host, on_device)
        begin = time.perf_counter()
        submit(target, source, sizes, stream)
        submitted = time.perf_counter()
        driver.stream_synchronize(stream)
        totals.append(time.perf_counter() - begin)
        submits.append(submitted - begin)
    total_s = float(np.median(totals[1:]))
    rate = gb_per_s(count * size, total_s)
    bench.row(
        way=way,
        fragment_bytes=size,
        fragments=count,
        order=order,
        overlap_hint=overlap,
        method=copies.method.value,
        submit_us=float(np.median(submits[1:])) * 1e6,
        total_us=total_s * 1e6,
        gb_per_s=rate,
        ratio=rate / ceiling[way],
        checked_mib=region.check(on_device, in_host, sizes) / MIB,
    )


def both(bench: Bench, region: Region, ceiling: dict[str, float], size: int) -> None:
    """Both ways at once for a while, each with two batches in flight; halves of the region."""
    half = region.n // 2
    loops = [
        CopyLoop(
            region.device,
            way,
            device_address=region.address + index * half,
            host_address=region.host.address + index * half,
            region_bytes=half,
            fragment_bytes=size,
        )
        for index, way in enumerate((H2D, D2H))
    ]
    for loop in loops:
        loop.start()
    time.sleep(bench.pick(1.0, 0.05))
    for loop in loops:
        loop.stop()
        if loop.error is not None:
            raise loop.error
    rate = sum(loop.rate_gb_per_s() for loop in loops)
    bench.row(
        way=BOTH,
        fragment_bytes=size,
        fragments=min(4_096, half // size),
        order="usual",
        overlap_hint=False,
        gb_per_s=rate,
        h2d_gb_per_s=loops[0].rate_gb_per_s(),
        d2h_gb_per_s=loops[1].rate_gb_per_s(),
        ratio=rate / ceiling[BOTH],
    )
