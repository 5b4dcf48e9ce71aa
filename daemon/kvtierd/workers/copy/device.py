"""What a copy worker needs of the device whose memory it copies: the one place where "cpu" and a GPU differ.

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
"""One flag per block of a chunk."""

Area = tuple[int, int]
"""Offset and length in the pool file."""


class DeviceUnusableError(Exception):
    """A device cannot be served, and trying again at once is no use; `refusal` is for the client that asked
    for it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


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


class Device(MemoryMapper, Protocol):
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

    def pool_areas(self) -> Iterable[Area]:
        """What of the pool to prepare ahead of use, in this order; looked at as it is gone through."""

    def pool_area_mapped(self, area: Area) -> None:
        """The pages of an area are mapped now; does what else it takes to copy there fast."""
