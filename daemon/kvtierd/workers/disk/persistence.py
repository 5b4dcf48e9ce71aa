"""The slab's headers and records: copies of the image's, written a page at a time, in an order that survives
a kill."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PoolRecords

from kvtierd.core.ids import PAGE_BYTES
from kvtierd.tiers.disk.slab import HEADER_BYTES, ExtentHeaders, Slab
from kvtierd.workers.channel.status import StatusPage, StatusWord
from kvtierd.workers.disk.faults import Faults
from kvtierd.workers.disk.jobs import U32

PIECE_BYTES = 1 << 20
"""Bytes of a table that are written at once."""

GAP_BYTES = 16 * PAGE_BYTES
"""Record pages that are no further apart are written together with the pages between them, which belong to
the same table, because the next table is most of an extent away. A few more pages cost less than another
call."""


class DiskRecords:
    """Writes what the image says into the file. Any thread may use it, but only one writes at a time, so that
    no older copy of a page replaces a newer one."""

    def __init__(
        self,
        slab: Slab,
        image: npt.NDArray[np.uint8],
        records: PoolRecords,
        headers: ExtentHeaders,
        status: StatusPage,
        faults: Faults,
    ) -> None:
        """`headers` is what the file says about the extents now."""
        self._slab = slab
        self._image = image.data
        self._records = records
        self._headers = headers
        self._status = status
        self._faults = faults
        self._lock = threading.Lock()

    def persist(self, slots: U32, word: StatusWord) -> npt.NDArray[np.int32]:
        """Makes the file say what the image says now about these slots and the extents that hold them.
        Returns 0 or an errno for each slot. If the file has another header for an extent, it gets the
        image's, and the whole table, because no record of an extent is believed before all are there.

        `word` is set while the disk is waited for. Raises ValueError if one of these is not a slot.
        """
        errors = np.zeros(len(slots), np.int32)
        extents = self._slab.geometry.extent_of(slots)
        with self._lock:
            for extent in np.unique(extents).tolist():
                if code := self._persist_extent(extent, word):
                    errors[extents == extent] = code
            good = np.flatnonzero(errors == 0)
            pages = self._records.record_pages(slots[good])
            failed = self._persist_pages(pages, word)
        if failed:
            for row in good.tolist():
                errors[row] = failed.get(int(self._records.record_pages(slots[row : row + 1])[0]), 0)
        return errors

    def persist_all(self, word: StatusWord) -> None:
        """Makes the file say what the image says now about every extent, extent by extent, so that other
        threads get their turn. Raises OSError at the first that cannot be written; of the rest it is then not
        known."""
        for extent in range(self._slab.geometry.extents):
            with self._lock:
                if self._records.extent_info(extent) is None:
                    self._forget_extent(extent, word)
                elif code := self._persist_extent(extent, word):
                    raise OSError(code, os.strerror(code))
                else:
                    self._write_table(self._records.table_range(extent), word)

    def _forget_extent(self, extent: int, word: StatusWord) -> None:
        """Clears an extent that nobody uses, whatever the file says about it, even if that could not be
        read."""
        if self._headers.get(extent) != bytes(HEADER_BYTES):
            self._write(memoryview(bytes(PAGE_BYTES)), self._slab.extent_offset(extent), word)
            self._headers.set(extent, bytes(HEADER_BYTES))

    def _persist_pages(self, pages: npt.NDArray[np.uint64], word: StatusWord) -> dict[int, int]:
        """For each page that could not be written, by its offset, the errno."""
        failed: dict[int, int] = {}
        breaks = np.flatnonzero(np.diff(pages) > GAP_BYTES) + 1
        for run in np.split(pages, breaks) if len(pages) else []:
            start, length = int(run[0]), int(run[-1] - run[0]) + PAGE_BYTES
            try:
                self._write(self._image[start : start + length], start, word)
            except OSError as error:
                failed |= dict.fromkeys(run.tolist(), error.errno or errno.EIO)
        return failed

    def _persist_extent(self, extent: int, word: StatusWord) -> int:
        """Returns 0, or an errno if it is not known what the file says about the extent now."""
        start = self._slab.extent_offset(extent)
        header = bytes(self._image[start : start + HEADER_BYTES])
        if self._headers.get(extent) == header:
            return 0
        table = self._records.table_range(extent)  # first, because it raises if the extent is not in use
        self._headers.set(extent, None)
        try:
            self._write(memoryview(bytes(PAGE_BYTES)), start, word)
            self._write_table(table, word)
            self._write(memoryview(header.ljust(PAGE_BYTES, b"\0")), start, word)
        except OSError as error:
            return error.errno or errno.EIO
        self._headers.set(extent, header)
        return 0

    def _write_table(self, table: tuple[int, int], word: StatusWord) -> None:
        offset, length = table
        for done in range(0, length, PIECE_BYTES):
            at, end = offset + done, offset + min(done + PIECE_BYTES, length)
            self._write(self._image[at:end], at, word)

    def _write(self, pages: memoryview, offset: int, word: StatusWord) -> None:
        with waiting(self._status, word):
            if code := self._faults.strike("records"):
                raise OSError(code, "a fault that a test asked for")
            self._slab.write(pages, offset)
        self._faults.step()


@contextmanager
def waiting(status: StatusPage, word: StatusWord) -> Iterator[None]:
    """For calls that wait for the disk: the front can see since when they do."""
    status.enter(word)
    try:
        yield
    finally:
        status.leave(word)
