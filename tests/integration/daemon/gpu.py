"""A fake GPU as an engine uses it, and sessions whose cache is in its memory."""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kvtier.v1 import side_pb2
from kvtier_kernels import cuda

from tests.integration.daemon.raw import RawSession, memfd
from tests.support.fake_cuda import FakeCuda
from tests.support.process import Daemon

ConnectGpu = Callable[..., "GpuSession"]


class Memory:
    """Some of a GPU's memory, in this process."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.array: npt.NDArray[np.uint8] = np.ctypeslib.as_array(
            (ctypes.c_uint8 * size_bytes).from_address(address)
        )


class Gpu:
    """One GPU, as an engine uses it. Its context is current in the thread that makes this."""

    def __init__(self, driver: cuda.Driver, ordinal: int = 0) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.name = self.driver.devices()[ordinal].name
        self.context = self.driver.retain_primary(ordinal)
        self.context.make_current()
        self.granularity = self.driver.chunk_granularity(ordinal)

    def allocate(self, size_bytes: int) -> Memory:
        """Memory of cuMemAlloc."""
        with self.context:
            return Memory(self.driver.alloc(size_bytes), size_bytes)

    def ipc_range(
        self, memory: Memory, offset: int = 0, size_bytes: int | None = None
    ) -> side_pb2.DeviceRange:
        """A piece of it, to be imported by handle."""
        with self.context:
            source = side_pb2.CudaIpc(
                handle=self.driver.ipc_export(memory.address),
                offset=offset,
                buffer_id=self.driver.pointer_info(memory.address).buffer_id,
            )
        return side_pb2.DeviceRange(bytes=memory.size_bytes if size_bytes is None else size_bytes, ipc=source)

    def chunks(self, count: int) -> tuple[Memory, list[int]]:
        """Memory of cuMemCreate, of chunks of one granule, and their descriptors, the caller's to close."""
        size = self.granularity
        with self.context:
            address = self.driver.reserve(count * size)
            fds = []
            for index in range(count):
                handle = self.driver.chunk_create(size, self.ordinal)
                self.driver.map_chunk(address + index * size, size, handle)
                fds.append(self.driver.chunk_export(handle))
                self.driver.chunk_release(handle)
            self.driver.allow_access(address, count * size, self.ordinal)
        return Memory(address, count * size), fds


class FakeGpu(Gpu):
    """And as only tests see it."""

    def __init__(self, fake: FakeCuda, ordinal: int = 0) -> None:
        super().__init__(fake.driver(), ordinal)
        self.fake = fake

    def imports(self) -> int:
        """What other processes have open of anybody's memory."""
        return len(self.fake.open_imports())

    def workers(self) -> list[int]:
        """Other processes that have called the driver."""
        return [pid for pid in self.fake.processes() if pid != os.getpid()]


class GpuSession(RawSession):
    """A session whose words name a GPU."""

    def __init__(self, socket_path: Path, gpu: Gpu, **options: Any) -> None:
        super().__init__(socket_path, **options)
        self.gpu = gpu
        self.device = gpu.name

    def gpu_places(self, offset: int = 0) -> side_pb2.RegisterMemory:
        """Its cache in one new allocation, so many bytes into it; `memory` is it."""
        request = self.places()
        memory = self.gpu.allocate(offset + request.mapping_bytes)
        self.memory = memory.array[offset:]
        request.ranges.append(self.gpu.ipc_range(memory, offset, request.mapping_bytes))
        return request

    def register_memory(self, fd: int | None = None, *, sparse: bool = False) -> int:
        assert (fd, sparse) == (None, False), "memory of a GPU has no descriptor"
        return self.register(self.gpu_places())

    def register(self, request: side_pb2.RegisterMemory) -> int:
        response, _ = self.side.call(register_memory=request)
        self.registration = response.memory_registered.registration_id
        return self.registration

    def add_chunks(self, fds: Sequence[int], sizes: Sequence[int] | None = None) -> int:
        """How many the session has added by then. The descriptors stay the caller's."""
        sizes = [self.gpu.granularity] * len(fds) if sizes is None else sizes
        response, _ = self.side.call(fds, add_chunks=side_pb2.AddChunks(bytes=sizes))
        return response.chunks_added.chunks

    def chunk_places(self, count: int, offset: int = 0) -> side_pb2.RegisterMemory:
        """Its cache in so many chunks, from `offset` in the first to the end of the last."""
        request = self.places()
        size = count * self.gpu.granularity - offset
        assert request.mapping_bytes <= size
        request.mapping_bytes = size
        source = side_pb2.CudaChunks(count=count, offset=offset)
        request.ranges.append(side_pb2.DeviceRange(bytes=size, chunks=source))
        return request

    def request_words(self) -> None:
        """Sends RegisterWords and does not wait for the answer."""
        size = 8 * 128
        fd = memfd(size)
        request = side_pb2.SideRequest(id=77, register_words=self.words_request())
        self.side.send(request.SerializeToString(), [fd])
        self.words_page = mmap.mmap(fd, size)
        os.close(fd)


def gpu_workers(daemon: Daemon) -> list[Any]:
    """What Status says of copy workers of GPUs."""
    return [worker for worker in daemon.status().workers if worker.device != "cpu"]


@pytest.fixture
def fake(make_fake_cuda: Callable[..., FakeCuda], request: pytest.FixtureRequest) -> FakeCuda:
    """A fake machine with two GPUs; `indirect` parameters are other settings of it."""
    return make_fake_cuda(**({"devices": 2} | getattr(request, "param", {})))


@pytest.fixture
def gpu(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The first of its GPUs, which daemons that are started from now on see as well."""
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    return FakeGpu(fake)


@pytest.fixture
def connect_gpu(socket_dir: Path, gpu: FakeGpu) -> Iterator[ConnectGpu]:
    """Opens sessions of the daemon that use the GPU, closed at the end of the test."""
    sessions: list[GpuSession] = []

    def connect_one(**options: Any) -> GpuSession:
        sessions.append(GpuSession(socket_dir / "kvtierd.sock", options.pop("gpu", gpu), **options))
        return sessions[-1]

    yield connect_one
    for session in sessions:
        session.close()
