"""Lookups, prefetches and touches: which blocks of one group or several can be read, leased and brought
up."""

from collections.abc import Sequence

import numpy as np

from kvtierd.core.actions import GroupHits, LookupReply
from kvtierd.core.blocks.prefix import Mask, There, common_tokens, longest
from kvtierd.core.blocks.table import U8
from kvtierd.core.errors import Refusal
from kvtierd.core.state.asks import READY, Ask
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.entities import Instance, LeaseCut
from kvtierd.core.stimuli import BlockQuery, LookupBlocks, PrefetchBlocks, TouchBlocks
from kvtierd.core.tier import Tier
from kvtierd.core.transfers.ahead import OpenPrompts
from kvtierd.core.transfers.checks import check_queries
from kvtierd.core.transfers.leases import Leases
from kvtierd.core.transfers.outlook import ABSENT, HIT, MISS, PENDING, WRITING, Outlook


class Lookups:
    def __init__(self, core: CoreState, leases: Leases, tier: Tier) -> None:
        self._core = core
        self._blocks = core.blocks
        self._table = core.blocks.table
        self._leases = leases
        self._tier = tier
        self._below = core.below.tables
        self._outlook = Outlook(core, tier)
        self.ahead = OpenPrompts(core, tier, self._bring_up)

    def lookup(self, stimulus: LookupBlocks) -> LookupReply:
        """Finds the longest prefix that all groups can load now, or each block of an exact query. The blocks
        it needs become recent, or are pinned under one lease for each group. Blocks that only disks have are
        pending, and are promoted."""
        core, queries = self._core, stimulus.queries
        instance = core.submitter(stimulus.session, stimulus.epoch)
        check_queries(queries, core.limits.lookup_hashes_max, together=True)
        loads = instance.live and not core.draining
        asks = self._asks(instance, queries) if loads else ()
        instance.alive_at_s = core.now_s
        core.tally.lookups += 1
        if not asks:  # everything is a miss, because a hit would lead to a load, which is refused
            self._count_unanswered(instance, queries)
            return _nothing(queries, again=stimulus.again)
        again = stimulus.again or instance.waiting.asks_again(queries, core.now_s)
        tokens = self._find(asks) if again else self._use(asks)
        if tokens and instance.prefill_tokens_per_s:
            wanted = [(ask.plan, len(ask.found)) for ask in asks]
            if self._tier.load_loses(instance, wanted, tokens):
                return self._recomputed(instance, asks, tokens, again=again)
        leased, refused = tokens, None
        if stimulus.lease and tokens:
            leased, refused = self._lease(instance, asks, tokens)
        if tokens:
            held = asks[0].lease is not None and leased == tokens
            for ask in asks:
                if not held:
                    self._blocks.touch(ask.found)
                self._tier.found(ask.plan.domain, ask.found)
        if refused is None:
            left = self._tell(instance, asks, tokens, host_only=stimulus.host_only)
            self.ahead.asked(instance, queries, left=left)
        else:
            self._tell_of_cut(asks, tokens, leased)
        self._count(instance, asks, tokens, leased)
        to_wait = any(
            len(ask.told) > leased // ask.block_tokens and bool((ask.told == PENDING).any()) for ask in asks
        )
        instance.waiting.told(queries, core.now_s, to_wait=to_wait)
        return _reply(asks, tokens, leased, refused, again=again)

    def prefetch(self, stimulus: PrefetchBlocks) -> LookupReply:
        """Promotes what disks have, as a lookup does, but leases nothing and counts no hits. The lookup that
        is to come uses the same blocks, so that both together are one use."""
        core, queries = self._core, stimulus.queries
        instance = core.submitter(stimulus.session, stimulus.epoch)
        check_queries(queries, core.limits.lookup_hashes_max, together=True)
        loads = instance.live and not core.draining
        asks = self._asks(instance, queries) if loads else ()
        instance.alive_at_s = core.now_s
        if not asks:
            return _nothing(queries, again=True)
        again = instance.waiting.asks_again(queries, core.now_s)
        tokens = self._find(asks) if again else self._use(asks)
        left = self._tell(instance, asks, tokens, host_only=False)
        self.ahead.asked(instance, queries, left=left)
        instance.waiting.told(queries, core.now_s, to_wait=True)
        return _reply(asks, tokens, tokens, None, again=again)

    def _bring_up(self, instance: Instance, queries: Sequence[BlockQuery]) -> bool:
        """Begins to bring up more of what was asked for. Returns whether some of it is left."""
        asks = self._asks(instance, queries)
        return self._tell(instance, asks, self._find(asks), host_only=False)

    def touch(self, stimulus: TouchBlocks) -> None:
        """Makes hits recent, or cold, group by group."""
        core, queries = self._core, stimulus.queries
        instance = core.submitter(stimulus.session, stimulus.epoch)
        check_queries(queries, core.limits.lookup_hashes_max, together=False)
        asks = self._asks(instance, queries) if instance.live else ()
        instance.alive_at_s = core.now_s
        for ask in asks:
            if ask.query.exact or ask.window_blocks:
                ask.look_at_each(self._table)
            else:
                ask.look(self._table, ask.blocks)
            if len(ask.run) == 0:
                continue
            if stimulus.cold:
                self._blocks.cool(ask.plan.domain, ask.run)
            else:
                self._blocks.touch(ask.run)
                if not (ask.query.exact or ask.window_blocks):
                    self._blocks.chain(ask.run)
                core.retention.hold(ask.plan.domain, ask.run, stimulus.hold_ms)

    # --- what is there ---

    def _asks(self, instance: Instance, queries: Sequence[BlockQuery]) -> list[Ask]:
        """Raises Refusal UNKNOWN_GROUP."""
        asks = []
        for query in queries:
            plan = self._core.plan(instance, query.group)
            asks.append(Ask(plan.block_tokens, query.window_blocks, len(query.hashes), plan, query))
        return asks

    def _use(self, asks: Sequence[Ask]) -> int:
        """As `_find`, and tells everybody who learns from it that these blocks are used."""
        ranks = self._blocks.ranks
        for ask in asks if ranks else ():
            if not (ask.query.exact or ask.window_blocks):
                self._table.asked(ask.plan.space, ask.plan.domain.domain, ask.query.hashes, self._below)
        tokens = self._find(asks)
        for ask in asks:
            if not (ask.query.exact or ask.window_blocks):
                self._core.shadow.asked(ask.plan, ask.query.hashes, len(ask.found))
                continue
            ask.plan.by_prefix = False
            if ranks and tokens:
                self._table.asked_each(ask.found, self._below)
        return tokens

    def _find(self, asks: Sequence[Ask]) -> int:
        """Tokens of the prefix that the host can serve; fills in what each ask has found."""
        table = self._table
        if asks[0].query.exact:
            tokens = asks[0].look_at_each(table) * asks[0].block_tokens
        else:
            tokens = longest(asks, lambda query, end: asks[query].look(table, end), self._there(asks))
        for ask in asks:
            ask.found = ask.entries(table, tokens)
        return tokens

    def _there(self, asks: Sequence[Ask]) -> There:
        def there(query: int, first: int, end: int) -> Mask:
            _, raw = self._table.lookup(asks[query].plan.space, asks[query].query.hashes[first:end])
            ready: Mask = raw == READY
            return ready

        return there

    # --- what is leased ---

    def _lease(self, instance: Instance, asks: Sequence[Ask], tokens: int) -> tuple[int, Refusal | None]:
        """Leases the longest prefix of the `tokens` readable ones for which there is room. Returns its length
        in tokens, and why it is not all of them."""
        fitting, refused = self._fitting(asks, tokens, instance), None
        if fitting < tokens:
            refused = self._leases.no_room(instance, fitting, tokens)
        if not fitting:
            return 0, refused
        try:
            if fitting == tokens:
                self._leases.grant(instance, asks, [ask.found for ask in asks])
            else:
                self._leases.grant(instance, asks, [ask.entries(self._table, fitting) for ask in asks])
        except Refusal as refusal:
            return 0, refusal
        return fitting, refused

    def _fitting(self, asks: Sequence[Ask], tokens: int, instance: Instance | None) -> int:
        """Tokens of the longest prefix, out of the `tokens` that were found, that an instance may hold now.
        For a single group that is at least one block while nobody holds anything, however small the pool.
        Without an instance: what any instance may hold while nobody holds anything."""
        room = self._core.lease_budget
        room_bytes = room.alone_bytes if instance is None else room.room_bytes(instance.held)
        cost = 0
        for ask in asks:
            cost += len(ask.found) * room.block_bytes(ask.plan.domain)
        if cost <= room_bytes:  # even if none of it is held yet
            return tokens
        alone = instance is None or not room.all.bytes
        step = common_tokens(asks)
        ends = np.arange(step, tokens + 1, step)
        costs = np.zeros(len(ends), np.int64)
        cost = 0
        for ask in asks:
            block_bytes = room.block_bytes(ask.plan.domain)
            new = np.ones(len(ask.found), np.bool_) if alone else room.costs(ask.found)
            cost += int(np.count_nonzero(new)) * block_bytes
            if ask.window_blocks:  # as if the window were whole and not held, wherever the prefix ends
                costs += min(ask.window_blocks, ask.blocks) * block_bytes
            else:
                costs += np.cumsum(new)[ends // ask.block_tokens - 1] * block_bytes
        if cost <= room_bytes:
            return tokens
        most = step * int(np.searchsorted(costs, room_bytes, "right"))
        if alone and len(asks) == 1:
            most = max(most, step)
        return longest(asks, lambda query, end: end, self._there(asks), most_tokens=most) if most else 0

    # --- what is told ---

    def _tell(self, instance: Instance, asks: Sequence[Ask], tokens: int, *, host_only: bool) -> bool:
        """Fills in what the reply says, including blocks that are on their way, and begins to bring up what
        disks have. Returns whether some of it waits for room in a queue."""
        if asks[0].query.exact:
            asks[0].told = self._outlook.exact(instance, asks[0], host_only=host_only)
            return asks[0].left
        left = False
        longer = self._outlook.beyond(instance, asks, tokens, host_only=host_only)
        for ask in asks:
            ask.told = told = _hit(ask, tokens, longer)
            if longer > tokens:
                first, end = ask.needed_beyond(tokens, longer)
                _, raw = self._table.lookup(ask.plan.space, ask.query.hashes[first:end])
                told[first:] = np.where(raw == READY, HIT, PENDING)
                left = left or bool((raw == ABSENT).any())
        return left

    def _tell_of_cut(self, asks: Sequence[Ask], tokens: int, leased: int) -> None:
        """Fills in what the reply says when less is leased than is readable. What can be leased once other
        leases have ended is pending, because it is worth waiting for."""
        self._core.tally.refused_leases += 1
        longer = max(leased, self._fitting(asks, tokens, None))
        for ask in asks:
            hits, later, readable = (length // ask.block_tokens for length in (leased, longer, tokens))
            ask.plan.cut = LeaseCut(self._blocks.now, hits, readable)
            if ask.query.exact:
                ask.told = told = self._outlook.on_host(ask)
                told[np.flatnonzero(told == HIT)[hits:]] = PENDING if later > hits else MISS
            else:
                ask.told = told = _hit(ask, leased, longer)
                first, end = ask.needed_beyond(leased, longer)
                told[first:end] = PENDING

    # --- what is counted ---

    def _count_unanswered(self, instance: Instance, queries: Sequence[BlockQuery]) -> None:
        tally = self._core.tally
        hashes = sum(len(query.hashes) for query in queries)
        tally.lookup_hashes += hashes
        instance.tally.lookup_hashes += hashes
        if self._core.draining:
            tally.missed_draining += hashes
        else:
            tally.missed_not_ready += hashes

    def _recomputed(
        self, instance: Instance, asks: Sequence[Ask], tokens: int, *, again: bool
    ) -> LookupReply:
        """The reply when computing what was found is faster than loading it: nothing is a hit."""
        reply, tally = _nothing([ask.query for ask in asks], again=again), self._core.tally
        for ask, group in zip(asks, reply.groups, strict=True):
            ask.told = group.states
            tally.recompute_blocks += len(ask.found)
        before, own_before = tally.lookup_hits, instance.tally.lookup_hits
        self._count(instance, asks, tokens, tokens)
        tally.missed_recompute += tally.lookup_hits - before
        tally.lookup_hits, instance.tally.lookup_hits = before, own_before
        return reply

    def _count(self, instance: Instance, asks: Sequence[Ask], tokens: int, leased: int) -> None:
        """Counts the hits and misses of a lookup, by what the reply says. Blocks that a window does not need
        do not count as asked for."""
        tally, own = self._core.tally, instance.tally
        for ask in asks:
            first, hits = ask.needed(leased)
            readable = tokens // ask.block_tokens
            tally.lookup_hashes += ask.blocks - first
            tally.lookup_hits += hits - first
            own.lookup_hashes += ask.blocks - first
            own.lookup_hits += hits - first
            tally.missed_lease_limit += readable - hits
            misses = ask.blocks - readable
            if not misses:
                continue
            if ask.query.exact:
                told = ask.told if leased == tokens else ask.told[ask.states != READY]
                pending = int(np.count_nonzero(told == PENDING))
                tally.missed_pending += pending
                tally.missed_absent += misses - pending
                continue
            tally.missed_beyond += misses - 1
            if leased == tokens:
                pending = len(ask.told) > readable and bool((ask.told[readable:] == PENDING).any())
            else:  # nothing is told of it
                pending = ask.ended == WRITING
            tally.missed_pending += pending
            tally.missed_absent += not pending


def _hit(ask: Ask, tokens: int, longer: int) -> U8:
    """States of a prefix of `longer` tokens of which only the hits, `tokens` long, are known."""
    first, end = ask.needed(tokens)
    blocks = longer // ask.block_tokens
    if first == 0 and end == blocks:
        states = np.empty(blocks, np.uint8)
        states.fill(HIT)
        return states
    states = np.zeros(blocks, np.uint8)
    states[first:end] = HIT
    return states


def _nothing(queries: Sequence[BlockQuery], *, again: bool) -> LookupReply:
    groups = tuple(
        GroupHits(0, np.zeros(len(query.hashes) if query.exact else 0, np.uint8)) for query in queries
    )
    return LookupReply(groups, again=again)


def _reply(
    asks: Sequence[Ask], tokens: int, leased: int, refused: Refusal | None, *, again: bool
) -> LookupReply:
    groups = []
    for ask in asks:
        first, hits = ask.needed(leased)
        readable = tokens // ask.block_tokens
        if ask.lease is None:
            groups.append(GroupHits(hits, ask.told, readable))
        else:
            groups.append(GroupHits(hits, ask.told, readable, ask.lease.lease, first))
    return LookupReply(tuple(groups), refused, again)
