"""Doorbells that a thread rings after events, where a stream cannot write to the words page."""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from kvtier_kernels.cuda import CudaError

from kvtier.cuda.gpu import Gpu
from kvtier.memory import Ring

log = logging.getLogger("kvtier")

RINGS_MAX = 256
"""The most rings of one doorbell that wait. A further one replaces the last: both then ring together."""
POLL_S = 0.000_2
IDLE_WAIT_S = 60.0


@dataclass(slots=True)
class _Waiting:
    event: int
    value: int


class EventRings:
    """Rings the doorbells of one client from a thread of its own, each in the order of the requests."""

    def __init__(self, gpu: Gpu, ring: Ring) -> None:
        """`ring` is called from the thread, which starts when there is something to wait for."""
        self._gpu = gpu
        self._ring = ring
        self._changed = threading.Condition()
        self._waiting: dict[int, deque[_Waiting]] = {}
        self._spare: list[int] = []  # events
        self._thread: threading.Thread | None = None
        self._closed = False

    def ring_after(self, stream: int, doorbell: int, value: int) -> None:
        """Rings the doorbell once the stream has done what is queued on it now. Raises CudaError if it never
        will."""
        with self._changed:
            if self._closed:
                return
            self._watch()
            rings = self._waiting.setdefault(doorbell, deque())
            with self._gpu.context:
                if len(rings) < RINGS_MAX:
                    event = self._spare.pop() if self._spare else self._gpu.driver.event_create()
                    self._gpu.driver.event_record(event, stream)
                    rings.append(_Waiting(event, value))
                else:
                    self._gpu.driver.event_record(rings[-1].event, stream)
                    rings[-1].value = max(value, rings[-1].value)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the ringing. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _watch(self) -> None:
        """Starts the thread if none runs."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._thread is not None:
            log.error("kvtier: the thread that rings doorbells after events has died; there is a new one")
        self._thread = threading.Thread(target=self._run, name="kvtier-events", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not any(self._waiting.values()):
                    self._changed.wait(IDLE_WAIT_S)
                if self._closed:
                    self._destroy_events()
                    return
                due = self._take_due()
            for doorbell, value in due:
                try:
                    self._ring(doorbell, value)
                except Exception:  # the next ring of this doorbell makes up for it
                    log.exception("kvtier: doorbell %d was not rung", doorbell)
            if not due:
                time.sleep(POLL_S)

    def _take_due(self) -> list[tuple[int, int]]:
        due: list[tuple[int, int]] = []
        for doorbell, rings in self._waiting.items():
            try:
                with self._gpu.context:
                    while rings and self._gpu.driver.event_is_done(rings[0].event):
                        ring = rings.popleft()
                        self._spare.append(ring.event)
                        due.append((doorbell, ring.value))
            except CudaError as error:  # how far the stream is, is not known; a shut gate is safe
                log.error("kvtier: %d rings of doorbell %d are lost: %s", len(rings), doorbell, error)
                rings.clear()
        return due

    def _destroy_events(self) -> None:
        events = [ring.event for rings in self._waiting.values() for ring in rings] + self._spare
        self._waiting.clear()
        self._spare.clear()
        try:
            with self._gpu.context:
                for event in events:
                    self._gpu.driver.event_destroy(event)
        except CudaError:
            pass  # the context is gone, and the events with it
