"""Maps memfds of clients."""

import fcntl
import gc
import mmap
import os
import stat

from kvtierd.core.errors import Reason, Refusal


def map_memfd(fd: int, length: int) -> mmap.mmap:
    """Maps the first `length` bytes of a memfd that cannot shrink, because access to a truncated one would
    kill the worker. Raises Refusal if the descriptor is not such a memfd."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        status = os.fstat(fd)
    except OSError as error:
        raise Refusal(
            Reason.MAPPING_INVALID, f"the descriptor is no memfd: {error}", field="descriptor", value=fd
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise Refusal(Reason.MAPPING_INVALID, "the descriptor is no memfd", field="descriptor", value=fd)
    if not seals & fcntl.F_SEAL_SHRINK:
        raise Refusal(
            Reason.MAPPING_NOT_SEALED,
            "seal the memfd with F_SEAL_SHRINK before it is registered",
            field="seals",
            value=hex(seals),
        )
    if not 0 < length <= status.st_size:
        raise Refusal(
            Reason.MAPPING_INVALID,
            f"the memfd has {status.st_size} bytes",
            field="mapping_bytes",
            value=length,
        )
    # Whole pages of the file are mapped, because munmap takes no part of a huge page.
    whole = min(-(-length // status.st_blksize) * status.st_blksize, status.st_size)
    try:
        return mmap.mmap(fd, whole)
    except (OSError, ValueError, OverflowError) as error:
        raise Refusal(
            Reason.MAPPING_INVALID,
            f"the memfd cannot be mapped: {error}",
            field="mapping_bytes",
            value=length,
        ) from None


def unmap(mapping: mmap.mmap) -> None:
    """Unmaps. Raises RuntimeError if something still uses the mapping; then only the end of the process
    helps."""
    try:
        mapping.close()
    except BufferError:
        # Something in a reference cycle, such as an exception's traceback, still holds a view.
        gc.collect()
        try:
            mapping.close()
        except BufferError as error:
            raise RuntimeError(f"a session's mapping is still in use: {error}") from error
