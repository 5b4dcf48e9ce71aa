"""Maps the pool's pages ahead of use, so that the first copy into a slot does not wait for the kernel."""

import mmap
import os
import threading
from collections.abc import Callable

import numpy as np
from kvtier_kernels import populate

from kvtierd.transfer.worker.log import logger

CHUNK_BYTES = 16 * 1024 * 1024
"""Mapped at one go: 1 to 2 ms in pages of 4 KiB, during which nothing can be unmapped."""

NICENESS = 10
"""Whoever has something to do comes first."""

YIELD_S = 0.005
"""Between two looks at whether the lanes are busy."""

_log = logger(__name__)


class Populator:
    """A thread that maps the whole pool, from its start, while the lanes have nothing to do.

    It changes no byte. What it has not reached, or cannot map, is mapped when a copy touches it.
    """

    def __init__(self, pool: mmap.mmap, is_busy: Callable[[], bool]) -> None:
        """`is_busy()` is asked before each chunk, from the thread."""
        self._pool = pool
        self._is_busy = is_busy
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="populate", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """It ends after the chunk that it is at. Any number of times."""
        self._stopped.set()

    def join(self, timeout_s: float) -> bool:
        """Waits for its end; False if it has not come. True if it was never started."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        pool = np.frombuffer(self._pool, np.uint8)
        try:
            for offset in range(0, len(pool), CHUNK_BYTES):
                while self._is_busy() and not self._stopped.wait(YIELD_S):
                    pass
                if self._stopped.is_set():
                    return
                populate(pool, offset, min(CHUNK_BYTES, len(pool) - offset))
        except OSError as error:
            # A kernel before 5.14, no memory for page tables, or a hole in the file and no room for it.
            _log.info("the pool's pages are mapped as they are touched", why=str(error))
