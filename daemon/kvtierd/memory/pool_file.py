"""The pool's file: opening it safely, locking it, making it, and deciding whether what is there can be
kept."""

import contextlib
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PoolRecords, format_pool, xxh3_64

from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.memory.errors import POOL, Naming, PoolLocked, PoolRefused, PoolTooLarge
from kvtierd.memory.populating import NO_ROOM, THREADS_MAX, Progress, no_progress, node_of, populate_range
from kvtierd.memory.writers import TABLE_BYTES, TABLE_OFFSET, living

log = logging.getLogger(__name__)

FORMAT = 1
ENCRYPTED_FORMAT = 2
"""That of a slab that is encrypted."""
HEADER_AREA_BYTES = 2 << 20
EXTENT_BYTES_MIN = 1 << 20
EXTENT_BYTES_MAX = 1 << 30
POOL_BYTES_MAX = PAGE_BYTES << 32
MAGIC_STEM = b"KVTIERP"
MAGIC = b"KVTIERP1"
MAGIC_MAKING = b"KVTIERP0"

LOCK_POLL_S = 0.02
AREA_BYTES = 256 << 20
"""A pool gets its memory in areas of so many bytes, or of one extent where that is larger, and in such areas
GPUs' workers register it."""


def never_stop() -> None:
    """Never stops what is under way."""


