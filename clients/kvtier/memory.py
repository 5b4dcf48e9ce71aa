"""What a rank shares with the copy worker: host memory by descriptor, or memory of a GPU by handles.

`SharedBuffer` is of the first kind, `kvtier.cuda.DeviceMemory` of the second. Nothing here needs a GPU or its
driver.
"""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from kvtier.errors import KvtierError, Reason
from kvtier.v1 import side_pb2

CPU = "cpu"

MADV_POPULATE_WRITE = 23
"""For madvise: allocates pages as if each were written to, and keeps their content. Python has no name for it
before 3.14."""
POPULATE_BYTES = 64 << 20
"""Allocated in one call, which holds the interpreter's lock: about 20 ms."""


class Shareable(Protocol):
    """Host memory that another process can map: a memfd sealed against shrinking. `SharedBuffer` is one."""

    @property
    def size_bytes(self) -> int:
        """Bytes to map, from the start of the descriptor."""

    @property
    def is_sparse(self) -> bool:
        """Whether its owner allocates blocks only while they are copied. Otherwise all of it is allocated."""

    def fileno(self) -> int:
        """Returns the descriptor, which stays open as long as the client that was given it."""


def populate(mapping: mmap.mmap, first: int, end: int, field: str = "size_bytes") -> None:
    """Allocates the pages of a shared mapping from byte `first`, where a page begins, to `end`. Their content
    stays. Only what is allocated can be copied by the daemon, which takes no memory for others.

    Raises OSError without memory, with `field` and the bytes in its message.
    """
    try:
        for offset in range(first, end, POPULATE_BYTES):
            mapping.madvise(MADV_POPULATE_WRITE, offset, min(POPULATE_BYTES, end - offset))
    except OSError as error:
        message = (
            f"{field}={end - first}: no memory for so many bytes ({error.strerror}): "
            "share less, or give this process more, such as by the memory limit of its container"
        )
        raise OSError(error.errno, message) from error


class SharedBuffer:
    """Zeroed memory in a memfd that is sealed against shrinking and growing, so it cannot harm a process that
    maps it.

    The descriptor is close-on-exec and belongs to this object; close it after the clients that were given it.
    """

    def __init__(self, fd: int, size_bytes: int, *, sparse: bool) -> None:
        """Use `create`."""
        self._fd = fd
        self._size_bytes = size_bytes
        self._sparse = sparse
        self._mapping: mmap.mmap | None = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED)
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(self._mapping, np.uint8)
        self._kept = False

    @classmethod
    def create(cls, size_bytes: int, name: str = "kvtier", *, sparse: bool = False) -> Self:
        """Makes a buffer of `size_bytes` zeros, which must be more than 0, and allocates it: this process
        pays for memory that it shares, and not the daemon. `name` is shown in /proc/PID/maps.

        A `sparse` buffer begins without memory. Then `populate` blocks, or write to them, before they are
        stored or loaded, or the transfer fails.

        Raises KvtierError for a size of 0 or less, and OSError if there is no memory.
        """
        if size_bytes <= 0:
            raise KvtierError(
                Reason.MAPPING_INVALID, "must be more than 0", field="size_bytes", value=size_bytes
            )
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            buffer = cls(fd, size_bytes, sparse=sparse)
        except OSError:
            os.close(fd)
            raise
        if not sparse:
            try:
                buffer.populate(0, size_bytes)
            except OSError:
                buffer.close()
                raise
        return buffer

    @property
    def size_bytes(self) -> int:
        """The size that it was created with."""
        return self._size_bytes

    @property
    def is_sparse(self) -> bool:
        """Whether it was created as sparse."""
        return self._sparse

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The memory as a writable array of shape (size_bytes,). `close` can give the memory back only when
        all views of it are gone. Raises ValueError if the buffer is closed."""
        array = self._array
        if array is None:
            raise ValueError("the buffer is closed")
        return array

    def fileno(self) -> int:
        """Returns the memfd, or -1 once the buffer is closed."""
        return self._fd

    @property
    def held_bytes(self) -> int:
        """How many bytes of memory it takes from the system now."""
        return os.fstat(self._fd).st_blocks * 512

    def populate(self, offset: int, size_bytes: int) -> None:
        """Allocates all pages that this range touches, and keeps their content. Raises OSError without
        memory, ValueError if the buffer is closed."""
        if self._mapping is None:
            raise ValueError("the buffer is closed")
        populate(self._mapping, offset // mmap.PAGESIZE * mmap.PAGESIZE, offset + size_bytes)

    def discard(self, offset: int, size_bytes: int) -> None:
        """Gives the whole pages in this range back to the system, for every process that maps them. They then
        read as zeros, and the daemon copies none of them. Raises ValueError if the buffer is closed."""
        if self._mapping is None:
            raise ValueError("the buffer is closed")
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            self._mapping.madvise(mmap.MADV_REMOVE, first, end - first)

    def keep_mapped(self) -> int:
        """Keeps the memory mapped until the process ends: neither `close` nor the end of this object or of
        the interpreter unmaps it. For memory that a device may still write at any later time.

        Returns its address. Raises ValueError if the buffer is closed. Another thread may be closing it.
        """
        array = self.array  # while somebody holds it, `close` unmaps nothing
        if not self._kept:
            self._kept = True
            # This reference is never dropped, not even when the interpreter takes modules apart at its end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(array))
        return int(array.ctypes.data)

    def close(self) -> None:
        """Closes the descriptor and unmaps the memory. Safe to call twice. The mapping stays while views
        exist."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        self._array = None
        mapping, self._mapping = self._mapping, None
        if mapping is not None and not self._kept:
            try:
                mapping.close()
            except BufferError:  # somebody holds a view: the last one to go unmaps it
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class ChunkPacket:
    """Chunks of a GPU's physical memory for one AddChunks request. The export closes the descriptors."""

    sizes_bytes: Sequence[int]
    fds: tuple[int, ...]


