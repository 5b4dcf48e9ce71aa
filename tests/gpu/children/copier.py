"""A process that copies by DMA as a copy worker does: its own context, registered host memory, a lane per
direction."""

from __future__ import annotations

from typing import Any

from tests.gpu.parts.child import Handler
from tests.gpu.parts.device import take_device
from tests.gpu.parts.host import HostMemory
from tests.gpu.parts.loops import FLIGHTS, CopyLoop
from tests.gpu.parts.submitting import BATCH


class Copier:
    """Answers `open`, `start`, `stop`."""

    def __init__(self) -> None:
        self._loops: list[CopyLoop] = []

    def open(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Makes a region of device and of host memory for each direction."""
        self._device = take_device()
        self._region_bytes: int = fields["region_bytes"]
        self._regions = {}
        for direction in fields["directions"]:
            host = HostMemory(self._region_bytes)
            host.fill().register(self._device.driver)
            address = self._device.alloc(self._region_bytes)
            self._device.fill(address, self._region_bytes)
            self._regions[direction] = (address, host)
        return {"used_bytes": self._device.used_bytes()}

    def start(self, fields: dict[str, Any], fds: list[int]) -> None:
        """Begins to copy in these directions at once."""
        self._loops = [
            CopyLoop(
                self._device,
                direction,
                device_address=self._regions[direction][0],
                host_address=self._regions[direction][1].address,
                region_bytes=self._region_bytes,
                fragment_bytes=fields["fragment_bytes"],
                shape=fields.get("shape", BATCH),
                batch_bytes=fields.get("batch_bytes", 0),
                flights=fields.get("flights", FLIGHTS),
            ).start()
            for direction in fields["directions"]
        ]

    def stop(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """What was copied meanwhile."""
        for loop in self._loops:
            loop.stop()
            if loop.error is not None:
                raise loop.error
        return {"gb_per_s": round(sum(loop.rate_gb_per_s() for loop in self._loops), 2)}


def handlers() -> dict[str, Handler]:
    copier = Copier()
    return {"open": copier.open, "start": copier.start, "stop": copier.stop}
