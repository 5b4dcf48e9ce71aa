"""The host pool for the composition root: opening it, handing it out, closing it."""

import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PoolRecords

from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.ids import Slots
from kvtierd.core.stimuli import Recovered
from kvtierd.memory import pool_file
from kvtierd.memory.populating import Progress, no_progress
from kvtierd.memory.recovery import NOTHING_FOUND, free_proven, recover, set_aside, writers_named
from kvtierd.memory.replacing import replace_memory
from kvtierd.memory.writers import WriterTable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolStart:
    """How the pool was opened, for the log, the status call and the metrics."""

    warm: bool
    cold_reason: str
    """Why an earlier pool was not kept; empty if it was."""
    recovered_blocks: int
    recovered_bytes: int
    quarantined_slots: int
    discarded_slots: int
    seconds: float


class HostPool:
    """An open pool, which belongs to this process and to those that inherit `fd`.

    The lock is held as long as any copy of the descriptor, or any mapping made from it, exists: a successor
    gets the pool only when this process and all its workers have closed it or are gone. Not safe for use from
    several threads.
    """

    fd: int
    size_bytes: int
    """The size that was asked for; the file has as many whole extents as fit into it."""
    geometry: PoolGeometry
    shortage: str
    """Why the pool stays smaller than its file, because there is no memory for the rest; empty if it does
    not."""
    records: PoolRecords
    array: npt.NDArray[np.uint8]
    """The whole file; workers map it themselves."""
    boot_nonce: int
    """A random number of this boot, never 0. Together with a transfer's number it identifies a store for
    ever."""
    start: PoolStart
    recovered: Recovered
    """What was found in the pool. The core gets it once, before any session."""

    def __init__(
        self, fd: int, geometry: PoolGeometry, array: npt.NDArray[np.uint8], cold_reason: str, began_s: float
    ) -> None:
        """Call `HostPool.open` instead."""
        self.fd = fd
        self.geometry = geometry
        self.shortage = ""
        self.array = array
        self.records = PoolRecords(array)
        self.boot_nonce = secrets.randbits(64) | 1
        self._writers = WriterTable(array, partial(writers_named, self.records))
        self._writers.set_owner(os.getpid())
        found = NOTHING_FOUND if cold_reason else recover(self.records, self._writers.gone)
        self._quarantined = found.recovered.quarantined
        self._quarantined_writers = found.quarantined_writers
        self._replace_foreign(found.recovered)
        self.recovered = replace(found.recovered, quarantined=self._quarantined)
        self._writers.sweep(np.unique(self._quarantined_writers).tolist())
        self.records.start_boot(self.boot_nonce)
        self.start = PoolStart(
            warm=not cold_reason,
            cold_reason=cold_reason,
            recovered_blocks=found.blocks,
            recovered_bytes=found.data_bytes,
            quarantined_slots=len(self._quarantined),
            discarded_slots=found.discarded,
            seconds=time.monotonic() - began_s,
        )

    @classmethod
    def open(
        cls,
        path: Path | None,
        size_bytes: int,
        extent_bytes: int | None = None,
        *,
        lock_timeout_s: float,
        progress: Progress = no_progress,
        check_stop: Callable[[], None] = pool_file.never_stop,
    ) -> "HostPool":
        """Opens the pool at `path`: recovers what is there, or makes a new one. If `path` is None, makes one
        in a memfd.

        The file has at most `size_bytes`: a 2 MiB header and whole extents. If `extent_bytes` is None, an
        existing pool keeps its own, and a new one gets a suitable size. A new pool has memory for its first
        area only; `populated` says that more of it has some. The call blocks up to `lock_timeout_s` for the
        lock, and for the first area, about 0.2 CPU seconds, which it reports to `progress`. Meanwhile it
        calls `check_stop()` again and again; if that raises, opening ends, and a pool that is not finished is
        removed.

        A pool that cannot be kept is made anew, and `start.cold_reason` says why. Raises PoolLocked,
        PoolTooLarge or PoolRefused, each of which names the path and what to do, and ValueError for sizes out
        of range; the pool that was found is then unchanged.
        """
        began_s = time.monotonic()
        wanted = pool_file.geometry_for(
            size_bytes, extent_bytes or pool_file.default_extent_bytes(size_bytes)
        )
        if path is None:
            fd = os.memfd_create("kvtier-pool", os.MFD_CLOEXEC)
        else:
            fd = pool_file.open_locked(path, lock_timeout_s, check_stop=check_stop)

        def populated(done: int, of: int) -> None:
            progress(done, of)
            check_stop()

        try:
            check_stop()
            if path is None:
                header: pool_file.Header | str = "the pool is not persistent"
            else:
                pool_file.refuse_foreign(fd, path)
                header = pool_file.read_header(fd)
            length = os.fstat(fd).st_size
            cold_reason = pool_file.reason_to_remake(header, length, size_bytes, extent_bytes) or ""
            if isinstance(header, str) or cold_reason:
                geometry = wanted
                array = pool_file.make_pool(fd, path, geometry, populated)
            else:
                geometry = header.geometry
                assert path is not None
                array = pool_file.map_found(fd, path, header)
            pool = cls(fd, geometry, array, cold_reason, began_s)
            pool.size_bytes = size_bytes
        except BaseException:
            if path is not None:
                pool_file.remove_unmade(fd, path)
            os.close(fd)
            raise
        pool._log(path)
        return pool

    @property
    def populated_extents(self) -> int:
        """How many extents, from the first on, have memory. The others must not be touched."""
        return self.records.populated

    @property
    def populated_bytes(self) -> int:
        """Bytes of the extents that have memory."""
        return self.records.populated * self.geometry.extent_bytes

    def populated(self, end: int) -> int:
        """Takes over that the file has memory up to `end`. Returns how many extents can be used now: those of
        whole areas."""
        self.records.set_populated(pool_file.whole_areas(self.geometry, end))
        return self.records.populated

    def no_more(self, why: str) -> None:
        """There is no memory for the rest of the pool, `why` says. Gives back what it has of an area that is
        not complete."""
        self.shortage = why
        end = pool_file.populated_bytes(self.geometry, self.records.populated)
        pool_file.give_back(self.fd, end, len(self.array))

    def register_writer(self, pid: int) -> int:
        """Gives a living process, which is about to write slots, its writer id (1 to 65,535). Raises
        ValueError if the process is gone."""
        return self._writers.register(pid)

    def set_aside(self, slots: Slots) -> None:
        """Takes slots out of use for as long as the file exists, because their memory has failed a check. A
        cell that has failed once is the likeliest to fail again, and after a warm start the slot is still in
        the same place in memory."""
        set_aside(self.records, slots, self.boot_nonce)

    def retry_quarantine(self) -> Slots:
        """Frees the quarantined slots whose writers are now proved to be gone, and returns them, for the
        core."""
        if not len(self._quarantined):
            return self._quarantined
        proven = free_proven(self.records, self._quarantined, self._quarantined_writers, self._writers.gone)
        slots = self._quarantined[proven]
        self._quarantined = self._quarantined[~proven]
        self._quarantined_writers = self._quarantined_writers[~proven]
        if len(slots):
            log.info(
                "%d quarantined slots are free: their writers are gone; %d remain",
                len(slots),
                len(self._quarantined),
            )
        return slots

    def _replace_foreign(self, recovered: Recovered) -> None:
        """Frees quarantined slots whose writers cannot be seen from here, by giving them other memory.

        This works only before this daemon has a worker, because a worker that has registered the old memory
        with a GPU's driver would go on using it.
        """
        foreign = np.flatnonzero(
            np.isin(self._quarantined_writers, self._writers.foreign(self._quarantined_writers))
        )
        if not len(foreign):
            return
        slot_bytes = {each.extent: each.slot_bytes for each in recovered.extents}
        slots = self._quarantined[foreign]
        done = replace_memory(self.fd, self.geometry, slot_bytes, slots)
        if done.any():
            self.records.free(np.ascontiguousarray(slots[done]))
        left = np.ones(len(self._quarantined), bool)
        left[foreign[done]] = False
        self._quarantined = self._quarantined[left]
        self._quarantined_writers = self._quarantined_writers[left]
        log.info(
            "%d slots of writers that cannot be seen from here have other memory, %d have not",
            np.count_nonzero(done),
            np.count_nonzero(~done),
        )

    @property
    def quarantined_slots(self) -> int:
        """Slots still in quarantine."""
        return len(self._quarantined)

    def close(self) -> None:
        """Closes this process's copy of the descriptor. Call it when nothing here writes to the pool any
        more.

        The mapping goes with the last array over it.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            del self._writers, self.records, self.array

    def __enter__(self) -> "HostPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log(self, path: Path | None) -> None:
        start = self.start
        where = path or "memory, not persistent"
        if not start.warm:
            log.info(
                "pool %s: cold start, %s; %s with its header, the first %s in %.1f s",
                where,
                start.cold_reason,
                pool_file.gib(len(self.array)),
                pool_file.gib(self.populated_bytes),
                start.seconds,
            )
            return
        log.info(
            "pool %s: warm start, %d blocks (%s) recovered, %d slots discarded, in %.2f s",
            where,
            start.recovered_blocks,
            pool_file.gib(start.recovered_bytes),
            start.discarded_slots,
            start.seconds,
        )
        if start.quarantined_slots:  # usual after a kill, for a moment; an alert tells of those that stay
            log.info(
                "pool %s: %d slots are in quarantine until the process that was writing them is proved gone",
                where,
                start.quarantined_slots,
            )