class Export(Protocol):
    """One export of a GPU's memory, for one registration. It is used from one thread at a time."""

    def next_packet(self) -> ChunkPacket | None:
        """Returns the next 1 to 64 chunks, or None after the last, and closes those of the packet before.

        Asks the driver, which may take a while. Raises KvtierError.
        """

    def ranges(self) -> list[side_pb2.DeviceRange]:
        """Returns the ranges for RegisterMemory, once `next_packet` has returned None."""

    def close(self) -> None:
        """Closes all open descriptors. Safe to call twice. Never waits, not even for a `next_packet`."""


class StreamDoorbells(Protocol):
    """How the streams of one GPU ring one client's doorbells. It may be used from any thread.

    Calls of the driver may take a while, so nothing here is called with the session's lock held.
    """

    @property
    def mode(self) -> str:
        """How doorbells are rung, and why not in a better way, for people."""

    def expose(self, buffer: SharedBuffer, size_bytes: int) -> int | None:
        """Lets the GPU write the first `size_bytes` of a buffer, which then stay mapped until the process
        ends. Returns their address on the GPU, or None if the GPU cannot write them. Never raises."""

    def ring_on(self, stream: Any, address: int | None, doorbell: int, value: int) -> None:
        """Has `stream` write `value` to this address of the GPU once it has done what was queued before.
        Without an address, or where that does not work, a thread of ours then calls `ring(doorbell, value)`.

        Raises KvtierError if the driver refuses both.
        """

    def close(self) -> None:
        """Ends the ringing by a thread. Streams still write what they were asked to. Safe to call twice."""


Ring = Callable[[int, int], None]


class DeviceShareable(Protocol):
    """Memory of a GPU that can be shared. `kvtier.cuda.DeviceMemory` is one."""

    @property
    def device(self) -> str:
        """The GPU's name: `GPU-` and a UUID in lower case."""

    @property
    def size_bytes(self) -> int:
        """The size of the mapping that planes' offsets refer to: the sum of `range_bytes`."""

    @property
    def range_bytes(self) -> Sequence[int]:
        """The sizes of the ranges that the mapping consists of, in order. A plane lies wholly in one."""

    def export(self) -> Export:
        """Makes the handles for one registration. Asks the driver anew each time. Raises KvtierError."""

    def stream_doorbells(self, ring: Ring) -> StreamDoorbells:
        """Returns what lets streams of this GPU ring doorbells; where they cannot, `ring` is called."""


Memory = Shareable | DeviceShareable


def device_of(memory: Memory) -> str:
    """Returns the device that this memory is on: "cpu", or `GPU-` and a UUID."""
    return str(getattr(memory, "device", CPU))


def on_device(memory: Memory) -> TypeGuard[DeviceShareable]:
    """Whether this is memory of a GPU, which is registered by handles, not by descriptor."""
    return device_of(memory) != CPU


def fd_of(memory: Memory) -> int:
    """Returns the descriptor of host memory."""
    return cast(Shareable, memory).fileno()


def is_sparse(memory: Memory) -> bool:
    """Whether memory is on the host, and its owner allocates it block by block."""
    return not on_device(memory) and cast(Shareable, memory).is_sparse


def range_bytes_of(memory: Memory) -> Sequence[int]:
    """Returns the sizes of the memory's ranges; host memory is one range."""
    return memory.range_bytes if on_device(memory) else (memory.size_bytes,)
