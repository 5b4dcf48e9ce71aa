"""Where the blocks are that a store's slots stand for."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PoolRecords

from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.tiers.store.packed import Shelf

U32 = npt.NDArray[np.uint32]
NOWHERE = 0
"""The number of no pack."""


@dataclass(frozen=True, slots=True)
class KnownPack:
    """A pack in which there is a block that a slot stands for."""

    shelf: Shelf
    name: str


@dataclass(slots=True, eq=False)
class _Extent:
    """The slots of one extent, which have one size."""

    slot_bytes: int
    stride: int
    first: int
    """Where in the file the first slot would be."""
    packs: U32
    records: U32


class Locations:
    """For each slot its pack, and its record there. A slot that was given to another block keeps what it had
    until it is set anew; who reads it compares key and checksum."""

    def __init__(self, image: PoolRecords, geometry: PoolGeometry) -> None:
        self._image = image
        self._geometry = geometry
        self._extents: dict[int, _Extent] = {}
        self._packs: dict[int, KnownPack] = {}
        self._uses: Counter[int] = Counter()
        self._next = NOWHERE + 1

    @property
    def packs(self) -> int:
        """How many packs are known."""
        return len(self._packs)

    def pack(self, number: int) -> KnownPack | None:
        """The pack of that number; None if no slot stands for a block of it any more."""
        return self._packs.get(number)

    def set(self, slots: U32, pack: KnownPack, records: U32) -> None:
        """These slots, of which there is one at least, stand for these records of a pack."""
        number = self._next
        self._next = self._next % ((1 << 32) - 1) + 1
        while self._next in self._packs:
            self._next = self._next % ((1 << 32) - 1) + 1
        self._packs[number] = pack
        for extent, own, at in self._by_extent(slots):
            for old, count in zip(*np.unique(extent.packs[at], return_counts=True), strict=True):
                self._left(int(old), int(count))
            extent.packs[at], extent.records[at] = number, records[own]
        self._uses[number] += len(slots)

    def of(self, slots: U32) -> tuple[U32, U32]:
        """The number of each slot's pack, or NOWHERE, and its record there."""
        packs, records = np.zeros(len(slots), np.uint32), np.zeros(len(slots), np.uint32)
        for extent, own, at in self._by_extent(slots):
            packs[own], records[own] = extent.packs[at], extent.records[at]
        return packs, records

    def _left(self, number: int, count: int) -> None:
        """So many slots do not stand for blocks of a pack any more."""
        if number == NOWHERE:
            return
        self._uses[number] -= count
        if not self._uses[number]:
            del self._uses[number], self._packs[number]

    def _by_extent(self, slots: U32) -> list[tuple[_Extent, npt.NDArray[np.intp], npt.NDArray[np.int64]]]:
        """For each extent that is in use, which of the slots lie there, and at which places."""
        where = self._geometry.extent_of(slots)
        found = []
        for number in np.unique(where).tolist():
            extent = self._extent(number)
            if extent is not None:
                own = np.flatnonzero(where == number)
                at = (slots[own].astype(np.int64) * PAGE_BYTES - extent.first) // extent.stride
                found.append((extent, own, at))
        return found

    def _extent(self, number: int) -> _Extent | None:
        info = self._image.extent_info(number)
        if info is None:
            return None
        slot_bytes, stride, count, first = info
        extent = self._extents.get(number)
        if extent is None or extent.slot_bytes != slot_bytes:
            if extent is not None:
                for old, uses in zip(*np.unique(extent.packs, return_counts=True), strict=True):
                    self._left(int(old), int(uses))
            empty = np.zeros(count, np.uint32)
            extent = self._extents[number] = _Extent(slot_bytes, stride, first, empty, empty.copy())
        return extent
