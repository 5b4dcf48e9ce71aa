"""What a rank shares with the copy worker: memory of the host by descriptor, memory of a GPU by handles.

Only protocols: `kvtier.SharedBuffer` is the first kind, `kvtier.cuda.DeviceMemory` the second. Nothing here
needs a GPU or its driver.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, cast

from kvtier.shared import SharedBuffer
from kvtier.v1 import side_pb2

CPU = "cpu"


class Shareable(Protocol):
    """Host memory that another process can map: a memfd sealed against shrinking. `SharedBuffer` is one."""

    @property
    def size_bytes(self) -> int:
        """Bytes to map, from the start of the descriptor."""

    def fileno(self) -> int:
        """The descriptor. It stays open as long as the client that was given it."""


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
