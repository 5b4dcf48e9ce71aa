"""PoolRecords across two pools: what a slot may take over from the record of the same block elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_kernels import PoolRecords

from tests.unit.memory.plain_pool import (
    HEADER_AREA,
    MIB,
    PAGE,
    hashes,
    new_pool,
    read_extent,
    slots_of,
    sum_data,
    u64,
)

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
SLOT_BYTES = 5000
METHODS = ["match", "adopt", "accept"]
DATA_CHECKSUM = 96
"""Its place in a record."""


@dataclass(frozen=True)
class Key:
    """What a record says of its block."""

    name: int = 1
    namespace: bytes = b"a namespace of 16"[:16]
    group: int = 2
    shard: int = 1
    world: int = 4
    data_bytes: int = SLOT_BYTES


@dataclass
class Pool:
    """A pool whose extent 1 is in use."""

    slot_bytes: int = SLOT_BYTES

    def __post_init__(self) -> None:
        self.bytes = new_pool()
        self.records = PoolRecords(self.bytes)
        self.records.format_extent(1, self.slot_bytes)
        self.slots = slots_of(self.records, 1)

    def open(self, slots: U32, key: Key, *, boot_nonce: int = 5) -> U64:
        names = hashes(*range(key.name, key.name + len(slots)))
        return self.records.open(
            slots, 3, boot_nonce, 7, key.namespace, key.group, key.shard, key.world, names, key.data_bytes
        )

    def fill(self, slots: U32, *, seed: int, at: int = 0, data_bytes: int = SLOT_BYTES) -> None:
        """New data from byte `at` of each slot on."""
        random = np.random.default_rng(seed)
        for slot in slots.astype(int).tolist():
            start = slot * PAGE + at
            self.bytes[start : start + data_bytes] = random.integers(0, 256, data_bytes)

    def store(self, slots: U32, key: Key, *, seed: int = 1) -> U64:
        generations = self.open(slots, key)
        self.fill(slots, seed=seed, data_bytes=key.data_bytes)
        sums = sum_data(self.bytes, slots, key.data_bytes)
        self.records.set_data_checksums(slots, generations, sums)
        self.records.commit(slots, np.arange(len(slots), dtype=np.uint64))
        return generations

    def record_offset(self, slot: int) -> int:
        """Where in the file the record of a slot begins, by the format alone."""
        index = (slot * PAGE - HEADER_AREA) // MIB
        extent = read_extent(self.bytes, index)
        assert extent is not None
        base = HEADER_AREA + index * MIB
        return base + PAGE + (slot * PAGE - base - extent.data_offset) // extent.stride * 128


def ask(
    here: Pool, method: str, slots: U32, generations: U64, there: PoolRecords, others: U32, expected: U64
) -> U8:
    """What `here` says; to `accept` are given the sums of what is in the slots, as far as that are slots."""
    rows = slots, generations, there, others, expected
    if method != "accept":
        found: U8 = getattr(here.records, method)(*rows)
        return found
    sums = np.zeros(len(slots), np.uint64)
    for i, slot in enumerate(slots.astype(int).tolist()):
        if (slot + 2) * PAGE <= len(here.bytes):
            sums[i] = sum_data(here.bytes, slots[i : i + 1], SLOT_BYTES)[0]
    return here.records.accept(*rows, sums)


@dataclass
class Pair:
    """Blocks READY in one pool (`there`), being written in another (`here`) with slots of another size."""

    here: Pool
    there: Pool
    slots: U32
    generations: U64
    source_slots: U32
    source_generations: U64

    @staticmethod
    def of(count: int) -> Pair:
        here, there = Pool(slot_bytes=9000), Pool()
        source_slots = there.slots[4 : 4 + count][::-1].copy()
        source_generations = there.store(source_slots, Key())
        slots = here.slots[1 : 1 + count].copy()
        pair = Pair(here, there, slots, here.open(slots, Key()), source_slots, source_generations)
        for at, to in zip(source_slots.astype(int).tolist(), slots.astype(int).tolist(), strict=True):
            here.bytes[to * PAGE : to * PAGE + SLOT_BYTES] = there.bytes[at * PAGE : at * PAGE + SLOT_BYTES]
        return pair

    def call(self, method: str) -> list[int]:
        rows = self.slots, self.generations, self.there.records, self.source_slots, self.source_generations
        found = ask(self.here, method, *rows)
        assert found.dtype == np.uint8
        return [int(result) for result in found]

    def set_here(self, i: int, key: Key) -> None:
        """Opens slot i anew, for another block."""
        slot = self.slots[i : i + 1]
        self.here.records.free(slot)
        self.generations[i] = self.here.open(slot, key)[0]

    def store_anew_there(self, i: int) -> None:
        """The very same block, so that nothing but its generation is new."""
        slot = self.source_slots[i : i + 1]
        self.there.records.free(slot)
        self.there.store(slot, replace(KEY, name=KEY.name + i))

    def put(self, array: U32 | U64, i: int, value: int) -> None:
        array[i] = value

    def rot_here(self, i: int, byte: int) -> None:
        self.here.bytes[int(self.slots[i]) * PAGE + byte] ^= 0x80

    def flip(self, pool: Pool, slot: int, byte: int) -> None:
        """Changes a bit of the slot's record."""
        pool.bytes[pool.record_offset(int(slot)) + byte] ^= 1


