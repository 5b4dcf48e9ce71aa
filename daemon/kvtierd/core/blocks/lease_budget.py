"""How much of the host leases and running loads may hold, and how much of that each instance gets.

Blocks that are held for a load cannot be evicted, so part of the pool is kept out of it for stores. Of the
rest, a single instance may hold nearly all, and several share it. A block counts once, however many leases it
is in: a prefix that a hundred requests begin with costs no more than that of one.

The share of an instance follows the rule of dynamic thresholds for buffers that several queues share
(Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998): an instance may hold up to `SHARE`
times what is free. One alone gets SHARE / (1 + SHARE) of everything, n greedy ones get equal parts, and a
newcomer always finds something. Nothing has to be configured for each instance, and nothing is taken back
from any.
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
"""How many times what is free an instance may hold. With a larger value, one instance alone gets more, and
less is left for a newcomer."""
KNOWN_MAX = 1_024
"""Layouts whose block size is remembered."""


class LeasablePlan(Protocol):
    """The part of a group's plan that matters here."""

    @property
    def domain(self) -> Domain: ...
    @property
    def block_tokens(self) -> int: ...


class HeldBlocks:
    """Blocks that are held for loads, each counted once."""

    def __init__(self, counts: HoldCounts) -> None:
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

    def __init__(self, table: BlockTable, geometry: PoolGeometry, fraction: float) -> None:
        """`fraction` of the pool may be held for loads in all."""
        self._table = table
        self._geometry = geometry
        self._block_bytes: dict[tuple[int, ...], int] = {}
        """What a block takes, by the slot sizes of its shards."""
        self.leasable_bytes = int(fraction * geometry.capacity_bytes)
        self.all = self.new_holder()

    def new_holder(self) -> HeldBlocks:
        """Counts of what one instance holds, which is nothing yet."""
        return HeldBlocks(self._table.hold_counts())

    def block_bytes(self, domain: Domain) -> int:
        """What one block takes of the pool, including what is lost where slots do not fill their extents."""
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
        """Tokens of the longest prefix whose blocks of all these groups fit into the pool at once; 0 without
        plans."""
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
        """How much more an instance may hold, besides what it and all others hold already."""
        free = self.leasable_bytes - self.all.bytes
        return max(0, min(free, (SHARE * free - own.bytes) // (1 + SHARE)))

    def costs(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """Which of these blocks nobody holds yet. Holding the others costs nothing."""
        costs: npt.NDArray[np.bool_] = self.all.counts.of(entries) == 0
        return costs

    def add(self, own: HeldBlocks, domain: Domain, entries: Entries) -> None:
        """From now on a lease or load of an instance holds these blocks."""
        block_bytes = self.block_bytes(domain)
        own.add(entries, block_bytes)
        self.all.add(entries, block_bytes)

    def remove(self, own: HeldBlocks, domain: Domain, entries: Entries) -> None:
        """Undoes an `add` of the same entries."""
        block_bytes = self.block_bytes(domain)
        own.remove(entries, block_bytes)
        self.all.remove(entries, block_bytes)
