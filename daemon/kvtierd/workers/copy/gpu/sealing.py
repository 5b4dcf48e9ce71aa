"""Computes checksums of stored blocks outside the lane, so that the engine gets its blocks back as soon as
the GPU has read them, and the link never waits for a processor."""

import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvtier_kernels import CopyPlan, PoolRecords

from kvtierd.core.ids import Slots
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.copy.parts import PartEnd, PartTask
from kvtierd.workers.log import logger

_log = logger(__name__)

UNSEALED_BYTES_MAX = 256 << 20
"""Landed data without checksums beyond which the store lane waits: about 10 ms of work for four threads."""

THREADS_MIN, THREADS_MAX = 2, 8
"""Four threads seal 24 to 29 GB/s beside an H200 whose lane copies 46 (tests/gpu/results, `end_to_end`)."""

SEAL_DIED_STATUS = 72


@dataclass(frozen=True, slots=True)
class _Job:
    part: PartTask
    slots: Slots
    generations: npt.NDArray[np.uint64]
    slot_bytes: int


@dataclass(slots=True)
class _Unsealed:
    """A part that has chunks which are not sealed, or an end that waits for them."""

    jobs: int = 0
    error: str = ""
    end: PartEnd | None = None
    over: Callable[[PartEnd], None] | None = None

    def report(self) -> None:
        """Reports the end. Called once nothing of the part is left to seal."""
        assert self.end is not None
        assert self.over is not None
        if self.error and self.end.outcome == wire.DONE:
            self.over(PartEnd(wire.FAILED, self.error, copy_ns=self.end.copy_ns))
        else:
            self.over(self.end)


def automatic_threads() -> int:
    """Returns how many threads compute checksums unless a number was asked for: one for two processors that
    this process may use, within bounds."""
    return max(THREADS_MIN, min(THREADS_MAX, len(os.sched_getaffinity(0)) // 2))


class Sealer:
    """Threads that compute the checksums of landed chunks and put them into the slots' records.

    The queue is bounded by the flights that may land while `is_full` is false, because the lane asks before
    each chunk.
    """

    def __init__(
        self,
        pool: mmap.mmap,
        records: PoolRecords,
        threads: int,
        enter_thread: Callable[[], None],
        unsealed_bytes_max: int = UNSEALED_BYTES_MAX,
    ) -> None:
        """`threads`: 0 for `automatic_threads`."""
        threads = threads or automatic_threads()
        self._pool = pool
        self._records = records
        self._enter_thread = enter_thread
        self._unsealed_bytes_max = unsealed_bytes_max
        self._jobs: deque[_Job] = deque()
        self._parts: dict[PartTask, _Unsealed] = {}
        self._unsealed_bytes = 0
        self._stopping = False
        self._on_room: Callable[[], None] = lambda: None
        self._wake = threading.Condition()
        self._threads = [
            threading.Thread(target=self._serve, name=f"seal {number}", daemon=True)
            for number in range(threads)
        ]

    def start(self, on_room: Callable[[], None]) -> None:
        """`on_room()` is called from a thread of the sealer when it is no longer full."""
        self._on_room = on_room
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """The threads end when everything is sealed. Nothing may be put in afterwards."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Waits for the threads to end; False if they have not."""
        for thread in self._threads:
            thread.join(timeout_s / len(self._threads))
        return not any(thread.is_alive() for thread in self._threads)

    def is_full(self) -> bool:
        """Whether the store lane should wait. From any thread."""
        return self._unsealed_bytes >= self._unsealed_bytes_max

    def put(self, part: PartTask, slots: Slots, generations: npt.NDArray[np.uint64], slot_bytes: int) -> None:
        """Takes the landed slots of a part, which were all WRITING with these generations a moment ago."""
        with self._wake:
            self._parts.setdefault(part, _Unsealed()).jobs += 1
            self._unsealed_bytes += len(slots) * slot_bytes
            self._jobs.append(_Job(part, slots, generations, slot_bytes))
            self._wake.notify()

    def settle(self, part: PartTask, end: PartEnd, over: Callable[[PartEnd], None]) -> None:
        """Calls `over` when the part is completely sealed: now, or from a thread of the sealer. A part that
        would be DONE fails if one of its slots was taken back meanwhile."""
        with self._wake:
            unsealed = self._parts.setdefault(part, _Unsealed())
            unsealed.end, unsealed.over = end, over
            if unsealed.jobs:
                return
            del self._parts[part]
        unsealed.report()

    def _serve(self) -> None:
        try:
            self._enter_thread()
            while True:
                job = self._next()
                if job is None:
                    return
                self._sealed(job, self._seal(job))
        except BaseException:
            _log.critical("a sealing thread died; so does the worker", exc_info=True)
            logging.shutdown()
            os._exit(SEAL_DIED_STATUS)

    def _next(self) -> _Job | None:
        with self._wake:
            while not self._jobs:
                if self._stopping:
                    return None
                self._wake.wait()
            return self._jobs.popleft()

    def _seal(self, job: _Job) -> str:
        """Why the slots could not be sealed; empty if they were."""
        try:
            sums = _slot_reader(job.slot_bytes).checksums(self._pool, job.slots)
            # This raises if a slot is not WRITING any more, or is for another block.
            self._records.set_data_checksums(job.slots, job.generations, sums)
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _sealed(self, job: _Job, error: str) -> None:
        with self._wake:
            was_full = self.is_full()
            self._unsealed_bytes -= len(job.slots) * job.slot_bytes
            has_room = was_full and not self.is_full()
            unsealed = self._parts[job.part]
            unsealed.jobs -= 1
            unsealed.error = unsealed.error or error
            is_over = unsealed.jobs == 0 and unsealed.end is not None
            if is_over:
                del self._parts[job.part]
        if has_room:
            self._on_room()
        if is_over:
            unsealed.report()


def _slot_reader(slot_bytes: int) -> CopyPlan:
    """A plan that fits slots of this size, but no engine's blocks."""
    nowhere = np.empty(slot_bytes, np.uint8)  # never touched, so no memory
    size = np.array([slot_bytes], np.uint64)
    return CopyPlan(nowhere, np.zeros(1, np.uint64), size, size, 1)