# --- what happens to a row ---------------------------------------------------------------------------------

KEY = Key()
# Each makes row i one of these; whatever it is, the other rows do not notice.
HARMLESS: dict[str, Callable[[Pair, int], object]] = {
    "sound": lambda pair, i: None,
    "other bytes behind the data": lambda pair, i: pair.here.fill(
        pair.slots[i : i + 1], at=SLOT_BYTES, seed=9
    ),
    "data rotted there after the copy": lambda pair, i: pair.there.fill(pair.source_slots[i : i + 1], seed=9),
}
BREAKING: dict[str, Callable[[Pair, int], object]] = {
    "stale generation here": lambda pair, i: pair.put(pair.generations, i, pair.generations[i] - 1),
    "stale generation there": lambda pair, i: pair.put(
        pair.source_generations, i, pair.source_generations[i] - 1
    ),
    "freed here": lambda pair, i: pair.here.records.free(pair.slots[i : i + 1]),
    "freed there": lambda pair, i: pair.there.records.free(pair.source_slots[i : i + 1]),
    "ready here": lambda pair, i: pair.here.records.commit(pair.slots[i : i + 1], u64(1)),
    "stored anew there": lambda pair, i: pair.store_anew_there(i),
    "no slot here": lambda pair, i: pair.put(pair.slots, i, pair.slots[i] + 1),
    "no slot there": lambda pair, i: pair.put(pair.source_slots, i, pair.source_slots[i] + 1),
    "header page here": lambda pair, i: pair.put(pair.slots, i, i),
    "page beyond the pool there": lambda pair, i: pair.put(pair.source_slots, i, 0xFFFF_FFFF),
    "other block": lambda pair, i: pair.set_here(i, replace(KEY, name=77)),
    "other namespace": lambda pair, i: pair.set_here(i, replace(KEY, name=1 + i, namespace=bytes(16))),
    "other group": lambda pair, i: pair.set_here(i, replace(KEY, name=1 + i, group=3)),
    "other shard": lambda pair, i: pair.set_here(i, replace(KEY, name=1 + i, shard=0)),
    "other world": lambda pair, i: pair.set_here(i, replace(KEY, name=1 + i, world=5)),
    "fewer data bytes": lambda pair, i: pair.set_here(i, replace(KEY, name=1 + i, data_bytes=SLOT_BYTES - 1)),
    "more data bytes": lambda pair, i: pair.set_here(i, replace(KEY, name=1 + i, data_bytes=SLOT_BYTES + 1)),
    **{
        f"record damaged there at {byte}": partial(
            lambda byte, pair, i: pair.flip(pair.there, pair.source_slots[i], byte), byte
        )
        for byte in (0, 3, 8, 16, 24, 40, 72, 76, 78, 80, 84, 88, 96, 104)
    },
    **{
        f"record damaged here at {byte}": partial(
            lambda byte, pair, i: pair.flip(pair.here, pair.slots[i], byte), byte
        )
        for byte in (0, 3, 24, 40, 71, 72, 76, 78, 80, 84)
    },
}
OTHER_DATA: dict[str, Callable[[Pair, int], object]] = {
    f"data damaged here at {byte}": partial(lambda byte, pair, i: pair.rot_here(i, byte), byte)
    for byte in (0, 4096, SLOT_BYTES - 1)
}
ALL = HARMLESS | BREAKING | OTHER_DATA


def expected_of(method: str, what: str) -> int:
    if what in BREAKING:
        return 0
    return 2 if what in OTHER_DATA and method == "accept" else 1


