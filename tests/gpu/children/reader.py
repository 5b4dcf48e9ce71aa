"""A process that imports memory and says what is in it."""

from __future__ import annotations

from typing import Any

from kvtier_kernels import xxh3_64

from tests.gpu.parts.child import Handler
from tests.gpu.parts.device import take_device


def handlers() -> dict[str, Handler]:
    device = take_device()

    def read(fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Checksum of `bytes` bytes behind a legacy handle."""
        address = device.driver.ipc_open(bytes.fromhex(fields["handle"]))
        content = device.read(address, fields["bytes"])
        device.driver.ipc_close(address)
        return {"xxh3": int(xxh3_64(content))}

    return {"read": read}
