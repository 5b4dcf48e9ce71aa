"""The disks of one level below the host: what each of them holds, how it is, and what the flags of host
blocks say about it.

A block's disk in a level follows from its hash alone. A READY block of the host is flagged as clean exactly
if its disk has it READY and readable. That holds in every state of the disk, because the front keeps its
table.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtierd.core.actions import DiskJobKind
from kvtierd.core.blocks.blocks import READY, Blocks, BlockSnapshot
from kvtierd.core.blocks.domains import Domain
from kvtierd.core.blocks.eviction import Eviction
from kvtierd.core.blocks.history import Fate
from kvtierd.core.blocks.recovery import recover
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.blocks.table import U16, U32, BlockFlag, BlockTable
from kvtierd.core.blocks.tenants import Tenants
from kvtierd.core.disk.write_budget import WriteBudget
from kvtierd.core.ids import NO_ENTRY, DiskId, DiskJobId, Entries, Hashes, SpaceId
from kvtierd.core.state.entities import DiskJob, WorkerRecord
from kvtierd.core.state.rates import Rate
from kvtierd.core.state.transitions import DiskState, Entity, State
from kvtierd.core.status import DiskStatus, DiskTally
from kvtierd.core.stimuli import CoreDisks, PackFound, Recovered

Indexes = npt.NDArray[np.intp]
LATE = int(BlockFlag.LATE)
JOB_SLOTS_MAX = 4_096
"""Slots of one job, which has to fit into one packet."""
READS_MAX = 1_024
"""READ jobs of one disk under way at once, however small they are."""
WRITES_MAX = 256
"""WRITE jobs of one disk under way at once, however small they are."""
UNREADABLE_KEPT = 256
"""Batches of blocks that a disk could not read and that are kept until it is well again; beyond that, the
oldest are evicted."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The flags of host blocks that tell how they stand with one level."""

    clean: int
    """A disk of the level has the block."""
    queued: int
    """It is being written there."""
    spared: int
    """It is not to be written there."""


DISK_MARKS = Marks(int(BlockFlag.CLEAN), int(BlockFlag.QUEUED), int(BlockFlag.SPARED))
STORE_MARKS = Marks(int(BlockFlag.STORE_CLEAN), int(BlockFlag.STORE_QUEUED), int(BlockFlag.STORE_SPARED))


