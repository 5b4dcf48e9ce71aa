"""How much of the host may be held for loads, by leases and by the loads that run, and by whom.

What is held for a load cannot be evicted, so stores need some of the pool kept out of it; of the rest one
instance alone may hold nearly all, and several share it. Blocks are counted once, in however many leases they
are: a prefix that a hundred requests begin with costs what one costs.

The share of an instance follows the rule of dynamic thresholds for buffers that several queues share
(Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998): an instance may hold as long as it has
no more than `SHARE` times what is free. One alone comes to SHARE / (1 + SHARE) of everything; n greedy ones
come to equal parts; and a newcomer always finds something. There is nothing to configure per instance, and
nothing to take back from anybody.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtierd.core.domains import Domain
from kvtierd.core.ids import Entries
from kvtierd.core.slots import PoolGeometry
from kvtierd.core.table import U32

SHARE = 15
"""Times what is free. The larger, the more one instance gets alone, and the less is left for a newcomer."""


class Plan(Protocol):
    """Of a group's plan, what matters here."""

    @property
    def domain(self) -> Domain: ...
    @property
    def block_tokens(self) -> int: ...


class Held:
    """Blocks that are held for loads, each counted once."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: entries of the table. Memory is used as they are counted."""
        self.counts: U32 = np.zeros(capacity, np.uint32)
        """By entry: the leases and loads that hold it."""
        self.bytes = 0
        """Of the pool, that all blocks take which are held."""

    def add(self, entries: Entries, block_bytes: int) -> None:
        """One lease or load more holds these blocks of `block_bytes` each; an entry that comes twice counts
        once."""
        fresh = entries[self.counts[entries] == 0]
        self.counts[entries] += 1
        self.bytes += self._distinct(fresh, 1) * block_bytes

    def remove(self, entries: Entries, block_bytes: int) -> None:
        """Undoes an `add` of the same entries."""
        self.counts[entries] -= 1
        gone = entries[self.counts[entries] == 0]
        self.bytes -= self._distinct(gone, 0) * block_bytes

    def _distinct(self, entries: Entries, count: int) -> int:
        """How many different ones there are among entries that all have this count."""
        numbers = np.arange(len(entries), dtype=np.uint32)
        self.counts[entries] = numbers  # of equal entries, the last one's number stays
        distinct = int(np.count_nonzero(self.counts[entries] == numbers))
        self.counts[entries] = count
        return distinct


class LeaseRoom:
    """Of one pool."""

    def __init__(self, capacity: int, geometry: PoolGeometry, fraction: float) -> None:
        """`capacity`: entries of the table. `fraction`: of the pool, that may be held for loads in all."""
        self._capacity = capacity
        self._geometry = geometry
        self.leasable_bytes = int(fraction * geometry.capacity_bytes)
        self.all = Held(capacity)

    def new_holder(self) -> Held:
        """For one instance."""
        return Held(self._capacity)

    def block_bytes(self, domain: Domain) -> int:
        """What one block takes of the pool, with what is lost where slots do not fill their extents."""
        geometry = self._geometry
        return sum(
            per_block * -(-geometry.extent_bytes // geometry.slots_per_extent(slot_bytes))
            for slot_bytes, per_block in domain.per_size
        )

    def prefix_tokens(self, plans: Sequence[Plan]) -> int:
        """Of the longest prefix whose blocks of all these groups may be in the pool at once; 0 for none."""
        extents_per_token = sum(
            per_block / self._geometry.slots_per_extent(slot_bytes) / plan.block_tokens
            for plan in plans
            for slot_bytes, per_block in plan.domain.per_size
        )
        return int(self._geometry.extents / extents_per_token + 1e-6) if extents_per_token else 0

    @property
    def alone_bytes(self) -> int:
        """The most that one instance can hold while no other holds anything."""
        return self.leasable_bytes * SHARE // (1 + SHARE)

    def alone_blocks(self, domain: Domain) -> int:
        """The same in blocks: one at least, however small the pool."""
        return max(1, self.alone_bytes // self.block_bytes(domain))

    def room_bytes(self, own: Held) -> int:
        """That an instance may hold besides what is held already, by whomever."""
        free = self.leasable_bytes - self.all.bytes
        return max(0, min(free, (SHARE * free - own.bytes) // (1 + SHARE)))

    def costs(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """Which of these blocks nobody holds yet: the others cost nothing."""
        costs: npt.NDArray[np.bool_] = self.all.counts[entries] == 0
        return costs

    def fitting(self, own: Held, domain: Domain, entries: Entries) -> int:
        """How many of these blocks, from the first on, an instance may hold now. If nobody holds anything it
        is one at least, however small the pool."""
        room_blocks = self.room_bytes(own) // self.block_bytes(domain)
        if not self.all.bytes:
            room_blocks = max(1, room_blocks)
        return int(np.searchsorted(np.cumsum(self.costs(entries)), room_blocks, "right"))

    def add(self, own: Held, domain: Domain, entries: Entries) -> None:
        """A lease or load of an instance holds these blocks from now on."""
        for held in (own, self.all):
            held.add(entries, self.block_bytes(domain))

    def remove(self, own: Held, domain: Domain, entries: Entries) -> None:
        """Undoes an `add` of the same entries."""
        for held in (own, self.all):
            held.remove(entries, self.block_bytes(domain))
