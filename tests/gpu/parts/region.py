"""A region of device memory and one of host memory, registered, of equal size and with random content."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.gpu.parts.device import Device, open_device
from tests.gpu.parts.host import HostMemory

U64 = npt.NDArray[np.uint64]
CHECK_BYTES = 32 << 20


@dataclass
class Region:
    """Both ends."""

    device: Device
    address: int
    host: HostMemory
    n: int
    stream: int

    def check(self, on_device: U64, in_host: U64, sizes: U64) -> int:
        """Compares fragments at both ends, as many as a moment allows; returns how many bytes were compared.
        Raises AssertionError naming the first that differs."""
        compared = 0
        for number in np.random.default_rng().permutation(len(sizes)):
            if compared >= CHECK_BYTES:
                break
            n, place = int(sizes[number]), int(in_host[number]) - self.host.address
            same = np.array_equal(
                self.device.read(int(on_device[number]), n), self.host.array[place : place + n]
            )
            assert same, f"fragment {number} of {len(sizes)}, {n} bytes, differs"
            compared += n
        return compared


@contextmanager
def open_region(n: int) -> Iterator[Region]:
    """Opens the device as well."""
    with open_device() as device, HostMemory(n) as host:
        host.populate()
        host.fill().register(device.driver)
        address = device.alloc(n)
        device.fill(address, n)
        yield Region(device, address, host, n, device.stream())
