"""What the scheduler's side remembers of each request that vLLM has not finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_vllm.model.adapters import Keys
from kvtier_vllm.scheduler.control import Control
from kvtier_vllm.scheduler.storing import StoreState


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One request that vLLM has not finished."""

    request: Any
    control: Control
    """By the engine's settings and the request."""
    stores: StoreState
    keys: Keys | None
    """None: not known yet, or never."""
    preemptions: int = 0
    may_load: bool = True
    """False from the submission of a load until its success is reported, so for ever after a failure."""
    matched_at: int = 0
    """Units of the engine's own, when it was last asked about."""
    expected_tokens: int = 0
    """It begins with so many, of the engine's own and loaded here."""
    begun: bool = False
    """It has run since it was last asked about."""
    foreign_until: int = 0
    """It began with so many: another connector loads as well, perhaps in the very step, and perhaps in vain.
    0: it did not."""

    audit_drawn: bool = False
    """Whether it is audited has been decided."""
    audited_unit: int | None = None
    """It could be loaded, and is computed to be compared."""

    @property
    def hashes(self) -> Sequence[bytes]:
        """The keys of its blocks, in units of vLLM's block hashes; none while they are not known."""
        return () if self.keys is None else self.keys(self.request.block_hashes)


@dataclass(slots=True)
class LoadCounters:
    """Since the engine started, of loads that have ended."""

    loads: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """From submission to report, summed."""
