"""Which of a waiting request's blocks the daemon holds: one lookup and one lease per request, remembered.
None at all where the daemon's index page says already that there is nothing.

vLLM asks about a waiting request in every step until it has room for it, for hundreds of steps if need be,
and each time its own cache may hold a little more or less of the prefix.

A run of hits that ends at a PENDING block will soon be longer: the block is on its way up from a disk, or
somebody is storing it. Such a request waits for it, within bounds, while vLLM computes others.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier import Client, Lookup, LookupCall

from kvtier_vllm.scheduler.question import Question

ANSWER_DEADLINE_S = 0.2
"""A lookup unanswered for this long, when its request is asked about again, is given up."""
STARTS_MAX = 16
"""Lookups begun in one step; requests beyond it ask in the next. Each costs the scheduler some 50 µs, and a
thousand requests may arrive at once."""
LOOKUPS_MAX = 16
"""Per request and admission. The engine's own part of a prefix seldom changes while the request waits."""
LEASE_AGE_MAX_S = 60.0
"""An older lease is exchanged for a new one: the daemon ends leases some time, renewed or not."""
PENDING_WAIT_S = 2.0
PENDING_POLL_S = 0.01
POLLS_MAX = 8
"""Lookups repeated for PENDING blocks, in one step and in one `pending_poll_s`, of all requests together: the
more of them wait, the less often each asks."""
POLLS_PER_WAIT = 8
"""A request that has waited for long already asks again no sooner than after this part of it."""
STUCK_S = 10.0
"""A block that did not become readable while a request waited is not waited for again for so long, by any
request: if its writer is stopped, one request pays for it, not every one with that prefix."""
STUCK_MAX = 1_024


@dataclass(slots=True)
class _Match:
    """What is known about one waiting request."""

    first: int = 0
    """Block of the request at which the lookup started."""
    end: int = 0
    """Blocks below it, from `first` on, can be loaded."""
    call: LookupCall | None = None
    answer: Lookup | None = None
    asked_s: float = 0.0
    asked_step: int = 0
    lookups: int = 0
    given_up: bool = False
    seen_local: bool = False
    """The index page has said that there is nothing."""
    waiting: bool = False
    """The answer ended at a PENDING block, and is worth another lookup."""
    end_hash: bytes = b""
    asked_end: int = 0
    """The lookup was about blocks below it."""
    left: bool = False
    """It was seen that less can be loaded than is worth it."""
    end_since_s: float = 0.0
    """The PENDING block at which the answers end, and when they began to."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The right to load a request's blocks from `first` on."""

    lookup: Lookup
    """With a lease, or one for each group; on all blocks that were promised, but for those that are
    `unleased` and have to be looked up again."""
    first: int


@dataclass(slots=True)
class MatchCounters:
    """Since the engine started."""

    lookups: int = 0
    local: int = 0
    """Requests for which the index page has said that there is nothing, without a lookup."""
    hits: int = 0
    """Answers with at least one block."""
    given_up: int = 0
    polls: int = 0
    """Lookups repeated because of PENDING blocks; not among `lookups`."""
    waits: int = 0
    """Requests that waited for PENDING blocks."""
    waits_in_vain: int = 0
    """Of them: they got less than they waited for."""
    left: int = 0
    """Requests of which something could have been loaded, and less than is worth it."""


