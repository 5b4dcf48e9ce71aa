"""Registers the pool with the driver, area by area, so that the GPU's copy engines can reach it."""

import errno
import fcntl
import mmap
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PAGE_BYTES, PoolRecords, populate
from kvtier_kernels.cuda import CudaError, Driver

from kvtierd.core.ids import Slots
from kvtierd.memory import numa
from kvtierd.memory.pool_file import AREA_BYTES, HEADER_AREA_BYTES
from kvtierd.workers.channel.status import StatusPage, StatusWord
from kvtierd.workers.copy.device import Area
from kvtierd.workers.copy.gpu.fatal import context_guard
from kvtierd.workers.log import logger

_log = logger(__name__)

POPULATE_BYTES = 16 << 20

SAMPLES = 4
"""How many pages of an area are asked where they lie."""

LOCK_POLL_S = 0.002


class PoolNotRegisteredError(Exception):
    """The GPU cannot reach a part of the pool."""


class _BusyError(PoolNotRegisteredError):
    """Another thread or worker has been registering all the time."""


class PoolRegistration:
    """Which areas of the pool are registered. Any thread may register one.

    Areas are runs of whole extents, so that no slot lies in two. They are those in which the pool gets its
    memory, so an area with a slot that is in use has memory as a whole. A lane that needs an area first waits
    for it, about 25 ms at 0.1 s per GB, and so do the workers of other GPUs, because of the driver's locks.
    Copies must not cross `borders`. Nothing is ever unregistered, because the end of the process does that.
    """

    def __init__(
        self,
        driver: Driver,
        pool: mmap.mmap,
        pool_fd: int,
        records: PoolRecords,
        status: StatusPage,
        lock_deadline_s: float,
        area_bytes: int = AREA_BYTES,
    ) -> None:
        """`pool_fd` is the pool's file, open for writing as long as this object lives. A record lock on it
        keeps workers from registering at the same time, which some drivers do not survive."""
        self._driver = driver
        self._pool = np.frombuffer(pool, np.uint8)
        self.address = self._pool.ctypes.data
        """Where the pool is mapped."""
        self._pool_fd = pool_fd
        self._status = status
        self._lock_deadline_s = lock_deadline_s
        self._areas_bytes = records.extents * records.extent_bytes
        self._first = HEADER_AREA_BYTES
        self._area_bytes = max(1, area_bytes // records.extent_bytes) * records.extent_bytes
        self.areas: list[Area] = [
            (offset, min(self._area_bytes, self._first + self._areas_bytes - offset))
            for offset in range(self._first, self._first + self._areas_bytes, self._area_bytes)
        ]
        self.borders = np.array([offset for offset, _ in self.areas], np.uint64)
        self._registered = np.zeros(len(self.areas), np.bool_)
        self._populated_bytes = [0] * len(self.areas)
        self._registered_bytes = 0
        self._remote_bytes = 0
        self._registering = threading.Lock()
        self._why: dict[int, str] = {}
        """For each area, why it could not be registered the last time."""

    @property
    def pool_bytes(self) -> int:
        return len(self._pool)

    def ensure_next(self, slots: Slots) -> bool:
        """Takes a step towards registering an area that these slots need: maps some of its pages, or
        registers it, which may take a while. Returns True if another step may be needed.

        Failures show in `require`. Slots that the pool does not have are ignored.
        """
        if self._registered_bytes == self._areas_bytes:
            return False
        indexes = self._areas_of(slots)
        indexes = indexes[(indexes >= 0) & (indexes < len(self.areas))]
        missing = indexes[~self._registered[indexes]]
        if len(missing) == 0:
            return False
        index = int(missing[0])
        try:
            if self._populate_next(index):
                return True
            self._register(index, self._lock_deadline_s)
        except (CudaError, PoolNotRegisteredError, OSError) as error:
            # Every copy that needs the area tries again, perhaps for ever, so each reason is logged once.
            if self._why.get(index) != str(error):
                _log.error("a part of the pool cannot be registered", area=index, why=str(error))
            self._why[index] = str(error)
            return False
        return bool((missing != index).any())

    def require(self, slots: Slots) -> None:
        """Raises PoolNotRegisteredError unless the areas of all these slots are registered."""
        areas = self._areas_of(slots)
        missing = areas[~self._registered[areas]]
        if len(missing):
            area = int(missing[0])
            why = self._why.get(area, "nobody asked for it")
            raise PoolNotRegisteredError(
                f"area {area} of the pool could not be registered with the GPU: {why}"
            )

    def register(self, area: Area) -> bool:
        """Registers one of the areas, whose pages are mapped, if it is not registered yet. Does not wait:
        returns False if another thread or worker is registering just now. Raises CudaError, or OSError from
        the lock."""
        try:
            self._register((area[0] - self._first) // self._area_bytes, wait_s=0.0)
        except _BusyError:
            return False
        return True

    def _areas_of(self, slots: Slots) -> npt.NDArray[np.int64]:
        return (slots.astype(np.int64) * PAGE_BYTES - self._first) // self._area_bytes

    def _populate_next(self, index: int) -> bool:
        """Maps the next pages of an area. False if there are none left. Two threads at once may map some
        twice."""
        offset, length = self.areas[index]
        done = self._populated_bytes[index]
        if done == length:
            return False
        step_bytes = min(POPULATE_BYTES, length - done)
        populate(self._pool, offset + done, step_bytes)
        self._populated_bytes[index] = done + step_bytes
        return True

    def _register(self, index: int, wait_s: float) -> None:
        deadline_s = time.monotonic() + wait_s
        if not self._registering.acquire(timeout=wait_s):
            raise _BusyError(f"another thread has been registering for {wait_s} s")
        try:
            if self._registered[index]:
                return
            offset, length = self.areas[index]
            with self._alone(deadline_s, wait_s), self._watched(), context_guard():
                self._driver.host_register(self.address + offset, length)
            self._registered[index] = True
            self._registered_bytes += length
            self._status.words.store(StatusWord.REGISTERED_BYTES, self._registered_bytes)
        finally:
            self._registering.release()

    @contextmanager
    def _alone(self, deadline_s: float, wait_s: float) -> Iterator[None]:
        """Keeps the other GPUs' workers from registering. A record lock belongs to the process, so only one
        of its threads may be here at a time. It is not a flock, because a flock on this file is the pool's
        own lock."""
        while True:
            try:
                fcntl.lockf(self._pool_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                if time.monotonic() >= deadline_s:
                    raise _BusyError(f"another GPU's worker has been registering for {wait_s} s") from None
            time.sleep(LOCK_POLL_S)
        try:
            yield
        finally:
            fcntl.lockf(self._pool_fd, fcntl.LOCK_UN)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """If this hangs, the watchdog ends the process, and with it the lock for which the others wait."""
        self._status.enter(StatusWord.REGISTERING)
        try:
            yield
        finally:
            self._status.leave(StatusWord.REGISTERING)

    def nearest_first(self, node: int | None, start: int, end: int) -> Iterable[Area]:
        """Of the areas from `start` to `end`, all of which have memory, those that are not registered when
        their turn comes, with those on memory node `node` first."""
        order = [
            index
            for index, (offset, length) in enumerate(self.areas)
            if start <= offset and offset + length <= end
        ]
        if node is not None and len(numa.nodes()) > 1:
            remote = {index for index in order if self._node_of(index) != node}
            order.sort(key=remote.__contains__)
            self._remote_bytes += sum(self.areas[index][1] for index in remote)
            self._status.words.store(StatusWord.REMOTE_BYTES, self._remote_bytes)
        return (self.areas[index] for index in order if not self._registered[index])

    def _node_of(self, index: int) -> int | None:
        """The node on which most of an area's pages seem to lie."""
        offset, length = self.areas[index]
        places = range(offset, offset + length, max(PAGE_BYTES, length // SAMPLES))
        for place in places:
            # Before this process has touched a page, the kernel names no node for it.
            int(self._pool[place])
        found = [node for node in numa.nodes_of_pages([self.address + p for p in places]) if node is not None]
        return max(set(found), key=found.count) if found else None
