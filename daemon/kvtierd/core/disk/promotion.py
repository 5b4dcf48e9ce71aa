"""Lookups beyond the host: how much there will be when what is being written has come, and what disks have is
brought up.

The entry on the host, WRITING as soon as its promotion begins, is what makes many who wait share one read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtierd.core.actions import DiskJobKind
from kvtierd.core.blocks.blocks import READY
from kvtierd.core.blocks.prefix import Mask, asked_tokens, common_tokens, longest
from kvtierd.core.blocks.table import U8, BlockState
from kvtierd.core.disk.admission import Admission
from kvtierd.core.disk.disk_jobs import DiskJobs
from kvtierd.core.ids import NO_ENTRY, Entries, Hashes
from kvtierd.core.state.asks import Ask
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.disks import LATE, Disk, Indexes
from kvtierd.core.state.entities import GroupPlan, Instance

MISS, PENDING, HIT = 0, 1, 2
ABSENT = int(BlockState.ABSENT)
WRITING = int(BlockState.WRITING)
TABLE_FULL = 2
FIRST_WINDOW = 32
"""Hashes looked at beyond the hits at first; each further window is this many times as long."""
WINDOW_GROWTH = 4
POOL_FRACTION_MAX = 0.5
"""Of the host, that promotions may hold at once: stores find room beside them."""

_NO_ENTRIES = np.empty(0, np.uint32)
_TOLD = np.zeros(len(BlockState), np.uint8)
"""kvtier.v1.BlockState of each state of the table."""
_TOLD[WRITING] = PENDING
_TOLD[READY] = HIT


@dataclass(frozen=True, slots=True)
class _View:
    """Some of a group's blocks."""

    there: Mask
    """Readable, or coming."""
    ready: Entries
    """Of the host, those that are readable."""
    absent: Indexes
    """Positions, in the query, of those that only a disk has; and where it has them."""
    copies: Entries


