"""Makes a disk ready: opens and locks its slab, fills or keeps the image, and makes what moves its data."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PoolRecords, format_pool

from kvtierd.core.ids import PAGE_BYTES
from kvtierd.memory.pool_file import config_digest, file_bytes, gib
from kvtierd.tiers.disk.slab import HEADER_BYTES, NAMING, ExtentHeaders, Slab, io_refusal, load, refuse
from kvtierd.workers.channel.status import StatusPage, io_word
from kvtierd.workers.disk.faults import Faults
from kvtierd.workers.disk.moving import Mover
from kvtierd.workers.disk.persistence import DiskRecords
from kvtierd.workers.log import logger

if TYPE_CHECKING:
    from kvtierd.workers.disk.encryption import Encryption

_log = logger(__name__)


class OpenDisk:
    """The slab of one disk and its image, which say the same where it matters."""

    cold_reason: str
    """Why nothing in the file was kept; empty if something was."""
    is_direct: bool
    """Whether data bypasses the kernel's cache."""

    def __init__(
        self,
        directory: Path,
        size_bytes: int,
        extent_bytes: int,
        image: npt.NDArray[np.uint8],
        *,
        load: bool,
        status: StatusPage,
        faults: Faults,
        keys_folder: Path | None = None,
    ) -> None:
        """With `load`, the image becomes what the file says, or both are made anew. Without it, the image is
        the truth, and the file must be the one that belongs to it. `keys_folder`: the slab is encrypted with
        the keys there. Raises Refusal, which says what is wrong and what to do."""
        self._encryption: Encryption | None = None
        if keys_folder is not None:
            # Only here, because a disk in plain needs no library for it.
            from kvtierd.workers.disk import encryption

            self._encryption = encryption.Encryption(keys_folder)
        self._image = image
        self._status = status
        self._faults = faults
        self.cold_reason = ""
        self.slab = Slab.open(directory, size_bytes, extent_bytes, create=load)
        if len(image) != file_bytes(self.slab.geometry):
            raise ValueError(f"an image of {len(image)} bytes, the slab has {file_bytes(self.slab.geometry)}")
        try:
            headers = self._load() if load else self._keep()
            self._direct_fd = None if faults.no_direct else self.slab.open_direct()
        except OSError as error:
            raise io_refusal(self.slab.path, "opening it", error) from error
        self.is_direct = self._direct_fd is not None
        if not self.is_direct:
            _log.warning(
                "no direct input and output there: data goes through the kernel's cache", path=directory
            )
        self._disk = PoolRecords(image)
        self._records = DiskRecords(self.slab, image, self._disk, headers, status, faults)

    def movers(self, pool: npt.NDArray[np.uint8], threads: int, depth: int) -> list[Mover]:
        """One mover for each thread. Raises Refusal if the kernel has no room for so many operations."""
        host = PoolRecords(pool)
        fd = self.slab.fd if self._direct_fd is None else self._direct_fd
        make: Callable[..., Mover] = Mover
        if self._encryption is not None:
            make = self._encryption.maker(self._disk)
        try:
            return [
                make(
                    path=self.slab.path,
                    geometry=self.slab.geometry,
                    direct_fd=fd,
                    fallback_fd=None if self.is_direct else self.slab.fd,
                    depth=depth,
                    pool=pool,
                    host=host,
                    disk=self._disk,
                    records=self._records,
                    status=self._status,
                    word=io_word(thread),
                    faults=self._faults,
                )
                for thread in range(threads)
            ]
        except OSError as error:
            message = f"{error.strerror}; or lower disk.queue_depth or disk.threads"
            raise refuse("disk.queue_depth", depth, message) from error

    def _load(self) -> ExtentHeaders:
        encryption, geometry = self._encryption, self.slab.geometry
        encrypted = encryption is not None
        self.cold_reason = self.slab.reason_to_remake(encrypted=encrypted)
        if encryption is not None and not self.cold_reason:
            self.cold_reason = encryption.why_cold(self.slab)
        if self.cold_reason:
            digest = config_digest(geometry)
            format_pool(self._image, geometry.extent_bytes, geometry.extents, digest, encrypted=encrypted)
            table = b"" if encryption is None else encryption.new_table()
            if not self.slab.make(bytes(self._image[:PAGE_BYTES]), self._faults.step, table):
                self._warn_sparse()
            return ExtentHeaders()
        if not self.slab.allocate():
            self._warn_sparse()
        headers = load(self.slab, self._image)
        for extent, error in headers.errors.items():
            _log.warning("part of a slab cannot be read, and is given up", extent=extent, error=str(error))
        if encryption is not None:
            lost = encryption.forget_unreadable(self.slab, PoolRecords(self._image), self._image.data)
            if lost:
                _log.warning("blocks whose keys are gone, or others now, are given up", slots=lost)
        return headers

    def _keep(self) -> ExtentHeaders:
        found = self.slab.reason_to_remake(encrypted=self._encryption is not None)
        if not found and self.slab.header() != bytes(self._image[:HEADER_BYTES]):
            found = "its header is not the one that this daemon began with"
        if found:
            raise refuse(
                NAMING.path,
                self.slab.path.parent,
                f"slab {self.slab.path} was changed by somebody else: {found}. Restart the daemon",
            )
        if self._encryption is not None:
            self._encryption.require_same(self.slab)
        return self.slab.extent_headers()

    def _warn_sparse(self) -> None:
        _log.warning(
            "the file system cannot preallocate: when it is full, blocks will not be written",
            path=self.slab.path,
            size=gib(file_bytes(self.slab.geometry)),
        )
