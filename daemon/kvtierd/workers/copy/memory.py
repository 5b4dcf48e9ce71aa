"""An engine's memory, mapped into a copy worker, as both kinds of devices map it: "cpu" and a GPU."""

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
        """Refusal if the group does not lie inside the memory."""

    def unmap(self) -> None:
        """Lets go of it; no plan may be in use. May take long.

        Raises if it cannot: then only the end of the process helps.
        """


class Chunk(Protocol):
    """A chunk of physical GPU memory that waits for the registration that it is a piece of."""

    def release(self) -> None:
        """Lets go of it, after or instead of mapping it. Raises as `MappedMemory.unmap`."""


class MemoryMapper(Protocol):
    """Maps the memory of engines. For the main thread only."""

    def map_memory(
        self, message: wire.MapMemory, fds: Sequence[int], chunks: Sequence[Chunk]
    ) -> tuple[MappedMemory, int]:
        """Maps what the message says, from descriptors that stay the caller's, or from the first of a
        session's chunks; says how many of them it took, which the caller then releases.

        Refusal, and nothing changed, if it is not what the message says.
        """

    def import_chunk(self, fd: int, size_bytes: int) -> Chunk:
        """Takes a chunk; the descriptor stays the caller's. Refusal if it is none."""
