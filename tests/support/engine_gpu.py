"""A GPU of the fake driver as an engine uses it: memory of either kind, streams, work that takes time."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
from kvtier_kernels.cuda import Context, Driver

from tests.support.fake_cuda import FakeCuda


class EngineGpu:
    """Device 0 of a fake machine, whose primary context is current in the thread that makes this."""

    def __init__(self, fake: FakeCuda, ordinal: int = 0) -> None:
        self.fake = fake
        self.ordinal = ordinal
        self.driver: Driver = fake.driver()
        self.context: Context = self.driver.retain_primary(ordinal)
        self.context.make_current()

    def alloc(self, size_bytes: int) -> int:
        """Allocates memory with cuMemAlloc."""
        return self.driver.alloc(size_bytes)

    def alloc_chunks(self, chunks: int, chunk_bytes: int | None = None, *, exportable: bool = True) -> Chunks:
        """Allocates memory with cuMemCreate: so many chunks, one after another."""
        return Chunks(self, chunks, chunk_bytes or self.driver.chunk_granularity(self.ordinal), exportable)

    def view(self, address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Returns the memory as the engine's kernels see it."""
        return self.fake.view(address, size_bytes)

    def stream(self) -> int:
        """Makes a new stream."""
        return self.driver.stream_create()


class Chunks:
    """Reserved addresses with chunks mapped to them."""

    def __init__(self, gpu: EngineGpu, chunks: int, chunk_bytes: int, exportable: bool) -> None:
        self._gpu, self._chunks, self.chunk_bytes = gpu, chunks, chunk_bytes
        self._exportable = exportable
        self.size_bytes = chunks * chunk_bytes
        self.address = gpu.driver.reserve(self.size_bytes)
        self.map()

    def map(self) -> None:
        """Maps new physical memory behind the addresses."""
        driver, ordinal = self._gpu.driver, self._gpu.ordinal
        for index in range(self._chunks):
            chunk = driver.chunk_create(self.chunk_bytes, ordinal, self._exportable)
            driver.map_chunk(self.address + index * self.chunk_bytes, self.chunk_bytes, chunk)
            driver.chunk_release(chunk)
        driver.allow_access(self.address, self.size_bytes, ordinal)

    def unmap(self) -> None:
        """Frees the physical memory; the addresses stay reserved."""
        for index in range(self._chunks):
            self._gpu.driver.unmap(self.address + index * self.chunk_bytes, self.chunk_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unmap()
        self._gpu.driver.unreserve(self.address, self.size_bytes)
