"""What is known of a store: which block is in which of its packs. A lookup asks this, and nobody else."""

from dataclasses import dataclass
from typing import Final, NewType

import numpy as np
import numpy.typing as npt
from kvtier_kernels import BlockTable

from kvtierd.core.ids import NO_ENTRY, Entries, Hashes, SpaceId

PackNumber = NewType("PackNumber", int)
NO_PACK: Final = PackNumber(0)
DOMAIN: Final = 1
"""All blocks go by one recency, because none of them takes room here but for its entry."""
_NO_PAGES: Final = 2
"""The fewest that a table may have; nothing here has slots."""

U32 = npt.NDArray[np.uint32]


@dataclass(slots=True)
class KnownPack:
    """One object of a store."""

    space: SpaceId
    name: str
    blocks: int
    """How many blocks of the catalogue are in it."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where blocks are: for each the number of its pack, and of its first record there."""

    packs: U32
    records: U32


class Catalogue:
    """The blocks of a store that are known here, as many as there is room for: what was found or added least
    recently goes first. Nothing in it is evidence: a pack may be gone, or not have what it had."""

    def __init__(self, blocks_max: int, seed: int | None = None) -> None:
        self._blocks_max = blocks_max
        self._table = BlockTable(blocks_max, _NO_PAGES, seed=seed)
        self._pack_of = np.zeros(blocks_max, np.uint32)
        self._record_of = np.zeros(blocks_max, np.uint32)
        self._packs: dict[PackNumber, KnownPack] = {}
        self._numbers: dict[tuple[SpaceId, str], PackNumber] = {}
        self._next = PackNumber(NO_PACK + 1)
        self._blocks = 0

    def __len__(self) -> int:
        """How many blocks are known."""
        return self._blocks

    @property
    def packs(self) -> int:
        """How many packs have at least one of them."""
        return len(self._packs)

    def knows(self, space: SpaceId, name: str) -> bool:
        """Whether a pack has blocks here."""
        return (space, name) in self._numbers

    def pack(self, number: int) -> KnownPack | None:
        """The pack of that number, unless all of its blocks have gone from here."""
        return self._packs.get(PackNumber(number))

    def find(self, space: SpaceId, hashes: Hashes) -> Entries:
        """For each block its entry, or NO_ENTRY. Valid until the catalogue changes."""
        entries, _ = self._table.lookup(space, hashes)
        return entries

    def use(self, entries: Entries) -> None:
        """These blocks were found; the head of their prompt comes first, and goes last."""
        self._table.touch(np.ascontiguousarray(entries[::-1]))

    def places(self, entries: Entries) -> Places:
        """Where blocks are."""
        return Places(self._pack_of[entries], self._record_of[entries])

    def add(self, space: SpaceId, name: str, hashes: Hashes, records: U32) -> int:
        """Takes note of a pack with these blocks, in the order of their prompts. A block that is known in
        another pack is in this one from now on, as the newer pack stays for longer. Blocks for which there is
        no room push out what was found least recently; of more than there can be, the first are kept. Returns
        how many of its blocks are known."""
        hashes, records = hashes[: self._blocks_max], records[: self._blocks_max]
        known, _ = self._table.lookup(space, hashes)
        old = known[known != NO_ENTRY]
        self._table.touch(np.ascontiguousarray(old[::-1]))  # so that they are not pushed out for the others
        new = np.ascontiguousarray(hashes[known == NO_ENTRY])
        self._make_room(len(new))
        entries, created = self._table.insert(space, DOMAIN, new)
        self._table.commit(np.ascontiguousarray(entries[created == 1]))
        self._blocks += int(created.sum())
        number = self._number(space, name)
        whole, _ = self._table.lookup(space, hashes)
        self._left(self._pack_of[old])
        whole, first = np.unique(whole, return_index=True)
        self._pack_of[whole], self._record_of[whole] = number, records[first]
        self._packs[number].blocks += len(whole)
        self._drop_empty((number,))
        return len(whole)

    def gone(self, number: int) -> int:
        """A pack is not there any more. Returns how many blocks were lost with it."""
        pack = self._packs.get(PackNumber(number))
        if pack is None:
            return 0
        entries = np.flatnonzero(self._pack_of == number).astype(np.uint32)
        self._remove(entries)
        return len(entries)

    def lost(self, entries: Entries) -> None:
        """These blocks are not what they should be: nobody is told of them again."""
        self._remove(np.unique(entries))

    def _number(self, space: SpaceId, name: str) -> PackNumber:
        number = self._numbers.get((space, name))
        if number is None:
            number = self._next
            self._next = PackNumber(number % ((1 << 32) - 1) + 1)
            while self._next in self._packs:
                self._next = PackNumber(self._next % ((1 << 32) - 1) + 1)
            self._numbers[space, name] = number
            self._packs[number] = KnownPack(space, name, 0)
        return number

    def _make_room(self, blocks: int) -> None:
        missing = self._blocks + blocks - self._blocks_max
        if missing > 0:
            self._remove(self._table.victims(DOMAIN, missing))

    def _remove(self, entries: Entries) -> None:
        if not len(entries):
            return
        packs = self._pack_of[entries]
        self._pack_of[entries] = NO_PACK
        self._table.begin_evict(entries)
        self._table.remove(entries)
        self._blocks -= len(entries)
        self._left(packs)

    def _left(self, packs: U32) -> None:
        """So many blocks as there are numbers have left these packs."""
        numbers, counts = np.unique(packs, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self._packs[PackNumber(number)].blocks -= count
        self._drop_empty(tuple(numbers.tolist()))

    def _drop_empty(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            pack = self._packs[PackNumber(number)]
            if not pack.blocks:
                del self._packs[PackNumber(number)]
                del self._numbers[pack.space, pack.name]