@settings(deadline=None)
@given(method=st.sampled_from(METHODS), rows=st.lists(st.sampled_from(sorted(ALL)), min_size=1, max_size=8))
def test_only_slots_of_the_same_block_take_over_its_checksum(method: str, rows: list[str]) -> None:
    pair = Pair.of(len(rows))
    for i, what in enumerate(rows):
        ALL[what](pair, i)
    before, there = pair.here.bytes.copy(), pair.there.bytes.copy()
    steps = pair.here.records.persisted_steps
    results = pair.call(method)
    assert results == [expected_of(method, what) for what in rows]
    taken = [i for i, result in enumerate(results) if result == 1 and method != "match"]
    for i in taken:
        at = pair.here.record_offset(int(pair.slots[i])) + DATA_CHECKSUM
        source = pair.there.record_offset(int(pair.source_slots[i])) + DATA_CHECKSUM
        before[at : at + 8] = there[source : source + 8]
    assert np.array_equal(pair.here.bytes, before)
    assert np.array_equal(pair.there.bytes, there)
    assert pair.here.records.persisted_steps - steps == len(taken)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("what", sorted(ALL))
def test_each_fault_is_noticed_by_each_question(method: str, what: str) -> None:
    pair = Pair.of(3)
    ALL[what](pair, 1)
    assert pair.call(method) == [1, expected_of(method, what), 1]


@pytest.mark.parametrize("method", ["adopt", "accept"])
def test_what_was_taken_over_is_sound_when_it_is_committed(method: str) -> None:
    pair = Pair.of(3)
    assert pair.call(method) == [1, 1, 1]
    pair.here.records.commit(pair.slots, u64(7, 8, 9))
    assert pair.here.records.verify_data(pair.slots, pair.generations).tolist() == [1, 1, 1]
    sums, sound = pair.here.records.data_sums(pair.slots, pair.generations)
    assert sound.tolist() == [1, 1, 1]
    assert sums.tolist() == sum_data(pair.there.bytes, pair.source_slots, SLOT_BYTES).tolist()


def test_a_source_that_rotted_before_the_copy_is_adopted_as_it_is_and_found_out_by_whoever_reads_it() -> None:
    pair = Pair.of(1)
    pair.there.bytes[int(pair.source_slots[0]) * PAGE] ^= 1
    pair.here.bytes[int(pair.slots[0]) * PAGE] ^= 1
    assert pair.call("adopt") == [1]
    pair.here.records.commit(pair.slots, u64(7))
    assert pair.here.records.verify_data(pair.slots, pair.generations).tolist() == [0]


def test_a_row_that_names_too_many_data_bytes_is_never_read() -> None:
    """The record here says what its slot cannot hold, and so does the sound one of larger slots there."""
    here, there = Pool(slot_bytes=100), Pool()
    source_generations = there.store(there.slots[:1], KEY)
    generations = here.open(here.slots[:1], replace(KEY, data_bytes=100))
    at = here.record_offset(int(here.slots[0])) + 72
    here.bytes[at : at + 4] = np.frombuffer(SLOT_BYTES.to_bytes(4, "little"), np.uint8)
    for method in METHODS:
        rows = here.slots[:1], generations, there.records, there.slots[:1], source_generations
        found = ask(here, method, *rows)
        assert found.tolist() == [0]
    with pytest.raises(
        ValueError, match=rf"slot {here.slots[0]}: expected at most 100 data bytes, found 5000"
    ):
        here.records.data_bytes(here.slots[:1])