def gib(size: int) -> str:
    """Writes a size for people: "64.0 GiB", "12.5 MiB"."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"


@dataclass(frozen=True, slots=True)
class Header:
    """What the header page says, with a checksum that matches."""

    geometry: PoolGeometry
    digest: bytes
    encrypted: bool = False
    """Whether it is a slab that is encrypted."""
    populated: int = 0
    """How many extents, from the first on, have memory."""


def config_digest(geometry: PoolGeometry) -> bytes:
    """16 bytes that differ whenever an old pool cannot be used with this configuration."""
    text = f"kvtier pool format {FORMAT}, {geometry.extents} extents of {geometry.extent_bytes}"
    return hashlib.sha256(text.encode()).digest()[:16]


def default_extent_bytes(size_bytes: int) -> int:
    """About 64 extents, of 1 MiB to 256 MiB: few enough to be cheap, enough to share between slot sizes."""
    target = max(size_bytes // 64, EXTENT_BYTES_MIN)
    return int(min(1 << (target.bit_length() - 1), 256 << 20))


def geometry_for(size_bytes: int, extent_bytes: int, naming: Naming = POOL) -> PoolGeometry:
    """The extents of a pool of at most this size. Raises ValueError naming the field that is out of range."""
    if not EXTENT_BYTES_MIN <= extent_bytes <= EXTENT_BYTES_MAX or extent_bytes & (extent_bytes - 1):
        raise ValueError(f"{naming.extent} is {extent_bytes}; expected a power of two from 1 MiB to 1 GiB")
    if size_bytes > POOL_BYTES_MAX:
        raise ValueError(
            f"{naming.size} is {gib(size_bytes)}; a {naming.what} is at most {gib(POOL_BYTES_MAX)}"
        )
    extents = (size_bytes - HEADER_AREA_BYTES) // extent_bytes
    if extents < 1:
        raise ValueError(
            f"{naming.size} is {gib(size_bytes)}; expected at least {gib(HEADER_AREA_BYTES + extent_bytes)}, "
            "the header and one extent"
        )
    return PoolGeometry(extents, extent_bytes, HEADER_AREA_BYTES)


def file_bytes(geometry: PoolGeometry) -> int:
    """The length of the pool file."""
    return geometry.first_extent_offset + geometry.extents * geometry.extent_bytes


def populated_bytes(geometry: PoolGeometry, populated: int) -> int:
    """Where the memory of a pool ends, of which so many extents have some."""
    return geometry.first_extent_offset + populated * geometry.extent_bytes


def memory_end(records: PoolRecords) -> int:
    """Where the memory of a pool ends now, as its records say it to every process that has them."""
    return HEADER_AREA_BYTES + records.populated * records.extent_bytes


def extents_per_area(extent_bytes: int) -> int:
    """How many extents get their memory together."""
    return max(1, AREA_BYTES // extent_bytes)


def whole_areas(geometry: PoolGeometry, length: int) -> int:
    """How many extents lie in areas that end within the first `length` bytes of the file. The last area may
    have fewer extents than the others."""
    extents = (length - geometry.first_extent_offset) // geometry.extent_bytes
    if extents >= geometry.extents:
        return geometry.extents
    step = extents_per_area(geometry.extent_bytes)
    return max(0, extents // step * step)


# --- opening and locking ------------------------------------------------------------------------------------


def open_locked(
    path: Path,
    lock_timeout_s: float,
    naming: Naming = POOL,
    *,
    create: bool = True,
    check_stop: Callable[[], None] = never_stop,
) -> int:
    """Opens (or creates, empty) a pool file that is safe to use. The returned descriptor holds its lock.

    Waits at most `lock_timeout_s` for processes that hold the lock, and meanwhile calls `check_stop()`, which
    may raise. Raises PoolLocked, or PoolRefused for a path that is not a private regular file of this user.
    """
    deadline = time.monotonic() + lock_timeout_s
    while True:
        fd = _open(path, naming, create)
        try:
            _require_private(path, os.fstat(fd), naming)
            _lock(fd, path, deadline, lock_timeout_s, naming, check_stop)
            if same_file(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the file was removed or replaced while we waited, so look again
        if time.monotonic() > deadline:
            raise PoolLocked(path, (), lock_timeout_s, naming)


def _open(path: Path, naming: Naming, create: bool) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    if create:
        flags |= os.O_CREAT
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        hint = {
            errno.ELOOP: "it is a symbolic link; name the file itself",
            errno.ENOENT: f"its folder does not exist; create {path.parent}" if create else "it is gone",
            errno.EISDIR: "it is a folder; name a file in it",
            errno.EACCES: "access is denied; it, or its folder, belongs to another user",
        }.get(error.errno or 0, os.strerror(error.errno or 0))
        raise PoolRefused(f"{naming.path} {path} cannot be opened: {hint}") from error


def _require_private(path: Path, found: os.stat_result, naming: Naming) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise PoolRefused(f"{naming.path} {path} is not a regular file")
    if found.st_uid != os.geteuid():
        raise PoolRefused(
            f"{naming.what} {path} belongs to uid {found.st_uid}, this daemon runs as {os.geteuid()}; "
            f"remove it, or set another {naming.path}"
        )
    if found.st_nlink > 1:
        raise PoolRefused(
            f"{naming.what} {path} has {found.st_nlink} hard links; remove the others, it may be a file in "
            "disguise"
        )
    if found.st_mode & 0o077:
        raise PoolRefused(
            f"{naming.what} {path} has mode {stat.S_IMODE(found.st_mode):04o}: others may have changed it. "
            "Remove it, or `chmod 600` it if you trust what is in it"
        )


def remove_unmade(fd: int, path: Path) -> None:
    """Removes a pool file, locked through `fd`, that has no pool in it, so that a start that failed, now or
    earlier, leaves no trace."""
    if os.fstat(fd).st_size == 0 or os.pread(fd, len(MAGIC), 0) == MAGIC_MAKING:
        path.unlink(missing_ok=True)


def same_file(fd: int, path: Path) -> bool:
    """Whether the path still names the file that is open here."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def _lock(
    fd: int,
    path: Path,
    deadline: float,
    waited_s: float,
    naming: Naming,
    check_stop: Callable[[], None],
) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise PoolLocked(path, holders(fd), waited_s, naming) from None
        check_stop()
        time.sleep(min(LOCK_POLL_S, left_s))


def holders(fd: int) -> list[int]:
    """Processes that hold this file's lock, as far as can be seen, from the best source that knows any."""
    found = (
        living(os.pread(fd, TABLE_BYTES, TABLE_OFFSET)) if os.fstat(fd).st_size >= HEADER_AREA_BYTES else []
    )
    return found or _takers(os.fstat(fd)) or _openers(os.fstat(fd))


def _takers(file: os.stat_result) -> list[int]:
    """Living processes that took the lock. Those that inherited it are not listed, and some of these may be
    gone."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    # "1: FLOCK  ADVISORY  WRITE 1234 08:02:5678 0 EOF", and "1: -> FLOCK ..." for one who waits
    wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    locks = [fields for fields in map(str.split, lines) if fields[1] == "FLOCK" and fields[5] == wanted]
    return [int(lock[4]) for lock in locks if Path("/proc", lock[4]).exists()]


def _openers(file: os.stat_result) -> list[int]:
    """The pids of other processes that have the file open."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                opened = [os.stat(entry) for entry in (process / "fd").iterdir()]
            except OSError:  # the process has just ended, or belongs to another user
                continue
            if any(os.path.samestat(entry, file) for entry in opened):
                found.append(int(process.name))
    return sorted(found)


