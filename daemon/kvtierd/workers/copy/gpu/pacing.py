"""How much a lane of a GPU hands to the driver at a time.

Copies of two processes on one copy engine take turns of a millisecond (Bakita and Anderson, RTAS 2024;
measured on an H200: `slices` in tests/gpu/results), and a lane that always has its next chunk on the stream
never gives its turn up early. So each small copy of an engine's step, of sampled tokens or block tables,
waits for ours as long as a turn lasts. While engines compute, a lane therefore hands over a smaller chunk,
and the next one when that has landed.
"""

import time
from collections.abc import Callable

from kvtierd.workers.lane_chunks import LaneChunks, Pacing

STEPPING_S = 0.5
"""An engine counts as computing for so long after a step whose blocks are stored. With few requests, a block
of tokens is full only every few hundred milliseconds."""

SHARED_BYTES = 16 << 20
"""The most of one chunk while several tenants use a lane, which wait for each other's chunks: 0.3 ms at 54
GB/s, in which this process can prepare the next one (0.1 to 0.2 ms). Much less, such as the CPU's chunk or a
paced one, would leave the link idle between chunks. Nor is it needed: the GPU moves the data, so a chunk
takes no longer where processor time is short."""


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

    def bytes_of(self, *, load: bool, shared: bool = False) -> int:
        """Returns how much data a chunk has; `shared`: in a lane that several tenants use."""
        chunks = self._chunks
        most = chunks.load_bytes if load else chunks.store_bytes
        if shared:
            most = min(most, SHARED_BYTES)
        return min(most, chunks.paced_bytes) if self.paced else most
