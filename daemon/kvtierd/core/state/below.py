"""Everything below the host: the disks, and under them the store, each a level of its own.

Levels know nothing of each other: each writes what it is to have from the host, and what any of them has is
read into the host. So a block may be in several. Lookups take it from the first that has it.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from kvtierd.core.blocks.blocks import Blocks
from kvtierd.core.blocks.history import Fate
from kvtierd.core.blocks.table import BlockFlag, BlockTable
from kvtierd.core.ids import NO_ENTRY, Entries, Hashes, SpaceId
from kvtierd.core.state.disks import DISK_MARKS, STORE_MARKS, Disk, Indexes, Level
from kvtierd.core.status import Tally

STORE_COPY = np.uint32(1 << 31)
"""What is added to an entry of the store, to tell it from one of a disk: tables are smaller than that."""
_UNLOST = int(BlockFlag.HOST_ONLY) | sum(marks.clean | marks.spared for marks in (DISK_MARKS, STORE_MARKS))
"""Flags of host blocks that are not lost when they are evicted, or that nothing below was to have."""


class Below:
    """All levels, and the host's blocks above them."""

    def __init__(self, host: Blocks, tally: Tally, levels: Sequence[Level]) -> None:
        """`levels` are in the order in which they are asked; a store comes last."""
        self.levels = tuple(levels)
        self.all: tuple[Disk, ...] = tuple(disk for level in levels for disk in level.all)
        """All disks and the store, in the order of their ids."""
        self.late_jobs = 0
        """Reads on their way whose blocks are flagged LATE on the host."""
        self._host = host
        self._tally = tally
        if self.all:
            host.leaving = self._host_leaves

    def __bool__(self) -> bool:
        """Whether there is anything below."""
        return bool(self.all)

    @property
    def store(self) -> Disk | None:
        """The store, if there is one."""
        return self.all[-1] if self.all and self.all[-1].shared else None

    @property
    def tables(self) -> list[BlockTable]:
        """The block tables of all disks and of the store."""
        return [disk.blocks.table for disk in self.all]

    @property
    def any_live(self) -> bool:
        return any(level.any_live for level in self.levels)

    def begin(self) -> None:
        """A stimulus begins: all tiers share its time and its actions."""
        for disk in self.all:
            disk.blocks.now, disk.blocks.actions = self._host.now, self._host.actions

    def find(self, space: SpaceId, hashes: Hashes) -> Entries:
        """For each block the name of a copy that can be read, for `by_disk`; NO_ENTRY without one."""
        if len(self.levels) == 1:
            [level] = self.levels
            found = level.find(space, hashes)
            return _of_store(found) if level.shared else found
        found = np.full(len(hashes), NO_ENTRY, np.uint32)
        for level in self.levels:
            missing = np.flatnonzero(found == NO_ENTRY)
            if len(missing) and level.any_live:
                more = level.find(space, np.ascontiguousarray(hashes[missing]))
                found[missing] = _of_store(more) if level.shared else more
        return found

    def by_disk(self, hashes: Hashes, copies: Entries) -> Iterator[tuple[Disk, Indexes, Entries]]:
        """Each disk that has some of these copies, which `find` has named, their indexes, and their entries
        there."""
        in_store = copies >= STORE_COPY
        for level in self.levels:
            of_level = np.flatnonzero(in_store == level.shared)
            if len(of_level) == 0:
                continue
            for disk, own in level.by_disk(np.ascontiguousarray(hashes[of_level])):
                indexes = of_level[own]
                yield disk, indexes, copies[indexes] & ~STORE_COPY

    def settle(self, space: SpaceId, entries: Entries, *, but: Level | None = None) -> None:
        """Has `Level.settle` done by all levels, but for one."""
        for level in self.levels:
            if level is not but:
                level.settle(space, entries)

    def _host_leaves(self, entries: Entries, fate: Fate) -> None:
        if fate is not Fate.EVICTED:
            return
        flags = self._host.table.flags(entries)
        self._tally.evicted_unwritten_blocks += int(np.count_nonzero(flags & _UNLOST == 0))
        for level in self.levels:
            level.host_evicts(entries, flags)


def _of_store(found: Entries) -> Entries:
    named: Entries = np.where(found == NO_ENTRY, found, found | STORE_COPY)
    return named
