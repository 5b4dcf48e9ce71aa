"""How much of the host leases and running loads may hold, and how much of that everybody gets.

Blocks that are held for a load cannot be evicted, so part of the pool is kept out of it for stores. Of the
rest, a single instance may hold nearly all, and several share it. A block counts once, however many leases it
is in: a prefix that a hundred requests begin with costs no more than that of one.

The share of an instance follows the rule of dynamic thresholds for buffers that several queues share
(Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998): an instance may hold up to `SHARE`
times what is free. One alone gets SHARE / (1 + SHARE) of everything, n greedy ones get equal parts, and a
newcomer always finds something. Where engines of several tenants are attached, the same rule decides between
tenants first, and then between the instances of each, so a tenant gets no more by having more instances.
Nothing has to be configured, and nothing is taken back from anybody. What is guaranteed to a tenant by
configuration is not free for others, even while it holds less.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtierd.core.blocks.domains import Domain
from kvtierd.core.blocks.slots import SlotAllocator
from kvtierd.core.blocks.table import BlockTable, HoldCounts
from kvtierd.core.blocks.tenants import Tenants
from kvtierd.core.ids import NO_TENANT, Entries, TenantTag

SHARE = 15
"""How many times what is free an instance may hold. With a larger value, one instance alone gets more, and
less is left for a newcomer."""


class LeasablePlan(Protocol):
    """The part of a group's plan that matters here."""

    @property
    def domain(self) -> Domain: ...
    @property
    def block_tokens(self) -> int: ...


class HeldBlocks:
    """Blocks that are held for loads, each counted once."""

    def __init__(self, counts: HoldCounts, tenant: TenantTag) -> None:
        self.tenant = tenant
        self.counts = counts
        """For each entry, how many leases and loads hold it."""
        self.bytes = 0
        """Bytes of the pool that the held blocks take."""

    def add(self, entries: Entries, block_bytes: int) -> None:
        """One more lease or load holds these blocks, of `block_bytes` each."""
        self.bytes += self.counts.add(entries) * block_bytes

    def remove(self, entries: Entries, block_bytes: int) -> None:
        """Undoes an `add` of the same entries."""
        self.bytes -= self.counts.remove(entries) * block_bytes


class LeaseBudget:
    """The budget of one pool."""

    def __init__(self, table: BlockTable, slots: SlotAllocator, fraction: float, tenants: Tenants) -> None:
        """`fraction` of the pool may be held for loads in all."""
        self._tenants = tenants
        self._held_bytes: Counter[TenantTag] = Counter()
        """The sum of what all instances of a tenant hold. What two of them hold counts twice."""
        self._table = table
        self._slots = slots
        self._geometry = slots.geometry
        self._taken_by = lru_cache(1_024)(slots.geometry.taken_by)
        self._fraction = fraction
        self.all = HeldBlocks(self._table.hold_counts(), NO_TENANT)

    @property
    def leasable_bytes(self) -> int:
        """The most that may be held for loads in all. It grows with the part of the pool that has memory."""
        return int(self._fraction * self._slots.capacity_bytes)

    def new_holder(self, tenant: TenantTag) -> HeldBlocks:
        """Counts of what one instance of a tenant holds, which is nothing yet."""
        return HeldBlocks(self._table.hold_counts(), tenant)

    def block_bytes(self, domain: Domain) -> int:
        """What one block takes of the pool, including what is lost where slots do not fill their extents."""
        return self._taken_by(domain.per_size)

    def prefix_tokens(self, plans: Sequence[LeasablePlan]) -> int:
        """Tokens of the longest prefix whose blocks of all these groups fit at once into the pool as it will
        be when all of it has memory; 0 without plans."""
        extents_per_token = sum(
            per_block / self._geometry.slots_per_extent(slot_bytes) / plan.block_tokens
            for plan in plans
            for slot_bytes, per_block in plan.domain.per_size
        )
        extents = self._slots.extents + self._slots.extents_coming
        return int(extents / extents_per_token + 1e-6) if extents_per_token else 0

    @property
    def alone_bytes(self) -> int:
        """The most that one instance can hold while no other holds anything."""
        return self.leasable_bytes * SHARE // (1 + SHARE)

    def room_bytes(self, own: HeldBlocks) -> int:
        """How much more an instance may hold, besides what it and all others hold already."""
        leasable_bytes = self.leasable_bytes
        kept = 0
        for tenant, least in self._tenants.reserved:
            if tenant != own.tenant:
                kept += max(0, int(least * leasable_bytes) - self._held_bytes[tenant])
        free = max(0, leasable_bytes - self.all.bytes - kept)
        room = free
        if self._tenants.several:
            room = _threshold(room, self._held_bytes[own.tenant])
        return min(free, _threshold(room, own.bytes))

    def held_bytes(self, tenant: TenantTag) -> int:
        """What all instances of a tenant hold. What two of them hold counts twice."""
        return self._held_bytes[tenant]

    def costs(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """Which of these blocks nobody holds yet. Holding the others costs nothing."""
        costs: npt.NDArray[np.bool_] = self.all.counts.of(entries) == 0
        return costs

    def add(self, own: HeldBlocks, domain: Domain, entries: Entries) -> None:
        """From now on a lease or load of an instance holds these blocks."""
        block_bytes, before = self.block_bytes(domain), own.bytes
        own.add(entries, block_bytes)
        self.all.add(entries, block_bytes)
        self._changed(own.tenant, own.bytes - before)

    def remove(self, own: HeldBlocks, domain: Domain, entries: Entries) -> None:
        """Undoes an `add` of the same entries."""
        block_bytes, before = self.block_bytes(domain), own.bytes
        own.remove(entries, block_bytes)
        self.all.remove(entries, block_bytes)
        self._changed(own.tenant, own.bytes - before)

    def _changed(self, tenant: TenantTag, by_bytes: int) -> None:
        held_bytes = self._held_bytes[tenant] + by_bytes
        if held_bytes:
            self._held_bytes[tenant] = held_bytes
        else:
            self._held_bytes.pop(tenant, None)


def _threshold(free: int, held: int) -> int:
    """How much more somebody who holds so much may hold, so that it is at most `SHARE` times what is left."""
    return max(0, (SHARE * free - held) // (1 + SHARE))
