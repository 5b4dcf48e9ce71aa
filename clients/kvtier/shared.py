"""Memory that the daemon's copy worker maps too: memfds sealed against changes of size."""

import ctypes
import fcntl
import mmap
import os
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtier.errors import KvtierError, Reason


class SharedBuffer:
    """Zeroed memory in a memfd sealed against shrinking and growing: no process that maps it can be hurt by
    us.

    The descriptor is close-on-exec and belongs to this object; close it after the clients that were given it.
    Memory is taken from the system page by page, on first touch.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Use `create`."""
        self._fd = fd
        self._size_bytes = size_bytes
        self._mapping: mmap.mmap | None = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED)
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(self._mapping, np.uint8)
        self._kept = False

    @classmethod
    def create(cls, size_bytes: int, name: str = "kvtier") -> Self:
        """`size_bytes` of zeros, more than 0; `name` is shown in /proc/PID/maps. Raises OSError if there is
        no memory."""
        if size_bytes <= 0:
            raise KvtierError(
                Reason.MAPPING_INVALID, "must be more than 0", field="size_bytes", value=size_bytes
            )
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd, size_bytes)
        except OSError:
            os.close(fd)
            raise

    @property
    def size_bytes(self) -> int:
        """As created."""
        return self._size_bytes

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The memory, writable, shape (size_bytes,). Views of it must be gone before `close` can give it
        back."""
        array = self._array
        if array is None:
            raise ValueError("the buffer is closed")
        return array

    def fileno(self) -> int:
        """The memfd; -1 once closed."""
        return self._fd

    @property
    def held_bytes(self) -> int:
        """Memory that was taken from the system and not given back."""
        return os.fstat(self._fd).st_blocks * 512

    def discard(self, offset: int, size_bytes: int) -> None:
        """Gives the whole pages among these bytes back to the system, in every process that maps them; they
        read as zeros then."""
        if self._mapping is None:
            raise ValueError("the buffer is closed")
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            self._mapping.madvise(mmap.MADV_REMOVE, first, end - first)

    def keep_mapped(self) -> int:
        """From now on the mapping outlives `close`, this object and the interpreter: only the process's end
        unmaps it. For memory that a device may still write at any later time.

        Returns its address. Raises ValueError if it is closed; another thread may be closing it.
        """
        array = self.array  # as long as somebody holds it, `close` unmaps nothing
        if not self._kept:
            self._kept = True
            # A reference that nobody will ever drop, not even the interpreter when it takes modules apart.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(array))
        return int(array.ctypes.data)

    def close(self) -> None:
        """Closes the descriptor and unmaps. Safe to call twice; while views live, the mapping lives on with
        them."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        self._array = None
        mapping, self._mapping = self._mapping, None
        if mapping is not None and not self._kept:
            try:
                mapping.close()
            except BufferError:  # somebody holds a view: the last one to go unmaps
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