@dataclass(slots=True, eq=False)
class Scrub:
    """A walk over all blocks of a disk, extent by extent."""

    blocks: int
    """Blocks to look at, as counted at the start; once the scrub is over, those that were looked at."""
    done: int = 0
    extent: int = 0
    """The next extent."""
    found: deque[tuple[Domain, BlockSnapshot]] = field(default_factory=deque)
    """Blocks of the extents before it that are still to be looked at."""
    job: DiskJobId | None = None
    """The job that is under way, if any."""
    over: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Disk(Entity):
    """One disk, or the store."""

    state: State = DiskState.STARTING
    disk: DiskId
    level: "Level"
    """The level that it is part of."""
    blocks: Blocks
    eviction: Eviction
    tally: DiskTally
    budget: WriteBudget
    worker: WorkerRecord | None = None
    """The worker that lives, if any."""
    why: str = ""
    """What its latest problem was."""
    jobs: dict[DiskJobId, DiskJob] = field(default_factory=dict)
    """Jobs that are POSTED or LOST, oldest first."""
    counts: dict[DiskJobKind, int] = field(default_factory=lambda: dict.fromkeys(DiskJobKind, 0))
    """How many jobs there are of each kind."""
    bytes: dict[DiskJobKind, int] = field(default_factory=lambda: dict.fromkeys(DiskJobKind, 0))
    """How many bytes the jobs of each kind move."""
    rates: dict[DiskJobKind, Rate] = field(default_factory=lambda: {kind: Rate() for kind in DiskJobKind})
    """How fast jobs of each kind are. READ includes everything that was read, to be promoted or to be
    checked."""
    ended_s: float = 0.0
    """When the latest job ended."""
    errors_in_row: int = 0
    failed_s: float = 0.0
    """When the disk became FAILING, or when its last probe failed."""
    refusals_in_row: int = 0
    """How often a store has answered, and has not taken what it was given, since it took something."""
    refused_s: float = 0.0
    """When it did so last."""
    answered: bool = False
    """Whether the latest job to end, other than a check, succeeded, of the present worker."""
    probe: DiskJobId | None = None
    unreadable: deque[BlockSnapshot] = field(default_factory=deque)
    """Blocks that could not be read; they are flagged LATE."""
    scrub: Scrub | None = None
    finds: list[PackFound] = field(default_factory=list)
    """Of a store, what its worker has found, and waits to be answered, while it is not LIVE."""
    watched: dict[SpaceId, Domain] = field(default_factory=dict)
    """Of a store, the spaces that its worker looks for, and the host's domain of their blocks."""

    @property
    def live(self) -> bool:
        return self.state is DiskState.LIVE

    @property
    def shared(self) -> bool:
        """Whether it is a store that other hosts use as well. Its slots then have no bytes: they stand for
        blocks in packs, as many as are remembered here, and its worker knows which."""
        return self.level.shared

    @property
    def recovered(self) -> bool:
        return self.state is not DiskState.STARTING

    @property
    def refuses(self) -> bool:
        """Whether it takes nothing just now, so that it is given one block at a time, and rarely, until it
        takes that."""
        return self.refusals_in_row >= self.level.policy.errors_max

    @property
    def on_trial(self) -> bool:
        """Whether it is a store that is to be given one job at a time, until it answers. Blocks that are
        prepared for a store which then takes none of them have cost the host their copies and checksums."""
        return self.shared and not self.answered

    def fits(self, domain: Domain) -> bool:
        """Whether blocks of a domain of the host can be stored here at all."""
        sizes = domain.sizes
        per_extent = self.blocks.geometry.slots_per_extent
        fits = len(sizes) <= JOB_SLOTS_MAX and all(per_extent(size) for size in set(sizes))
        return fits and self.blocks.domains.has_room(domain.tenant, sizes)

    def find(self, space: SpaceId, hashes: Hashes) -> Entries:
        """Entries of the blocks that can be read; NO_ENTRY for the others."""
        entries, states = self.blocks.table.lookup(space, hashes)
        there = np.flatnonzero(states == READY)
        if self.unreadable and len(there):
            there = there[self.blocks.table.flags(entries[there]) & LATE == 0]
        found = np.full(len(hashes), NO_ENTRY, np.uint32)
        found[there] = entries[there]
        return found

    def status(self, now_s: float) -> DiskStatus:
        slots, scrub = self.blocks.slots, self.scrub
        sizes = self.blocks.sizes()
        return DiskStatus(
            disk=self.disk,
            state="refusing" if self.live and self.refuses else self.state.value,
            why=self.why,
            used_bytes=sum(size.used_bytes for size in sizes),
            capacity_bytes=slots.geometry.capacity_bytes,
            blocks=self.blocks.table.stats()["ready"],
            corrupt_slots=len(slots.corrupt),
            extents=slots.extents,
            extents_free=slots.extents_free,
            sizes=sizes,
            jobs=len(self.jobs),
            write_budget_bytes=self.budget.bytes_left(self.level.policy, now_s),
            writing_bytes=self.bytes[DiskJobKind.WRITE],
            reading_bytes=self.bytes[DiskJobKind.READ],
            read_bytes_per_s=self.rates[DiskJobKind.READ].bytes_per_s(now_s),
            write_bytes_per_s=self.rates[DiskJobKind.WRITE].bytes_per_s(now_s),
            scrub_blocks=0 if scrub is None else scrub.blocks,
            scrubbed_blocks=0 if scrub is None else scrub.done,
            scrubbing=scrub is not None and not scrub.over,
            counters=copy.copy(self.tally),
        )


