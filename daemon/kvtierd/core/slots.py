"""Arithmetic of the pool's extents and slots."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtierd.core.ids import PAGE_BYTES, Slots

RECORD_BYTES = 128


def pages_up(size: int) -> int:
    """`size` rounded up to whole pages, in bytes."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """Where the extents of a pool file lie. An extent: a header page, its slots' records, its slots."""

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

    def extent_of(self, slots: Slots) -> npt.NDArray[np.int64]:
        """The extent that each slot lies in."""
        return (slots.astype(np.int64) * PAGE_BYTES - self.first_extent_offset) // self.extent_bytes
