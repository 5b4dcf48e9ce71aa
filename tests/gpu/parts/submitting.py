"""The ways of handing scattered fragments to the driver, each as a call without arguments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from kvtier_kernels.cuda import Copies, CopyMethod

from tests.gpu.parts.bench import Unavailable
from tests.gpu.parts.device import Device
from tests.gpu.parts.fragments import scattered, sizes_of
from tests.gpu.parts.volumes import batch_of_volumes

H2D, D2H = "h2d", "d2h"
BATCH, STREAM, HINT, LOOP, ROWS, STAGED = "batch", "stream", "hint", "loop", "rows", "staged"
"""Batches as the daemon makes them; told that the source is read in the stream's order; with the overlap
flag; one call for each fragment; two-dimensional copies of a block's planes; one copy to the device of all
fragments, which a batch on the device then scatters."""
SINGLE, PAIRS, VOLUMES = "single", "pairs", "volumes"
"""Two-dimensional copies of one row, and of two; a batch of three-dimensional copies."""
PLANES = 32
"""Of a block that is copied as rows."""
PLANES_OF = {ROWS: PLANES, SINGLE: 1, PAIRS: 2}


def submitter(
    device: Device,
    shape: str,
    way: str,
    stream: int,
    *,
    device_address: int,
    host_address: int,
    region_bytes: int,
    fragment_bytes: int,
    count: int,
    rng: np.random.Generator,
    staging_address: int = 0,
) -> Callable[[], None]:
    """Returns what puts copies of `count` fragments of a region on the stream. `staging_address`: device
    memory for that many fragments, for STAGED, which exists to the device only."""
    driver = device.driver
    copies = Copies(driver, CopyMethod.LOOP if shape == LOOP else None, prefer_overlap=shape == HINT)
    if (
        shape in PLANES_OF
    ):  # blocks of so many fragments: contiguous in host memory, a plane apart on the device
        planes = PLANES_OF[shape]
        blocks = max(1, count // planes)
        plane_bytes = region_bytes // planes
        ends = (
            scattered(device_address, plane_bytes, fragment_bytes, blocks, rng),
            scattered(host_address, region_bytes, planes * fragment_bytes, blocks, rng),
        )
        width, rows, device_pitch, host_pitch = (
            np.full(blocks, value, np.uint64)
            for value in (fragment_bytes, planes, plane_bytes, fragment_bytes)
        )
        by_rows = copies.rows_to_device if way == H2D else copies.rows_to_host
        return lambda: by_rows(*ends, width, rows, device_pitch, host_pitch, stream)
    on_device = scattered(device_address, region_bytes, fragment_bytes, count, rng)
    in_host = scattered(host_address, region_bytes, fragment_bytes, count, rng)
    sizes = sizes_of(count, fragment_bytes)
    if shape == STAGED:
        staged = np.uint64(staging_address) + np.arange(count, dtype=np.uint64) * np.uint64(fragment_bytes)
        n = count * fragment_bytes

        def by_staging() -> None:
            driver.copy_async(staging_address, host_address, n, stream)
            copies.to_host(on_device, staged, sizes, stream)  # in the stream's order

        return by_staging
    if shape == VOLUMES:
        ends = (on_device, in_host) if way == H2D else (in_host, on_device)
        by_volumes = batch_of_volumes(driver, *ends, sizes, stream)
        if by_volumes is None:
            raise Unavailable("the driver has no batches of three-dimensional copies")
        return by_volumes
    if way == D2H:
        return lambda: copies.to_host(in_host, on_device, sizes, stream)
    if shape == STREAM:  # the call decides the order that the driver is told, the addresses the way
        return lambda: copies.to_host(on_device, in_host, sizes, stream)
    return lambda: copies.to_device(on_device, in_host, sizes, stream)
