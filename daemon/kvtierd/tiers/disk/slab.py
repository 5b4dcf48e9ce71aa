"""A disk's slab file: opening it safely, locking it, making it, reading and writing its pages.

It is one file, `kvtier.slab`, in the pool's format 1, or 2 if it is encrypted. Only the disk's worker uses
it, because every call may take as long as the disk does.
"""

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PoolRecords

from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.memory import pool_file
from kvtierd.memory.errors import Naming, PoolError
from kvtierd.tiers.disk import key_table as key_tables
from kvtierd.tiers.disk.key_table import KeyTable

SLAB_NAME = "kvtier.slab"

NAMING = Naming("slab", "disk.paths", "disk.size", "disk.extent_size")

HEADER_BYTES = 64
"""The part of the header page, and of an extent's, that never changes while the file is in use."""

LOCK_TIMEOUT_S = 5.0
"""Time for an old worker to be gone. A killed one holds the lock until the disk has done what it was asked
for."""

_EMPTY = bytes(HEADER_BYTES)
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def refuse(field: str, value: object, message: str) -> Refusal:
    """A Refusal that says why a disk cannot be used, for the log and the status."""
    return Refusal(Reason.DEVICE_UNAVAILABLE, message, field=field, value=value)


class Slab:
    """An open slab file, locked through `fd` until this process has ended. Not safe for several threads,
    except `read` and `write`, which may run side by side."""

    fd: int
    """Uses the kernel's cache; for headers and records."""
    path: Path
    geometry: PoolGeometry

    def __init__(self, fd: int, path: Path, geometry: PoolGeometry, *, is_new: bool) -> None:
        """Call `Slab.open` instead."""
        self.fd = fd
        self.path = path
        self.geometry = geometry
        self._is_new = is_new
        # No read-ahead, because it would bring data into the kernel's cache, which writes of data bypass.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    @classmethod
    def open(
        cls,
        directory: Path,
        size_bytes: int,
        extent_bytes: int,
        *,
        create: bool,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> "Slab":
        """Opens and locks the slab of a directory, and changes nothing in it. With `create`, an empty file is
        made if there is none.

        Raises Refusal if the directory or the file cannot be used, belongs to another user, is locked for
        longer than `lock_timeout_s`, or holds something other than a slab. Raises ValueError for sizes out of
        range.
        """
        geometry = pool_file.geometry_for(size_bytes, extent_bytes, NAMING)
        path = directory / SLAB_NAME
        _require_directory(directory)
        try:
            fd = pool_file.open_locked(path, lock_timeout_s, NAMING, create=create)
        except PoolError as error:
            raise refuse(NAMING.path, directory, str(error)) from error
        except OSError as error:
            raise io_refusal(path, "opening it", error) from error
        try:
            pool_file.refuse_foreign(fd, path, NAMING)
            return cls(fd, path, geometry, is_new=os.fstat(fd).st_size == 0)
        except PoolError as error:
            os.close(fd)
            raise refuse(NAMING.path, directory, str(error)) from error
        except OSError as error:
            os.close(fd)
            raise io_refusal(path, "reading its header", error) from error

    def reason_to_remake(self, *, encrypted: bool = False) -> str:
        """Why the contents of the file cannot be kept, in words for the log; empty if they can. `encrypted`:
        they are to be encrypted. Raises Refusal if the header cannot be read."""
        try:
            found, length = pool_file.read_header(self.fd, NAMING), os.fstat(self.fd).st_size
        except OSError as error:
            raise io_refusal(self.path, "reading its header", error) from error
        size_bytes, extent_bytes = pool_file.file_bytes(self.geometry), self.geometry.extent_bytes
        why = pool_file.reason_to_remake(found, length, size_bytes, extent_bytes, NAMING, encrypted=encrypted)
        return why or ""

    def header(self) -> bytes:
        """The part of the header that does not change from boot to boot. Raises OSError."""
        return os.pread(self.fd, HEADER_BYTES, 0)

    def key_table(self) -> KeyTable | None:
        """The key table of a slab that is encrypted; None if there is none that can be believed. Raises
        OSError."""
        return key_tables.unpack(os.pread(self.fd, key_tables.BYTES_MAX, key_tables.OFFSET))

    # --- making it ---

    def make(self, header_page: bytes, step: Callable[[], None], key_table: bytes = b"") -> bool:
        """Makes the file a new slab with this header and no extent in use; one that is encrypted has a key
        table, of whole pages. `step()` is called after each change. Returns False if the file system cannot
        preallocate, so that the disk may get full later, and writes fail.

        If this is killed at any point, the file can be recognised as unfinished. Raises Refusal if there is
        no room: nothing has changed if that could be known in advance; otherwise the file is empty, or gone
        if it was new.
        """
        length = pool_file.file_bytes(self.geometry)
        try:
            self._require_room(length)
            self.write(memoryview(pool_file.MAGIC_MAKING.ljust(PAGE_BYTES, b"\0")), 0)
            step()
            os.ftruncate(self.fd, PAGE_BYTES)
            step()
            preallocated = _fallocate(self.fd, length)
            os.ftruncate(self.fd, length)
            step()
            if key_table:
                self.write(memoryview(key_table), key_tables.OFFSET)
                step()
            self.write(memoryview(header_page), 0)
            step()
        except OSError as error:
            self._give_up()
            if error.errno in _NO_ROOM:
                raise self._no_room(length, f"the space ran out while it was made ({error})") from error
            raise io_refusal(self.path, "making it", error) from error
        except Refusal:
            if self._is_new:
                self._give_up()
            raise
        return preallocated

    def allocate(self) -> bool:
        """Allocates the parts of a kept file that are not yet, as `make` does. Raises Refusal if there is no
        room."""
        length = pool_file.file_bytes(self.geometry)
        try:
            return os.fstat(self.fd).st_blocks * 512 >= length or _fallocate(self.fd, length)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise self._no_room(length, "parts of it are not allocated yet, and cannot be") from error
            raise io_refusal(self.path, "allocating it", error) from error

    def _require_room(self, length: int) -> None:
        system, have = os.fstatvfs(self.fd), os.fstat(self.fd).st_blocks * 512
        free = system.f_bavail * system.f_frsize + have
        if length > free:
            total = system.f_blocks * system.f_frsize
            raise self._no_room(length, f"{pool_file.gib(free)} free of {pool_file.gib(total)}")

    def _no_room(self, length: int, why: str) -> Refusal:
        return refuse(
            NAMING.size,
            length,
            f"a slab of {pool_file.gib(length)} does not fit {self.path.parent}: {why}. "
            "Lower disk.size, make room there, or name another directory in disk.paths",
        )

    def _give_up(self) -> None:
        """Gives the room back, so that a start that failed leaves no trace."""
        try:
            os.ftruncate(self.fd, 0)
            if self._is_new:
                self.path.unlink(missing_ok=True)
        except OSError:
            pass  # the disk is failing: the first error says more

    # --- pages ---

    def open_direct(self) -> int | None:
        """A descriptor of the same file that bypasses the kernel's cache, or None if the file system has no
        such thing. Raises OSError, or Refusal if the file has just been replaced."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return None
            raise
        if not os.path.sameopenfile(self.fd, fd):
            os.close(fd)
            raise refuse(NAMING.path, self.path.parent, f"slab {self.path} was replaced while it was opened")
        # Some file systems can open it, but need larger pieces than pages of 4 KiB.
        with mmap.mmap(-1, PAGE_BYTES) as page:
            try:
                os.preadv(fd, [page], 0)
            except OSError as error:
                os.close(fd)
                if error.errno == errno.EINVAL:
                    return None
                raise
        return fd

    def read(self, into: memoryview, offset: int) -> None:
        """Fills `into` from the file. Raises OSError, with EIO if the file is too short."""
        while into:
            count = os.preadv(self.fd, [into], offset)
            if count == 0:
                raise OSError(errno.EIO, "the file is shorter than it was")
            into, offset = into[count:], offset + count

    def write(self, pages: memoryview, offset: int) -> None:
        """Writes whole pages. Raises OSError, and then it is not known how much was written."""
        assert len(pages) % PAGE_BYTES == 0
        assert offset + len(pages) <= pool_file.file_bytes(self.geometry)
        while pages:
            count = os.pwritev(self.fd, [pages], offset)
            pages, offset = pages[count:], offset + count

    def extent_offset(self, extent: int) -> int:
        return self.geometry.first_extent_offset + extent * self.geometry.extent_bytes

    def extent_headers(self) -> "ExtentHeaders":
        """What the file says about every extent. Extents that cannot be read count as unknown."""
        headers = ExtentHeaders()
        offsets = [self.extent_offset(extent) for extent in range(self.geometry.extents)]
        for offset in offsets:  # all of them at once, where the disk can
            os.posix_fadvise(self.fd, offset, PAGE_BYTES, os.POSIX_FADV_WILLNEED)
        buffer = bytearray(HEADER_BYTES)
        for extent, offset in enumerate(offsets):
            try:
                self.read(memoryview(buffer), offset)
            except OSError as error:
                headers.fail(extent, error)
                continue
            headers.set(extent, bytes(buffer))
        return headers


class ExtentHeaders:
    """The headers of extents as the file has them. Extents that are not listed are known to have none."""

    ERRORS_MAX = 16
    """If more extents than this cannot be read, the disk is not used, because each may take the disk
    seconds."""

    def __init__(self) -> None:
        self._known: dict[int, bytes | None] = {}
        self.errors: dict[int, OSError] = {}

    def get(self, extent: int) -> bytes | None:
        """None if it is unknown."""
        return self._known.get(extent, _EMPTY)

    def set(self, extent: int, header: bytes | None) -> None:
        if header == _EMPTY:
            self._known.pop(extent, None)
        else:
            self._known[extent] = header

    def fail(self, extent: int, error: OSError) -> None:
        """Remembers that an extent cannot be read. Raises `error` if that has happened too often."""
        self.errors[extent] = error
        self._known[extent] = None
        if len(self.errors) > self.ERRORS_MAX:
            raise error


def load(slab: Slab, image: npt.NDArray[np.uint8]) -> ExtentHeaders:
    """Copies the header, the extents' headers, and the record tables of extents in use into the image, over
    whatever was there.

    The slab's header must be one that can be kept. An extent that cannot be read is not in use in the image,
    and will be written anew. Returns what the file says about the extents. Raises Refusal if more than a few
    cannot be read.
    """
    view = image.data
    try:
        slab.read(view[:PAGE_BYTES], 0)
        headers = slab.extent_headers()
        for extent in range(slab.geometry.extents):
            start = slab.extent_offset(extent)
            view[start : start + HEADER_BYTES] = headers.get(extent) or _EMPTY
        records = PoolRecords(image)
        for extent in range(slab.geometry.extents):
            if records.extent_info(extent) is None:
                continue
            offset, length = records.table_range(extent)
            try:
                slab.read(view[offset : offset + length], offset)
            except OSError as error:
                start = slab.extent_offset(extent)
                view[start : start + HEADER_BYTES] = _EMPTY
                headers.fail(extent, error)
    except OSError as error:
        raise io_refusal(slab.path, "reading its headers and records", error) from error
    return headers


def _require_directory(directory: Path) -> None:
    try:
        found = os.stat(directory)
    except FileNotFoundError as error:
        raise refuse(
            NAMING.path, directory, f"{directory} does not exist: create it, or take it out of disk.paths"
        ) from error
    except OSError as error:
        raise io_refusal(directory, "looking at it", error) from error
    if not stat.S_ISDIR(found.st_mode):
        raise refuse(NAMING.path, directory, f"{directory} is not a directory: name one in disk.paths")


def io_refusal(path: Path, doing: str, error: OSError) -> Refusal:
    name = errno.errorcode.get(error.errno or 0, "OSError")
    advice = {
        errno.EROFS: "the file system is mounted read-only: remount it, or name another directory",
        errno.EACCES: "let this daemon's user write there, or name another directory",
        errno.EIO: "the disk may be failing: check it, or take it out of disk.paths",
    }.get(error.errno or 0, "check the disk, or take it out of disk.paths")
    return refuse(NAMING.path, path, f"{path}: {doing} failed with {name} ({error.strerror}); {advice}")


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _fallocate(fd: int, length: int) -> bool:
    """False if the file system cannot. `os.posix_fallocate` is not used, because there it would write to
    every block of the file."""
    while _libc.fallocate(fd, 0, 0, length):
        code = ctypes.get_errno()
        if code in _NO_FALLOCATE:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True
