"""What a copy worker needs of the device whose memory it copies: the only place where "cpu" and a GPU differ.

Engine, sessions and lanes know only this. `cpu.py` and `gpu/` are the two kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtierd.core.errors import Refusal
from kvtierd.workers.copy.memory import MemoryMapper
from kvtierd.workers.copy.parts import PartEnd, PartTask

Blocks = npt.NDArray[np.bool_]
"""One flag for each block of a chunk."""

Area = tuple[int, int]
"""Offset and length in the pool file."""


class DeviceUnusableError(Exception):
    """A device cannot be served, and trying again at once does not help. `refusal` is for the client that
    asked for it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


@dataclass(slots=True)
class Flight:
    """A chunk of a part that is being copied."""

    part: PartTask
    chunk: slice
    good: Blocks
    """Which blocks have passed the checks so far."""
    started_ns: int = 0
    """Set by the lane, on the monotonic clock."""


class Copier(Protocol):
    """Copies chunks in one direction. Only its lane's thread calls it, except `is_full`."""

    @property
    def depth(self) -> int:
        """How many flights there may be at a time, as of now. They land in the order in which they
        started."""

    @property
    def chunk_bytes(self) -> int:
        """Data of one chunk, as of now; a chunk has at least one block."""

    @property
    def shared_chunk_bytes(self) -> int:
        """The same while several tenants use the lane, each of which waits for the others' chunks; not more
        than `chunk_bytes`."""

    @property
    def chunk_fragments(self) -> int:
        """Fragments of one chunk; a chunk has at least one block."""

    def is_full(self) -> bool:
        """True while it can take no chunk. When that ends, the device calls its `on_room`."""

    def prepare(self, part: PartTask, chunk: slice) -> bool:
        """Prepares what a chunk needs and what may take a while, step by step, before the part starts.
        Returns True if it has to be called again. Raises nothing: if something is not ready, `submit`
        fails."""

    def submit(self, part: PartTask, chunk: slice) -> Flight:
        """Starts a chunk of a started part. If it raises, the part has failed, and no copy of the chunk is
        under way."""

    def land(self, flight: Flight) -> Blocks:
        """Waits for the oldest flight and returns which blocks are in place. If it raises, the part has
        failed, and no copy of the flight is under way."""

    def settle(self, part: PartTask, end: PartEnd, over: Callable[[PartEnd], None]) -> None:
        """Does what remains to be done for a part that has landed and whose word is terminal. Then calls
        `over`, at once or from another thread, with the end to report. A part without blocks has nothing to
        settle."""


class Device(MemoryMapper, Protocol):
    """A device that is ready for copies. Made in the main thread."""

    @property
    def load(self) -> Copier: ...
    @property
    def store(self) -> Copier: ...

    def enter_thread(self) -> None:
        """Called first in every thread that uses the device, except the main thread."""

    def engine_stepped(self) -> None:
        """An engine has just computed a step of which something is stored. From any thread."""

    def start(self, on_room: Callable[[], None]) -> None:
        """Called before the first part. `on_room()` may be called from any thread."""

    def stop(self) -> None:
        """Called after the last part has landed. The device's own threads end when every part is settled."""

    def join(self, timeout_s: float) -> bool:
        """Waits for the device's own threads after `stop`; False if they have not ended."""

    def pool_areas(self, start: int, end: int) -> Iterable[Area]:
        """The areas of the pool from `start` to `end`, which have got memory, to prepare before they are
        used, in this order. The order may change while they are iterated over."""

    def pool_area_mapped(self, area: Area) -> None:
        """The pages of an area are mapped now. Does what else is needed for fast copies there."""
