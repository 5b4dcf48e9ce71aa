"""Keeps one direction of the link busy with copies of fragments, from a thread of its own, as a copy worker's
lane does."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Self

import numpy as np
from kvtier_kernels.cuda import CudaError

from tests.gpu.parts.device import Device
from tests.gpu.parts.submitting import BATCH, D2H, H2D, PLANES, ROWS, submitter

__all__ = ["D2H", "H2D"]

FLIGHTS = 2
BATCHES = 4
"""Different orders of the fragments, taken in turn."""
STOP_S = 30.0


class CopyLoop:
    """Copies fragments of a region, each time in another order, two batches in flight unless told otherwise,
    until it is stopped."""

    def __init__(
        self,
        device: Device,
        direction: str,
        *,
        device_address: int,
        host_address: int,
        region_bytes: int,
        fragment_bytes: int,
        shape: str = BATCH,
        batch_bytes: int = 0,
        flights: int = FLIGHTS,
    ) -> None:
        """`shape`: how they get to the driver (`submitting`). `batch_bytes`: of one batch; 0 for the whole
        region. `flights`: batches on the stream at once."""
        self._flights = flights
        self._shape = shape
        count = min(4_096, max(1, (batch_bytes or region_bytes) // fragment_bytes))
        self._count = max(PLANES, count - count % PLANES) if shape == ROWS else count
        self._batch_bytes = self._count * fragment_bytes
        self._region = {
            "device_address": device_address,
            "host_address": host_address,
            "region_bytes": region_bytes,
            "fragment_bytes": fragment_bytes,
        }
        self._device = device
        self._direction = direction
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"copies-{direction}", daemon=True)
        self.copied_bytes = 0
        self.seconds = 0.0
        self.error: CudaError | None = None

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Returns when nothing is in flight; `error` says whether a call failed, `seconds` how long it
        ran."""
        self._stopping.set()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            raise TimeoutError(f"copies {self._direction} still run {STOP_S} s after they were told to stop")

    def rate_gb_per_s(self) -> float:
        """Over the whole time that it ran."""
        return self.copied_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def _run(self) -> None:
        driver = self._device.driver
        self._device.context.make_current()
        begin = time.perf_counter()
        try:
            stream, rng = driver.stream_create(), np.random.default_rng()
            submit = [
                submitter(
                    self._device,
                    self._shape,
                    self._direction,
                    stream,
                    count=self._count,
                    rng=rng,
                    **self._region,
                )
                for _ in range(BATCHES)
            ]
            events = [driver.event_create() for _ in range(self._flights)]
            flying: deque[int] = deque()
            turn = 0
            begin = time.perf_counter()
            while not self._stopping.is_set():
                if len(flying) == self._flights:
                    driver.event_synchronize(flying.popleft())
                    self.copied_bytes += self._batch_bytes
                submit[turn % BATCHES]()
                event = events[turn % self._flights]
                driver.event_record(event, stream)
                flying.append(event)
                turn += 1
            driver.stream_synchronize(stream)
            self.copied_bytes += len(flying) * self._batch_bytes
            self.seconds = time.perf_counter() - begin
            for event in events:
                driver.event_destroy(event)
            driver.stream_destroy(stream)
        except CudaError as error:
            self.error = error
            self.seconds = time.perf_counter() - begin
