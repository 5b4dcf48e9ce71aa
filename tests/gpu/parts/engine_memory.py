"""The kinds of device memory that engines keep their caches in."""

from __future__ import annotations

from typing import Any, Protocol

from tests.gpu.parts.device import Device

DRIVER, CHUNKS = "driver", "chunks"
CACHING, EXPANDABLE, POOL = "torch-caching", "torch-expandable", "torch-pool"
MIRROR = "mirror"
"""Of the driver's, kept in a mirror in host memory, as where it cannot be exported."""
WITHOUT_TORCH = (DRIVER, CHUNKS)
WITH_TORCH = (CACHING, EXPANDABLE, POOL)
ENVIRONMENT = {EXPANDABLE: {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
"""What the engine's process needs in its environment."""
INSIDE_BYTES = 1 << 16
"""Caches begin so far inside their allocation: an importer that takes the base for the cache is found out."""


class EngineMemory(Protocol):
    """Memory of one kind."""

    address: int
    tensor: Any
    """The same bytes as a uint8 tensor; None without torch."""

    def close(self) -> None:
        """Gives it back. Nobody may use it any more."""


class DriverMemory:
    """One allocation of the driver's."""

    tensor = None

    def __init__(self, device: Device, n: int) -> None:
        self._device = device
        self._base = device.alloc(INSIDE_BYTES + n)
        self.address = self._base + INSIDE_BYTES

    def close(self) -> None:
        self._device.free(self._base)


class ChunkMemory:
    """Chunks of physical memory, mapped one after another: engines that sleep have such caches."""

    tensor = None
    COUNT = 4

    def __init__(self, device: Device, n: int) -> None:
        self._device = device
        driver, ordinal = device.driver, device.info.ordinal
        granularity = driver.chunk_granularity(ordinal)
        self._chunk_bytes = -(-(INSIDE_BYTES + n) // self.COUNT // granularity) * granularity
        self._bytes = self.COUNT * self._chunk_bytes
        self._base = driver.reserve(self._bytes)
        self._chunks = [driver.chunk_create(self._chunk_bytes, ordinal) for _ in range(self.COUNT)]
        for index, chunk in enumerate(self._chunks):
            driver.map_chunk(self._base + index * self._chunk_bytes, self._chunk_bytes, chunk)
        driver.allow_access(self._base, self._bytes, ordinal)
        self.address = self._base + INSIDE_BYTES

    def close(self) -> None:
        driver = self._device.driver
        driver.unmap(self._base, self._bytes)
        for chunk in self._chunks:
            driver.chunk_release(chunk)
        driver.unreserve(self._base, self._bytes)


class TorchMemory:
    """A tensor of torch's allocator, as this process's environment has it, or of a memory pool of its own."""

    def __init__(self, n: int, *, own_pool: bool) -> None:
        import torch

        self._pool: Any = None
        if own_pool:
            self._pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self._pool):
                self._all = torch.empty(INSIDE_BYTES + n, dtype=torch.uint8, device="cuda")
        else:
            # Something before it, so that it is not the only tensor of its segment.
            self._before = torch.empty(3 << 19, dtype=torch.uint8, device="cuda")
            self._all = torch.empty(INSIDE_BYTES + n, dtype=torch.uint8, device="cuda")
        self.tensor = self._all[INSIDE_BYTES:]
        self.address: int = self.tensor.data_ptr()

    def close(self) -> None:
        import torch

        del self.tensor, self._all
        self._pool = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def make_memory(kind: str, device: Device, n: int) -> EngineMemory:
    """`n` bytes of it."""
    if kind in (DRIVER, MIRROR):
        return DriverMemory(device, n)
    if kind == CHUNKS:
        return ChunkMemory(device, n)
    return TorchMemory(n, own_pool=kind == POOL)
