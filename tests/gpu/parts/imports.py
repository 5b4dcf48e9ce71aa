"""Memory of another process, imported as a copy worker does: by legacy handle, or chunk by chunk."""

from __future__ import annotations

import os

from tests.gpu.parts.child import Child
from tests.gpu.parts.device import Device


class Chunks:
    """Chunks of a child's, mapped one after another at `address`."""

    def __init__(self, device: Device, owner: Child, count: int, n: int) -> None:
        """Fetches, imports and maps `count` chunks of `n` bytes."""
        self._device, self._bytes = device, count * n
        driver, ordinal = device.driver, device.info.ordinal
        self.address = driver.reserve(self._bytes)
        self._handles: list[int] = []
        while len(self._handles) < count:
            fds = owner.ask("fetch", first=len(self._handles), count=count - len(self._handles)).fds
            for fd in fds:
                handle = driver.chunk_import(fd)
                os.close(fd)
                driver.map_chunk(self.address + len(self._handles) * n, n, handle)
                self._handles.append(handle)
        driver.allow_access(self.address, self._bytes, ordinal)

    def close(self) -> None:
        """Unmaps them and gives them back. No copy may be under way."""
        driver = self._device.driver
        driver.unmap(self.address, self._bytes)
        for handle in self._handles:
            driver.chunk_release(handle)
        driver.unreserve(self.address, self._bytes)
