"""Arithmetic of extents and slots, and the allocator's bookkeeping."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtierd.core.blocks.slots import RECORD_BYTES, PoolGeometry, SlotAllocator, pages_up
from kvtierd.core.ids import PAGE_BYTES

from tests.oracles.free_slots import free_slots
from tests.unit.core.host import GEOMETRY


@given(
    extent_bytes=st.sampled_from([1 << power for power in range(20, 27)]),
    slot_bytes=st.integers(1, 1 << 26),
    extent=st.integers(0, 7),
)
def test_slots_lie_behind_their_records_and_inside_their_extent(
    extent_bytes: int, slot_bytes: int, extent: int
) -> None:
    geometry = PoolGeometry(8, extent_bytes, 2 << 20)
    count = geometry.slots_per_extent(slot_bytes)
    assert (count > 0) == (slot_bytes <= geometry.slot_bytes_max)
    slots = geometry.slots_of(extent, slot_bytes).astype(np.int64) * PAGE_BYTES
    assert len(slots) == count
    if count == 0:
        return
    start = geometry.first_extent_offset + extent * extent_bytes
    stride = pages_up(slot_bytes)
    assert slots[0] - start >= PAGE_BYTES + count * RECORD_BYTES
    assert (np.diff(slots) == stride).all()
    assert slots[-1] + stride <= start + extent_bytes
    assert (geometry.extent_of(geometry.slots_of(extent, slot_bytes)) == extent).all()
    one_more = PAGE_BYTES + pages_up((count + 1) * RECORD_BYTES) + (count + 1) * stride
    assert one_more > extent_bytes, "another one would fit"


class TestAllocator:
    def test_takes_slots_of_one_extent_in_ascending_order_first(self) -> None:
        slots = SlotAllocator(GEOMETRY)
        assert slots.assign_free(4096, 3) == [0]
        taken = [slots.take(4096, 1)[0] for _ in range(3)]
        assert taken == GEOMETRY.slots_of(0, 4096)[:3].tolist()

    def test_assigns_as_many_extents_as_needed_and_no_more_than_there_are(self) -> None:
        slots = SlotAllocator(GEOMETRY)
        assert slots.assign_free(4096, 15) == [0, 1]
        assert slots.assign_free(4096, 1000) == [2, 3]
        assert slots.free(4096) == 56

    def test_hands_out_extents_as_they_get_memory_the_first_first(self) -> None:
        slots = SlotAllocator(GEOMETRY, populated=1)
        assert (slots.capacity_bytes, slots.extents_free) == (GEOMETRY.extent_bytes, 1)
        assert slots.assign_free(4096, 1000) == [0]
        slots.populated(3)
        assert (slots.extents, slots.extents_free, slots.extents_coming) == (3, 2, 1)
        assert slots.assign_free(4096, 1000) == [1, 2]
        with pytest.raises(AssertionError):
            slots.populated(2)
        slots.no_more()
        with pytest.raises(AssertionError):
            slots.populated(4)
        slots.retire(1)
        assert slots.assign_free(8192, 1000) == [1]

    def test_never_hands_out_a_slot_twice(self) -> None:
        slots = SlotAllocator(GEOMETRY)
        slots.assign_free(4096, 20)
        first = slots.take(4096, 20)
        slots.give_back(4096, first[5:10])
        second = slots.take(4096, 5)
        assert set(second.tolist()) == set(first[5:10].tolist())

    def test_does_not_take_back_more_than_there_is(self) -> None:
        slots = SlotAllocator(GEOMETRY)
        slots.assign_free(4096, 1)
        with pytest.raises(AssertionError):
            slots.give_back(4096, np.array([1], np.uint32))
        with pytest.raises(AssertionError):
            slots.take(4096, 15)
        with pytest.raises(AssertionError):
            slots.take(8192, 1)

    def test_retires_only_extents_that_are_wholly_free(self) -> None:
        slots = SlotAllocator(GEOMETRY)
        slots.assign_free(4096, 28)
        taken = slots.take(4096, 14)
        used, free = sorted({0, 1}, key=lambda extent: -int((GEOMETRY.extent_of(taken) == extent).sum()))
        with pytest.raises(AssertionError):
            slots.retire(used)
        slots.retire(free)
        assert (slots.free(4096), slots.extents_free) == (0, 3)
        slots.give_back(4096, taken)
        assert not slots.retire_empty(keep=[4096])
        assert slots.retire_empty(keep=[8192])
        assert (list(slots.sizes()), slots.extents_free) == ([], 4)

    def test_a_retired_extent_serves_another_size(self) -> None:
        slots = SlotAllocator(GEOMETRY)
        slots.assign_free(4096, 56)
        slots.retire(2)
        assert slots.assign_free(8192, 1) == [2]
        assert free_slots(slots, 8192).tolist() == GEOMETRY.slots_of(2, 8192)[::-1].tolist()
        assert 2 not in GEOMETRY.extent_of(free_slots(slots, 4096))

    def test_recovered_extents_have_their_taken_and_withheld_slots(self) -> None:
        slots = SlotAllocator(GEOMETRY)
        everything = GEOMETRY.slots_of(1, 4096)
        slots.recover(1, 4096, everything[:3], everything[3:5], everything[5:6])
        assert set(free_slots(slots, 4096).tolist()) == set(everything[6:].tolist())
        assert slots.withheld_by_size() == {4096: 3}
        freed = slots.release_quarantined(everything[[0, 1, 2, 3, 5]])
        assert freed.tolist() == [everything[3]]
        assert slots.free(4096) == 9