class Promotion:
    def __init__(self, core: CoreState, jobs: DiskJobs, admission: Admission) -> None:
        self._core = core
        self._host = core.blocks
        self._disks = core.disks
        self._jobs = jobs
        self._admission = admission

    # --- a prefix ---

    def beyond(self, instance: Instance, asks: Sequence[Ask], tokens: int, *, host_only: bool) -> int:
        """Tokens of the prefix that there will be when what is on its way has come, no fewer than the
        `tokens` that were found. Begins to promote what it needs from disks, and nothing else, never at the
        cost of what was found. `host_only`: disks are left alone."""
        if tokens == asked_tokens(asks):
            return tokens
        on_disks = not host_only and self._disks.any_live
        for ask in asks:
            if self._ends(ask, tokens, on_disks):
                return tokens
        # Beyond what an instance could lease, nothing is promoted. What is being written is waited for.
        step, most_tokens = common_tokens(asks), self._leasable_tokens(asks)
        on_disks = on_disks and tokens + step <= most_tokens
        most_tokens = max(most_tokens, tokens + step)
        longer = self._longest(asks, tokens, most_tokens, on_disks)
        if longer == tokens or not on_disks:
            return longer
        views = [self._view(ask, *ask.needed_beyond(tokens, longer), True) for ask in asks]
        if not any(len(view.absent) for view in views):
            return longer
        if self._loses(instance, asks, views, longer - tokens):
            return self._longest(asks, tokens, most_tokens, on_disks=False)
        coming = self._promote(asks, views, longer)
        if coming < longer and any(ask.window_blocks for ask in asks):
            # The windows of a shorter prefix are others, and were not brought up.
            return self._longest(asks, tokens, coming, on_disks=False)
        return max(tokens, coming)

    def _ends(self, ask: Ask, tokens: int, on_disks: bool) -> bool:
        """Whether the prefix of so many tokens is as long as this group will have it, as far as that is known
        without looking further."""
        if ask.window_blocks or ask.ended in (READY, WRITING) or len(ask.run) != tokens // ask.block_tokens:
            return False
        if ask.ended != ABSENT or not on_disks:
            return True
        return not self._disks.has(ask.plan.space, ask.query.hashes[len(ask.run) :][:1])

    def _longest(self, asks: Sequence[Ask], tokens: int, most_tokens: int, on_disks: bool) -> int:
        def leading(query: int, end: int) -> int:
            """The run of the host is known: what lies behind it is looked at window by window."""
            ask = asks[query]
            position, length = min(len(ask.run), end), FIRST_WINDOW
            while position < end:
                last = min(position + length, end)
                there = self._view(ask, position, last, on_disks).there
                if not there.all():
                    return position + int(np.argmin(there))
                position, length = last, length * WINDOW_GROWTH
            return position

        def there(query: int, first: int, end: int) -> Mask:
            return self._view(asks[query], first, end, on_disks).there

        return longest(asks, leading, there, above=tokens, most_tokens=most_tokens)

    def _view(self, ask: Ask, first: int, end: int, on_disks: bool) -> _View:
        hashes, table = ask.query.hashes[first:end], self._host.table
        entries, raw = table.lookup(ask.plan.space, hashes)
        there = raw == READY
        ready = entries[there]
        writing = np.flatnonzero(raw == WRITING)
        there[writing] = self._in_time(entries[writing])
        absent, copies = np.flatnonzero(raw == ABSENT), _NO_ENTRIES
        if on_disks and len(absent):
            copies = self._disks.find(ask.plan.space, np.ascontiguousarray(hashes[absent]))
            absent, copies = absent[copies != NO_ENTRY], copies[copies != NO_ENTRY]
            there[absent] = True
        else:
            absent = absent[:0]
        return _View(there, ready, absent + first, copies)

    def _leasable_tokens(self, asks: Sequence[Ask]) -> int:
        """Of the longest prefix that an instance could lease."""
        room = self._core.lease_budget
        left = float(room.alone_bytes)
        per_token = 0.0
        for ask in asks:
            if ask.window_blocks:
                left -= min(ask.window_blocks, ask.blocks) * room.block_bytes(ask.plan.domain)
            else:
                per_token += room.block_bytes(ask.plan.domain) / ask.block_tokens
        asked = asked_tokens(asks)
        return int(min(asked, max(0.0, left) / per_token)) if per_token else asked

    def _promote(self, asks: Sequence[Ask], views: Sequence[_View], longer: int) -> int:
        """Tokens of the longest prefix without a block that cannot come for want of room."""
        needed = [(ask.plan, view.ready) for ask, view in zip(asks, views, strict=True)]
        needed += [(ask.plan, ask.found) for ask in asks if ask.lease is None]
        pinned = [(plan, entries) for plan, entries in needed if self._pin(entries)]
        for ask, view in zip(asks, views, strict=True):
            if len(view.absent):
                in_order = not ask.window_blocks
                coming = self._bring(ask.plan, ask.query.hashes, view.absent, view.copies, in_order=in_order)
                if not coming.all():
                    longer = min(longer, int(view.absent[np.argmin(coming)]) * ask.block_tokens)
        for plan, entries in pinned:
            self._host.unpin(plan.domain, entries)
        return longer - longer % common_tokens(asks)

    # --- single blocks ---

    def exact(self, instance: Instance, ask: Ask, *, host_only: bool) -> U8:
        """What to tell of each block of an exact query; begins to promote what disks have, as `beyond`
        does."""
        states = self.on_host(ask)
        if len(ask.run) == ask.blocks or host_only or not self._disks.any_live:
            return states
        positions = np.flatnonzero(ask.states == ABSENT)
        copies = self._disks.find(ask.plan.space, np.ascontiguousarray(ask.query.hashes[positions]))
        there = copies != NO_ENTRY
        view = _View(there, _NO_ENTRIES, positions[there], copies[there])
        gain = len(view.absent) * ask.block_tokens
        if not gain or self._loses(instance, [ask], [view], gain):
            return states
        pinned = ask.lease is None and self._pin(ask.found)
        coming = self._bring(ask.plan, ask.query.hashes, view.absent, view.copies, in_order=False)
        states[view.absent[coming]] = PENDING
        if pinned:
            self._host.unpin(ask.plan.domain, ask.found)
        return states

    def on_host(self, ask: Ask) -> U8:
        """What to tell of each block of an exact query, without looking at disks."""
        states = _TOLD[ask.states]
        if self._disks.late_jobs:
            pending = np.flatnonzero(states == PENDING)
            hashes = np.ascontiguousarray(ask.query.hashes[pending])
            entries, _ = self._host.table.lookup(ask.plan.space, hashes)
            states[pending[~self._in_time(entries)]] = MISS
        return states

    # --- both ---

    def _in_time(self, entries: Entries) -> Mask:
        """Which WRITING entries are worth waiting for."""
        if not self._disks.late_jobs:
            return np.ones(len(entries), np.bool_)
        in_time: Mask = self._host.table.flags(entries) & LATE == 0
        return in_time

    def _loses(self, instance: Instance, asks: Sequence[Ask], views: Sequence[_View], gain: int) -> bool:
        """Whether computing the `gain` tokens is faster than bringing up what disks have of them; counted."""
        if not instance.prefill_tokens_per_s:
            return False
        of_disk: dict[Disk, int] = {}
        for ask, view in zip(asks, views, strict=True):
            for disk, own in self._disks.by_disk(np.ascontiguousarray(ask.query.hashes[view.absent])):
                of_disk[disk] = of_disk.get(disk, 0) + len(own) * ask.plan.domain.block_bytes
        wanted = [(ask.plan, len(view.absent)) for ask, view in zip(asks, views, strict=True)]
        if not self._admission.promotion_loses(instance, wanted, of_disk, gain):
            return False
        self._core.tally.recompute_blocks += sum(blocks for _, blocks in wanted)
        return True

    def _pin(self, entries: Entries) -> bool:
        """False if so many hold them that they will not go anyway."""
        try:
            self._host.table.pin(entries)
        except ValueError:
            return False
        return True

    def _room(self, plan: GroupPlan) -> int:
        """Blocks that may be promoted now, by what is on its way."""
        reading = sum(disk.bytes[DiskJobKind.READ] for disk in self._disks.all)
        most = int(self._host.geometry.capacity_bytes * POOL_FRACTION_MAX) - reading
        if reading == 0:
            most = max(most, plan.domain.block_bytes)
        return max(0, most) // plan.domain.block_bytes

    def _bring(
        self, plan: GroupPlan, hashes: Hashes, positions: Indexes, copies: Entries, *, in_order: bool
    ) -> Mask:
        """Begins to promote blocks, `copies` on their LIVE disks, as far as queues and the host have room;
        `in_order`: none before those in front of it. Returns which of them are on their way, or will be when
        queues have room. What must stay on the host is pinned already."""
        coming = np.ones(len(positions), np.bool_)
        chosen = self._within_queues(plan, np.ascontiguousarray(hashes[positions]), in_order=in_order)
        if len(chosen) == 0:
            return coming
        host, room, domain = self._host, self._core.eviction, plan.domain
        chosen_hashes = np.ascontiguousarray(hashes[positions[chosen]])
        room.for_entries(domain, len(chosen))
        inserted = host.insert(plan.space, domain, chosen_hashes)
        new = np.flatnonzero(inserted.created == 1)
        roomy = room.for_slots(domain, len(new))
        entries = inserted.entries
        given_up = entries[new[roomy:]]
        full = inserted.created == TABLE_FULL
        coming[chosen[full | np.isin(entries, given_up)]] = False
        host.discard(domain, given_up, None)
        new = new[:roomy]
        slots = host.give_slots(domain, entries[new])
        for disk, own in self._disks.by_disk(chosen_hashes[new]):
            per_job = self._jobs.blocks_per_job(domain)
            for first in range(0, len(own), per_job):
                some = own[first : first + per_job]
                self._jobs.read(
                    disk, copies[chosen[new[some]]], plan.space, domain, entries[new[some]],
                    np.ascontiguousarray(slots[:, some]), np.ascontiguousarray(chosen_hashes[new[some]]),
                )  # fmt: skip
        return coming

    def _within_queues(self, plan: GroupPlan, hashes: Hashes, *, in_order: bool) -> Indexes:
        """Which of these their disks, and the host, may begin with now."""
        within = np.zeros(len(hashes), np.bool_)
        for disk, own in self._disks.by_disk(hashes):
            may = self._jobs.may_read(disk) // plan.domain.block_bytes
            if may == 0 and not disk.counts[DiskJobKind.READ]:
                may = 1  # larger than the queue
            within[own[:may]] = True
        if in_order and not within.all():
            within[int(np.argmin(within)) :] = False
        return np.flatnonzero(within)[: self._room(plan)]
