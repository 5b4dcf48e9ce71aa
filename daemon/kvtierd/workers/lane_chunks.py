"""How much a lane of a GPU's copy worker hands to the driver at a time: what the daemon tells its workers."""

from dataclasses import dataclass
from enum import Enum


class Pacing(Enum):
    """When chunks are small."""

    STEPPING = "stepping"
    """While an engine of this GPU computes."""
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class LaneChunks:
    """The chunks of a GPU's lanes. Data in bytes; a chunk has at least one block."""

    load_bytes: int = 32 << 20
    """More than a link needs to be busy, and 0.6 ms at 50 GB/s, for which a dead engine's memory waits."""
    store_bytes: int = 16 << 20
    """0.3 ms at 50 GB/s, which is long enough for this process to prepare the next chunk (about 0.1 ms).
    Loads share the engine's memory bandwidth."""
    flights: int = 2
    """How many of each lane are under way: the next one is already on the stream when one lands."""
    pacing: Pacing = Pacing.STEPPING
    paced_bytes: int = 8 << 20
    """The most of one chunk while paced: 0.15 ms at 54 GB/s."""
