"""The memory that a worker's contract is tested on: a memfd, and a GPU's behind the fake driver."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
from kvtier_kernels import cuda
from kvtierd.core.ids import RegistrationId, SessionId, WorkerId
from kvtierd.wire.worker_pb2 import DeviceRange, MappedGroup
from kvtierd.workers.supervisor.supervisor import Supervisor

from tests.support.fake_cuda import FakeCuda

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Mode:
    """A device, the driver it has, and how its worker copies."""

    name: str
    driver_version: int = 0
    method: str = "auto"

    @property
    def is_gpu(self) -> bool:
        return self.driver_version > 0


ON_CPU = Mode("cpu")
GPU_13 = Mode("gpu-13.0", 13_000)
GPU_12 = Mode("gpu-12.8", 12_080)
GPU_LOOP = Mode("gpu-loop", 12_040)
GPU_ROWS = Mode("gpu-rows", 13_000, "rows")
GPU_BATCHES = Mode("gpu-batches", 13_000, "batch")


ALL = (ON_CPU, GPU_13, GPU_12, GPU_LOOP)
USUAL = (ON_CPU, GPU_13)


def params(modes: Sequence[Mode]) -> list[Any]:
    """Parameters of the fixture `mode`."""
    return [
        pytest.param(mode, id=mode.name, marks=[pytest.mark.fake_gpu] if mode.is_gpu else [])
        for mode in modes
    ]


def on(*modes: Mode) -> pytest.MarkDecorator:
    """Runs a test, or all of a module's that say nothing else, with rigs of these modes instead of the usual
    ones."""
    return pytest.mark.modes(*modes)


def memfd(size: int, *, sealed: bool = True) -> int:
    fd = os.memfd_create("kvt-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.posix_fallocate(fd, 0, size)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


class RankMemory(Protocol):
    """The KV cache of one rank, in this process."""

    @property
    def array(self) -> Bytes:
        """Its bytes; writing to it may change nothing."""

    def write(self, content: Bytes) -> None:
        """Replaces all of it."""

    async def register(
        self,
        supervisor: Supervisor,
        worker: WorkerId,
        session: SessionId,
        registration: RegistrationId,
        groups: Sequence[MappedGroup],
    ) -> None:
        """Has a worker map it, all of it."""

    def close(self) -> None: ...


class Memfd:
    """What engines without a GPU have."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        """`fd`: one of this size, which becomes this object's."""
        self.fd = memfd(size) if fd is None else fd
        self.array: Bytes = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)

    def write(self, content: Bytes) -> None:
        self.array[:] = content

    async def register(
        self,
        supervisor: Supervisor,
        worker: WorkerId,
        session: SessionId,
        registration: RegistrationId,
        groups: Sequence[MappedGroup],
    ) -> None:
        size = self.array.nbytes
        await supervisor.orders.map_memory(worker, session, registration, self.fd, size, groups)

    def close(self) -> None:
        os.close(self.fd)


class DeviceMemory:
    """Memory of a GPU, in ranges that follow each other."""

    array: Bytes

    def ranges(self) -> list[DeviceRange]:
        raise NotImplementedError

    def chunk_fds(self) -> tuple[list[int], list[int]]:
        """Descriptors, which become the caller's, and sizes of the chunks that it is made of."""
        return [], []

    def write(self, content: Bytes) -> None:
        self.array[:] = content

    async def register(
        self,
        supervisor: Supervisor,
        worker: WorkerId,
        session: SessionId,
        registration: RegistrationId,
        groups: Sequence[MappedGroup],
    ) -> None:
        fds, sizes = self.chunk_fds()
        try:
            if fds:
                await supervisor.orders.add_chunks(worker, session, fds, sizes)
        finally:
            for fd in fds:
                os.close(fd)
        ranges = self.ranges()
        size = sum(range_.bytes for range_ in ranges)
        await supervisor.orders.map_memory(worker, session, registration, None, size, groups, ranges)

    def close(self) -> None:
        pass


