"""Finds out which of a waiting request's blocks the daemon holds, with one lookup and one lease per request,
which are remembered. There is no lookup if the daemon's index page already says that there is nothing.

vLLM asks about a waiting request in every step until it has room for it, for hundreds of steps if need be,
and each time its own cache may hold a little more or less of the prefix.

A run of hits that ends at a PENDING block will soon be longer, because the block is being read from a disk,
or somebody is storing it. The request waits for it, within bounds, while vLLM computes others.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier import Client, Lookup, LookupCall

from kvtier_vllm.scheduler.question import Question

ANSWER_DEADLINE_S = 0.2
"""A lookup that has not been answered for this long, when its request is asked about again, is given up."""
STARTS_MAX = 16
"""The most lookups that begin in one step; other requests ask in the next. Each costs the scheduler about 50
µs, and a thousand requests may arrive at once."""
LOOKUPS_MAX = 16
"""The most lookups per request and admission. The engine's own part seldom changes."""
LEASE_AGE_MAX_S = 60.0
"""A lease that is older is exchanged for a new one, because the daemon ends leases after some time."""
PENDING_WAIT_S = 2.0
PENDING_POLL_S = 0.01
POLLS_MAX = 8
"""The most lookups repeated for PENDING blocks in one step, and in one `pending_poll_s`, of all requests
together: the more of them wait, the less often each asks."""
POLLS_PER_WAIT = 8
"""A request asks again no sooner than after this part (one eighth) of the time that it has already waited."""
STUCK_S = 10.0
"""For how long no request waits for a block that did not become readable while one waited. If the block's
writer is stopped, one request pays for it, not every one with that prefix."""
STUCK_MAX = 1_024
IDLE_BUDGETS = 10.0
"""While nothing is computed, waiting delays nobody: a step may then wait this many times as long. vLLM would
sleep for a millisecond before it asks again."""
NEWEST_ANSWER = 0.125
"""The weight of the newest answer that was waited for in the time that answers take."""
ANSWER_BUDGETS_MAX = 4.0
"""No answer counts as having taken longer than this many budgets."""
UNTRIED_STEP = 0.98
"""Each step that does not wait takes off two percent of that time, so that waiting is tried again."""


@dataclass(slots=True)
class _Match:
    """What is known about one waiting request."""

    first: int = 0
    """The request's unit at which the lookup started."""
    end: int = 0
    """Units below it, from `first` on, can be loaded."""
    call: LookupCall | None = None
    waited: bool = False
    """Whether a step has waited for the answer to `call`."""
    answer: Lookup | None = None
    asked_s: float = 0.0
    asked_step: int = 0
    lookups: int = 0
    has_asked: bool = False
    given_up: bool = False
    seen_local: bool = False
    """Whether the index page has said that there is nothing."""
    waiting: bool = False
    """Whether the answer ended at a PENDING block, and is worth another lookup."""
    end_hash: bytes = b""
    asked_end: int = 0
    """The lookup was about units below it."""
    left: bool = False
    """Whether less can be loaded than is worth it."""
    held_until_s: float = 0.0
    """Until when its leases hold what was promised last; 0 if there may be more to ask."""
    end_since_s: float = 0.0
    """Since when the answers have ended at the PENDING block with `end_hash`."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The right to load a request's units from `first` on."""

    lookup: Lookup
    """The lookup with its leases, one for each group, on all blocks that were promised, except `unleased`
    ones, which have to be looked up again."""
    first: int


@dataclass(slots=True)
class MatchCounters:
    """What has happened since the engine started."""

    lookups: int = 0
    local: int = 0
    """Requests for which the index page said, without a lookup, that there is nothing."""
    hits: int = 0
    """Answers with at least one block."""
    given_up: int = 0
    polls: int = 0
    """Lookups repeated because of PENDING blocks, which are not among `lookups`."""
    waits: int = 0
    """Requests that waited for PENDING blocks."""
    waits_in_vain: int = 0
    """Those of them that got less than they waited for."""
    left: int = 0
    """Requests of which something could have been loaded, but less than is worth it."""


