"""Lookups beyond the host: what disks have is told to be pending, and brought up.

The entry on the host, WRITING as soon as its promotion begins, is what makes many who wait share one read.
"""

import numpy as np
import numpy.typing as npt

from kvtierd.core.actions import DiskJobKind
from kvtierd.core.blocks.blocks import READY
from kvtierd.core.blocks.table import U8, BlockState
from kvtierd.core.disk.admission import Admission
from kvtierd.core.disk.disk_jobs import DiskJobs
from kvtierd.core.ids import NO_ENTRY, Entries, Hashes
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.disks import LATE, Indexes
from kvtierd.core.state.entities import GroupPlan, Instance
from kvtierd.core.stimuli import MatchMode

MISS, PENDING = 0, 1
TABLE_FULL = 2
WRITING = int(BlockState.WRITING)
FIRST_WINDOW = 32
"""Hashes looked at beyond the hits at first; each further window is this many times as long."""
WINDOW_GROWTH = 4
POOL_FRACTION_MAX = 0.5
"""Of the host, that promotions may hold at once: stores find room beside them."""

_NO_ENTRIES = np.empty(0, np.uint32)


class Promotion:
    def __init__(self, core: CoreState, jobs: DiskJobs, admission: Admission) -> None:
        self._core = core
        self._host = core.blocks
        self._disks = core.disks
        self._jobs = jobs
        self._admission = admission

    def beyond(
        self, instance: Instance, plan: GroupPlan, hashes: Hashes, mode: MatchMode, hits: Entries,
        states: U8, *, held: bool,
    ) -> U8:  # fmt: skip
        """What to tell of a lookup that the host cannot wholly serve: `states` as the host alone would tell
        them, with its `hits`. Begins to promote what disks have of the rest, never at the cost of the hits;
        `held`: they are pinned already."""
        if not self._disks.late_jobs and not self._disks.any_live:
            return states
        keep = _NO_ENTRIES if held else hits
        if mode is MatchMode.PREFIX:
            first = len(hits)
            if states[first] == PENDING or self._disks.has(plan.space, hashes[first : first + 1]):
                states[first] = self._prefix(instance, plan, hashes, first, keep)
            return states
        return self._exact(instance, plan, hashes, states, keep)

    def promote(
        self, plan: GroupPlan, hashes: Hashes, positions: Indexes, copies: Entries, *, in_order: bool
    ) -> bool:
        """Begins to promote the blocks at these positions, `copies` on their LIVE disks. False if some of
        them cannot come. What must stay on the host is pinned already."""
        return bool(self._promote(plan, hashes, positions, copies, _NO_ENTRIES, in_order=in_order).all())

    def without_late(self, plan: GroupPlan, hashes: Hashes, states: U8) -> U8:
        """States to tell of the first of these blocks, with misses for what is being promoted and takes too
        long."""
        if self._disks.late_jobs:
            pending = np.flatnonzero(states == PENDING)
            entries, _ = self._host.table.lookup(plan.space, np.ascontiguousarray(hashes[pending]))
            states[pending[~self._in_time(entries)]] = MISS
        return states

    # --- a run ---

    def _prefix(self, instance: Instance, plan: GroupPlan, hashes: Hashes, hits: int, keep: Entries) -> int:
        """State of the first block beyond the hits."""
        end = min(len(hashes), self._core.lease_budget.alone_blocks(plan.domain))
        if hits >= end:  # an instance could not lease any more of it
            entries, raw = self._host.table.lookup(plan.space, hashes[hits : hits + 1])
            return PENDING if raw[0] == WRITING and self._in_time(entries)[0] else MISS
        first = MISS
        wanted: list[Indexes] = []
        copies: list[Entries] = []
        kept = [keep]
        room = self._room(plan)
        position, length = hits, FIRST_WINDOW
        while position < end:
            window = hashes[position : min(position + length, end)]
            entries, raw = self._host.table.lookup(plan.space, window)
            there = raw == READY
            writing = np.flatnonzero(raw == WRITING)
            there[writing] = self._in_time(entries[writing])
            absent = np.flatnonzero(raw == 0)
            found = self._disks.find(plan.space, np.ascontiguousarray(window[absent]))
            there[absent] = found != NO_ENTRY
            run = len(there) if there.all() else int(np.argmin(there))
            if position == hits and run:
                first = PENDING
            within = absent < run
            wanted.append(absent[within] + position)
            copies.append(found[within])
            kept.append(entries[:run][raw[:run] == READY])
            room -= int(np.count_nonzero(within))
            if run < len(window) or room <= 0:
                break
            position += len(window)
            length *= WINDOW_GROWTH
        positions = np.concatenate(wanted)
        if len(positions) == 0:
            return first
        if self._loses(instance, plan, np.ascontiguousarray(hashes[positions])):
            coming = np.zeros(1, np.bool_)
        else:
            coming = self._promote(
                plan, hashes, positions, np.concatenate(copies), np.concatenate(kept), in_order=True
            )
        return MISS if positions[0] == hits and not coming[0] else first

    # --- single blocks ---

    def _exact(self, instance: Instance, plan: GroupPlan, hashes: Hashes, states: U8, keep: Entries) -> U8:
        states = self.without_late(plan, hashes, states)
        missed = np.flatnonzero(states == MISS)
        missed_hashes = np.ascontiguousarray(hashes[missed])
        _, raw = self._host.table.lookup(plan.space, missed_hashes)
        absent = np.flatnonzero(raw == 0)
        found = self._disks.find(plan.space, np.ascontiguousarray(missed_hashes[absent]))
        there = found != NO_ENTRY
        positions, copies = missed[absent[there]], found[there]
        if len(positions) and not self._loses(instance, plan, np.ascontiguousarray(hashes[positions])):
            coming = self._promote(plan, hashes, positions, copies, keep, in_order=False)
            states[positions[coming]] = PENDING
        return states

    # --- both ---

    def _in_time(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """Which WRITING entries are worth waiting for."""
        if not self._disks.late_jobs:
            return np.ones(len(entries), np.bool_)
        in_time: npt.NDArray[np.bool_] = self._host.table.flags(entries) & LATE == 0
        return in_time

    def _loses(self, instance: Instance, plan: GroupPlan, hashes: Hashes) -> bool:
        """Whether computing what disks have of these is faster; counted."""
        if not instance.prefill_tokens_per_s:
            return False
        of_disk = [(disk, len(own)) for disk, own in self._disks.by_disk(hashes)]
        if not self._admission.promotion_loses(instance, plan, len(hashes), of_disk):
            return False
        self._core.tally.recompute_blocks += len(hashes)
        return True

    def _room(self, plan: GroupPlan) -> int:
        """Blocks that may be promoted now, by what is on its way."""
        reading = sum(disk.bytes[DiskJobKind.READ] for disk in self._disks.all)
        most = int(self._host.geometry.capacity_bytes * POOL_FRACTION_MAX) - reading
        if reading == 0:
            most = max(most, plan.domain.block_bytes)
        return max(0, most) // plan.domain.block_bytes

    def _promote(
        self, plan: GroupPlan, hashes: Hashes, positions: Indexes, copies: Entries, keep: Entries, *,
        in_order: bool,
    ) -> npt.NDArray[np.bool_]:  # fmt: skip
        """Begins to promote blocks, `copies` on their LIVE disks, as far as queues and the host have room;
        `in_order`: none before those in front of it. Returns which of them are on their way, or will be when
        queues have room."""
        coming = np.ones(len(positions), np.bool_)
        chosen = self._within_queues(plan, np.ascontiguousarray(hashes[positions]), in_order=in_order)
        if len(chosen) == 0:
            return coming
        host, room, domain = self._host, self._core.eviction, plan.domain
        try:
            host.table.pin(keep)
        except ValueError:  # so many hold them that they will not go anyway
            keep = _NO_ENTRIES
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
        host.unpin(domain, keep)
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