class Allocation(DeviceMemory):
    """From cuMemAlloc, shared by IPC handle."""

    def __init__(self, driver: cuda.Driver, size: int, offset: int = 0) -> None:
        """`size` bytes that begin `offset` bytes into an allocation."""
        self._driver = driver
        self.offset = offset
        self.address = driver.alloc(offset + size)
        self.array = FakeCuda.view(self.address + offset, size)
        self.array[:] = 0

    def ranges(self) -> list[DeviceRange]:
        buffer_id = self._driver.pointer_info(self.address).buffer_id
        handle = self._driver.ipc_export(self.address)
        return [
            DeviceRange(bytes=self.array.nbytes, offset=self.offset, ipc_handle=handle, buffer_id=buffer_id)
        ]

    def close(self) -> None:
        del self.array
        self._driver.free(self.address)


class Chunked(DeviceMemory):
    """From cuMemCreate, shared by descriptors."""

    def __init__(self, driver: cuda.Driver, ordinal: int, size: int, offset: int = 0) -> None:
        """`size` bytes that begin `offset` bytes into the first of as many chunks as it takes."""
        self._driver = driver
        self.offset = offset
        self.chunk_bytes = driver.chunk_granularity(ordinal)
        count = -(-(offset + size) // self.chunk_bytes)
        self.total_bytes = count * self.chunk_bytes
        self.address = driver.reserve(self.total_bytes)
        for index in range(count):
            chunk = driver.chunk_create(self.chunk_bytes, ordinal)
            driver.map_chunk(self.address + index * self.chunk_bytes, self.chunk_bytes, chunk)
            driver.chunk_release(chunk)
        driver.allow_access(self.address, self.total_bytes, ordinal)
        self.array = FakeCuda.view(self.address + offset, size)

    @property
    def chunks(self) -> int:
        return self.total_bytes // self.chunk_bytes

    def ranges(self) -> list[DeviceRange]:
        return [DeviceRange(bytes=self.array.nbytes, offset=self.offset, chunks=self.chunks)]

    def chunk_fds(self) -> tuple[list[int], list[int]]:
        fds = []
        for index in range(self.chunks):
            chunk = self._driver.chunk_of(self.address + index * self.chunk_bytes)
            fds.append(self._driver.chunk_export(chunk))
            self._driver.chunk_release(chunk)
        return fds, [self.chunk_bytes] * self.chunks

    def close(self) -> None:
        del self.array
        self._driver.unmap(self.address, self.total_bytes)
        self._driver.unreserve(self.address, self.total_bytes)


class Joined(DeviceMemory):
    """Several memories one after another; `array` is a copy."""

    def __init__(self, memories: Sequence[DeviceMemory]) -> None:
        self.memories = memories

    @property
    def array(self) -> Bytes:  # type: ignore[override]
        return np.concatenate([memory.array for memory in self.memories])

    def write(self, content: Bytes) -> None:
        start = 0
        for memory in self.memories:
            memory.write(content[start : start + memory.array.nbytes])
            start += memory.array.nbytes

    def ranges(self) -> list[DeviceRange]:
        return [range_ for memory in self.memories for range_ in memory.ranges()]

    def chunk_fds(self) -> tuple[list[int], list[int]]:
        fds: list[int] = []
        sizes: list[int] = []
        for memory in self.memories:
            more_fds, more_sizes = memory.chunk_fds()
            fds += more_fds
            sizes += more_sizes
        return fds, sizes

    def close(self) -> None:
        for memory in self.memories:
            memory.close()


class Foreign(DeviceMemory):
    """Another process's, as that has described it: its bytes are not seen here."""

    def __init__(self, range_: DeviceRange) -> None:
        self._range = range_
        self.array = np.empty(0, np.uint8)

    def ranges(self) -> list[DeviceRange]:
        return [self._range]


class Gpu:
    """A GPU of a fake machine, as this process uses it."""

    def __init__(self, fake: FakeCuda, ordinal: int = 0) -> None:
        self.fake = fake
        self.driver = fake.driver()
        self.ordinal = ordinal
        self.name = fake.device_name(ordinal)
        self.context = self.driver.retain_primary(ordinal)

    def allocate(self, size: int, offset: int = 0) -> Allocation:
        with self.context:
            return Allocation(self.driver, size, offset)

    def chunked(self, size: int, offset: int = 0) -> Chunked:
        return Chunked(self.driver, self.ordinal, size, offset)

    def imports(self, pid: int) -> list[str]:
        """What a process has open of others' device memory."""
        return [str(open_) for open_ in self.fake.open_imports() if open_.importer_pid == pid]
