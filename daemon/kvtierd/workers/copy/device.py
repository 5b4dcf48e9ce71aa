"""What a copy worker needs of the device whose memory it copies: the one place where "cpu" and a GPU differ.

Engine, sessions and lanes know only this. `cpu.py` and `gpu/` are the two kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtierd.core.errors import Refusal
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.copy.parts import PartEnd, PartTask

Blocks = npt.NDArray[np.bool_]
"""One flag per block of a chunk."""

Area = tuple[int, int]
"""Offset and length in the pool file."""


class DeviceUnusableError(Exception):
    """A device cannot be served, and trying again at once is no use; `refusal` is for the client that asked
    for it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


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


@dataclass(slots=True)
class Flight:
    """A chunk of a part on its way."""

    part: PartTask
    chunk: slice
    good: Blocks
    """Blocks that passed the checks so far."""
    started_ns: int = 0
    """Set by the lane, on the monotonic clock."""


class Copier(Protocol):
    """Copies chunks in one direction. Only its lane's thread calls it, except `is_full`."""

    @property
    def depth(self) -> int:
        """Flights there may be at a time; they land in the order of their start."""

    @property
    def chunk_bytes(self) -> int:
        """Data of one chunk; a chunk has one block at least."""

    @property
    def chunk_fragments(self) -> int:
        """Fragments of one chunk, likewise."""

    def is_full(self) -> bool:
        """True while it can take no chunk; the `on_room` of its device is called when that ends."""

    def prepare(self, part: PartTask, chunk: slice) -> bool:
        """Makes ready what a chunk needs and what may take a while, before the part starts, step by step:
        True if it is to be called again. Raises nothing: what is not ready then shows in `submit`."""

    def submit(self, part: PartTask, chunk: slice) -> Flight:
        """Starts a chunk of a started part.

        If it raises, the part has failed, and nothing of the chunk flies.
        """

    def land(self, flight: Flight) -> Blocks:
        """Waits for the oldest flight and says which blocks are in place. If it raises, the part has failed,
        and nothing of the flight flies."""

    def settle(self, part: PartTask, end: PartEnd, over: Callable[[PartEnd], None]) -> None:
        """Does what remains to be done of a part of which nothing flies and whose word is terminal; then
        calls `over`, at once or from another thread, with the end that is to be reported. Without blocks
        nothing remains."""


class Device(Protocol):
    """A device that is ready to be copied from and to. Made in the main thread."""

    @property
    def load(self) -> Copier: ...
    @property
    def store(self) -> Copier: ...

    def enter_thread(self) -> None:
        """First thing in every thread that uses the device, the main thread excepted."""

    def start(self, on_room: Callable[[], None]) -> None:
        """Before the first part. `on_room()` may be called from any thread."""

    def stop(self) -> None:
        """After the last part has landed: its own threads end when every part is settled."""

    def join(self, timeout_s: float) -> bool:
        """Waits for its own threads after `stop`; False if they have not ended."""

    def map_memory(
        self, message: wire.MapMemory, fds: Sequence[int], chunks: Sequence[Chunk]
    ) -> tuple[MappedMemory, int]:
        """Maps what the message says, from descriptors that stay the caller's, or from the first of a
        session's chunks; says how many of them it took, which the caller then releases. Main thread.

        Refusal, and nothing changed, if it is not what the message says.
        """

    def import_chunk(self, fd: int, size_bytes: int) -> Chunk:
        """Takes a chunk; the descriptor stays the caller's. Refusal if it is none. Main thread."""

    def pool_areas(self) -> Iterable[Area]:
        """What of the pool to prepare ahead of use, in this order; looked at as it is gone through."""

    def pool_area_mapped(self, area: Area) -> None:
        """The pages of an area are mapped now; does what else it takes to copy there fast."""
