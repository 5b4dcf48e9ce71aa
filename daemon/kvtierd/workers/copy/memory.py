"""An engine's memory, mapped into a copy worker, as both kinds of devices ("cpu" and a GPU) map it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtierd.wire import worker_pb2 as wire


class FragmentPlan(Protocol):
    """Where the fragments of one group's blocks lie."""

    @property
    def slot_bytes(self) -> int: ...
    @property
    def planes(self) -> int: ...


class MappedMemory(Protocol):
    """A rank's memory, mapped into this process for one registration."""

    def plan(self, group: wire.MappedGroup) -> FragmentPlan:
        """The plan of one group. Raises Refusal if the group does not lie inside the memory."""

    def unmap(self) -> None:
        """Unmaps the memory, which may take long. No plan may be in use.

        Raises if it cannot be unmapped; then only the end of the process helps.
        """


class Chunk(Protocol):
    """A chunk of physical GPU memory that waits for the registration that it belongs to."""

    def release(self) -> None:
        """Releases the chunk, after mapping it or instead. Raises as `MappedMemory.unmap` does."""


class MemoryMapper(Protocol):
    """Maps the memory of engines. For the main thread only."""

    def map_memory(
        self, message: wire.MapMemory, fds: Sequence[int], chunks: Sequence[Chunk]
    ) -> tuple[MappedMemory, int]:
        """Maps what the message says, from descriptors that stay the caller's, or from the first of a
        session's chunks. Returns how many chunks it took, which the caller then releases.

        Raises Refusal if the memory is not what the message says, and then nothing has changed.
        """

    def import_chunk(self, fd: int, size_bytes: int) -> Chunk:
        """Imports a chunk; the descriptor stays the caller's. Raises Refusal if it is not a chunk's."""
