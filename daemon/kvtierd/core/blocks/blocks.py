"""The blocks of one tier, the host or a disk: the block table and the slots, kept in step. Every slot that is
freed is freed here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtierd.core.actions import Action, CommitSlots, FreeSlots, QuarantineSlots
from kvtierd.core.blocks.domains import Domain, Domains, Spaces
from kvtierd.core.blocks.history import Fate, History
from kvtierd.core.blocks.slots import PoolGeometry, SlotAllocator
from kvtierd.core.blocks.table import U8, U32, BlockFlag, BlockState, BlockTable
from kvtierd.core.errors import Reason
from kvtierd.core.ids import NO_ENTRY, DiskId, Entries, Hashes, Slots, SpaceId
from kvtierd.core.status import SizeStatus
from kvtierd.core.stimuli import CoreIntegrity, PoolPolicy, Verify

EVICTING = int(BlockState.EVICTING)
READY = int(BlockState.READY)
VERIFY = int(BlockFlag.VERIFY)
RECOVERED = int(BlockFlag.RECOVERED)
HISTORY_PART = 1_000
"""What is learnt of reuse may remember gone blocks in one thousandth of the pool's size."""
REMEMBERED_BYTES = 48
"""What one takes: the table remembers up to twice as many as it was asked to."""
STAMPS_PER_S = 10


