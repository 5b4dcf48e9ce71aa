"""Arithmetic of the pool's extents and slots, and which of them are free."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvtierd.core.ids import PAGE_BYTES, Slots

RECORD_BYTES = 128


def pages_up(size: int) -> int:
    """`size` rounded up to whole pages, in bytes."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """Where the extents of a pool file lie. An extent is a header page, the records of its slots, and its
    slots."""

    extents: int
    extent_bytes: int
    first_extent_offset: int

    @property
    def slot_bytes_max(self) -> int:
        """The largest slot that fits an extent."""
        return self.extent_bytes - 2 * PAGE_BYTES

    @property
    def capacity_bytes(self) -> int:
        """All extents together, headers and records included."""
        return self.extents * self.extent_bytes

    def slots_per_extent(self, slot_bytes: int) -> int:
        """How many slots of this size an extent holds; 0 if not even one fits."""
        if not 0 < slot_bytes <= self.slot_bytes_max:
            return 0
        stride = pages_up(slot_bytes)
        count = (self.extent_bytes - PAGE_BYTES) // (stride + RECORD_BYTES)
        while PAGE_BYTES + pages_up(count * RECORD_BYTES) + count * stride > self.extent_bytes:
            count -= 1
        return count

    def taken_by(self, per_size: tuple[tuple[int, int], ...]) -> int:
        """The bytes that one block takes, including what is lost where slots do not fill their extents.
        `per_size` has a slot size, and how many of it the block has."""
        return _taken_by(self, per_size)

    def slots_of(self, extent: int, slot_bytes: int) -> Slots:
        """The slots of an extent that holds slots of this size, ascending."""
        if not 0 <= extent < self.extents:
            raise ValueError(f"extent {extent}: the pool has {self.extents}")
        count = self.slots_per_extent(slot_bytes)
        first = (
            self.first_extent_offset
            + extent * self.extent_bytes
            + PAGE_BYTES
            + pages_up(count * RECORD_BYTES)
        )
        step = pages_up(slot_bytes) // PAGE_BYTES
        return (np.arange(count, dtype=np.int64) * step + first // PAGE_BYTES).astype(np.uint32)

    def slots_at(
        self,
        extents: npt.NDArray[np.int64],
        slot_bytes: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> Slots:
        """The slot at each position of an extent that holds `counts` slots of `slot_bytes`; all arrays are
        parallel."""
        tables = -(-counts * RECORD_BYTES // PAGE_BYTES)
        firsts = (self.first_extent_offset + extents * self.extent_bytes) // PAGE_BYTES + 1 + tables
        return (firsts + positions * -(-slot_bytes // PAGE_BYTES)).astype(np.uint32)

    def extent_of(self, slots: Slots) -> npt.NDArray[np.uint32]:
        """The extent that each slot lies in."""
        # In pages, which fit the slots' own type: this is done for every batch.
        return (slots - self.first_extent_offset // PAGE_BYTES) // (self.extent_bytes // PAGE_BYTES)


class _Size:
    """Free slots of one size, as a stack in an array."""

    def __init__(self, slot_bytes: int, per_extent: int) -> None:
        self.slot_bytes = slot_bytes
        self.per_extent = per_extent
        self.slots = 0
        self.extents = 0
        self.free = 0
        self.stack = np.empty(0, np.uint32)


@lru_cache(1_024)
def _taken_by(geometry: PoolGeometry, per_size: tuple[tuple[int, int], ...]) -> int:
    return sum(
        per_block * -(-geometry.extent_bytes // geometry.slots_per_extent(slot_bytes))
        for slot_bytes, per_block in per_size
    )


class SlotAllocator:
    """Knows which slots are free, by size, and which extent holds slots of which size. It decides nothing
    about blocks.

    Every slot of an assigned extent is free, taken, quarantined or corrupt. Extents are used from the moment
    in which they have memory, which they get one after another.
    """

    def __init__(self, geometry: PoolGeometry, populated: int | None = None) -> None:
        """`populated`: how many extents, from the first on, have memory already; None for all."""
        self.geometry = geometry
        self.extents = geometry.extents if populated is None else populated
        """How many extents, from the first on, have memory."""
        self.extents_coming = geometry.extents - self.extents
        """How many more will get some."""
        self.extent_size = np.zeros(geometry.extents, np.int64)
        """Slot bytes of each extent; 0 for an extent that is assigned to no size."""
        self.extent_slots = np.zeros(geometry.extents, np.int64)
        """Number of slots in each extent."""
        self.used_at = np.zeros(geometry.extents, np.uint32)
        """When a slot of each extent was last stored to or loaded from, in the caller's unit."""
        self.quarantined: set[int] = set()
        """Slots that an earlier daemon's writers may still be writing."""
        self.corrupt: set[int] = set()
        """Slots that have failed a check and are never handed out again."""
        self._sizes: dict[int, _Size] = {}
        self._unassigned = list(range(self.extents - 1, -1, -1))

    @property
    def capacity_bytes(self) -> int:
        """All extents that have memory together, headers and records included. Whoever may have a fraction of
        the tier may have it of this."""
        return self.extents * self.geometry.extent_bytes

    @property
    def extents_free(self) -> int:
        return len(self._unassigned)

    def sizes(self) -> Iterator[tuple[int, int, int, int]]:
        """(slot bytes, extents, slots, free slots) of each size that has extents."""
        for size in self._sizes.values():
            yield size.slot_bytes, size.extents, size.slots, size.free

    def free(self, slot_bytes: int) -> int:
        """Number of free slots of a size."""
        size = self._sizes.get(slot_bytes)
        return 0 if size is None else size.free

    def take(self, slot_bytes: int, n: int) -> Slots:
        """Takes n free slots of a size. At least so many must be free."""
        size = self._sizes.get(slot_bytes)
        if n == 0 or size is None:
            assert n == 0, f"no slots of {slot_bytes} bytes"
            return np.empty(0, np.uint32)
        assert size.free >= n, f"{n} slots of {slot_bytes} bytes asked for, {size.free} free"
        size.free -= n
        return size.stack[size.free : size.free + n].copy()

    def give_back(self, slot_bytes: int, slots: Slots) -> None:
        """Frees slots of a size that were taken."""
        size = self._sizes[slot_bytes]
        end = size.free + len(slots)
        assert end <= size.slots, f"more than all slots of {slot_bytes} bytes are free"
        size.stack[size.free : end] = slots
        size.free = end

    # --- extents ---

    def populated(self, extents: int) -> None:
        """The first `extents` extents have memory now: no fewer than before."""
        assert self.extents <= extents <= self.extents + self.extents_coming, f"{extents} extents"
        # The last of the list is taken first.
        self._unassigned[:0] = range(extents - 1, self.extents - 1, -1)
        self.extents_coming -= extents - self.extents
        self.extents = extents

    def no_more(self) -> None:
        """No more extents will get memory."""
        self.extents_coming = 0

    def assign_free(self, slot_bytes: int, wanted: int) -> list[int]:
        """Assigns free extents to a size until it has `wanted` free slots, or no extent is left. Returns
        these extents."""
        assigned = []
        while self._unassigned and self.free(slot_bytes) < wanted:
            extent = self._unassigned.pop()
            slots = self.geometry.slots_of(extent, slot_bytes)
            self._assign(extent, slot_bytes)
            self.give_back(slot_bytes, slots[::-1])  # the first slot is taken first
            assigned.append(extent)
        return assigned

    def recover(self, extent: int, slot_bytes: int, taken: Slots, quarantined: Slots, corrupt: Slots) -> None:
        """Takes over an extent as it was found: `taken`, `quarantined` and `corrupt` are slots of it, and its
        others are free."""
        assert self.extent_size[extent] == 0, f"extent {extent} was recovered twice"
        slots = self.geometry.slots_of(extent, slot_bytes)
        assert np.isin(taken, slots).all()
        assert np.isin(quarantined, slots).all()
        assert np.isin(corrupt, slots).all()
        self._unassigned.remove(extent)
        self._assign(extent, slot_bytes)
        held = np.concatenate((taken, quarantined, corrupt))
        free = slots[~np.isin(slots, held)]
        assert len(free) + len(held) == len(slots)
        self.give_back(slot_bytes, free[::-1])
        self.quarantined.update(quarantined.tolist())
        self.corrupt.update(corrupt.tolist())

    def _assign(self, extent: int, slot_bytes: int) -> None:
        size = self._sizes.get(slot_bytes)
        if size is None:
            size = self._sizes[slot_bytes] = _Size(slot_bytes, self.geometry.slots_per_extent(slot_bytes))
        self.extent_size[extent] = slot_bytes
        self.extent_slots[extent] = size.per_extent
        self.used_at[extent] = 0
        size.extents += 1
        size.slots += size.per_extent
        if len(size.stack) < size.slots:
            grown = np.empty(max(size.slots, 2 * len(size.stack)), np.uint32)
            grown[: size.free] = size.stack[: size.free]
            size.stack = grown

    def free_in(self, extent: int) -> int:
        """Free slots of an assigned extent."""
        size = self._sizes[int(self.extent_size[extent])]
        return int(np.count_nonzero(self.geometry.extent_of(size.stack[: size.free]) == extent))

    def retire(self, extent: int) -> None:
        """Takes an extent from its size. All of its slots must be free."""
        size = self._sizes[int(self.extent_size[extent])]
        stack = size.stack[: size.free]
        kept = stack[self.geometry.extent_of(stack) != extent]
        assert size.free - len(kept) == size.per_extent, f"extent {extent} has slots that are not free"
        size.stack[: len(kept)] = kept
        size.free = len(kept)
        size.slots -= size.per_extent
        size.extents -= 1
        if size.extents == 0:
            del self._sizes[size.slot_bytes]
        self.extent_size[extent] = 0
        self.extent_slots[extent] = 0
        self._unassigned.append(extent)

    def retire_empty(self, keep: Collection[int]) -> bool:
        """Retires all extents without a taken slot, except those of the sizes to keep. True if there were
        any."""
        found = False
        for size in list(self._sizes.values()):
            if size.slot_bytes in keep or size.free < size.per_extent:
                continue
            counts = np.bincount(
                self.geometry.extent_of(size.stack[: size.free]), minlength=self.geometry.extents
            )
            for extent in np.flatnonzero(counts == size.per_extent).tolist():
                self.retire(extent)
                found = True
        return found

    # --- quarantine ---

    def set_aside(self, slots: Slots) -> None:
        """Marks taken slots that have failed a check, so that they are never free again."""
        self.corrupt.update(slots.tolist())

    def withheld_by_size(self) -> dict[int, int]:
        """Number of quarantined and corrupt slots of each size that has some."""
        withheld = self.quarantined | self.corrupt
        slots = np.fromiter(withheld, np.uint32, len(withheld))
        sizes, counts = np.unique(self.extent_size[self.geometry.extent_of(slots)], return_counts=True)
        return dict(zip(sizes.tolist(), counts.tolist(), strict=True))

    def release_quarantined(self, slots: Slots) -> Slots:
        """Frees those of the slots that are quarantined; returns them."""
        proven = sorted(self.quarantined.intersection(slots.tolist()))
        self.quarantined.difference_update(proven)
        freed = np.array(proven, np.uint32)
        for slot_bytes in np.unique(self.extent_size[self.geometry.extent_of(freed)]).tolist():
            self.give_back(slot_bytes, freed[self.extent_size[self.geometry.extent_of(freed)] == slot_bytes])
        return freed
