"""How long the daemon keeps a request's blocks, and in which tiers, as engine and request wish."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtier import Retention

HOST, DISK = "host", "disk"
TIERS = (HOST, DISK)
PRIORITIES = ("low", "normal", "high")


@dataclass(frozen=True, slots=True, order=True)
class Kept:
    """How a store has its blocks kept. The larger of two is what the daemon grants of both: a block with a
    time to live stays on the host whatever else is asked for."""

    on_disks: bool = True
    ttl_s: float = math.inf

    def __post_init__(self) -> None:
        if self.ttl_s < math.inf:
            object.__setattr__(self, "on_disks", False)

    @property
    def retention(self) -> Retention | None:
        """The retention to submit a store with; None if there is nothing special to ask for."""
        if self is PLAIN or self == PLAIN:
            return None
        return Retention(ttl_s=self.ttl_s if self.ttl_s < math.inf else 0.0, host_only=True)


PLAIN = Kept()
"""Blocks are kept as long as there is room, in all tiers."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """How the blocks of one request are kept."""

    kept: Kept = PLAIN
    """How its stores have their blocks kept."""
    host_only: bool = False
    """Whether blocks that only disks have are not looked for."""
    hold_s: float = 0.0
    """For how many seconds the blocks that it has used are held after its end."""
    cool: bool = False
    """Whether the blocks that it has made are the first to be evicted after its end."""


ANYHOW = Keeping()
"""Nothing special is asked for."""
