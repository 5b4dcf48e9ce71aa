"""Copy kernels by thread blocks: how many multiprocessors a kernel takes to fill the link.

One process, fragments in random order between registered host memory and the GPU, two launches in flight.
`ratio` is to the ceiling of the same way. Needs torch and Triton; DMA takes no multiprocessor at all.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from tests.gpu.parts.bench import GIB, KIB, Bench
from tests.gpu.parts.ceilings import ceilings
from tests.gpu.parts.device import open_device
from tests.gpu.parts.host import HostMemory
from tests.gpu.parts.kernel_loop import KernelLoop
from tests.gpu.parts.loops import D2H, H2D

PROGRAMS = (4, 8, 16, 2, 12, 32, 64, 1)
FRAGMENTS = (64 * KIB, 512 * KIB)
REGION_BYTES = GIB // 4
SECONDS = 0.4


def run(bench: Bench) -> None:
    torch.empty(1, device="cuda")  # the primary context, which `open_device` shares
    with open_device() as device, HostMemory(REGION_BYTES) as host:
        ceiling = ceilings(bench, device)
        host.fill().register(device.driver)
        on_device = torch.empty(REGION_BYTES // 8, device="cuda", dtype=torch.int64)
        for fragment in FRAGMENTS:
            for way in (H2D, D2H):
                check(host, on_device, way, fragment)
            for programs in PROGRAMS:
                for way in (H2D, D2H):
                    if bench.left_s() > 2:
                        case(bench, ceiling, host, on_device, way, fragment, programs)


def case(
    bench: Bench,
    ceiling: dict[str, float],
    host: HostMemory,
    on_device: torch.Tensor,
    way: str,
    fragment: int,
    programs: int,
) -> None:
    """One row."""
    loop = KernelLoop(way, host, on_device, fragment_bytes=fragment, programs=programs).start()
    time.sleep(SECONDS)
    loop.stop()
    if loop.error is not None:
        raise loop.error
    rate = loop.rate_gb_per_s()
    bench.row(
        way=way, fragment_bytes=fragment, thread_blocks=programs, gb_per_s=rate, ratio=rate / ceiling[way]
    )


def check(host: HostMemory, on_device: torch.Tensor, way: str, fragment: int) -> None:
    """One launch over fresh content: afterwards both ends hold the same fragments, every one of them
    copied."""
    host.fill()
    on_device.random_()
    torch.cuda.synchronize()
    before = (host.array.copy() if way == H2D else on_device.cpu().numpy().view(np.uint8)).reshape(
        -1, fragment
    )
    loop = KernelLoop(
        way, host, on_device, fragment_bytes=fragment
    )  # its first launch copies everything once
    source_index, target_index = (index.cpu().numpy() for index in loop.indexes(0))
    after = (on_device.cpu().numpy().view(np.uint8) if way == H2D else host.array).reshape(-1, fragment)
    assert np.array_equal(after[target_index], before[source_index]), f"{way}: the kernel copied wrong bytes"
