"""Blocks of one tier, the host's or a disk's: the block table and the slots, kept in step. Whatever frees a
slot goes through here."""

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
from kvtierd.core.stimuli import CoreIntegrity, Verify

EVICTING = int(BlockState.EVICTING)
READY = int(BlockState.READY)
VERIFY = int(BlockFlag.VERIFY)
RECOVERED = int(BlockFlag.RECOVERED)
STAMPS_PER_S = 10


@dataclass(slots=True, eq=False)
class Inserted:
    """What became of the keys of a store: entry and table's verdict of each (1 created, 0 existed, 2 table
    full)."""

    entries: Entries
    created: U8
    count: int
    """Created."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockSnapshot:
    """Blocks as they were at some time; they may go, and others come in their place."""

    entries: Entries
    generations: U32
    slots: Slots
    """One of each block."""

    def __getitem__(self, chosen: "slice | npt.NDArray[Any]") -> "BlockSnapshot":
        return BlockSnapshot(self.entries[chosen], self.generations[chosen], self.slots[chosen])

    def __len__(self) -> int:
        return len(self.entries)


class Blocks:
    """The only owner of table and slots. Batches; appends what must be done to `actions`."""

    def __init__(
        self,
        table: BlockTable,
        geometry: PoolGeometry,
        integrity: CoreIntegrity | None = None,
        *,
        disk: DiskId | None = None,
        host: "Blocks | None" = None,
    ) -> None:
        """`disk`: whose blocks these are, with the host's as `host`: spaces and memory are shared. None: they
        are the host's."""
        integrity = integrity or CoreIntegrity()
        always = integrity.verify is Verify.ALWAYS
        self.integrity = integrity
        self.disk = disk
        self._flags_of_new = VERIFY if always and disk is None else 0
        self.flags_of_recovered = VERIFY | RECOVERED if disk is None else 0
        """A disk's blocks are checked whenever they are read."""
        self._flags_once = RECOVERED if always else VERIFY | RECOVERED
        """What a load that found a block sound takes from it."""
        self.history: History = History(integrity.remembered_blocks) if host is None else host.history
        self.corrupt: set[int] = set()
        """Slots of condemned blocks that are to be set aside when their blocks go."""
        self.table = table
        self.geometry = geometry
        self.slots = SlotAllocator(geometry)
        self.domains = Domains()
        if host is None:
            self.spaces = Spaces(table)
        else:
            self.spaces = host.spaces
            self.spaces.tables.append(table)
        self.capacity = int(table.stats()["capacity"])
        self.live = 0
        """Entries in the table."""
        self.condemned = 0
        """Entries that wait for their last pin to be dropped."""
        self.opened_bytes = 0
        """Of all blocks that were ever given slots, or taken over."""
        self.clock = 0
        """Recency, as written to slot records: higher is more recent."""
        self.used_at = np.zeros(self.capacity, np.uint32)
        """When each entry was last stored, found or loaded, in `STAMPS_PER_S`: compares across domains."""
        self.now = 0
        self.actions: list[Action] = []
        self.leaving: Callable[[Entries, Fate], None] | None = None
        """Told of READY blocks that are being evicted or condemned, while they still are in the table."""
        self.condemning: Callable[[Entries], object] | None = None
        """Told of READY blocks that are being condemned, after `leaving`. It drops the pins of its holds, so
        that the blocks go with the last pin of those that use them."""
        self.removed: Callable[[Entries], None] | None = None
        """Told of entries that are not in the table any more, before others can have their numbers."""

    # --- life of a block ---

    def insert(self, space: SpaceId, domain: Domain, hashes: Hashes) -> Inserted:
        """Creates the absent keys, WRITING and without slots."""
        entries, created = self.table.insert(space, domain.domain, hashes, self._flags_of_new)
        count = int(np.count_nonzero(created == 1))
        self.live += count
        domain.blocks += count
        return Inserted(entries, created, count)

    def give_slots(self, domain: Domain, entries: Entries) -> Slots:
        """Slots for new entries, for which there must be room; shape (world, n)."""
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
        """WRITING to READY; the first is the most recent. `slots` of shape (world, n)."""
        n = len(entries)
        if n == 0:
            return
        self.table.commit(tail_first(entries))
        if self.disk is None:  # a disk's worker has done it, with the clocks it was given
            self.clock += n
            self.actions.append(CommitSlots(np.ascontiguousarray(slots.T), self.clock))
        self.mark_used(entries, slots)

    def discard(self, domain: Domain, entries: Entries, slots: Slots | None) -> None:
        """Removes unpinned WRITING or EVICTING entries; `slots` of shape (world, n), None if they have none
        yet."""
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
        """Frees slots of shape (world, n), but those that have failed a check; False if none of them has."""
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
        """Removes READY, unpinned entries of a domain, to make room."""
        domain.evicted += len(entries)
        self.drop(domain, entries, Fate.EVICTED)

    def drop(self, domain: Domain, entries: Entries, fate: Fate) -> None:
        """Removes READY, unpinned entries of a domain."""
        if self.leaving is not None:
            self.leaving(entries, fate)
        self.remember(entries, fate)
        self.table.begin_evict(entries)
        self.discard(domain, entries, self.slots_of(domain, entries))

    def remember(self, entries: Entries, fate: Fate, reason: Reason | None = None) -> None:
        """Remembers why blocks that are still in the table are not going to be."""
        table = self.table
        self.history.remember(table.spaces(entries), table.hashes(entries), fate, self.now, reason)

    # --- doubt ---

    def sound(self, entries: Entries) -> None:
        """A load has found the data of READY blocks to fit its checksums."""
        self.table.clear_flags(entries, self._flags_once)

    def condemn(self, entries: Entries, slots: Slots) -> Entries:
        """Makes blocks unfindable because these slots of theirs have failed a check; parallel, an entry may
        come several times. Returns those that were READY until now. They go with their last pin, and the
        slots with them; `reap` at once those that may have none."""
        there = self.table.states(entries) >= READY
        self.corrupt.update(slots[there].tolist())
        entries = np.unique(entries)
        ready: Entries = entries[self.table.states(entries) == READY]
        if len(ready):
            if self.leaving is not None:
                self.leaving(ready, Fate.CORRUPT)
            self.remember(ready, Fate.CORRUPT)
            if self.condemning is not None:
                self.condemning(ready)
            self.table.condemn(ready)
            self.table.set_flags(ready, VERIFY)  # whoever still loads it shall see it fail
            self.condemned += len(ready)
        return ready

    # --- blocks that are remembered and not held ---

    def seen(self, domain: Domain, entries: Entries) -> "BlockSnapshot":
        """Remembers blocks of a domain."""
        return BlockSnapshot(entries, self.table.generations(entries), self.slots_of(domain, entries)[0])

    def are_still(self, seen: "BlockSnapshot") -> npt.NDArray[np.bool_]:
        """Which of the blocks have not been removed since."""
        there: npt.NDArray[np.bool_] = self.table.owners(seen.slots) == seen.entries
        there[there] = self.table.generations(seen.entries[there]) == seen.generations[there]
        return there

    # --- pins and recency ---

    def unpin(self, domain: Domain, entries: Entries) -> None:
        """One pin less on each; the first becomes the most recent. Condemned blocks without pins go."""
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

    def touch(self, entries: Entries) -> None:
        """Makes blocks recent, the first most of all."""
        self.table.touch(tail_first(entries))
        self.used(entries)

    def used(self, entries: Entries) -> None:
        """Remembers when blocks were used."""
        self.used_at[entries.astype(np.intp)] = self.now  # numpy takes twice as long with other indexes

    def cool(self, domain: Domain, entries: Entries) -> None:
        """Makes those of a domain that may be evicted the next to be, the first of them last. For other
        domains they are as old then as what was to go before them."""
        entries = entries[self.table.pins(entries) == 0]
        oldest = self.table.victims(domain.domain, 1)
        self.table.cool(entries)
        if len(oldest):
            self.used_at[entries] = np.minimum(self.used_at[entries], self.used_at[oldest[0]])

    def mark_used(self, entries: Entries, slots: Slots) -> None:
        """Remembers when blocks and their extents were used."""
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
        """The domain of entries that are all of one."""
        return self.domains.by_id[int(self.table.domains(entries[:1])[0])]

    def sizes(self) -> tuple[SizeStatus, ...]:
        """Slots of every size that has some."""
        withheld = self.slots.withheld_by_size()
        return tuple(
            SizeStatus(slot_bytes, extents, total, free, withheld.get(slot_bytes, 0))
            for slot_bytes, extents, total, free in self.slots.sizes()
        )


def tail_first(entries: Entries) -> Entries:
    """The batch in the order in which the table has to see it, so that its head becomes the most recent."""
    return np.ascontiguousarray(entries[::-1])


def owned(owners: Entries) -> Entries:
    """The entries among owners of slots, each once, ascending."""
    return np.unique(owners[owners != NO_ENTRY])
