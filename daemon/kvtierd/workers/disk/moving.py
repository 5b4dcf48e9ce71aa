"""Moves a batch of slots between the pool and the slab, or checks it, in the order that makes it safe.

A batch is a few slots of one job. Whatever fails in it fails only its own slots, and none of its operations
is under way when a method returns.
"""

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PoolRecords, SlabIo

from kvtierd.core.actions import DiskJobKind
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.workers.channel.status import StatusPage, StatusWord
from kvtierd.workers.disk.faults import Faults
from kvtierd.workers.disk.jobs import U32, U64, Rows, SlotJob
from kvtierd.workers.disk.persistence import DiskRecords, waiting

WRITE_BYTES = 16 << 20
"""A batch of a write has as many slots as the disk is given at once, or as this many bytes hold if that is
more; reads wait for writes no longer than that takes. At the end of a batch the disk is idle for a moment, so
it should not be smaller: in batches of 4 MiB, slots of 64 KiB took half as long again. A read is a single
batch, because nothing goes before it."""

CHECK_BYTES = 4 << 20
"""Bytes that a check reads at once, or one slot if that is more."""

Bytes = npt.NDArray[np.uint8]


class Mover:
    """Moves data for one thread."""

    def __init__(
        self,
        *,
        path: Path,
        geometry: PoolGeometry,
        direct_fd: int,
        fallback_fd: int | None,
        depth: int,
        pool: Bytes,
        host: PoolRecords,
        disk: PoolRecords,
        records: DiskRecords,
        status: StatusPage,
        word: StatusWord,
        faults: Faults,
    ) -> None:
        """`direct_fd` is used only during this call. `fallback_fd` is given where `direct_fd` goes through
        the kernel's cache, and is used to drop from the cache what was moved. Raises OSError if the kernel
        has no room for `depth` operations."""
        self._path = path
        self._geometry = geometry
        self._io = SlabIo(direct_fd, depth, status.words, word)
        self._fallback_fd = fallback_fd
        self._depth = depth
        self._pool = pool
        self._host = host
        self._disk = disk
        self._records = records
        self._status = status
        self._word = word
        self._faults = faults
        self._buffer: Bytes | None = None

    def advance(self, job: SlotJob) -> None:
        """Deals with the job's next batch."""
        rows = np.arange(job.done, min(len(job), job.done + self._batch_slots(job)))
        match job.kind:
            case DiskJobKind.READ:
                self._read(job, rows)
            case DiskJobKind.WRITE:
                self._write(job, rows)
            case DiskJobKind.CHECK:
                self._check(job, rows)
        job.done += len(rows)

    def persist(self, slots: U32) -> None:
        """Makes the file say what the image says about slots, as far as that works. Skips those that are not
        slots any more."""
        try:
            self._records.persist(slots, self._word)
        except ValueError:
            for row in range(len(slots)):
                with contextlib.suppress(ValueError):  # its extent has been given another slot size
                    self._records.persist(slots[row : row + 1], self._word)

    def persist_all(self) -> None:
        """Makes the file say what the image says about everything. Raises OSError."""
        self._records.persist_all(self._word)

    def _batch_slots(self, job: SlotJob) -> int:
        """How many slots of the rest of a job the next batch has, at least one."""
        if job.kind is DiskJobKind.READ:
            return len(job)
        limit = WRITE_BYTES if job.kind is DiskJobKind.WRITE else CHECK_BYTES
        extents = self._geometry.extent_of(job.disk_slots[job.done :])
        strides = np.zeros(len(extents), np.int64)
        for extent in np.unique(extents).tolist():
            if extent < self._geometry.extents and (info := self._disk.extent_info(extent)):
                strides[extents == extent] = info[1]
        fitting = int(np.searchsorted(np.cumsum(strides), limit, "right"))
        return max(self._depth if job.kind is DiskJobKind.WRITE else 1, fitting)

    # --- the three kinds ---

    def _write(self, job: SlotJob, rows: Rows) -> None:
        rows = self._keep(job, rows, self._disk.match(*pair(job, rows, self._host)))
        rows = self._persist(job, rows)
        rows = self._write_data(job, rows, self._pool, job.host_slots[rows])
        # If the host's block is still there, its bytes are what was written, because a slot's generation
        # changes before its bytes do. Its checksum is taken over, and compared with what is read back.
        rows = self._keep(job, rows, self._disk.adopt(*pair(job, rows, self._host)))
        self._disk.commit(job.disk_slots[rows], job.clocks[rows])
        self._persist(job, rows)

    def _read(self, job: SlotJob, rows: Rows) -> None:
        matching = self._host.match(*pair(job, rows, self._disk)) == 1
        self._blame(job, rows[~matching])
        rows = rows[matching]
        rows, sums = self._read_data(job, rows, self._pool, job.host_slots[rows])
        verdicts = self._host.accept(*pair(job, rows, self._disk), sums)
        job.corrupt.append(rows[verdicts == 2])
        self._blame(job, rows[verdicts == 0])

    def _check(self, job: SlotJob, rows: Rows) -> None:
        expected, good = self._disk.data_sums(job.disk_slots[rows], job.disk_generations[rows])
        self._blame(job, rows[good == 0])
        rows, expected = rows[good == 1], expected[good == 1]
        sizes = in_pages(self._disk.data_bytes(job.disk_slots[rows]))
        places = (np.cumsum(sizes) - sizes) // PAGE_BYTES
        read, sums = self._read_data(job, rows, self._memory(int(sizes.sum())), places)
        wrong = read[sums != expected[np.searchsorted(rows, read)]]
        # It is corrupt only if the slot is still the same; otherwise it was given away while it was read.
        still = self._disk.check(job.disk_slots[wrong], job.disk_generations[wrong]) == 1
        job.corrupt.append(wrong[still])
        job.fail(wrong[~still])

    # --- their steps ---

    def _keep(self, job: SlotJob, rows: Rows, verdicts: npt.NDArray[np.uint8]) -> Rows:
        """The rows that may go on. The blocks of the others are gone, so they fail."""
        kept: Rows = rows[verdicts == 1]
        job.fail(rows[verdicts != 1])
        return kept

    def _blame(self, job: SlotJob, rows: Rows) -> None:
        """Fails rows that did not match their records. They are corrupt if the disk's record cannot be
        believed although it still has its generation; otherwise their blocks are gone."""
        for row in rows.tolist():
            at = slice(row, row + 1)
            slots, generations = job.disk_slots[at], job.disk_generations[at]
            try:
                same = bool((self._disk.generations(slots) == generations).all())
            except ValueError:  # its extent has been given another slot size
                same = False
            believed = bool(self._disk.check(slots, generations).all())
            (job.corrupt if same and not believed else job.failed).append(np.array([row]))

    def _persist(self, job: SlotJob, rows: Rows) -> Rows:
        """Makes the file say what the image says about these rows' records. Returns the rows for which that
        worked."""
        began_ns = time.monotonic_ns()
        errors = self._records.persist(job.disk_slots[rows], self._word)
        job.busy_ns += time.monotonic_ns() - began_ns
        return self._without(job, rows, errors, "writing the records of")

    def _write_data(
        self, job: SlotJob, rows: Rows, memory: Bytes, pages: npt.NDArray[np.unsignedinteger]
    ) -> Rows:
        """Writes the rows' data from these pages of `memory` to the disk. Returns the rows for which that
        worked."""
        if not len(rows):
            return rows
        places = pages.astype(np.uint64) * PAGE_BYTES
        offsets, data_bytes = self._on_disk(job, rows)
        with self._moving(job, offsets, data_bytes):
            if code := self._faults.strike("write"):
                errors = np.full(len(rows), code, np.int32)
            else:
                errors = self._io.write(memory, places, offsets, in_pages(data_bytes))
        self._faults.step()
        job.moved_bytes += int(in_pages(data_bytes)[errors == 0].sum())
        return self._without(job, rows, errors, "writing to")

    def _read_data(
        self,
        job: SlotJob,
        rows: Rows,
        memory: Bytes,
        pages: npt.NDArray[np.unsignedinteger],
        *,
        to_sum: bool = True,
    ) -> tuple[Rows, U64]:
        """Reads the rows' data from the disk into these pages of `memory`. Returns the rows for which that
        worked, and, with `to_sum`, their checksums."""
        sums = np.zeros(len(rows), np.uint64)
        if not len(rows):
            return rows, sums
        offsets, data_bytes = self._on_disk(job, rows)
        with self._moving(job, offsets, data_bytes):
            if code := self._faults.strike("read"):
                errors = np.full(len(rows), code, np.int32)
            else:
                places = pages.astype(np.uint64) * PAGE_BYTES
                summed = data_bytes if to_sum else np.zeros_like(data_bytes)
                errors, sums = self._io.read(memory, places, offsets, in_pages(data_bytes), summed)
        job.moved_bytes += int(in_pages(data_bytes)[errors == 0].sum())
        return self._without(job, rows, errors, "reading from"), sums[errors == 0]

    def _on_disk(self, job: SlotJob, rows: Rows) -> tuple[U64, U64]:
        """Where the rows' slots begin in the slab, and how many bytes of data they have."""
        slots = job.disk_slots[rows]
        return slots.astype(np.uint64) * PAGE_BYTES, self._disk.data_bytes(slots)

    @contextlib.contextmanager
    def _moving(self, job: SlotJob, offsets: U64, data_bytes: U64) -> Iterator[None]:
        """For operations of the disk for this job: reports to the front that the thread waits, and counts the
        time."""
        began_ns = time.monotonic_ns()
        with waiting(self._status, self._word):
            yield
            self._drop_cached(offsets, in_pages(data_bytes))
        job.busy_ns += time.monotonic_ns() - began_ns

    def _without(self, job: SlotJob, rows: Rows, errors: npt.NDArray[np.int32], doing: str) -> Rows:
        wrong = errors != 0
        if wrong.any():
            code = int(errors[wrong][0])
            name = errno.errorcode.get(code, str(code))
            job.fail(rows[wrong], f"{doing} {self._path} failed with {name} ({os.strerror(code)})")
        kept: Rows = rows[~wrong]
        return kept

    def _drop_cached(self, offsets: U64, sizes: U64) -> None:
        if self._fallback_fd is None:
            return
        for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
            os.posix_fadvise(self._fallback_fd, offset, size, os.POSIX_FADV_DONTNEED)

    def _memory(self, size: int) -> Bytes:
        """Whole pages of its own for a check. They are kept, unless they are unusually many."""
        if size > CHECK_BYTES:
            return np.frombuffer(mmap.mmap(-1, size), np.uint8)
        if self._buffer is None:
            self._buffer = np.frombuffer(mmap.mmap(-1, CHECK_BYTES), np.uint8)
        return self._buffer


def pair(job: SlotJob, rows: Rows, source: PoolRecords) -> tuple[U32, U64, PoolRecords, U32, U64]:
    """The arguments of `match`, `adopt` and `accept` for the records on the other side."""
    disk = job.disk_slots[rows], job.disk_generations[rows]
    host = job.host_slots[rows], job.host_generations[rows]
    # For a write, the records are the disk's and the source is the host; for a read, the reverse.
    return (*disk, source, *host) if job.kind is DiskJobKind.WRITE else (*host, source, *disk)


def in_pages(sizes: U64) -> U64:
    """Sizes rounded up to whole pages, in bytes; at least one page."""
    pages: U64 = np.maximum(-(-sizes.astype(np.int64) // PAGE_BYTES), 1).astype(np.uint64) * PAGE_BYTES
    return pages