# --- is it ours, and can it be kept? ------------------------------------------------------------------------


def read_header(fd: int, naming: Naming = POOL) -> Header | str:
    """The header of a pool file, or, in words for the log, why there is none that can be believed."""
    page = os.pread(fd, 88, 0)
    if len(page) < 88 or page[:8] == bytes(8):
        return f"there was no {naming.what} yet"
    if page[:8] == MAGIC_MAKING:
        return f"an earlier start was interrupted while it created the {naming.what}"
    magic, version, first, extent_bytes, extents = struct.unpack_from("<8s4Q", page)
    if magic != MAGIC:
        found = magic[len(MAGIC_STEM) :].decode("ascii", "replace")
        return f"the {naming.what} has format {found!r}, this daemon reads format '{FORMAT}'"
    if xxh3_64(page[:56]) != struct.unpack_from("<Q", page, 56)[0]:
        return f"the {naming.what}'s header is damaged: its checksum does not fit"
    if version not in (FORMAT, ENCRYPTED_FORMAT) or first != HEADER_AREA_BYTES:
        return f"the {naming.what} has format {version}, this daemon reads format {FORMAT}"
    if (
        not EXTENT_BYTES_MIN <= extent_bytes <= EXTENT_BYTES_MAX
        or extent_bytes & (extent_bytes - 1)
        or not extents
    ):
        return f"the {naming.what}'s header makes no sense: {extents} extents of {extent_bytes} bytes"
    missing = _missing(*struct.unpack_from("<2I", page, 80))
    if missing is None or missing >= extents:
        return f"the {naming.what}'s header is damaged: it does not say which extents have memory"
    geometry = PoolGeometry(extents, extent_bytes, first)
    return Header(geometry, page[40:56], version == ENCRYPTED_FORMAT, extents - missing)


def _missing(count: int, inverted: int) -> int | None:
    """How many extents have no memory yet; None if the two numbers do not fit together. In a pool of an
    earlier version both are 0."""
    return count if inverted == (count ^ 0xFFFF_FFFF if count else 0) else None


def refuse_foreign(fd: int, path: Path, naming: Naming = POOL) -> None:
    """Raises PoolRefused for a file that holds something other than a pool of ours. Such a file is never
    overwritten.

    A file of nothing but zeros that is no longer than a header is what a start leaves if it is killed before
    it writes its first byte. Call this with the lock held, because a daemon that is making the file changes
    its length.
    """
    length = os.fstat(fd).st_size
    start = os.pread(fd, min(length, HEADER_AREA_BYTES), 0)
    if start.startswith(MAGIC_STEM) or (length <= HEADER_AREA_BYTES and not any(start)):
        return
    # A longer file without any allocated block has never held anything.
    if os.fstat(fd).st_blocks == 0 and not any(start):
        return
    raise PoolRefused(
        f"{naming.path} {path} holds something that is not a {naming.what}; "
        f"remove it, or set another {naming.path}"
    )


def reason_to_remake(
    found: Header | str,
    length: int,
    size_bytes: int,
    extent_bytes: int | None,
    naming: Naming = POOL,
    *,
    encrypted: bool = False,
) -> str | None:
    """Why the pool that was found cannot be kept for this configuration; None if it can. `length` is the
    file's; `encrypted`: it is to be one that is encrypted."""
    if isinstance(found, str):
        return found
    have = found.geometry
    if encrypted != found.encrypted:
        is_now, is_to_be = ("encrypted", "plain") if found.encrypted else ("plain", "encrypted")
        return f"the {naming.what} is {is_now}, and is to be {is_to_be}"
    if extent_bytes is not None and extent_bytes != have.extent_bytes:
        return f"{naming.extent} changed from {have.extent_bytes} to {extent_bytes}"
    extents = (size_bytes - HEADER_AREA_BYTES) // have.extent_bytes
    if extents != have.extents:
        return (
            f"{naming.size} changed: the {naming.what} has {have.extents} extents of "
            f"{gib(have.extent_bytes)}, {gib(size_bytes)} would be {extents}"
        )
    if length != file_bytes(have):
        said = file_bytes(have)
        return f"the {naming.what}'s file was cut or extended: {length} bytes, its header says {said}"
    if found.digest != config_digest(have):
        return f"the configuration that the {naming.what} was made with differs from this one"
    return None


