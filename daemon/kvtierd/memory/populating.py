"""Gets the memory of a pool, page by page, before anything is stored there.

A store into a page that has no memory would wait for the kernel to find some, or be killed (SIGBUS) where
there is none. The first area of a new pool gets its memory before the daemon serves, and the others
meanwhile, from another process (`populate_rest.py`).
"""

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from kvtier_kernels import populate

from kvtierd.memory import numa

CHUNK_BYTES = 16 << 20
"""How much a thread populates in one step; a step takes about 10 ms."""
THREADS_MAX = 8
NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFAULT, errno.EDQUOT, errno.EFBIG)
"""What it means that the file system, the control group or a limit has no memory left for a pool."""

Progress = Callable[[int, int], None]
"""Called in the caller's thread with how many bytes are populated, and out of how many."""


def no_progress(done: int, of: int) -> None:
    """Ignores progress."""


def populate_range(
    fd: int,
    pool: npt.NDArray[np.uint8],
    offset: int,
    *,
    threads: int,
    node: int | None = None,
    progress: Progress = no_progress,
) -> None:
    """Gets memory for all pages of a mapped part of the pool's file, which begins at `offset` of the file,
    and maps them, several chunks at a time, near a memory node if one is given.

    This is safe beside readers and writers of the pool. Raises OSError, EFAULT among others, if there is not
    enough memory; what was had stays.
    """

    def one(start: int) -> None:
        length = min(CHUNK_BYTES, len(pool) - start)
        try:
            populate(pool, start, length)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.posix_fallocate(fd, offset + start, length)  # the kernel is older than 5.14

    with ThreadPoolExecutor(threads, "pool-populate", numa.stay_near, (node,)) as executor:
        starts = range(0, len(pool), CHUNK_BYTES)
        try:
            for start, _ in zip(starts, executor.map(one, starts), strict=True):
                progress(min(start + CHUNK_BYTES, len(pool)), len(pool))
        except BaseException:
            executor.shutdown(wait=True, cancel_futures=True)  # otherwise all others would run first
            raise


def node_of(area: int) -> int | None:
    """The memory node that an area's memory is asked from: each in turn, so that every GPU has some that is
    near. None where there is but one."""
    nodes = numa.nodes()
    return nodes[area % len(nodes)] if len(nodes) > 1 else None
