"""How long the daemon keeps a request's blocks, and in which tiers: what engine and request wish, as far as
the daemon in use can grant it."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtier import ClientStatus, Retention

if TYPE_CHECKING:
    from kvtier_vllm.config import ConnectorConfig
    from kvtier_vllm.scheduler.control import Control

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


class Granting:
    """What the daemon in use can grant. Called from the scheduler's thread."""

    def __init__(self, config: ConnectorConfig, log: logging.Logger) -> None:
        self._settings = [
            name
            for name, wished in (
                ("priority", config.priority != "normal"),
                ("pin_s", config.pin_s > 0),
                ("ttl_s", config.ttl_s > 0),
                ("tiers", DISK not in config.tiers),
            )
            if wished
        ]
        self._log = log
        self._version: str | None = None
        """Of a daemon that can grant nothing."""
        self._told = False

    def attached(self, status: ClientStatus) -> None:
        """To a daemon, which may be another one than before."""
        self._version = None if status.can_retain else status.daemon_version
        if self._version is not None and self._settings:
            self._tell(f"{', '.join(self._settings)} in kv_connector_extra_config")

    def of(self, wished: Control) -> Control:
        """As much of it as the daemon can do. It costs no request anything that the rest is left out."""
        if self._version is None or wished.keeping == ANYHOW:
            return wished
        if not self._settings:  # it is the request's own wish
            self._tell("what requests say of priority, pin_s, ttl_s and tiers")
        return replace(wished, keeping=ANYHOW)

    def _tell(self, what: str) -> None:
        """Once in an engine's life."""
        if not self._told:
            self._told = True
            self._log.warning(
                "kvtier: kvtierd %s can neither hold blocks nor let them go early, nor leave disks out: "
                "upgrade it; until then this does nothing: %s",
                self._version,
                what,
            )
