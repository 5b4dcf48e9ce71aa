"""Lookups over several groups at once."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtierd.core.actions import GroupHits, JointReply
from kvtierd.core.blocks import READY
from kvtierd.core.books import Books
from kvtierd.core.entities import GroupPlan, Instance, Lease
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Entries
from kvtierd.core.joint import Shape, longest
from kvtierd.core.joint_promotion import Ask, JointPromotion
from kvtierd.core.leases import Leases, check_hashes, touch
from kvtierd.core.promotion import PENDING
from kvtierd.core.stimuli import GroupQuery, LookupGroups, PrefetchGroups, TouchGroups
from kvtierd.core.tier import DiskTier

_NO_ENTRIES = np.empty(0, np.uint32)


class JointLookups:
    def __init__(self, books: Books, leases: Leases, tier: DiskTier) -> None:
        self._books = books
        self._blocks = books.blocks
        self._leases = leases
        self._tier = tier
        self._promotion = JointPromotion(books, tier)

    def lookup(self, stimulus: LookupGroups) -> JointReply:
        """The longest prefix that all groups can load now. What it needs becomes recent, or is pinned under a
        lease of each group."""
        books = self._books
        instance = books.submitter(stimulus.session, stimulus.epoch)
        asks = self._asks(instance, stimulus.queries)
        instance.alive_at_s = books.now_s
        tally = books.tally
        tally.lookups += 1
        if asks is None:
            hashes = sum(len(query.hashes) for query in stimulus.queries)
            tally.lookup_hashes += hashes
            if books.draining:
                tally.missed_draining += hashes
            else:
                tally.missed_not_ready += hashes
            return _nothing(stimulus.queries)
        tokens = self._tokens(asks)
        found = [self._needed(ask, tokens) for ask in asks]
        hits = sum(len(entries) for entries in found)
        tally.lookup_hashes += hits
        if self._recompute(instance, asks, found, tokens):
            tally.missed_recompute += hits
            reply = _nothing(stimulus.queries)
            self._count_misses(asks, tokens, reply)
            return reply
        tally.lookup_hits += hits
        leases: Sequence[Lease | None] = [None] * len(asks)
        refused: Refusal | None = None
        if stimulus.lease and tokens:
            wanted = [(ask.group, ask.plan, entries) for ask, entries in zip(asks, found, strict=True)]
            try:
                leases = self._leases.grant_all(instance, wanted)
            except Refusal as refusal:
                books.tally.refused_leases += 1
                refused = refusal
        if leases[0] is None:
            for entries in found:
                self._blocks.touch(entries)
        for ask, entries in zip(asks, found, strict=True):
            self._tier.found(ask.plan.domain, entries)
        keep = [_NO_ENTRIES] * len(asks) if leases[0] is not None else found
        reply = self._reply(instance, asks, tokens, keep, leases, refused, host_only=stimulus.host_only)
        self._count_misses(asks, tokens, reply)
        return reply

    def _count_misses(self, asks: Sequence[Ask], tokens: int, reply: JointReply) -> None:
        """What lies beyond the joint prefix was asked for in vain. What a window does not need was not asked
        for."""
        tally = self._books.tally
        for ask, group in zip(asks, reply.groups, strict=True):
            _, end = ask.shape.needed(tokens)
            misses = ask.shape.blocks - end
            if not misses:
                continue
            tally.lookup_hashes += misses
            tally.missed_beyond += misses - 1
            if (group.states == PENDING).any():
                tally.missed_pending += 1
            else:
                tally.missed_absent += 1

    def prefetch(self, stimulus: PrefetchGroups) -> JointReply:
        """As a lookup that wants nothing but to be told, and to have promoted what disks have."""
        instance = self._books.submitter(stimulus.session, stimulus.epoch)
        asks = self._asks(instance, stimulus.queries)
        instance.alive_at_s = self._books.now_s
        if asks is None:
            return _nothing(stimulus.queries)
        tokens = self._tokens(asks)
        keep = [self._needed(ask, tokens) for ask in asks]
        return self._reply(instance, asks, tokens, keep, [None] * len(asks), None)

    def touch(self, stimulus: TouchGroups) -> None:
        """Makes hits recent, or cold, group by group; says nothing."""
        instance = self._books.submitter(stimulus.session, stimulus.epoch)
        asks = self._asks(instance, stimulus.queries)
        instance.alive_at_s = self._books.now_s
        table = self._blocks.table
        for ask in asks or ():
            if ask.shape.window_blocks:
                entries, raw = table.lookup(ask.plan.space, ask.hashes)
                entries = entries[raw == READY]
            else:
                entries, _ = table.lookup_prefix(ask.plan.space, ask.hashes)
            touch(self._books, ask.plan, entries, stimulus)

    def _asks(self, instance: Instance, queries: Sequence[GroupQuery]) -> tuple[Ask, ...] | None:
        """None if the instance cannot load anything now. Refusal for what makes no sense."""
        books = self._books
        if not queries:
            raise Refusal(Reason.COUNT_MISMATCH, "one query at least", field="queries", value=0)
        hashes = 0
        groups = set[int]()
        for index, query in enumerate(queries):
            check_hashes(query.hashes, books.limits.lookup_hashes_max)
            hashes += len(query.hashes)
            if query.window_blocks < 0:
                raise Refusal(
                    Reason.MALFORMED,
                    "a window has 1 block or more; 0 for none",
                    field=f"queries[{index}].window_blocks",
                    value=query.window_blocks,
                )
            if query.group in groups:
                raise Refusal(
                    Reason.UNKNOWN_GROUP,
                    "name each group once",
                    field=f"queries[{index}].group",
                    value=query.group,
                )
            groups.add(query.group)
        if hashes > books.limits.lookup_hashes_max:
            raise Refusal(
                Reason.TOO_MANY_BLOCKS,
                f"at most {books.limits.lookup_hashes_max} in one call, of all groups together",
                field="queries",
                value=hashes,
            )
        if not instance.live or books.draining:  # who hits would ask for a load, which is refused
            return None
        plans = [books.plan(instance, query.group) for query in queries]
        return tuple(_ask(plan, query) for plan, query in zip(plans, queries, strict=True))

    def _tokens(self, asks: Sequence[Ask]) -> int:
        """Of the longest prefix that the host can serve."""
        table = self._blocks.table

        def leading(query: int, end: int) -> int:
            entries, _ = table.lookup_prefix(asks[query].plan.space, asks[query].hashes[:end])
            return len(entries)

        def there(query: int, first: int, end: int) -> npt.NDArray[np.bool_]:
            _, raw = table.lookup(asks[query].plan.space, asks[query].hashes[first:end])
            ready: npt.NDArray[np.bool_] = raw == READY
            return ready

        return longest([ask.shape for ask in asks], leading, there)

    def _needed(self, ask: Ask, tokens: int) -> Entries:
        first, end = ask.shape.needed(tokens)
        entries, _ = self._blocks.table.lookup(ask.plan.space, ask.hashes[first:end])
        return entries

    def _recompute(
        self, instance: Instance, asks: Sequence[Ask], found: Sequence[Entries], tokens: int
    ) -> bool:
        """Whether computing the prefix anew is faster than loading it; counted."""
        if not self._tier or not tokens:
            return False
        wanted = [(ask.plan, len(entries)) for ask, entries in zip(asks, found, strict=True)]
        if not self._tier.admission.loads_lose(instance, wanted, tokens):
            return False
        self._books.tally.recompute_blocks += sum(len(entries) for entries in found)
        return True

    def _reply(
        self,
        instance: Instance,
        asks: Sequence[Ask],
        tokens: int,
        keep: Sequence[Entries],
        leases: Sequence[Lease | None],
        refused: Refusal | None,
        *,
        host_only: bool = False,
    ) -> JointReply:
        longer = tokens
        if tokens < min(ask.shape.blocks * ask.shape.block_tokens for ask in asks):
            longer = self._promotion.beyond(instance, asks, tokens, keep, host_only=host_only)
        groups = []
        states = self._promotion.states(asks, tokens, longer)
        for ask, told, lease in zip(asks, states, leases, strict=True):
            first, end = ask.shape.needed(tokens)
            groups.append(
                GroupHits(end, told, None if lease is None else lease.lease, 0 if lease is None else first)
            )
        return JointReply(tuple(groups), refused)


def _ask(plan: GroupPlan, query: GroupQuery) -> Ask:
    shape = Shape(plan.block_tokens, query.window_blocks, len(query.hashes))
    return Ask(query.group, plan, query.hashes, shape)


def _nothing(queries: Sequence[GroupQuery]) -> JointReply:
    return JointReply(tuple(GroupHits(0, np.zeros(0, np.uint8)) for _ in queries))
