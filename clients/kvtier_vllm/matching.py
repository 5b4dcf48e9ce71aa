"""Which of a waiting request's blocks the daemon holds: one lookup and one lease per request, remembered.

vLLM asks about a waiting request in every step until it has room for it, for hundreds of steps if need be,
and each time its own cache may hold a little more or less of the prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier import Client, Lookup, LookupCall

ANSWER_DEADLINE_S = 0.2
"""A lookup unanswered for this long, when its request is asked about again, is given up."""
STARTS_MAX = 16
"""Lookups begun in one step; requests beyond it ask in the next. Each costs the scheduler some 50 µs, and a
thousand requests may arrive at once."""
LOOKUPS_MAX = 16
"""Per request and admission. The engine's own part of a prefix seldom changes while the request waits."""
LEASE_AGE_MAX_S = 60.0
"""An older lease is exchanged for a new one: the daemon ends leases some time, renewed or not."""


@dataclass(slots=True)
class _Match:
    """What is known about one waiting request."""

    first: int = 0
    """Block of the request at which the lookup started."""
    call: LookupCall | None = None
    answer: Lookup | None = None
    asked_s: float = 0.0
    lookups: int = 0
    given_up: bool = False

    @property
    def end(self) -> int:
        """Blocks below it, from `first` on, can be loaded."""
        leased = self.answer is not None and self.answer.lease is not None
        return self.first + self.answer.hits if leased and self.answer is not None else self.first


@dataclass(frozen=True, slots=True)
class Grant:
    """The right to load a request's blocks from `first` on."""

    lookup: Lookup
    """With a lease."""
    first: int


@dataclass(slots=True)
class MatchCounters:
    """Since the engine started."""

    lookups: int = 0
    hits: int = 0
    """Lookups that found at least one block."""
    given_up: int = 0


@dataclass(slots=True)
class Matcher:
    """Lookups and leases of all waiting requests. Waits at most `budget_s` between two calls of
    `next_step`."""

    budget_s: float
    clock: Callable[[], float] = time.monotonic
    counters: MatchCounters = field(default_factory=MatchCounters)
    _left_s: float = field(init=False)
    _starts: int = 0
    _matches: dict[str, _Match] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._left_s = self.budget_s

    def next_step(self) -> None:
        """The budget is whole again."""
        self._left_s = self.budget_s
        self._starts = 0

    def match(
        self, client: Client, request: str, hashes: Sequence[bytes], local: int, total: int
    ) -> int | None:
        """How many blocks from block `local` on can be loaded, counting to block `total` at most.

        None: the answer is on its way; ask again in the next step. A lease holds what is promised until
        `take` or `drop`.
        """
        match = self._matches.get(request)
        if match is None:
            match = self._matches[request] = _Match()
        if match.given_up or local >= total:
            self._release(match)
            return 0
        if match.call is None and not self._covers(match, client, local):
            self._release(match)
            match.answer = None
            if match.lookups >= LOOKUPS_MAX:
                match.given_up = True
                return 0
            if self._starts >= STARTS_MAX:
                return None
            self._starts += 1
            match.lookups += 1
            self.counters.lookups += 1
            match.first, match.asked_s = local, self.clock()
            match.call = client.start_lookup(hashes[local:total], lease=True)
        if match.call is not None and not self._hear(match):
            return None if not match.given_up else 0
        if local < match.first:  # the answer came for a longer local part than there is now
            self._release(match)
            match.answer = None
            return None
        promised = min(match.end, total) - local
        if promised <= 0:
            self._release(match)
            return 0
        return promised

    def take(self, request: str) -> Grant | None:
        """Hands the request's lease to the caller and forgets the request. None: there is none."""
        match = self._matches.pop(request, None)
        if match is None or match.answer is None or match.answer.lease is None:
            return None
        return Grant(match.answer, match.first)

    def drop(self, request: str) -> None:
        """Forgets a request, and gives its lease back."""
        match = self._matches.pop(request, None)
        if match is None:
            return
        if match.call is not None:
            match.answer, match.call = match.call.abandon(), None
        self._release(match)

    def drop_all(self) -> None:
        """Forgets every request."""
        for request in list(self._matches):
            self.drop(request)

    def _covers(self, match: _Match, client: Client, local: int) -> bool:
        """Whether what is known still answers the question."""
        if match.answer is None or local < match.first:
            return False
        lease = match.answer.lease
        if lease is None:
            return True
        return lease.epoch == client.epoch and self.clock() - match.asked_s < LEASE_AGE_MAX_S

    def _hear(self, match: _Match) -> bool:
        """Takes the answer if it comes within what is left of the budget."""
        assert match.call is not None
        started_s = self.clock()
        answer = match.call.poll()
        if answer is None and self._left_s > 0:
            answer = match.call.wait_for_answer(self._left_s)
            self._left_s -= self.clock() - started_s
        if answer is None and started_s - match.asked_s > ANSWER_DEADLINE_S:
            answer = match.call.abandon()
            if not answer.answered:
                match.given_up = True
                self.counters.given_up += 1
        if answer is None:
            return False
        match.answer, match.call = answer, None
        if answer.hits:
            self.counters.hits += 1
        return not match.given_up

    def _release(self, match: _Match) -> None:
        """Gives the lease back. From `first` on nothing can be loaded then, and that stays known."""
        answer = match.answer
        if answer is not None and answer.lease is not None:
            answer.release()
            match.answer = Lookup(answered=True)
