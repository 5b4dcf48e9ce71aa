"""An engine without torch: owns device memory, exports it, and may be killed."""

from __future__ import annotations

from typing import Any

from tests.gpu.parts.child import DESCRIPTORS, Handler
from tests.gpu.parts.device import take_device

FILL_BYTES = 64 << 20


class Owner:
    """Answers `legacy` (allocations), `chunks` (physical memory by descriptor) and `fetch` (the
    descriptors)."""

    def __init__(self) -> None:
        self._device = take_device()
        self._chunks: list[int] = []

    def legacy(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """`count` allocations of `bytes`, the first bytes random; their handles."""
        driver, n = self._device.driver, fields["bytes"]
        addresses = [self._device.alloc(n) for _ in range(fields["count"])]
        self._fill(addresses[0], n)
        return {"handles": [driver.ipc_export(address).hex() for address in addresses]}

    def chunks(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """`count` chunks of `bytes`, rounded up to the granularity, mapped one after another."""
        driver, ordinal, count = self._device.driver, self._device.info.ordinal, fields["count"]
        granularity = driver.chunk_granularity(ordinal)
        n = -(-fields["bytes"] // granularity) * granularity
        address = driver.reserve(n * count)
        for index in range(count):
            chunk = driver.chunk_create(n, ordinal)
            driver.map_chunk(address + index * n, n, chunk)
            self._chunks.append(chunk)
        driver.allow_access(address, n * count, ordinal)
        self._fill(address, n)
        return {"bytes": n}

    def fetch(self, fields: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        """Descriptors of the `count` chunks from `first` on, or as many as one message carries."""
        chosen = self._chunks[fields["first"] :][: min(fields["count"], DESCRIPTORS)]
        return {}, [self._device.driver.chunk_export(chunk) for chunk in chosen]

    def _fill(self, address: int, n: int) -> None:
        self._device.fill(address, min(FILL_BYTES, n))


def handlers() -> dict[str, Handler]:
    owner = Owner()
    return {"legacy": owner.legacy, "chunks": owner.chunks, "fetch": owner.fetch}