@pytest.mark.parametrize("method", ["adopt", "accept"])
def test_a_batch_that_names_a_slot_twice_is_refused(method: str) -> None:
    pair = Pair.of(3)
    pair.slots[2] = pair.slots[0]
    before = pair.here.bytes.copy()
    with pytest.raises(ValueError, match=rf"slot {pair.slots[0]}: expected once in a batch, found twice"):
        pair.call(method)
    assert np.array_equal(pair.here.bytes, before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("missing", ["generations", "source_slots", "source_generations"])
def test_arrays_of_other_lengths_are_refused(method: str, missing: str) -> None:
    pair = Pair.of(3)
    before = pair.here.bytes.copy()
    setattr(pair, missing, getattr(pair, missing)[:2].copy())
    with pytest.raises(ValueError, match=f"{missing} has 2 rows; expected 3, one for each of slots"):
        pair.call(method)
    assert np.array_equal(pair.here.bytes, before)


def test_accept_wants_a_sum_for_each_slot() -> None:
    pair = Pair.of(3)
    rows = pair.slots, pair.generations, pair.there.records, pair.source_slots, pair.source_generations
    with pytest.raises(ValueError, match="sums has 2 rows; expected 3, one for each of slots"):
        pair.here.records.accept(*rows, u64(1, 2))


def test_one_pool_may_be_both_sides() -> None:
    pool = Pool()
    source, copy = pool.slots[:1], pool.slots[5:6]
    source_generations, generations = pool.store(source, KEY), pool.open(copy, KEY)
    found = pool.records.match(copy, generations, pool.records, source, source_generations)
    assert found.tolist() == [1]
    assert pool.records.match(
        source, source_generations, pool.records, source, source_generations
    ).tolist() == [0]


# --- what records tell -------------------------------------------------------------------------------------


def test_data_bytes_are_told_in_any_state() -> None:
    pool = Pool()
    pool.store(pool.slots[:1], KEY)
    pool.open(pool.slots[1:3], replace(KEY, name=5, data_bytes=17))
    pool.records.free(pool.slots[2:3])
    assert pool.records.data_bytes(pool.slots[[2, 0, 1, 0, 3]]).tolist() == [
        17,
        SLOT_BYTES,
        17,
        SLOT_BYTES,
        0,
    ]
    with pytest.raises(ValueError, match=rf"slot {pool.slots[0] + 1}: expected the first page of a slot"):
        pool.records.data_bytes(pool.slots[:1] + np.uint32(1))


def test_checksums_are_told_of_ready_slots_only() -> None:
    pool = Pool()
    generations = np.zeros(5, np.uint64)
    generations[:3] = pool.store(pool.slots[:3], KEY)
    generations[3:4] = pool.open(pool.slots[3:4], replace(KEY, name=9))
    pool.records.set_data_checksums(pool.slots[3:4], generations[3:4], u64(5))
    generations[1] += 1
    pool.bytes[pool.record_offset(int(pool.slots[2])) + 40] ^= 1
    sums, sound = pool.records.data_sums(pool.slots[:5], generations)
    assert sound.tolist() == [1, 0, 0, 0, 0]
    assert sums.tolist() == [sum_data(pool.bytes, pool.slots[:1], SLOT_BYTES)[0], 0, 0, 0, 0]
    assert sound.tolist() == pool.records.check(pool.slots[:5], generations).tolist()


@settings(deadline=None)
@given(data=st.data(), slot_bytes=st.sampled_from([1, 4096, 4097, 60_000]))
def test_the_pages_of_records_are_those_of_the_format(data: st.DataObject, slot_bytes: int) -> None:
    pool = Pool(slot_bytes)
    pool.records.format_extent(0, 300)
    slots = np.concatenate([slots_of(pool.records, 0), pool.slots])
    chosen = slots[data.draw(st.lists(st.integers(0, len(slots) - 1), max_size=20))]
    expected = {pool.record_offset(slot) // PAGE * PAGE for slot in chosen.astype(int).tolist()}
    found = pool.records.record_pages(chosen)
    assert found.dtype == np.uint64
    assert found.tolist() == sorted(expected)


def test_pages_of_records_are_those_of_slots_only() -> None:
    pool = Pool()
    with pytest.raises(ValueError, match="slot 7: expected the first page of a slot of an extent in use"):
        pool.records.record_pages(np.array([pool.slots[0], 7], np.uint32))


@pytest.mark.parametrize("slot_bytes", [1, 5000, 200_000])
def test_a_header_page_and_its_table_are_all_that_an_image_needs(slot_bytes: int) -> None:
    pool = Pool(slot_bytes)
    generations = pool.store(pool.slots[1:4], replace(KEY, data_bytes=1))
    image = np.zeros_like(pool.bytes)
    header = HEADER_AREA + MIB
    for page in (0, header):
        image[page : page + PAGE] = pool.bytes[page : page + PAGE]
    extent = read_extent(pool.bytes, 1)
    assert extent is not None
    records = PoolRecords(image)
    offset, length = records.table_range(1)
    assert (offset, length) == (header + PAGE, extent.data_offset - PAGE)
    image[offset : offset + length] = pool.bytes[offset : offset + length]
    assert records.check(pool.slots[1:4], generations).tolist() == [1, 1, 1]
    assert all(np.array_equal(records.scan()[name], column) for name, column in pool.records.scan().items())


def test_an_extent_out_of_use_has_no_table() -> None:
    records = Pool().records
    with pytest.raises(ValueError, match="extent 0: expected one in use, found none there"):
        records.table_range(0)
    with pytest.raises(ValueError, match="extent 2: the pool has 2"):
        records.table_range(2)
