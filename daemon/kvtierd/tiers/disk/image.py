"""A disk's image, as the front uses it: headers and record tables of the slab file, in memory.

A sparse memfd as long as the file. Front and worker both map it and work on it as on the pool; the slots' own
pages are never touched. The file is the worker's business alone.
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
"""The writer in every record of a disk. Whether it is gone need not be proved: the slab's lock does that."""


def disk_geometry(size_bytes: int, extent_bytes: int = 0) -> PoolGeometry:
    """The extents of a disk of at most `size_bytes`; `extent_bytes` 0: chosen. ValueError naming the setting
    that is out of range."""
    return geometry_for(size_bytes, extent_bytes or default_extent_bytes(size_bytes), NAMING)


class DiskImage:
    """One disk's image for one boot. Not for several threads, except `recover`, which may run in a thread of
    its own while nothing else uses the image."""

    fd: int
    """For workers to inherit."""
    geometry: PoolGeometry
    records: PoolRecords
    """After `recover`."""

    def __init__(self, geometry: PoolGeometry) -> None:
        """An empty one: the disk's first worker fills it. OSError."""
        self.geometry = geometry
        self.bytes = file_bytes(geometry)
        """Its length, and the file's."""
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
        """Once, when the first worker is ready: begins a boot in the image, frees what cannot be believed,
        and lists what is left. Some 0.3 s per million slots."""
        self._boot_nonce = boot_nonce
        records = PoolRecords(self._array)
        records.start_boot(boot_nonce)
        found = recover(records, gone=lambda writer: True)
        self.records = records
        return found

    def set_aside(self, slots: Slots) -> None:
        """Takes slots out of use for as long as the slab lives: their place on the disk has failed a check.
        The worker has to be told to persist them."""
        set_aside(self.records, slots, self._boot_nonce)

    def close(self) -> None:
        """Gives up this process's copy of the descriptor; the mapping goes with the last user of it."""
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
