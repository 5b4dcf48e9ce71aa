"""A copy worker to be killed: imports device memory of its parent, registers the parent's host memory, and
copies one way for ever, each pass from the other of two sources, so that a copy that still lands shows."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
from kvtier_kernels.cuda import Copies

from tests.gpu.parts.child import Handler
from tests.gpu.parts.device import take_device
from tests.gpu.parts.fragments import scattered, sizes_of
from tests.gpu.parts.host import HostMemory
from tests.gpu.parts.loops import H2D

PASSES_IN_FLIGHT = 3


class CopyWorker:
    """Answers `open` and `run`; after `run` it copies until it is killed."""

    def open(self, fields: dict[str, Any], fds: list[int]) -> None:
        """`fields["handle"]` is the device memory, the descriptor the host memory; each holds what its side
        needs: two sources, or one target, of `region_bytes`."""
        self._device = take_device()
        self._region_bytes: int = fields["region_bytes"]
        self._direction: str = fields["direction"]
        on_device = self._device.driver.ipc_open(bytes.fromhex(fields["handle"]))
        self._host = host = HostMemory(fields["host_bytes"], fd=fds[0]).register(self._device.driver)
        os.close(fds[0])
        fragment_bytes: int = fields["fragment_bytes"]
        count = self._region_bytes // fragment_bytes
        rng = np.random.default_rng()
        source, target = (host.address, on_device) if self._direction == H2D else (on_device, host.address)
        to = scattered(target, self._region_bytes, fragment_bytes, count, rng)
        # The same fragment of either source goes to the same place, so that every pass changes every byte.
        first = source + (to - np.uint64(target))
        self._passes = [(to, first), (to, first + np.uint64(self._region_bytes))]
        self._sizes = sizes_of(count, fragment_bytes)

    def run(self, fields: dict[str, Any], fds: list[int]) -> None:
        threading.Thread(target=self._copy, daemon=True).start()

    def _copy(self) -> None:
        driver = self._device.driver
        self._device.context.make_current()
        copies, stream = Copies(driver), driver.stream_create()
        events = [driver.event_create() for _ in range(PASSES_IN_FLIGHT)]
        turn = 0
        while True:
            event = events[turn % PASSES_IN_FLIGHT]
            driver.event_synchronize(event)  # at first it was never recorded, and is done
            to, source = self._passes[turn % 2]
            if self._direction == H2D:
                copies.to_device(to, source, self._sizes, stream)
            else:
                copies.to_host(to, source, self._sizes, stream)
            driver.event_record(event, stream)
            turn += 1


def handlers() -> dict[str, Handler]:
    worker = CopyWorker()
    return {"open": worker.open, "run": worker.run}
