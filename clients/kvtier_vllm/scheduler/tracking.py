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
    """What is stored and loaded of it, by the engine's settings and the request's wishes."""
    stores: StoreState
    keys: Keys | None
    """How its blocks are named; None if that is not known yet, or never will be."""
    preemptions: int = 0
    may_load: bool = True
    """Whether it may load: not from a load's submission until its success is reported, so never after a
    failure."""
    settled: tuple[int, int, int] | None = None
    """The question to which the answer is known: the engine's own tokens, all tokens, and the fewest units
    that are loaded. None if it is not. The matcher tells whether a lease still holds what was promised."""
    promised_tokens: int = 0
    """The answer to it."""
    matched_at: int = 0
    """How many units the engine itself had when it was last asked about."""
    expected_tokens: int = 0
    """How many tokens it begins with, the engine's own and those loaded here."""
    begun: bool = False
    """Whether it has run since it was last asked about."""
    foreign_until: int = 0
    """How many tokens it began with if these are more than expected, because another connector loads as well,
    perhaps in this very step, and perhaps in vain; else 0."""

    audit_drawn: bool = False
    """Whether it was already decided if it is audited."""
    audited_unit: int | None = None
    """The unit that could be loaded, but is computed to be compared."""

    @property
    def hashes(self) -> Sequence[bytes]:
        """The keys of its blocks, one for each of vLLM's block hashes; none while they are not known."""
        return () if self.keys is None else self.keys(self.request.block_hashes)


@dataclass(slots=True)
class LoadCounters:
    """Totals since the engine started, of loads that have ended."""

    loads: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """The sum of the times from submission to report."""