@dataclass(slots=True, eq=False)
class Inserted:
    """What became of the keys of a store: for each its entry, and what the table made of it (1 created, 0
    existed, 2 table full)."""

    entries: Entries
    created: U8
    count: int
    """How many were created."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockSnapshot:
    """Blocks as they were at one time. They may go since, and others may get their entries."""

    entries: Entries
    generations: U32
    slots: Slots
    """One slot of each block."""

    def __getitem__(self, chosen: "slice | npt.NDArray[Any]") -> "BlockSnapshot":
        return BlockSnapshot(self.entries[chosen], self.generations[chosen], self.slots[chosen])

    def __len__(self) -> int:
        return len(self.entries)


class Blocks:
    """The only owner of a tier's table and slots. Methods work on batches, and append what has to be done to
    `actions`."""

    def __init__(
        self,
        table: BlockTable,
        geometry: PoolGeometry,
        integrity: CoreIntegrity | None = None,
        *,
        disk: DiskId | None = None,
        host: "Blocks | None" = None,
        populated: int | None = None,
    ) -> None:
        """`disk` is the disk whose blocks these are, with the host's blocks as `host`, because spaces and
        history are shared; None if these are the host's. `populated`: how many extents, from the first on,
        have memory already; None for all."""
        integrity = integrity or CoreIntegrity()
        always = integrity.verify is Verify.ALWAYS
        self.integrity = integrity
        self.disk = disk
        self._flags_of_new = VERIFY if always and disk is None else 0
        self.flags_of_recovered = VERIFY | RECOVERED if disk is None else 0
        """What recovered blocks are flagged with. A disk's blocks need no flag: they are checked whenever
        they are read."""
        self._flags_once = RECOVERED if always else VERIFY | RECOVERED
        """The flags that a load removes from blocks that it found sound."""
        self.history: History = History(integrity.remembered_blocks) if host is None else host.history
        self.corrupt: set[int] = set()
        """Slots of condemned blocks, which are set aside when their blocks go."""
        self.table = table
        self.geometry = geometry
        self.slots = SlotAllocator(geometry, populated)
        self.domains = Domains()
        if host is None:
            self.spaces = Spaces(table)
        else:
            self.spaces = host.spaces
            self.spaces.tables.append(table)
        self.capacity = int(table.stats()["capacity"])
        self._above = None if host is None else host.table
        self.ranks = table.ranks
        """Whether the table learns what is worth its room, as `keep_by` says."""
        self.live = 0
        """Entries in the table."""
        self.condemned = 0
        """Entries that are removed when their last pin is dropped."""
        self.opened_bytes = 0
        """Bytes of all blocks that were ever given slots, or taken over."""
        self.clock = 0
        """The latest recency that was written to slot records; higher is more recent."""
        self.used_at = np.zeros(self.capacity, np.uint32)
        """When each entry was last stored, found or loaded, in 1 / `STAMPS_PER_S` seconds, so that domains
        can be compared."""
        self.now = 0
        self.actions: list[Action] = []
        self.leaving: Callable[[Entries, Fate], None] | None = None
        """Called with READY blocks that are being evicted or condemned, while they are still in the table."""
        self.came: Callable[[Entries], None] | None = None
        """Called with blocks that have become READY."""
        self.going: Callable[[Entries], None] | None = None
        """Called with READY blocks that will not be found any more, while they are still in the table."""
        self.condemning: Callable[[Entries], object] | None = None
        """Called with READY blocks that are being condemned, after `leaving`. It drops the pins of holds, so
        that the blocks go with the last pin of those who use them."""
        self.removed: Callable[[Entries], None] | None = None
        """Called with entries that have left the table, before other blocks can get their numbers."""

    # --- life of a block ---

    def insert(self, space: SpaceId, domain: Domain, hashes: Hashes) -> Inserted:
        """Creates the absent keys as WRITING, without slots."""
        entries, created = self.table.insert(space, domain.domain, hashes, self._flags_of_new)
        count = int(np.count_nonzero(created == 1))
        self.live += count
        domain.blocks += count
        return Inserted(entries, created, count)

    def give_slots(self, domain: Domain, entries: Entries) -> Slots:
        """Takes slots for new entries, for which there must be room; shape (world, n)."""
        n = len(entries)
        if len(domain.per_size) == 1:
            flat = self.slots.take(domain.sizes[0], n * domain.world)
            slots = flat.reshape(domain.world, n)
        else:
            slots = np.empty((domain.world, n), np.uint32)
            for rank, slot_bytes in enumerate(domain.sizes):
                slots[rank] = self.slots.take(slot_bytes, n)
        self.table.attach_slots(entries, np.ascontiguousarray(slots.T))
        domain.opened += n
        self.opened_bytes += n * domain.block_bytes
        return slots

    def commit(self, domain: Domain, entries: Entries, slots: Slots) -> None:
        """Makes WRITING entries READY, with the first the most recent. `slots` has shape (world, n)."""
        n = len(entries)
        if n == 0:
            return
        self.table.commit(tail_first(entries))
        if self.came is not None:
            self.came(entries)
        if self.disk is None:  # a disk's worker has committed them, with the clocks that it was given
            self.clock += n
            self.actions.append(CommitSlots(np.ascontiguousarray(slots.T), self.clock))
        self.mark_used(entries, slots)

    def discard(self, domain: Domain, entries: Entries, slots: Slots | None) -> None:
        """Removes unpinned WRITING or EVICTING entries. `slots` has shape (world, n), and is None if they
        have none yet."""
        n = len(entries)
        if n == 0:
            return
        self.table.remove(entries)
        if self.removed is not None:
            self.removed(entries)
        self.live -= n
        domain.blocks -= n
        if slots is None:
            return
        if self.corrupt and self._set_aside(domain, slots):
            return
        self.actions.append(FreeSlots(slots.reshape(-1), self.disk))
        if len(domain.per_size) == 1:
            self.slots.give_back(domain.sizes[0], slots.reshape(-1))
        else:
            for rank, slot_bytes in enumerate(domain.sizes):
                self.slots.give_back(slot_bytes, slots[rank])

    def _set_aside(self, domain: Domain, slots: Slots) -> bool:
        """Frees slots of shape (world, n), except those that have failed a check. Does nothing and returns
        False if none of them has."""
        bad = np.isin(slots, np.fromiter(self.corrupt, np.uint32, len(self.corrupt)))
        if not bad.any():
            return False
        self.corrupt.difference_update(slots[bad].tolist())
        self.slots.set_aside(slots[bad])
        self.actions.append(QuarantineSlots(slots[bad], self.disk))
        if not bad.all():
            self.actions.append(FreeSlots(slots[~bad], self.disk))
        for rank, slot_bytes in enumerate(domain.sizes):
            self.slots.give_back(slot_bytes, slots[rank][~bad[rank]])
        return True

    def evict(self, domain: Domain, entries: Entries) -> None:
        """Removes READY, unpinned entries of a domain to make room."""
        domain.evicted += len(entries)
        self.drop(domain, entries, Fate.EVICTED)

    def drop(self, domain: Domain, entries: Entries, fate: Fate) -> None:
        """Removes READY, unpinned entries of a domain."""
        if self.leaving is not None:
            self.leaving(entries, fate)
        if self.going is not None:
            self.going(entries)
        self.remember(entries, fate)
        self.table.begin_evict(entries)
        self.discard(domain, entries, self.slots_of(domain, entries))

    def remember(self, entries: Entries, fate: Fate, reason: Reason | None = None) -> None:
        """Remembers why blocks that are still in the table are about to go."""
        table = self.table
        self.history.remember(table.spaces(entries), table.hashes(entries), fate, self.now, reason)

    # --- doubt ---

    def sound(self, entries: Entries) -> None:
        """A load has found that the data of READY blocks match their checksums."""
        self.table.clear_flags(entries, self._flags_once)

    def condemn(self, entries: Entries, slots: Slots) -> Entries:
        """Makes blocks unfindable because these slots of theirs have failed a check. The arrays are parallel,
        and an entry may come several times. Returns the entries that were READY until now. They and their
        slots go with their last pin; call `reap` at once for those that may have none."""
        there = self.table.states(entries) >= READY
        self.corrupt.update(slots[there].tolist())
        entries = np.unique(entries)
        ready: Entries = entries[self.table.states(entries) == READY]
        if len(ready):
            if self.leaving is not None:
                self.leaving(ready, Fate.CORRUPT)
            if self.going is not None:
                self.going(ready)
            self.remember(ready, Fate.CORRUPT)
            if self.condemning is not None:
                self.condemning(ready)
            self.table.condemn(ready)
            self.table.set_flags(ready, VERIFY)  # loads that still hold one have to see it fail
            self.condemned += len(ready)
        return ready

    # --- blocks that are remembered but not held ---

    def seen(self, domain: Domain, entries: Entries) -> "BlockSnapshot":
        """A snapshot of blocks of a domain."""
        return BlockSnapshot(entries, self.table.generations(entries), self.slots_of(domain, entries)[0])

    def are_still(self, seen: "BlockSnapshot") -> npt.NDArray[np.bool_]:
        """Which of the blocks have not been removed since the snapshot."""
        there: npt.NDArray[np.bool_] = self.table.owners(seen.slots) == seen.entries
        there[there] = self.table.generations(seen.entries[there]) == seen.generations[there]
        return there

    # --- pins and recency ---

    def unpin(self, domain: Domain, entries: Entries) -> None:
        """Drops a pin of each; the first becomes the most recent. Condemned blocks without pins are
        removed."""
        if len(entries) == 0:
            return
        self.table.unpin(tail_first(entries))
        if self.condemned:
            self.reap(domain, entries)

    def reap(self, domain: Domain, entries: Entries) -> None:
        """Removes those of the entries that are condemned and have lost their last pin."""
        entries = np.unique(entries)
        gone = entries[(self.table.states(entries) == EVICTING) & (self.table.pins(entries) == 0)]
        self.condemned -= len(gone)
        self.discard(domain, gone, self.slots_of(domain, gone))

    def keep_by(self, policy: PoolPolicy) -> None:
        """Decides from now on by this policy what goes first. What was learnt by another one is forgotten.
        Disks go by what the host learns, so the host has to be told first."""
        if policy is PoolPolicy.REUSE and self._above is not None:
            if not self.ranks:
                self.table.rank_below(self._above)
        elif policy is PoolPolicy.REUSE and not self.ranks:
            self.table.rank(self.geometry.capacity_bytes // HISTORY_PART // REMEMBERED_BYTES)
        elif policy is PoolPolicy.LRU and self.ranks:
            self.table.stop_ranking()
        self.ranks = self.table.ranks

    def chain(self, entries: Entries) -> None:
        """Tells which blocks follow each other in a prompt."""
        if self.ranks:
            self.table.chained(entries)

    def touch(self, entries: Entries) -> None:
        """Makes blocks recent, the first most of all."""
        self.table.touch(tail_first(entries))
        self.used(entries)

    def used(self, entries: Entries) -> None:
        """Remembers that blocks were used now."""
        self.used_at[entries.astype(np.intp)] = self.now  # numpy takes twice as long with other indexes

    def cool(self, domain: Domain, entries: Entries) -> None:
        """Makes those of a domain's blocks that may be evicted the next to be, the first of them last. To
        other domains they are then as old as the block that would have been evicted before them."""
        entries = entries[self.table.pins(entries) == 0]
        oldest = self.table.victims(domain.domain, 1)
        self.table.cool(entries)
        if len(oldest):
            self.used_at[entries] = np.minimum(self.used_at[entries], self.used_at[oldest[0]])

    def mark_used(self, entries: Entries, slots: Slots) -> None:
        """Remembers that blocks and their extents were used now."""
        self.used(entries)
        self.slots.used_at[self.geometry.extent_of(slots.reshape(-1))] = self.now

    def slots_of(self, domain: Domain, entries: Entries) -> Slots:
        """Slots of the entries, shape (world, n)."""
        return np.ascontiguousarray(self.table.slots(entries, domain.world).T)

    def by_domain(self, entries: Entries) -> Iterator[tuple[Domain, Entries]]:
        """Each domain, and those of the entries that are of it, in their order."""
        domains = self.table.domains(entries)
        for number in np.unique(domains).tolist():
            yield self.domains.by_id[number], entries[domains == number]

    def domain_of(self, entries: Entries) -> Domain:
        """The domain of entries that all have the same."""
        return self.domains.by_id[int(self.table.domains(entries[:1])[0])]

    def sizes(self) -> tuple[SizeStatus, ...]:
        """How many slots there are of every size that has some."""
        withheld = self.slots.withheld_by_size()
        return tuple(
            SizeStatus(slot_bytes, extents, total, free, withheld.get(slot_bytes, 0))
            for slot_bytes, extents, total, free in self.slots.sizes()
        )


def tail_first(entries: Entries) -> Entries:
    """The batch in the order in which the table has to see it for its head to become the most recent."""
    return np.ascontiguousarray(entries[::-1])


def owned(owners: Entries) -> Entries:
    """The entries among the owners of slots, each once, in ascending order."""
    return np.unique(owners[owners != NO_ENTRY])
