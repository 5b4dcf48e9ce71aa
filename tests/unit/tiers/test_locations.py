"""Where the blocks are that a store's slots stand for."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kvtier_kernels import PoolRecords, format_pool
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.memory.pool_file import config_digest, file_bytes
from kvtierd.tiers.disk.image import disk_geometry
from kvtierd.tiers.store.packed import Shelf
from kvtierd.workers.store.locations import NOWHERE, KnownPack, Locations

GEOMETRY = disk_geometry(6 << 20, 1 << 20)
SHELF = cast(Shelf, None)
"""Nobody asks it anything here."""


def image(*sizes: int) -> PoolRecords:
    """With an extent for each size of slots."""
    memory = np.zeros(file_bytes(GEOMETRY), np.uint8)
    format_pool(memory, GEOMETRY.extent_bytes, GEOMETRY.extents, config_digest(GEOMETRY))
    records = PoolRecords(memory)
    for extent, size in enumerate(sizes):
        records.format_extent(extent, size)
    return records


def slots(extent: int, size: int) -> Any:
    return GEOMETRY.slots_of(extent, size)


def test_a_slot_has_its_pack_and_record_until_it_is_set_anew() -> None:
    places = Locations(image(4 * PAGE_BYTES, 10 * PAGE_BYTES), GEOMETRY)
    small, large = slots(0, 4 * PAGE_BYTES)[:4], slots(1, 10 * PAGE_BYTES)[:3]
    both = np.concatenate([small, large])
    places.set(both, KnownPack(SHELF, "one"), np.arange(7, dtype=np.uint32) + 20)
    numbers, records = places.of(both[::-1].copy())
    assert records.tolist() == [26, 25, 24, 23, 22, 21, 20]
    assert {places.pack(number) for number in numbers.tolist()} == {KnownPack(SHELF, "one")}
    places.set(both[:6], KnownPack(SHELF, "two"), np.arange(6, dtype=np.uint32))
    assert places.packs == 2
    places.set(both[6:], KnownPack(SHELF, "three"), np.zeros(1, np.uint32))
    assert places.packs == 2, "nobody stands for a block of the first any more"
    assert places.pack(int(numbers[0])) is None


def test_what_was_never_set_and_what_is_no_slot_is_nowhere() -> None:
    places = Locations(image(4 * PAGE_BYTES), GEOMETRY)
    never, unused = slots(0, 4 * PAGE_BYTES)[:2], slots(2, 4 * PAGE_BYTES)[:2]
    numbers, _ = places.of(np.concatenate([never, unused]))
    assert numbers.tolist() == [NOWHERE] * 4
    assert places.pack(NOWHERE) is None


def test_an_extent_of_another_size_begins_anew() -> None:
    records = image(4 * PAGE_BYTES)
    places = Locations(records, GEOMETRY)
    places.set(slots(0, 4 * PAGE_BYTES)[:3], KnownPack(SHELF, "one"), np.zeros(3, np.uint32))
    records.format_extent(0, 9 * PAGE_BYTES)
    numbers, _ = places.of(slots(0, 9 * PAGE_BYTES)[:3])
    assert numbers.tolist() == [NOWHERE] * 3
    assert places.packs == 0


@given(st.lists(st.tuples(st.sets(st.integers(0, 29), min_size=1), st.integers(0, 1000)), max_size=12))
def test_beside_a_dictionary(steps: list[tuple[set[int], int]]) -> None:
    places, plain = Locations(image(8 * PAGE_BYTES, 8 * PAGE_BYTES), GEOMETRY), dict[int, tuple[str, int]]()
    every = np.concatenate([slots(extent, 8 * PAGE_BYTES)[:15] for extent in (0, 1)])
    for number, (which, first) in enumerate(steps):
        chosen = np.array(sorted(which))
        places.set(
            every[chosen], KnownPack(SHELF, str(number)), np.arange(len(chosen), dtype=np.uint32) + first
        )
        plain |= {place: (str(number), first + at) for at, place in enumerate(chosen.tolist())}
    numbers, records = places.of(every)
    for place, (number, record) in enumerate(zip(numbers.tolist(), records.tolist(), strict=True)):
        pack = places.pack(number)
        assert (None if pack is None else (pack.name, record)) == plain.get(place)
    assert places.packs == len({name for name, _ in plain.values()})