class Level:
    """The disks of one level, in the order of their ids, or the store. The host's blocks are above them."""

    def __init__(
        self,
        host: Blocks,
        policy: CoreDisks,
        disks: Sequence[tuple[BlockTable, PoolGeometry]],
        tenants: Tenants,
        *,
        first: int = 0,
        shared: bool = False,
    ) -> None:
        """`disks` has one at least; their ids begin with `first`. `shared`: the only one is a store."""
        assert len(disks) == 1 or (disks and not shared), "there is one store"
        self.policy = policy
        self.shared = shared
        self.marks = STORE_MARKS if shared else DISK_MARKS
        self._host = host
        self.all: tuple[Disk, ...] = tuple(
            self._disk(DiskId(number), table, geometry, tenants)
            for number, (table, geometry) in enumerate(disks, first)
        )

    def _disk(self, number: DiskId, table: BlockTable, geometry: PoolGeometry, tenants: Tenants) -> Disk:
        host = self._host
        blocks, tally = Blocks(table, geometry, host.integrity, disk=number, host=host), DiskTally()
        disk = Disk(
            disk=number,
            level=self,
            blocks=blocks,
            eviction=Eviction(blocks, tally, tenants),
            tally=tally,
            budget=WriteBudget(geometry.capacity_bytes),
        )
        blocks.leaving = partial(self._disk_leaves, disk)
        return disk

    @property
    def any_live(self) -> bool:
        return any(disk.live for disk in self.all)

    def place(self, hashes: Hashes) -> Indexes:
        """The position among the level's disks of the one that each hash belongs to."""
        if len(self.all) == 1:
            return np.zeros(len(hashes), np.intp)
        words = hashes.view(np.uint64)
        mixed = words[:, 0] ^ words[:, 1] ^ words[:, 2] ^ words[:, 3]
        mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xFF51_AFD7_ED55_8CCD)
        mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xC4CE_B9FE_1A85_EC53)
        return ((mixed >> np.uint64(32)) % np.uint64(len(self.all))).astype(np.intp)

    def by_disk(self, hashes: Hashes) -> Iterator[tuple[Disk, Indexes]]:
        """Each disk, and the indexes of the hashes that belong to it. Disks without any are left out."""
        where = self.place(hashes)
        for position, disk in enumerate(self.all):
            own = np.flatnonzero(where == position)
            if len(own):
                yield disk, own

    def find(self, space: SpaceId, hashes: Hashes) -> Entries:
        """Entries, on their disks, of the blocks that LIVE disks can read; NO_ENTRY for the others."""
        if len(self.all) == 1 and self.all[0].live:
            return self.all[0].find(space, hashes)
        found = np.full(len(hashes), NO_ENTRY, np.uint32)
        for disk, own in self.by_disk(hashes):
            if disk.live:
                found[own] = disk.find(space, np.ascontiguousarray(hashes[own]))
        return found

    # --- what the host's flags say about disks ---

    def settle(self, space: SpaceId, entries: Entries) -> None:
        """Blocks of one space have become READY on the host: those that their disks have become clean. Copies
        that a disk could not read lately are evicted there, so that they are written anew."""
        hashes = self._host.table.hashes(entries)
        for disk, own in self.by_disk(hashes):
            table = disk.blocks.table
            copies, states = table.lookup(space, np.ascontiguousarray(hashes[own]))
            there = np.flatnonzero(states == READY)
            if disk.unreadable and (late := table.flags(copies[there]) & LATE != 0).any():
                evict(disk, copies[there][late])
                there = there[~late]
            self._host.table.set_flags(entries[own[there]], self.marks.clean)

    def written(self, disk: Disk, entries: Entries) -> None:
        """Blocks have become READY, or readable, on a disk: where the host has them, they become clean."""
        self._on_host(disk, entries, self._host.table.set_flags)

    def unwritten(self, disk: Disk, entries: Entries) -> None:
        """Blocks are leaving a disk, or cannot be read there: where the host has them, they are not clean any
        more."""
        self._on_host(disk, entries, self._host.table.clear_flags)

    def _on_host(self, disk: Disk, entries: Entries, mark: Callable[[Entries, int], None]) -> None:
        table, host = disk.blocks.table, self._host.table
        hashes = table.hashes(entries)
        for space, own in by_space(table.spaces(entries)):
            there, states = host.lookup(space, np.ascontiguousarray(hashes[own]))
            mark(there[states == READY], self.marks.clean)

    def _disk_leaves(self, disk: Disk, entries: Entries, fate: Fate) -> None:
        self.unwritten(disk, entries)

    def host_evicts(self, entries: Entries, flags: U16) -> None:
        """Blocks of one domain are being evicted from the host: the copies that disks have of them become
        recent there."""
        table, clean = self._host.table, entries[flags & self.marks.clean != 0]
        if len(clean) == 0:
            return
        hashes = table.hashes(clean)
        for space, of_space in by_space(table.spaces(clean)):
            for disk, own in self.by_disk(np.ascontiguousarray(hashes[of_space])):
                copies, _ = disk.blocks.table.lookup(space, np.ascontiguousarray(hashes[of_space[own]]))
                disk.blocks.table.touch(copies)
                domain = disk.blocks.domain_of(copies)
                disk.blocks.mark_used(copies, disk.blocks.slots_of(domain, copies))

    # --- what disks cannot read ---

    def unreadable(self, disk: Disk, domain: Domain, entries: Entries) -> None:
        """READY blocks of a disk could not be read: lookups do not find them there until the disk is well
        again."""
        if len(entries) == 0:
            return
        disk.blocks.table.set_flags(entries, LATE)
        self.unwritten(disk, entries)
        disk.unreadable.append(disk.blocks.seen(domain, entries))
        if len(disk.unreadable) > UNREADABLE_KEPT:
            entries = _still_late(disk, disk.unreadable.popleft())
            evict(disk, entries[disk.blocks.table.pins(entries) == 0])

    def readable(self, disk: Disk) -> None:
        """The disk is well again, so everything that it could not read is tried again."""
        while disk.unreadable:
            entries = _still_late(disk, disk.unreadable.popleft())
            disk.blocks.table.clear_flags(entries, LATE)
            self.written(disk, entries)

    def forget_everything(self, disk: Disk) -> None:
        """Nobody knows any more where the blocks of a store are, but for those that are pinned."""
        for entries in self._everything(disk):
            evict(disk, entries[disk.blocks.table.pins(entries) == 0])

    # --- the start ---

    def recover(self, disk: Disk, found: Recovered) -> None:
        """Takes over what an earlier daemon left on a disk. Blocks that belong to another disk are freed,
        because nobody would look for them here."""
        assert len(found.quarantined) == 0, "nobody but its worker writes a disk's records"
        wanted = self.place(found.hashes) == self.all.index(disk) if len(found.hashes) else None
        recover(disk.blocks, found, wanted)
        for entries in self._everything(disk):
            self.written(disk, entries)

    def host_recovered(self) -> None:
        """The host's blocks have been taken over: those that disks have become clean."""
        for disk in self.all:
            for entries in self._everything(disk):
                self.written(disk, entries)

    def _everything(self, disk: Disk) -> Iterator[Entries]:
        """READY entries of a disk, space by space."""
        table = disk.blocks.table
        for space in self._host.spaces.names:
            if table.count(space):
                entries = table.entries_of(space)
                yield entries[table.states(entries) == READY]


def evict(disk: Disk, entries: Entries) -> None:
    """Removes READY, unpinned blocks from a disk. They may be of several domains."""
    for domain, chosen in disk.blocks.by_domain(entries):
        disk.blocks.evict(domain, chosen)
        disk.blocks.domains.forget_idle(domain)
    disk.tally.evicted_blocks += len(entries)


def by_space(spaces: U32) -> Iterator[tuple[SpaceId, Indexes]]:
    """Each space, and the indexes of the entries that are in it. There is nearly always just one."""
    if len(spaces) == 0:
        return
    if (spaces == spaces[0]).all():
        yield SpaceId(int(spaces[0])), np.arange(len(spaces))
        return
    for space in np.unique(spaces).tolist():
        yield SpaceId(space), np.flatnonzero(spaces == space)


def _still_late(disk: Disk, seen: BlockSnapshot) -> Entries:
    """The entries that are still the same blocks, and still flagged LATE."""
    table = disk.blocks.table
    entries = seen.entries[disk.blocks.are_still(seen)]
    late: Entries = entries[(table.states(entries) == READY) & (table.flags(entries) & LATE != 0)]
    return late
