"""Maps the pool's pages before they are used, so that the first copy into a slot does not wait for the
kernel."""

import mmap
import os
import threading
from collections.abc import Callable

import numpy as np
from kvtier_kernels import populate

from kvtierd.workers.copy.device import Device
from kvtierd.workers.log import logger

CHUNK_BYTES = 16 * 1024 * 1024
"""Mapped at once, which takes 1 to 2 ms with pages of 4 KiB. Nothing can be unmapped in that time."""

NICENESS = 10
"""Every thread with something to do comes first."""

YIELD_S = 0.005
"""Time between two looks at whether the lanes are busy."""

GROWTH_S = 0.1
"""Time between two looks at whether more of the pool has memory. It doubles as long as none has more, up to
`GROWTH_MAX_S`."""
GROWTH_MAX_S = 5.0

_log = logger(__name__)


class Populator:
    """A thread that maps the pool, from its beginning and as it gets memory, while the lanes have nothing to
    do, and lets the device prepare what has been mapped.

    It changes no byte. What it has not reached, or cannot map, is mapped when a copy touches it.
    """

    def __init__(
        self,
        pool: mmap.mmap,
        memory_end: Callable[[], int],
        is_busy: Callable[[], bool],
        device: Device | None = None,
    ) -> None:
        """`memory_end()` is where the pool's memory ends now, and `is_busy()` is called before each chunk,
        both from the thread. Without a device, all is mapped."""
        self._pool = pool
        self._memory_end = memory_end
        self._is_busy = is_busy
        self._device = device
        self._can_map = True
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="populate", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current chunk. May be called several times."""
        self._stopped.set()

    def join(self, timeout_s: float) -> bool:
        """Waits until the thread has ended; False if it has not. True if it was never started."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        if self._device is not None:
            self._device.enter_thread()
        done, pause_s = 0, GROWTH_S
        while done < len(self._pool):
            end = self._memory_end()
            if end == done:
                if self._stopped.wait(pause_s):
                    return
                pause_s = min(2 * pause_s, GROWTH_MAX_S)
                continue
            if not self._prepare(done, end):
                return
            done, pause_s = end, GROWTH_S

    def _prepare(self, start: int, end: int) -> bool:
        """False if the thread was stopped."""
        if self._device is None:
            return self._map(start, end - start)
        for offset, length in self._device.pool_areas(start, end):
            if not self._map(offset, length) or not self._turn():
                return False
            self._device.pool_area_mapped((offset, length))
        return True

    def _map(self, area_offset: int, area_bytes: int) -> bool:
        """False if the thread was stopped."""
        pool = np.frombuffer(self._pool, np.uint8)
        try:
            for offset in range(area_offset, area_offset + area_bytes, CHUNK_BYTES):
                if not self._turn():
                    return False
                populate(pool, offset, min(CHUNK_BYTES, area_offset + area_bytes - offset))
        except OSError as error:
            # The kernel is older than 5.14, or there is no memory for page tables or for a hole in the file.
            if self._can_map:
                _log.info("the pool's pages are mapped as they are touched", why=str(error))
            self._can_map = False
        return True

    def _turn(self) -> bool:
        """Waits until the lanes have nothing to do. False if the thread was stopped."""
        while self._is_busy() and not self._stopped.wait(YIELD_S):
            pass
        return not self._stopped.is_set()