# --- making it ----------------------------------------------------------------------------------------------


def make_pool(
    fd: int, path: Path | None, geometry: PoolGeometry, progress: Progress = no_progress
) -> npt.NDArray[np.uint8]:
    """Makes the file a new, empty pool, gets memory for its first area, and maps it. `path` is None for a
    memfd.

    Wherever this is interrupted, the file can be recognised as unfinished. Raises PoolTooLarge; nothing has
    changed if the lack of room could be known in advance.
    """
    length = file_bytes(geometry)
    populated = min(extents_per_area(geometry.extent_bytes), geometry.extents)
    first = populated_bytes(geometry, populated)
    _require_room(fd, path, length)
    try:
        os.ftruncate(fd, 0)
        os.ftruncate(fd, HEADER_AREA_BYTES)
        os.posix_fallocate(fd, 0, HEADER_AREA_BYTES)
        with mmap.mmap(fd, HEADER_AREA_BYTES) as header:
            header[: len(MAGIC)] = MAGIC_MAKING
        os.ftruncate(fd, length)
        pool = map_pool(fd, length)
        threads = min(THREADS_MAX, os.cpu_count() or 1)
        populate_range(fd, pool[:first], 0, threads=threads, node=node_of(0), progress=progress)
        ensure_allocated(fd, first)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        os.ftruncate(fd, 0)
        raise PoolTooLarge(
            f"pool of {gib(length)} at {path or 'memory'}: the space ran out while it was made ({error})"
        ) from error
    digest = config_digest(geometry)
    format_pool(pool, geometry.extent_bytes, geometry.extents, digest, populated=populated)
    return pool


def map_found(fd: int, path: Path, header: Header) -> npt.NDArray[np.uint8]:
    """Maps a pool that is there, with memory for all that its header says has some. Raises PoolTooLarge if
    there is no room for that, or for the rest."""
    length = file_bytes(header.geometry)
    end = populated_bytes(header.geometry, header.populated)
    try:
        if end < length:
            _require_room(fd, path, length)
            # What was populated last, and not noted any more, would hide a hole from the count of blocks.
            give_back(fd, end, length)
        ensure_allocated(fd, end)
        return map_pool(fd, length)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        missing = max(0, end - os.fstat(fd).st_blocks * 512)
        raise PoolTooLarge(
            f"pool.path {path}: {gib(missing)} of the pool's {gib(length)} have no memory, because the file "
            f"has holes, and there is no room for them ({error}). Free as much in {path.parent}, or remove "
            "the file, which loses the blocks in it"
        ) from error


def map_pool(fd: int, length: int) -> npt.NDArray[np.uint8]:
    """Maps the file, shared and writable. It is unmapped with the last array over it, and the lock is held
    until then."""
    return np.frombuffer(mmap.mmap(fd, length), np.uint8)


def ensure_allocated(fd: int, length: int) -> None:
    """Allocates the parts of the file that are not yet: a hole would cause a SIGBUS once the file system is
    full."""
    if os.fstat(fd).st_blocks * 512 < length:
        os.posix_fallocate(fd, 0, length)


def give_back(fd: int, start: int, end: int) -> None:
    """Gives the memory of a part of the file back. Nobody may have registered it with a driver. Both are
    multiples of the extent's bytes from the first extent on."""
    # A file system that cannot do it keeps the memory, which harms nothing.
    with contextlib.suppress(OSError), mmap.mmap(fd, end - start, offset=start) as pages:
        pages.madvise(mmap.MADV_REMOVE)


def _require_room(fd: int, path: Path | None, length: int) -> None:
    if path is None:
        free = _available_memory()
        if length > free:
            raise PoolTooLarge(
                f"a pool of {gib(length)} does not fit into memory: {gib(free)} available. Lower pool.size"
            )
        return
    system = os.fstatvfs(fd)
    if system.f_blocks == 0:
        return  # hugetlbfs without a size says nothing; mapping the pool reserves its pages, or fails
    have = os.fstat(fd).st_blocks * 512
    free = system.f_bavail * system.f_frsize
    if length > free + have:
        total = system.f_blocks * system.f_frsize
        raise PoolTooLarge(
            f"a pool of {gib(length)} does not fit {path.parent}: {gib(free + have)} free of {gib(total)}. "
            f"Lower pool.size, or enlarge the file system (tmpfs: mount -o remount,size=… {path.parent}; "
            "containers: give them a larger /dev/shm)"
        )


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")
