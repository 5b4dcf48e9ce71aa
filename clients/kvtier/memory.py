"""What a rank shares with the copy worker: memory of the host by descriptor, memory of a GPU by handles.

`SharedBuffer` is the first kind, `kvtier.cuda.DeviceMemory` the second. Nothing here needs a GPU or its
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


class Shareable(Protocol):
    """Host memory that another process can map: a memfd sealed against shrinking. `SharedBuffer` is one."""

    @property
    def size_bytes(self) -> int:
        """Bytes to map, from the start of the descriptor."""

    def fileno(self) -> int:
        """The descriptor. It stays open as long as the client that was given it."""


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

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class ChunkPacket:
    """Physical memory of a GPU for one AddChunks. The descriptors stay the export's: it closes them."""

    sizes_bytes: Sequence[int]
    fds: tuple[int, ...]


class Export(Protocol):
    """One export of a GPU's memory, for one registration. Used from one thread at a time."""

    def next_packet(self) -> ChunkPacket | None:
        """The next 1 to 64 chunks, None after the last. Those of the packet before are closed.

        Asks the driver, which may take a while. Raises KvtierError.
        """

    def ranges(self) -> list[side_pb2.DeviceRange]:
        """Of RegisterMemory, once `next_packet` has returned None."""

    def close(self) -> None:
        """Closes what is open; never waits, not even for a `next_packet` that runs. Safe to call twice."""


class StreamDoorbells(Protocol):
    """How the streams of one GPU ring one client's doorbells. May be used from any thread.

    A driver's call may take a while: nothing here is called with the session's lock held.
    """

    @property
    def mode(self) -> str:
        """For people: how it rings, and why not better."""

    def expose(self, buffer: SharedBuffer, size_bytes: int) -> int | None:
        """Lets the GPU write the first `size_bytes` of a buffer, which then stay mapped for as long as the
        process lives. Returns their address on the GPU; None if that cannot be had. Never raises."""

    def ring_on(self, stream: Any, address: int | None, doorbell: int, value: int) -> None:
        """Has `stream` write `value` to this address of the GPU once it has done what was queued before; with
        None, or where that does not work, `ring(doorbell, value)` is called by a thread of ours after that.

        Raises KvtierError if the driver refuses both.
        """

    def close(self) -> None:
        """Rings no more by thread. What streams were asked to write they still write. Safe to call twice."""


Ring = Callable[[int, int], None]


class DeviceShareable(Protocol):
    """Memory of a GPU. `kvtier.cuda.DeviceMemory` is one."""

    @property
    def device(self) -> str:
        """`GPU-` and a UUID in lower case."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the mapping that offsets refer to: the sum of `range_bytes`."""

    @property
    def range_bytes(self) -> Sequence[int]:
        """The mapping is these ranges, one after another; a plane lies wholly inside one of them."""

    def export(self) -> Export:
        """Asks the driver for handles, anew at each registration. Raises KvtierError."""

    def stream_doorbells(self, ring: Ring) -> StreamDoorbells:
        """For streams of the same GPU. Never raises."""


Memory = Shareable | DeviceShareable


def device_of(memory: Memory) -> str:
    """The device whose copy worker serves it."""
    return str(getattr(memory, "device", CPU))


def on_device(memory: Memory) -> TypeGuard[DeviceShareable]:
    """Whether it is registered by handles, not by descriptor."""
    return device_of(memory) != CPU


def fd_of(memory: Memory) -> int:
    """The descriptor of host memory."""
    return cast(Shareable, memory).fileno()


def range_bytes_of(memory: Memory) -> Sequence[int]:
    """Host memory is one range."""
    return memory.range_bytes if on_device(memory) else (memory.size_bytes,)
