"""How long the daemon keeps a request's blocks, and in which tiers: what engine and request wish."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtier import Retention

HOST, DISK = "host", "disk"
TIERS = (HOST, DISK)
PRIORITIES = ("low", "normal", "high")


@dataclass(frozen=True, slots=True, order=True)
class Kept:
    """What a store has its blocks kept like. The larger of two is what the daemon grants of both: a block
    with a time stays on the host whatever else is said of it."""

    on_disks: bool = True
    ttl_s: float = math.inf

    def __post_init__(self) -> None:
        if self.ttl_s < math.inf:
            object.__setattr__(self, "on_disks", False)

    @property
    def retention(self) -> Retention | None:
        """As a store says it; None: nothing need be said."""
        if self == PLAIN:
            return None
        return Retention(ttl_s=self.ttl_s if self.ttl_s < math.inf else 0.0, host_only=True)


PLAIN = Kept()
"""For as long as there is room, in all tiers."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Of one request."""

    kept: Kept = PLAIN
    """Its stores."""
    host_only: bool = False
    """What only disks have is not looked for."""
    hold_s: float = 0.0
    """When it ends, what it has used is held for so long."""
    cool: bool = False
    """When it ends, what it has made goes first."""


ANYHOW = Keeping()
"""Nothing is wished."""
