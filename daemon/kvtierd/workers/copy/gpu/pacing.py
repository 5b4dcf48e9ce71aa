"""How much a lane of a GPU hands to the driver at a time.

Copies of two processes on one copy engine are said to take turns of about a millisecond (Bakita and Anderson,
RTAS 2024), and a lane that always has its next chunk on the stream leaves no gap. So each small copy of an
engine's step, of sampled tokens or input ids, might wait for ours as long as a turn lasts. While engines
compute, a lane therefore hands over one small chunk and waits until it has landed.
"""

import time
from collections.abc import Callable

from kvtierd.workers.lane_chunks import LaneChunks, Pacing

STEPPING_S = 0.5
"""An engine counts as computing for so long after a step whose blocks are stored. With few requests, a block
of tokens is full only every few hundred milliseconds."""


class ChunkPace:
    """What the chunks of both lanes are to be now. Called from both lanes' threads."""

    def __init__(self, chunks: LaneChunks, clock: Callable[[], float] = time.monotonic) -> None:
        self._chunks = chunks
        self._clock = clock
        self._until_s = 0.0

    def stepped(self) -> None:
        """Takes note that an engine has computed a step just now."""
        self._until_s = self._clock() + STEPPING_S

    @property
    def paced(self) -> bool:
        """Whether chunks are small now, and one at a time."""
        pacing = self._chunks.pacing
        return pacing is Pacing.ALWAYS or (pacing is Pacing.STEPPING and self._clock() < self._until_s)

    @property
    def flights(self) -> int:
        """How many chunks a lane may have under way."""
        return 1 if self.paced else self._chunks.flights

    def bytes_of(self, *, load: bool) -> int:
        """Returns how much data a chunk has."""
        chunks = self._chunks
        usual = chunks.load_bytes if load else chunks.store_bytes
        return min(usual, chunks.paced_bytes) if self.paced else usual
