"""The memory that a worker's contract is tested on: a memfd, and a GPU's behind the fake driver."""

from __future__ import annotations

import ctypes
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
from kvtierd.transfer.supervisor import DeviceRange, GroupMapping, Supervisor

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


ALL = (ON_CPU, GPU_13, GPU_12, GPU_LOOP)
USUAL = (ON_CPU, GPU_13)


def params(modes: Sequence[Mode]) -> list[Any]:
    """Parameters of the fixture `mode`."""
    return [
        pytest.param(mode, id=mode.name, marks=[pytest.mark.fake_gpu] if mode.is_gpu else [])
        for mode in modes
    ]


def on(*modes: Mode) -> pytest.MarkDecorator:
    """Runs a test, or all of a module's, with rigs of these modes instead of the usual ones."""
    return pytest.mark.parametrize("mode", params(modes), indirect=True)


def memfd(size: int, *, sealed: bool = True) -> int:
    fd = os.memfd_create("kvt-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


class RankMemory(Protocol):
    """The KV cache of one rank, in this process."""

    array: Bytes

    async def register(
        self,
        supervisor: Supervisor,
        worker: WorkerId,
        session: SessionId,
        registration: RegistrationId,
        groups: Sequence[GroupMapping],
    ) -> None:
        """Has a worker map it, all of it."""

    def close(self) -> None: ...


class Memfd:
    """What engines without a GPU have."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        """`fd`: one of this size, which becomes this object's."""
        self.fd = memfd(size) if fd is None else fd
        self.array: Bytes = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)

    async def register(
        self,
        supervisor: Supervisor,
        worker: WorkerId,
        session: SessionId,
        registration: RegistrationId,
        groups: Sequence[GroupMapping],
    ) -> None:
        size = self.array.nbytes
        await supervisor.map_memory(worker, session, registration, self.fd, size, groups)

    def close(self) -> None:
        os.close(self.fd)


def view(address: int, size: int) -> Bytes:
    """Device memory of the fake driver: its addresses are addresses of this process."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class Allocation:
    """Device memory from cuMemAlloc, shared by IPC handle."""

    def __init__(self, driver: cuda.Driver, size: int, offset: int = 0) -> None:
        """`size` bytes that begin `offset` bytes into an allocation."""
        self.size = size
        self.offset = offset
        self._driver = driver
        self.address = driver.alloc(offset + size)
        self.array = view(self.address + offset, size)
        self.array[:] = 0

    def range(self) -> DeviceRange:
        buffer_id = self._driver.pointer_info(self.address).buffer_id
        return DeviceRange(self.size, self.offset, self._driver.ipc_export(self.address), buffer_id)

    async def register(
        self,
        supervisor: Supervisor,
        worker: WorkerId,
        session: SessionId,
        registration: RegistrationId,
        groups: Sequence[GroupMapping],
    ) -> None:
        ranges = [self.range()]
        await supervisor.map_memory(worker, session, registration, None, self.size, groups, ranges)

    def close(self) -> None:
        self._driver.free(self.address)


class Foreign:
    """Device memory of another process: `array` is empty here."""

    def __init__(self, range_: DeviceRange) -> None:
        self.range = range_
        self.array: Bytes = np.empty(0, np.uint8)

    async def register(
        self,
        supervisor: Supervisor,
        worker: WorkerId,
        session: SessionId,
        registration: RegistrationId,
        groups: Sequence[GroupMapping],
    ) -> None:
        size = self.range.size_bytes
        await supervisor.map_memory(worker, session, registration, None, size, groups, [self.range])

    def close(self) -> None:
        pass


class Gpu:
    """The first GPU of a fake machine, as this process uses it."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake = fake
        self.driver = fake.driver()
        self.info = self.driver.devices()[0]
        self.name = self.info.name
        self.context = self.driver.retain_primary(self.info.ordinal)

    def allocate(self, size: int) -> Allocation:
        return Allocation(self.driver, size)

    def imports(self, pid: int) -> list[str]:
        """What a process has open of others' device memory."""
        return [str(open_) for open_ in self.fake.open_imports() if open_.importer_pid == pid]