@dataclass(slots=True)
class Matcher:
    """The lookups and leases of all waiting requests. Waits at most `budget_s` per step, and only for answers
    that come within it, by what the last ones took.

    A request whose run of hits ends at a PENDING block is looked up again at most every `pending_poll_s`, and
    answered None meanwhile. `pending_wait_s` after its first such answer (0: at once) it gets what there is,
    and does not wait again until it is forgotten. It waits no longer than computing those blocks would take,
    as far as `block_s` tells.
    """

    question: Question
    budget_s: float
    pending_wait_s: float = PENDING_WAIT_S
    pending_poll_s: float = PENDING_POLL_S
    clock: Callable[[], float] = time.monotonic
    in_parts: bool = True
    """Whether readable blocks that are not leased yet are promised as well, behind some that are."""
    block_s: Callable[[], float] = lambda: 0.0
    """Returns the seconds in which the engine computes a unit; 0 if that is not known."""
    step_s: Callable[[], float] = lambda: 0.0
    """Returns the seconds until a request that was answered None is asked about again; 0 for hardly any."""
    counters: MatchCounters = field(default_factory=MatchCounters)
    _now_s: float = field(init=False, default=0.0)
    """When this step began."""
    _left_s: float = field(init=False)
    _answers_s: float = field(init=False, default=0.0)
    """What answers take, as a mean that follows the newest. Those that nobody waited for are left out: while
    vLLM's scheduler computes, they are read late."""
    _untried: bool = field(init=False, default=False)
    """Whether this step did not wait for an answer, because it would come too late."""
    _starts: int = field(init=False, default=0)
    _polls: int = field(init=False, default=0)
    _step: int = field(init=False, default=0)
    _matches: dict[str, _Match] = field(init=False, default_factory=dict)
    _since_s: dict[str, float] = field(init=False, default_factory=dict)
    """When a request was first answered PENDING. It outlives the match, so that no request waits twice."""
    _missing: dict[str, bytes] = field(init=False, default_factory=dict)
    """The heads of requests of which the index page had nothing when `match` was asked last."""
    _all_missing: bool | None = field(init=False, default=None)
    """Whether it still has none of the heads there were when it was asked in this step; None before that."""
    _waiting: set[str] = field(init=False, default_factory=set)
    _stuck: OrderedDict[bytes, float] = field(init=False, default_factory=OrderedDict)
    """Hashes of blocks that were waited for in vain, and until when nobody waits for them again."""

    def __post_init__(self) -> None:
        self._left_s, self._now_s = self.budget_s, self.clock()

    def next_step(self) -> None:
        """Begins a step with the whole budget."""
        if self._untried:
            self._untried = False
            self._answers_s *= UNTRIED_STEP
        self._left_s, self._now_s = self.budget_s, self.clock()
        self._starts = self._polls = 0
        self._all_missing = None
        self._step += 1

    def nothing_runs(self) -> None:
        """Says that no request is being computed in this step, in which nothing was asked yet."""
        self._left_s = IDLE_BUDGETS * self.budget_s

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
        """Returns how many units from unit `local` on can be loaded, at once or in parts, counting to unit
        `total` at most; 0 if they are fewer than `least`. With `host_only`, disks do not count.

        Returns None if the answer, or the next block, is on its way: ask again in the next step. A lease
        holds what is promised until `take` or `drop`; there is never a second one.
        """
        match = self._matches.get(request)
        if match is None:
            match = self._matches[request] = _Match()
        self._missing.pop(request, None)
        if match.given_up or local + least > total:
            if local < total and not match.given_up and not match.left:
                self._leave(match, self.question.known(client, hashes, local, total, counted=False) or 0)
            self._settle(request, match)
            self._release(match)
            return 0
        if match.call is None:
            covers = self._covers(match, client, local)
            known = None
            if not covers:
                known = self.question.known(client, hashes, local, total, counted=not match.seen_local)
            if known is not None:
                if known < least:
                    if known == 0:
                        self._missing[request] = self.question.head(hashes, local)
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
        if local < match.first:  # the answer was for a longer local part than there is now
            self._release(match)
            match.answer = None
            return None
        promised = min(match.end, total) - local
        if promised < least:
            self._leave(match, promised)
            self._release(match)
            return 0
        match.held_until_s = match.asked_s + LEASE_AGE_MAX_S
        return promised

    def holds(self, request: str) -> bool:
        """Returns whether leases hold what `match` has promised last, and nothing more was asked: the same
        question then has the same answer. Takes next to no time, because vLLM asks for hundreds of steps."""
        match = self._matches.get(request)
        return match is not None and match.held_until_s > self._now_s

    def misses(self, client: Client, request: str) -> bool:
        """Returns whether the index page still has nothing of what it had nothing of when `match` was asked
        last: the same question then has the same answer. Asks about all such requests at once, in their first
        question of a step."""
        head = self._missing.get(request)
        if head is None:
            return False
        if self._all_missing is None:
            self._all_missing = self.question.none_known(client, list(self._missing.values()))
        return self._all_missing or self.question.none_known(client, [head])

    def take(self, request: str) -> Grant | None:
        """Hands the request's lease to the caller and forgets the request. Returns None if there is none."""
        match = self._matches.get(request)
        if match is None or match.call is not None or match.answer is None or not match.answer.leases:
            # vLLM goes on without it, so it need not wait for an answer that is on its way
            self.drop(request)
            return None
        del self._matches[request]
        self._missing.pop(request, None)
        self._waiting.discard(request)
        return Grant(match.answer, match.first)

    def drop(self, request: str) -> None:
        """Gives a request's lease back. If vLLM asks about the request again, it is looked up anew."""
        self._missing.pop(request, None)
        self._waiting.discard(request)
        match = self._matches.pop(request, None)
        if match is None:
            return
        if match.call is not None:
            match.answer, match.call = match.call.abandon(), None
        self._release(match)

    def drop_all(self) -> None:
        """Calls `drop` for every request."""
        for request in list(self._matches):
            self.drop(request)

    def forget(self, request: str) -> None:
        """Drops a request that is over. If it ever comes again, it may wait anew."""
        self.drop(request)
        self._since_s.pop(request, None)

    def _may_ask(self, request: str, match: _Match, *, again: bool) -> bool:
        """Returns whether a lookup may begin now, which is then counted. `again`: for what was PENDING."""
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
        match.held_until_s = 0.0
        match.first, match.asked_s, match.asked_step = local, self.clock(), self._step
        match.waited = False
        match.end, match.asked_end = local, total
        match.call = self.question.ask(
            client, hashes, local, total, host_only=host_only, again=match.has_asked
        )
        match.has_asked = True

    def _judge(self, request: str, match: _Match, answer: Lookup, hashes: Sequence[bytes]) -> None:
        """Decides whether the answer that has come is taken, or a better one is worth waiting for."""
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
        elif now_s - since_s + self.step_s() >= self._patience_s(match):
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
        """Returns whether to look a waiting request up again now. Once its patience is over this is always
        true, because steps may be long, and what is known then may be old."""
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
        """Returns how many seconds a request waits for what is PENDING, in all."""
        block_s = self.block_s()
        if not block_s:
            return self.pending_wait_s
        return min(self.pending_wait_s, (match.asked_end - match.end) * block_s)

    def _leave(self, match: _Match, blocks: int) -> None:
        """Counts a request of which so many units can be loaded that are not worth it."""
        if blocks > 0 and not match.left:
            match.left = True
            self.counters.left += 1

    def _remember_stuck(self, block_hash: bytes, now_s: float) -> None:
        self._stuck[block_hash] = now_s + STUCK_S
        self._stuck.move_to_end(block_hash)
        if len(self._stuck) > STUCK_MAX:
            self._stuck.popitem(last=False)

    def _settle(self, request: str, match: _Match) -> None:
        """Takes what is known now as the answer."""
        match.waiting = False
        self._waiting.discard(request)

    def _covers(self, match: _Match, client: Client, local: int) -> bool:
        """Returns whether what is known still answers the question."""
        if match.answer is None or local < match.first:
            return False
        if not match.answer.leases:
            return True
        return match.answer.leases[0].epoch == client.epoch and self.clock() - match.asked_s < LEASE_AGE_MAX_S

    def _hear(self, request: str, match: _Match, hashes: Sequence[bytes]) -> bool:
        """Takes the answer if it comes within what is left of the budget. Returns whether there is one to
        use."""
        assert match.call is not None
        started_s = self.clock()
        answer = match.call.poll()
        if answer is None and self._left_s > 0:
            if match.asked_s + self._answers_s - started_s <= self._left_s:
                match.waited = True
                answer = match.call.wait_for_answer(self._left_s)
                self._left_s -= self.clock() - started_s
            else:
                self._untried = True
        if answer is None and started_s - match.asked_s > ANSWER_DEADLINE_S:
            answer = match.call.abandon()
            if not answer.answered:
                match.call = None
                self.counters.given_up += 1
                self._give_up(request, match)
                return False
        if answer is None:
            return False
        if match.waited and (took_s := match.call.took_s) is not None:
            took_s = min(took_s, ANSWER_BUDGETS_MAX * self.budget_s)
            self._answers_s += NEWEST_ANSWER * (took_s - self._answers_s)
        match.answer, match.call = answer, None
        if answer.leases:
            match.end = match.first + self.question.hits(answer)
            match.end += answer.unleased if self.in_parts else 0
        self.counters.hits += answer.hits > 0
        self._judge(request, match, answer, hashes)
        return not match.waiting

    def _nothing(self, request: str, match: _Match) -> None:
        """Notes that there is nothing to load now. When vLLM asks again, this is looked up again."""
        self.counters.local += not match.seen_local
        match.seen_local = True
        self._settle(request, match)
        self._release(match)
        match.answer = None

    def _give_up(self, request: str, match: _Match) -> None:
        """Gives a request up: nothing is loaded for it."""
        match.given_up = True
        self._settle(request, match)
        self._release(match)

    def _release(self, match: _Match) -> None:
        """Gives the lease back. Then nothing can be loaded from `first` on, which stays known."""
        answer = match.answer
        match.held_until_s = 0.0
        if answer is not None and answer.leases:
            answer.release()
            match.answer = Lookup(answered=True)
            match.end = match.first
