"""Regions of memory for copy kernels, one per direction, with the loops that use them. Needs torch and
Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvtier_kernels.cuda import load

from tests.gpu.parts.host import HostMemory
from tests.gpu.parts.kernel_loop import PROGRAMS, KernelLoop


class KernelRegions:
    """`start` and `stop` as often as wanted; memory lives as long as the process."""

    def __init__(
        self, region_bytes: int, directions: Sequence[str], fragment_bytes: int, programs: int = PROGRAMS
    ) -> None:
        torch.cuda.init()
        torch.empty(1, device="cuda")  # makes the primary context current in this thread
        self._fragment_bytes, self._programs = fragment_bytes, programs
        self._regions = {}
        for direction in directions:
            host = HostMemory(region_bytes).fill().register(load())
            on_device = torch.randint(
                -(1 << 62), 1 << 62, (region_bytes // 8,), device="cuda", dtype=torch.int64
            )
            self._regions[direction] = (host, on_device)
        self._loops: list[KernelLoop] = []

    def start(self, directions: Sequence[str]) -> None:
        """Begins to copy in these directions at once."""
        self._loops = [
            KernelLoop(
                direction,
                *self._regions[direction],
                fragment_bytes=self._fragment_bytes,
                programs=self._programs,
            )
            for direction in directions
        ]
        for loop in self._loops:
            loop.start()

    def stop(self) -> float:
        """Gigabytes per second, both directions together."""
        for loop in self._loops:
            loop.stop()
            if loop.error is not None:
                raise loop.error
        return round(sum(loop.rate_gb_per_s() for loop in self._loops), 2)