@dataclass(slots=True)
class Matcher:
    """Lookups and leases of all waiting requests. Waits at most `budget_s` between two calls of `next_step`.

    A request whose run of hits ends at a PENDING block is looked up again every `pending_poll_s` at most, and
    answered None meanwhile; `pending_wait_s` after its first such answer (0: at once) it gets what there is,
    and never waits again until it is forgotten. It waits no longer than computing those blocks would take, as
    far as `block_s` tells.
    """

    question: Question
    budget_s: float
    pending_wait_s: float = PENDING_WAIT_S
    pending_poll_s: float = PENDING_POLL_S
    clock: Callable[[], float] = time.monotonic
    in_parts: bool = True
    """Blocks that are readable and not leased yet are promised as well, behind some that are leased."""
    block_s: float = 0.0
    """Seconds in which the engine computes a block; 0: not known."""
    step_s: float = 0.0
    """Seconds until a request that is told None can be asked about again; 0: no time to speak of."""
    counters: MatchCounters = field(default_factory=MatchCounters)
    _left_s: float = field(init=False)
    _starts: int = field(init=False, default=0)
    _polls: int = field(init=False, default=0)
    _step: int = field(init=False, default=0)
    _matches: dict[str, _Match] = field(init=False, default_factory=dict)
    _since_s: dict[str, float] = field(init=False, default_factory=dict)
    """When a request was first told PENDING. Outlives its match, so that no request waits twice."""
    _waiting: set[str] = field(init=False, default_factory=set)
    _stuck: OrderedDict[bytes, float] = field(init=False, default_factory=OrderedDict)
    """Hashes of blocks that were waited for in vain, and until when that is held against them."""

    def __post_init__(self) -> None:
        self._left_s = self.budget_s

    def next_step(self) -> None:
        """The budget is whole again."""
        self._left_s = self.budget_s
        self._starts = self._polls = 0
        self._step += 1

    def match(
        self,
        client: Client,
        request: str,
        hashes: Sequence[bytes],
        local: int,
        total: int,
        least: int = 1,
        *,
        host_only: bool = False,
    ) -> int | None:
        """How many blocks from block `local` on can be loaded, at once or in parts, counting to block `total`
        at most; 0 if they are fewer than `least`. `host_only`: without those that only disks have.

        None: the answer, or the next block, is on its way; ask again in the next step. A lease holds what is
        promised until `take` or `drop`; there is never a second one.
        """
        match = self._matches.get(request)
        if match is None:
            match = self._matches[request] = _Match()
        if match.given_up or local + least > total:
            if local < total and not match.given_up and not match.left:
                self._leave(match, self.question.known(client, hashes, local, total) or 0)
            self._settle(request, match)
            self._release(match)
            return 0
        if match.call is None:
            covers = self._covers(match, client, local)
            if not covers and (known := self.question.known(client, hashes, local, total)) is not None:
                if known < least:
                    self._leave(match, known)
                    self._nothing(request, match)
                    return 0
                total = min(total, local + known)
            if not covers or match.waiting:
                if not self._may_ask(request, match, again=covers):
                    return 0 if match.given_up else None
                self._ask(match, client, hashes, local, total, host_only)
        if match.call is not None and not self._hear(request, match, hashes):
            return 0 if match.given_up else None
        if local < match.first:  # the answer came for a longer local part than there is now
            self._release(match)
            match.answer = None
            return None
        promised = min(match.end, total) - local
        if promised < least:
            self._leave(match, promised)
            self._release(match)
            return 0
        return promised

    def take(self, request: str) -> Grant | None:
        """Hands the request's lease to the caller and forgets the request. None: there is none."""
        match = self._matches.get(request)
        if match is None or match.call is not None or match.answer is None or not match.answer.leases:
            self.drop(request)  # vLLM goes on without: it need not wait for an answer that is on its way
            return None
        del self._matches[request]
        self._waiting.discard(request)
        return Grant(match.answer, match.first)

    def drop(self, request: str) -> None:
        """Gives a request's lease back, and asks anew if vLLM does."""
        self._waiting.discard(request)
        match = self._matches.pop(request, None)
        if match is None:
            return
        if match.call is not None:
            match.answer, match.call = match.call.abandon(), None
        self._release(match)

    def drop_all(self) -> None:
        """`drop` for every request."""
        for request in list(self._matches):
            self.drop(request)

    def forget(self, request: str) -> None:
        """The request is over: as `drop`, and it may wait anew if it ever comes again."""
        self.drop(request)
        self._since_s.pop(request, None)

    def _may_ask(self, request: str, match: _Match, *, again: bool) -> bool:
        """Whether a lookup may begin now, which is counted then. `again`: for what was PENDING."""
        if again:
            may = self._may_poll(request, match)
            self._polls += may
            self.counters.polls += may
            return may
        if match.lookups >= LOOKUPS_MAX:
            self._give_up(request, match)
            return False
        if self._starts >= STARTS_MAX:
            return False
        self._starts += 1
        match.lookups += 1
        self.counters.lookups += 1
        return True

    def _ask(
        self,
        match: _Match,
        client: Client,
        hashes: Sequence[bytes],
        local: int,
        total: int,
        host_only: bool,
    ) -> None:
        self._release(match)
        match.answer = None
        match.first, match.asked_s, match.asked_step = local, self.clock(), self._step
        match.end, match.asked_end = local, total
        match.call = self.question.ask(client, hashes, local, total, host_only=host_only)

    def _judge(self, request: str, match: _Match, answer: Lookup, hashes: Sequence[bytes]) -> None:
        """Whether the answer that has come is taken, or a better one is worth waiting for."""
        in_parts = self.in_parts and answer.unleased > 0 and bool(answer.leases)
        if not answer.pending or in_parts or self.pending_wait_s <= 0:
            self._settle(request, match)
            return
        now_s, end_hash = self.clock(), self.question.pending_hash(answer, hashes, match.first)
        if end_hash != match.end_hash:
            match.end_hash, match.end_since_s = end_hash, now_s
        since_s = self._since_s.get(request, now_s)
        if self._stuck.get(end_hash, 0.0) > now_s:
            self._settle(request, match)
        elif now_s - since_s + self.step_s >= self._patience_s(match):
            if match.waiting:
                self.counters.waits_in_vain += 1
            if now_s - match.end_since_s >= self.pending_wait_s / 2:
                self._remember_stuck(end_hash, now_s)
            self._settle(request, match)
        else:
            self.counters.waits += request not in self._since_s
            self._since_s[request] = since_s
            match.waiting = True
            self._waiting.add(request)

    def _may_poll(self, request: str, match: _Match) -> bool:
        """Whether to look a waiting request up again now. Once, whenever it comes, after its patience is
        over: steps may be long, and what is known then may be old."""
        if self._polls >= POLLS_MAX:
            return False
        now_s = self.clock()
        waited_s = now_s - self._since_s[request]
        if waited_s >= self._patience_s(match):
            return True
        share = -(-len(self._waiting) // POLLS_MAX)
        interval_s = max(self.pending_poll_s * share, waited_s / POLLS_PER_WAIT)
        return self._step - match.asked_step >= share and now_s - match.asked_s >= interval_s

    def _patience_s(self, match: _Match) -> float:
        """How long a request waits for what is PENDING, in all."""
        if not self.block_s:
            return self.pending_wait_s
        return min(self.pending_wait_s, (match.asked_end - match.end) * self.block_s)

    def _leave(self, match: _Match, blocks: int) -> None:
        """So many can be loaded, and are not worth it."""
        if blocks > 0 and not match.left:
            match.left = True
            self.counters.left += 1

    def _remember_stuck(self, block_hash: bytes, now_s: float) -> None:
        self._stuck[block_hash] = now_s + STUCK_S
        self._stuck.move_to_end(block_hash)
        if len(self._stuck) > STUCK_MAX:
            self._stuck.popitem(last=False)

    def _settle(self, request: str, match: _Match) -> None:
        """What is known now is the answer."""
        match.waiting = False
        self._waiting.discard(request)

    def _covers(self, match: _Match, client: Client, local: int) -> bool:
        """Whether what is known still answers the question."""
        if match.answer is None or local < match.first:
            return False
        if not match.answer.leases:
            return True
        return match.answer.leases[0].epoch == client.epoch and self.clock() - match.asked_s < LEASE_AGE_MAX_S

    def _hear(self, request: str, match: _Match, hashes: Sequence[bytes]) -> bool:
        """Takes the answer if it comes within what is left of the budget. False: there is none to go by."""
        assert match.call is not None
        started_s = self.clock()
        answer = match.call.poll()
        if answer is None and self._left_s > 0:
            answer = match.call.wait_for_answer(self._left_s)
            self._left_s -= self.clock() - started_s
        if answer is None and started_s - match.asked_s > ANSWER_DEADLINE_S:
            answer = match.call.abandon()
            if not answer.answered:
                match.call = None
                self.counters.given_up += 1
                self._give_up(request, match)
                return False
        if answer is None:
            return False
        match.answer, match.call = answer, None
        if answer.leases:
            match.end = match.first + self.question.hits(answer)
            match.end += answer.unleased if self.in_parts else 0
        self.counters.hits += answer.hits > 0
        self._judge(request, match, answer, hashes)
        return not match.waiting

    def _nothing(self, request: str, match: _Match) -> None:
        """There is nothing to load now; it is asked anew when vLLM asks again."""
        self.counters.local += not match.seen_local
        match.seen_local = True
        self._settle(request, match)
        self._release(match)
        match.answer = None

    def _give_up(self, request: str, match: _Match) -> None:
        """Nothing is loaded for this request."""
        match.given_up = True
        self._settle(request, match)
        self._release(match)

    def _release(self, match: _Match) -> None:
        """Gives the lease back. From `first` on nothing can be loaded then, and that stays known."""
        answer = match.answer
        if answer is not None and answer.leases:
            answer.release()
            match.answer = Lookup(answered=True)
            match.end = match.first
