"""What an engine's stream does before a doorbell: something long, and then it writes the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tests.gpu.parts.device import Device
from tests.gpu.parts.engine_rig import EngineCache
from tests.gpu.parts.host import HostMemory

U8 = npt.NDArray[np.uint8]
LONG_BYTES = 64 << 20
LONG_COPIES = 40
SLEEP_CYCLES = 100_000_000
"""About 50 ms."""


class Work(Protocol):
    """A stream and what it can do."""

    stream: Any
    """As `Client.ring_on` takes it."""

    def prepare(self, contents: U8) -> None:
        """Brings what will be written, of shape (blocks, planes, bytes of a fragment), to where the stream
        finds it."""

    def write_late(self, ids: Sequence[int]) -> None:
        """Enqueues something long, and behind it the writing of the prepared contents into these blocks."""

    def running(self) -> bool:
        """Whether the stream still has something to do."""

    def close(self) -> None:
        """Lets go of the cache and of what it has itself; the stream has nothing to do."""


class KernelWork:
    """By kernels, on a stream of torch's. `cache` is a uint8 tensor."""

    def __init__(self, cache: EngineCache, tensor: Any) -> None:
        import torch

        self._torch = torch
        self._planes = tensor[: cache.n].view(cache.planes, cache.num_blocks, cache.fragment_bytes)
        self.stream = torch.cuda.Stream()

    def prepare(self, contents: U8) -> None:
        self._contents = self._torch.from_numpy(np.ascontiguousarray(contents)).cuda()
        self._torch.cuda.synchronize()

    def write_late(self, ids: Sequence[int]) -> None:
        index = self._torch.tensor(list(ids), device="cuda")
        self._torch.cuda.synchronize()
        with self._torch.cuda.stream(self.stream):
            self._torch.cuda._sleep(SLEEP_CYCLES)
            for plane, target in enumerate(self._planes):
                target.index_copy_(0, index, self._contents[:, plane])

    def running(self) -> bool:
        return not self.stream.query()

    def close(self) -> None:
        self.stream.synchronize()
        del self._planes


class CopyWork:
    """By copies from registered host memory, on a stream of the driver's: for engines without torch."""

    def __init__(self, device: Device, cache: EngineCache, long_bytes: int = LONG_BYTES) -> None:
        self._device, self._cache = device, cache
        self.stream: int = device.stream()
        self._long = HostMemory(long_bytes).register(device.driver)
        self._scratch = device.alloc(long_bytes)
        self._staging: HostMemory | None = None

    def prepare(self, contents: U8) -> None:
        if self._staging is not None:
            self._device.driver.stream_synchronize(self.stream)
            self._staging.close()
        self._contents = contents
        self._staging = HostMemory(-(-contents.nbytes // 4_096) * 4_096)
        self._staging.array[: contents.nbytes] = contents.reshape(-1)
        self._staging.register(self._device.driver)

    def write_late(self, ids: Sequence[int]) -> None:
        assert self._staging is not None
        driver, n = self._device.driver, self._cache.fragment_bytes
        for _ in range(LONG_COPIES):
            driver.copy_async(self._scratch, self._long.address, self._long.n, self.stream)
        for number, block in enumerate(ids):
            for plane in range(self._cache.planes):
                source = self._staging.address + (number * self._cache.planes + plane) * n
                driver.copy_async(self._cache.fragment_address(plane, block), source, n, self.stream)

    def running(self) -> bool:
        return not self._device.driver.stream_is_done(self.stream)

    def close(self) -> None:
        self._device.driver.stream_synchronize(self.stream)
        for memory in (self._long, self._staging):
            if memory is not None:
                memory.close()
        self._device.free(self._scratch)
