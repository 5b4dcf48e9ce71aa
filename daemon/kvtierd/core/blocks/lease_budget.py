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

from kvtierd.core.blocks.domains import Domain
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.blocks.table import BlockTable, HoldCounts
from kvtierd.core.ids import Entries

SHARE = 15
"""Times what is free. The larger, the more one instance gets alone, and the less is left for a newcomer."""
KNOWN_MAX = 1_024
"""Layouts whose blocks' size is remembered."""


class LeasablePlan(Protocol):
    """Of a group's plan, what matters here."""

    @property
    def domain(self) -> Domain: ...
    @property
    def block_tokens(self) -> int: ...


class HeldBlocks:
    """Blocks that are held for loads, each counted once."""

    def __init__(self, counts: HoldCounts) -> None:
        self.counts = counts
        """By entry: the leases and loads that hold it."""
        self.bytes = 0
        """Of the pool, that all blocks take which are held."""

    def add(self, entries: Entries, block_bytes: int) -> None:
        """One lease or load more holds these blocks of `block_bytes` each."""
        self.bytes += self.counts.add(entries) * block_bytes

    def remove(self, entries: Entries, block_bytes: int) -> None:
        """Undoes an `add` of the same entries."""
        self.bytes -= self.counts.remove(entries) * block_bytes


class LeaseBudget:
    """Of one pool."""

    def __init__(self, table: BlockTable, geometry: PoolGeometry, fraction: float) -> None:
        """`fraction`: of the pool, that may be held for loads in all."""
        self._table = table
        self._geometry = geometry
        self._block_bytes: dict[tuple[int, ...], int] = {}
        """By slot sizes of a block's shards."""
        self.leasable_bytes = int(fraction * geometry.capacity_bytes)
        self.all = self.new_holder()

    def new_holder(self) -> HeldBlocks:
        """For one instance."""
        return HeldBlocks(self._table.hold_counts())

    def block_bytes(self, domain: Domain) -> int:
        """What one block takes of the pool, with what is lost where slots do not fill their extents."""
        geometry, known = self._geometry, self._block_bytes
        if domain.sizes not in known:
            if len(known) >= KNOWN_MAX:
                known.clear()
            known[domain.sizes] = sum(
                per_block * -(-geometry.extent_bytes // geometry.slots_per_extent(slot_bytes))
                for slot_bytes, per_block in domain.per_size
            )
        return known[domain.sizes]

    def prefix_tokens(self, plans: Sequence[LeasablePlan]) -> int:
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

    def room_bytes(self, own: HeldBlocks) -> int:
        """That an instance may hold besides what is held already, by whomever."""
        free = self.leasable_bytes - self.all.bytes
        return max(0, min(free, (SHARE * free - own.bytes) // (1 + SHARE)))

    def costs(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """Which of these blocks nobody holds yet: the others cost nothing."""
        costs: npt.NDArray[np.bool_] = self.all.counts.of(entries) == 0
        return costs

    def add(self, own: HeldBlocks, domain: Domain, entries: Entries) -> None:
        """A lease or load of an instance holds these blocks from now on."""
        block_bytes = self.block_bytes(domain)
        own.add(entries, block_bytes)
        self.all.add(entries, block_bytes)

    def remove(self, own: HeldBlocks, domain: Domain, entries: Entries) -> None:
        """Undoes an `add` of the same entries."""
        block_bytes = self.block_bytes(domain)
        own.remove(entries, block_bytes)
        self.all.remove(entries, block_bytes)
