"""How long the daemon keeps a request's blocks, and in which tiers, as engine and request wish."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtier import Retention
from kvtier_engine.hints import Hold

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
    holds: tuple[Hold, ...] = ()
    """Which of the blocks that it has used are held after its end, and for how long."""
    cool_from_tokens: int | None = None
    """After its end, the blocks that it has made from this token on are the first to be evicted. None: none
    of them."""


ANYHOW = Keeping()
"""Nothing special is asked for."""
