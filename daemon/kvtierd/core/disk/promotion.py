"""Promotions: blocks that disks have are read into the host.

Concurrent lookups see the entry on the host, which is WRITING from the beginning of its promotion, and return
PENDING, so they share one read.
"""

import numpy as np

from kvtierd.core.actions import DiskJobKind
from kvtierd.core.blocks.prefix import Mask
from kvtierd.core.disk.disk_jobs import DiskJobs
from kvtierd.core.ids import Entries, Hashes
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.disks import Indexes
from kvtierd.core.state.entities import GroupPlan

TABLE_FULL = 2
POOL_FRACTION_MAX = 0.5
"""The fraction of the host that promotions may hold at once, so that stores find room beside them."""


class Promotion:
    def __init__(self, core: CoreState, jobs: DiskJobs) -> None:
        self._core = core
        self._host = core.blocks
        self._below = core.below
        self._jobs = jobs

    def begin(self, plan: GroupPlan, hashes: Hashes, copies: Entries, *, in_order: bool) -> Mask:
        """As in `Tier.bring_up`; `copies` are what `Below.find` has named, on LIVE disks."""
        coming = np.ones(len(hashes), np.bool_)
        chosen = self._within_queues(plan, hashes, copies, in_order=in_order)
        if len(chosen) == 0:
            return coming
        host, room, domain = self._host, self._core.eviction, plan.domain
        chosen_hashes = np.ascontiguousarray(hashes[chosen])
        room.for_entries(domain, len(chosen))
        inserted = host.insert(plan.space, domain, chosen_hashes)
        new = np.flatnonzero(inserted.created == 1)
        roomy = room.for_slots(domain, len(new)).blocks
        entries = inserted.entries
        given_up = entries[new[roomy:]]
        full = inserted.created == TABLE_FULL
        coming[chosen[full | np.isin(entries, given_up)]] = False
        host.discard(domain, given_up, None)
        new = new[:roomy]
        slots = host.give_slots(domain, entries[new])
        for disk, own, there in self._below.by_disk(chosen_hashes[new], copies[chosen[new]]):
            per_job = self._jobs.blocks_per_job(disk, domain)
            for first in range(0, len(own), per_job):
                some = own[first : first + per_job]
                self._jobs.read(
                    disk, there[first : first + per_job], plan.space, domain, entries[new[some]],
                    np.ascontiguousarray(slots[:, some]), np.ascontiguousarray(chosen_hashes[new[some]]),
                )  # fmt: skip
        return coming

    def _within_queues(self, plan: GroupPlan, hashes: Hashes, copies: Entries, *, in_order: bool) -> Indexes:
        """The indexes of those that their disks and the host have room to begin with now."""
        within = np.zeros(len(hashes), np.bool_)
        for disk, own, _ in self._below.by_disk(hashes, copies):
            may = self._jobs.may_read(disk) // plan.domain.block_bytes
            if may == 0 and not disk.counts[DiskJobKind.READ]:
                may = 1  # a block that is larger than the queue
            within[own[:may]] = True
        if in_order and not within.all():
            within[int(np.argmin(within)) :] = False
        return np.flatnonzero(within)[: self._room(plan)]

    def _room(self, plan: GroupPlan) -> int:
        """How many more blocks may be promoted, beside those that are under way."""
        reading = sum(disk.bytes[DiskJobKind.READ] for disk in self._below.all)
        most = int(self._host.slots.capacity_bytes * POOL_FRACTION_MAX) - reading
        if reading == 0:
            most = max(most, plan.domain.block_bytes)
        return max(0, most) // plan.domain.block_bytes
