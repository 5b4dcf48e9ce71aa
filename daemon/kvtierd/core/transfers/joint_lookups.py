"""Lookups over several groups at once."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtierd.core.actions import GroupHits, JointReply
from kvtierd.core.blocks.blocks import READY
from kvtierd.core.disk.promotion import PENDING
from kvtierd.core.disk.tier import DiskTier
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Entries
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.entities import GroupPlan, Instance, LeaseCut, LeaseGrant
from kvtierd.core.stimuli import BlockQuery, LookupGroups, PrefetchGroups, TouchGroups
from kvtierd.core.transfers.joint import Shape, longest
from kvtierd.core.transfers.joint_promotion import Ask, JointPromotion
from kvtierd.core.transfers.leases import HIT, Leases, check_hashes, touch

_NO_ENTRIES = np.empty(0, np.uint32)


class JointLookups:
    def __init__(self, core: CoreState, leases: Leases, tier: DiskTier) -> None:
        self._core = core
        self._blocks = core.blocks
        self._leases = leases
        self._tier = tier
        self._promotion = JointPromotion(core, tier)

    def lookup(self, stimulus: LookupGroups) -> JointReply:
        """The longest prefix that all groups can load now. What it needs becomes recent, or is pinned under a
        lease of each group."""
        core = self._core
        instance = core.submitter(stimulus.session, stimulus.epoch)
        asks = self._asks(instance, stimulus.queries)
        instance.alive_at_s = core.now_s
        tally = core.tally
        tally.lookups += 1
        if asks is None:
            hashes = sum(len(query.hashes) for query in stimulus.queries)
            tally.lookup_hashes += hashes
            if core.draining:
                tally.missed_draining += hashes
            else:
                tally.missed_not_ready += hashes
            return _nothing(stimulus.queries)
        tokens = self._tokens(asks)
        found = [self._needed(ask, tokens) for ask in asks]
        readable = sum(len(entries) for entries in found)
        if self._recompute(instance, asks, found, tokens):
            tally.lookup_hashes += readable
            tally.missed_recompute += readable
            reply = _nothing(stimulus.queries)
            self._count_misses(asks, tokens, tokens, reply)
            return reply
        leases: Sequence[LeaseGrant | None] = [None] * len(asks)
        leasable, refused = tokens, None
        if stimulus.lease and tokens:
            leasable, leases, refused = self._lease(instance, asks, tokens, found)
        if leases[0] is None or leasable < tokens:
            for entries in found:
                self._blocks.touch(entries)
        for ask, entries in zip(asks, found, strict=True):
            self._tier.found(ask.plan.domain, entries)
        if refused is None:
            keep = [_NO_ENTRIES] * len(asks) if leases[0] is not None else found
            longer = self._beyond(instance, asks, tokens, keep, host_only=stimulus.host_only)
        else:
            tally.refused_leases += 1
            for ask in asks:
                leased, readable = (length // ask.plan.block_tokens for length in (leasable, tokens))
                ask.plan.cut = LeaseCut(self._blocks.now, leased, readable)
            longer = max(leasable, self._fitting(asks, tokens, found, None))
        reply = self._reply(asks, leasable, longer, leases, refused)
        hits = sum(end - first for first, end in (ask.shape.needed(leasable) for ask in asks))
        tally.lookup_hashes += hits
        tally.lookup_hits += hits
        self._count_misses(asks, leasable, tokens, reply)
        return reply

    def _lease(
        self, instance: Instance, asks: Sequence[Ask], tokens: int, found: Sequence[Entries]
    ) -> tuple[int, Sequence[LeaseGrant | None], Refusal | None]:
        """Leases for the longest prefix of the `tokens` readable ones that there is room for: how long it is,
        the lease of each group, and why it is not all of them."""
        fitting = self._fitting(asks, tokens, found, instance)
        refused: Refusal | None = None
        if fitting < tokens:
            refused = self._leases.no_room(instance, fitting, tokens, "tokens")
            found = [self._needed(ask, fitting) for ask in asks]
        if fitting:
            wanted = [(ask.group, ask.plan, entries) for ask, entries in zip(asks, found, strict=True)]
            try:
                return fitting, self._leases.grant_all(instance, wanted), refused
            except Refusal as refusal:
                refused = refusal
        return 0, [None] * len(asks), refused

    def _fitting(
        self, asks: Sequence[Ask], tokens: int, found: Sequence[Entries], instance: Instance | None
    ) -> int:
        """Tokens of the longest prefix, of the `tokens` of which `found` is what each group needs, that an
        instance may hold now. None: that any may hold if nobody holds anything."""
        room = self._core.lease_budget
        room_bytes = room.alone_bytes if instance is None else room.room_bytes(instance.held)
        new = [np.ones(len(each), np.bool_) if instance is None else room.costs(each) for each in found]
        cost = sum(
            int(np.count_nonzero(each)) * room.block_bytes(ask.plan.domain)
            for ask, each in zip(asks, new, strict=True)
        )
        if cost <= room_bytes:
            return tokens
        step = math.lcm(*(ask.shape.block_tokens for ask in asks))
        ends = np.arange(step, tokens + 1, step)
        costs = np.zeros(len(ends), np.int64)
        for ask, each in zip(asks, new, strict=True):
            block_bytes = room.block_bytes(ask.plan.domain)
            if ask.shape.window_blocks:  # wherever the prefix ends: a whole window, and none of it held yet
                costs += min(ask.shape.window_blocks, ask.shape.blocks) * block_bytes
            else:
                costs += np.cumsum(each)[ends // ask.shape.block_tokens - 1] * block_bytes
        most = step * int(np.searchsorted(costs, room_bytes, "right"))
        return self._tokens(asks, most) if most else 0

    def _count_misses(self, asks: Sequence[Ask], leased: int, tokens: int, reply: JointReply) -> None:
        """What lies beyond the joint prefix was asked for in vain. What a window does not need was not asked
        for."""
        tally = self._core.tally
        for ask, group in zip(asks, reply.groups, strict=True):
            end = ask.shape.needed(tokens)[1]
            unleased = end - ask.shape.needed(leased)[1]
            tally.lookup_hashes += unleased
            tally.missed_lease_limit += unleased
            misses = ask.shape.blocks - end
            if not misses:
                continue
            tally.lookup_hashes += misses
            tally.missed_beyond += misses - 1
            if leased == tokens and (group.states == PENDING).any():
                tally.missed_pending += 1
            else:
                tally.missed_absent += 1

    def prefetch(self, stimulus: PrefetchGroups) -> JointReply:
        """As a lookup that wants nothing but to be told, and to have promoted what disks have."""
        instance = self._core.submitter(stimulus.session, stimulus.epoch)
        asks = self._asks(instance, stimulus.queries)
        instance.alive_at_s = self._core.now_s
        if asks is None:
            return _nothing(stimulus.queries)
        tokens = self._tokens(asks)
        keep = [self._needed(ask, tokens) for ask in asks]
        longer = self._beyond(instance, asks, tokens, keep, host_only=False)
        return self._reply(asks, tokens, longer, [None] * len(asks), None)

    def touch(self, stimulus: TouchGroups) -> None:
        """Makes hits recent, or cold, group by group; says nothing."""
        instance = self._core.submitter(stimulus.session, stimulus.epoch)
        asks = self._asks(instance, stimulus.queries)
        instance.alive_at_s = self._core.now_s
        table = self._blocks.table
        for ask in asks or ():
            if ask.shape.window_blocks:
                entries, raw = table.lookup(ask.plan.space, ask.hashes)
                entries = entries[raw == READY]
            else:
                entries, _ = table.lookup_prefix(ask.plan.space, ask.hashes)
            touch(self._core, ask.plan, entries, stimulus)

    def _asks(self, instance: Instance, queries: Sequence[BlockQuery]) -> tuple[Ask, ...] | None:
        """None if the instance cannot load anything now. Refusal for what makes no sense."""
        core = self._core
        if not queries:
            raise Refusal(Reason.COUNT_MISMATCH, "one query at least", field="queries", value=0)
        hashes = 0
        groups = set[int]()
        for index, query in enumerate(queries):
            check_hashes(query.hashes, core.limits.lookup_hashes_max)
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
        if hashes > core.limits.lookup_hashes_max:
            raise Refusal(
                Reason.TOO_MANY_BLOCKS,
                f"at most {core.limits.lookup_hashes_max} in one call, of all groups together",
                field="queries",
                value=hashes,
            )
        if not instance.live or core.draining:  # who hits would ask for a load, which is refused
            return None
        plans = [core.plan(instance, query.group) for query in queries]
        return tuple(_ask(plan, query) for plan, query in zip(plans, queries, strict=True))

    def _tokens(self, asks: Sequence[Ask], most: int | None = None) -> int:
        """Of the longest prefix that the host can serve; `most`: no longer than that."""
        table = self._blocks.table

        def leading(query: int, end: int) -> int:
            entries, _ = table.lookup_prefix(asks[query].plan.space, asks[query].hashes[:end])
            return len(entries)

        def there(query: int, first: int, end: int) -> npt.NDArray[np.bool_]:
            _, raw = table.lookup(asks[query].plan.space, asks[query].hashes[first:end])
            ready: npt.NDArray[np.bool_] = raw == READY
            return ready

        return longest([ask.shape for ask in asks], leading, there, most_tokens=most)

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
        self._core.tally.recompute_blocks += sum(len(entries) for entries in found)
        return True

    def _beyond(
        self,
        instance: Instance,
        asks: Sequence[Ask],
        tokens: int,
        keep: Sequence[Entries],
        *,
        host_only: bool,
    ) -> int:
        """Tokens of the prefix that there will be when what is on its way has come; begins to bring it up."""
        if tokens == min(ask.shape.blocks * ask.shape.block_tokens for ask in asks):
            return tokens
        return self._promotion.beyond(instance, asks, tokens, keep, host_only=host_only)

    def _reply(
        self,
        asks: Sequence[Ask],
        tokens: int,
        longer: int,
        leases: Sequence[LeaseGrant | None],
        refused: Refusal | None,
    ) -> JointReply:
        """Of a prefix of `tokens` that will have `longer`."""
        groups = []
        states = self._promotion.states(asks, tokens, longer)
        for ask, told, lease in zip(asks, states, leases, strict=True):
            first, end = ask.shape.needed(tokens)
            if refused is not None:  # readable, and not to be had before others have loaded
                told[end:][told[end:] == HIT] = PENDING
            groups.append(
                GroupHits(end, told, None if lease is None else lease.lease, 0 if lease is None else first)
            )
        return JointReply(tuple(groups), refused)


def _ask(plan: GroupPlan, query: BlockQuery) -> Ask:
    shape = Shape(plan.block_tokens, query.window_blocks, len(query.hashes))
    return Ask(query.group, plan, query.hashes, shape)


def _nothing(queries: Sequence[BlockQuery]) -> JointReply:
    return JointReply(tuple(GroupHits(0, np.zeros(0, np.uint8)) for _ in queries))
