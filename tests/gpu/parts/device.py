"""A GPU as the steps use it: driver, context, streams, and memory that is given back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from kvtier_kernels.cuda import CudaUnavailableError, load
from kvtier_kernels.cuda.contexts import Context
from kvtier_kernels.cuda.devices import DeviceInfo
from kvtier_kernels.cuda.driver import Driver

from tests.gpu.parts.bench import Unavailable
from tests.gpu.parts.content import random_pieces

U8 = npt.NDArray[np.uint8]
DEVICE_VARIABLE = "KVTIER_GPU_TEST_DEVICE"
"""Name of the GPU to use; the first visible one if it is not set."""


@dataclass
class Device:
    """One GPU with its context current in this thread. One thread's; others make the context current
    themselves."""

    driver: Driver
    info: DeviceInfo
    context: Context
    _memory: list[int] = field(default_factory=list)
    _streams: list[int] = field(default_factory=list)

    def alloc(self, n: int) -> int:
        """Memory that is freed when the device is closed, at the latest."""
        address = self.driver.alloc(n)
        self._memory.append(address)
        return address

    def free(self, address: int) -> None:
        self._memory.remove(address)
        self.driver.free(address)

    def stream(self, priority: int = 0) -> int:
        """A stream that is destroyed when the device is closed."""
        stream = self.driver.stream_create(priority)
        self._streams.append(stream)
        return stream

    def write(self, address: int, content: U8) -> None:
        """Copies bytes to the device; done when it returns."""
        contiguous = np.ascontiguousarray(content)
        self.driver.copy_to_device(address, contiguous.ctypes.data, contiguous.nbytes)

    def fill(self, address: int, n: int) -> None:
        """New random content."""
        for offset, piece in random_pieces(n):
            self.write(address + offset, piece)

    def read(self, address: int, n: int) -> U8:
        """Copies bytes from the device; done when it returns."""
        content = np.empty(n, np.uint8)
        self.driver.copy_to_host(content.ctypes.data, address, n)
        return content

    def used_bytes(self) -> int:
        """Of the whole GPU, by all processes."""
        free, total = self.driver.memory_info()
        return total - free

    def close(self) -> None:
        for stream in self._streams:
            self.driver.stream_synchronize(stream)
            self.driver.stream_destroy(stream)
        for address in self._memory:
            self.driver.free(address)
        self._memory.clear()
        self._streams.clear()
        self.context.pop()
        self.context.release()


def find_device() -> tuple[Driver, DeviceInfo]:
    """The driver and the GPU to use; makes no context. Raises Unavailable."""
    try:
        driver = load()
    except CudaUnavailableError as error:
        raise Unavailable(str(error)) from error
    devices = driver.devices()
    if not devices:
        raise Unavailable("no GPU is visible to this process")
    wanted = os.environ.get(DEVICE_VARIABLE)
    return driver, driver.device(wanted) if wanted else devices[0]


def take_device() -> Device:
    """Makes the context current in this thread; for a process that keeps it all its life. Raises
    Unavailable."""
    driver, info = find_device()
    context = driver.retain_primary(info.ordinal)
    context.push()
    return Device(driver, info, context)


@contextmanager
def open_device() -> Iterator[Device]:
    """The same, and closes everything at the end. Raises Unavailable."""
    device = take_device()
    try:
        yield device
    finally:
        device.close()
