"""A fence that needs to know nothing about a writer: its slot gets other memory.

Whoever holds the pool's lock knows that no process can write to the pool any more, in whatever pid namespace
it was, because each writer held the lock through the descriptor or through its mapping. Only a device may
still be copying, for a process that the kernel is just taking down. It copies to pages that its driver has
pinned. So those pages are cut out of the file and replaced by new ones: the copy lands in memory that belongs
to nobody, and that the kernel gives to nobody else until the driver lets go of it.
"""

import errno
import mmap
import os

import numpy as np
import numpy.typing as npt

from kvtierd.core.blocks.slots import PoolGeometry, pages_up
from kvtierd.core.ids import PAGE_BYTES, Slots


def replace_memory(
    fd: int, geometry: PoolGeometry, slot_bytes_of_extent: dict[int, int], slots: Slots
) -> npt.NDArray[np.bool_]:
    """Gives slots other memory, all zero, and returns which have it. Nothing can land in these any more.

    False for a slot on a huge page that it shares with others and that is pinned or of hugetlbfs: the kernel
    then clears the slot where it is, and the next start tries again. False also when memory runs out.
    `slot_bytes_of_extent` has every extent in use. Nobody may have registered the memory with a driver since
    the lock was taken.
    """
    replaced = np.zeros(len(slots), bool)
    for position, slot in enumerate(slots.tolist()):
        offset = slot * PAGE_BYTES
        extent = (offset - geometry.first_extent_offset) // geometry.extent_bytes
        length = pages_up(slot_bytes_of_extent[extent])
        try:
            replaced[position] = _cut_out(fd, offset, length)
            os.posix_fallocate(fd, offset, length)
        except OSError as error:
            replaced[position] = False
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                break
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    return replaced


def _cut_out(fd: int, offset: int, length: int) -> bool:
    """Cuts a range out of the file. Returns False if the file still has some of the memory that it had
    there."""
    with mmap.mmap(fd, length, offset=offset) as pages:
        pages.madvise(mmap.MADV_REMOVE)
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= offset + length
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole from here to the end
            return True
        raise
