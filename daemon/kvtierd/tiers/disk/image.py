"""A disk's image, as the front uses it: the headers and record tables of the slab file, in memory.

It is a sparse memfd as long as the file. Front and worker both map it and use it as they use the pool, except
that the pages of the slots themselves are never touched. Only the worker reads and writes the file.
"""

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PoolRecords

from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.ids import Slots
from kvtierd.memory.pool_file import default_extent_bytes, file_bytes, geometry_for
from kvtierd.memory.recovery import Recovery, recover, set_aside
from kvtierd.tiers.disk.slab import NAMING

WRITER = 1
"""The writer in every record of a disk. Whether it is gone need not be proved, because the slab's lock proves
it."""


def disk_geometry(size_bytes: int, extent_bytes: int = 0) -> PoolGeometry:
    """The extents of a disk of at most `size_bytes`; with `extent_bytes` 0, a suitable size is chosen. Raises
    ValueError, which names the setting that is out of range."""
    return geometry_for(size_bytes, extent_bytes or default_extent_bytes(size_bytes), NAMING)


class DiskImage:
    """One disk's image for one boot. Not safe for several threads, except that `recover` may run in a thread
    of its own while nothing else uses the image."""

    fd: int
    """Workers inherit it."""
    geometry: PoolGeometry
    records: PoolRecords
    """Only after `recover`."""

    def __init__(self, geometry: PoolGeometry) -> None:
        """Makes an empty image, which the disk's first worker fills. Raises OSError."""
        self.geometry = geometry
        self.bytes = file_bytes(geometry)
        """The length of the image, and of the file."""
        self.fd = os.memfd_create("kvtier-disk-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.bytes)
            fcntl.fcntl(
                self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            self._array: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.fd, self.bytes), np.uint8)
        except BaseException:
            os.close(self.fd)
            raise

    def recover(self, boot_nonce: int) -> Recovery:
        """Begins a boot in the image, frees the slots whose records cannot be believed, and lists the others.
        Call it once, when the first worker is ready. Takes about 0.3 s per million slots."""
        self._boot_nonce = boot_nonce
        records = PoolRecords(self._array)
        records.start_boot(boot_nonce)
        found = recover(records, gone=lambda writer: True)
        self.records = records
        return found

    def set_aside(self, slots: Slots) -> None:
        """Takes slots out of use for as long as the slab exists, because their place on the disk has failed a
        check. The worker then has to be told to persist them."""
        set_aside(self.records, slots, self._boot_nonce)

    def close(self) -> None:
        """Closes this process's copy of the descriptor. The mapping goes with its last user."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            del self._array
            if hasattr(self, "records"):
                del self.records

    def __enter__(self) -> "DiskImage":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
