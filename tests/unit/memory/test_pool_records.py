"""PoolRecords against a plain reading of the bytes, and its promise that a refused batch changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_kernels import PoolRecords, format_pool
from kvtierd.core.blocks.slots import PoolGeometry

from tests.unit.memory.plain_pool import (
    DIGEST,
    FREE,
    HEADER_AREA,
    MIB,
    PAGE,
    READY,
    SPACE,
    WRITING,
    PlainRecord,
    hashes,
    new_pool,
    read_extent,
    read_header,
    read_records,
    slots_of,
    sum_data,
    u64,
)

SLOT_BYTES = 5000
NONCE = 0xFEED_FACE_CAFE_BEEF


@dataclass
class Bench:
    """A pool whose first extent is in use."""

    pool: npt.NDArray[np.uint8]
    records: PoolRecords
    slots: npt.NDArray[np.uint32]

    def open(
        self, slots: npt.NDArray[np.uint32], *, first: int = 0, transfer: int = 7
    ) -> npt.NDArray[np.uint64]:
        names = hashes(*range(first, first + len(slots)))
        return self.records.open(slots, 3, NONCE, transfer, SPACE, 2, 1, 4, names, SLOT_BYTES)

    def store(self, slots: npt.NDArray[np.uint32], *, first: int = 0) -> npt.NDArray[np.uint64]:
        generations = self.open(slots, first=first)
        for slot in slots.astype(int).tolist():
            self.pool[slot * PAGE : slot * PAGE + SLOT_BYTES] = slot % 251
        self.records.set_data_checksums(slots, generations, sum_data(self.pool, slots, SLOT_BYTES))
        self.records.commit(slots, np.arange(len(slots), dtype=np.uint64) + 100)
        return generations

    def read(self) -> dict[int, PlainRecord]:
        return {record.slot: record for record in read_records(self.pool)}


@pytest.fixture
def bench() -> Bench:
    pool = new_pool()
    records = PoolRecords(pool)
    records.format_extent(0, SLOT_BYTES)
    return Bench(pool, records, slots_of(records, 0))


# --- the format, field by field ---------------------------------------------------------------------------


def test_the_header_of_a_new_pool_is_as_documented() -> None:
    pool = new_pool(extents=3)
    header = read_header(pool)
    assert (header.magic, header.version, header.first_extent) == (b"KVTIERP1", 1, HEADER_AREA)
    assert (header.extent_bytes, header.extents, header.digest) == (MIB, 3, DIGEST)
    assert header.checksum_fits
    assert (header.boots, header.boot_nonce) == (0, 0)
    assert not pool[80:].any()


def test_a_boot_is_counted_and_named_without_touching_the_checksum() -> None:
    pool = new_pool()
    records = PoolRecords(pool)
    assert [records.start_boot(11), records.start_boot(12)] == [1, 2]
    header = read_header(pool)
    assert (header.boots, header.boot_nonce, records.boots) == (2, 12, 2)
    assert header.checksum_fits


def test_an_extent_describes_itself(bench: Bench) -> None:
    extent = read_extent(bench.pool, 0)
    assert extent is not None
    assert (extent.index, extent.slot_bytes, extent.stride) == (0, SLOT_BYTES, 2 * PAGE)
    assert extent.data_offset == PAGE + -(-extent.count * 128 // PAGE) * PAGE
    assert extent.data_offset + extent.count * extent.stride <= MIB
    assert read_extent(bench.pool, 1) is None
    assert bench.records.extent_info(1) is None
    assert all(record.state == FREE for record in read_records(bench.pool))


@given(slot_bytes=st.integers(1, MIB))
def test_the_core_and_the_kernel_place_slots_alike(slot_bytes: int) -> None:
    geometry = PoolGeometry(2, MIB, HEADER_AREA)
    pool = new_pool()
    records = PoolRecords(pool)
    if slot_bytes > geometry.slot_bytes_max:
        assert geometry.slots_per_extent(slot_bytes) == 0
        with pytest.raises(
            ValueError, match=f"slot_bytes {slot_bytes}: expected 1 to {geometry.slot_bytes_max}"
        ):
            records.format_extent(1, slot_bytes)
        return
    records.format_extent(1, slot_bytes)
    slots = geometry.slots_of(1, slot_bytes)
    assert slots.tolist() == slots_of(records, 1).tolist()
    assert len(slots) == geometry.slots_per_extent(slot_bytes) >= 1
    assert set(geometry.extent_of(slots).tolist()) == {1}


def test_an_opened_record_says_who_writes_what(bench: Bench) -> None:
    slots = bench.slots[[4, 2]]
    assert bench.open(slots, first=40).tolist() == [1, 1]
    record = bench.read()[int(slots[1])]
    assert (record.state, record.writer, record.generation) == (WRITING, 3, 1)
    assert (record.boot_nonce, record.transfer) == (NONCE, 7)
    assert (record.namespace, record.block_hash) == (SPACE, hashes(41).tobytes())
    assert (record.data_bytes, record.group, record.shard, record.world) == (SLOT_BYTES, 2, 1, 4)
    assert (record.clock, record.data_checksum, record.checksum) == (0, 0, 0)
    assert record.zeros == bytes(22)


def test_a_committed_record_carries_both_checksums_and_its_recency(bench: Bench) -> None:
    slots = bench.slots[:3]
    bench.store(slots)
    for i, slot in enumerate(slots.tolist()):
        record = bench.read()[slot]
        assert (record.state, record.writer, record.generation, record.clock) == (READY, 3, 1, 100 + i)
        assert record.checksum_fits
        assert record.data_fits
        assert record.zeros == bytes(22)


def test_every_opening_and_freeing_makes_a_new_generation(bench: Bench) -> None:
    slots = bench.slots[:1]
    seen = [bench.records.generations(slots)[0]]
    for step in (bench.store, bench.records.free, bench.open, bench.records.free, bench.records.free):
        step(slots)
        seen.append(bench.records.generations(slots)[0])
    assert seen == [0, 1, 2, 3, 4, 5]
    assert bench.read()[int(slots[0])].writer == 0


def test_generations_go_on_when_an_extent_changes_its_slot_size(bench: Bench) -> None:
    for _ in range(3):
        bench.store(bench.slots[:1])
        bench.records.free(bench.slots[:1])
    bench.records.format_extent(0, 100)
    slots = slots_of(bench.records, 0)
    assert set(bench.records.generations(slots).tolist()) == {7}
    assert all(record.block_hash == bytes(32) for record in read_records(bench.pool))


def test_generations_begin_again_after_the_last(bench: Bench) -> None:
    """2^40 of them on one slot: no part waits for so long. What matters is that nothing else breaks."""
    place = HEADER_AREA + PAGE
    bench.pool[place : place + 8] = np.frombuffer(((2**40 - 1) << 24).to_bytes(8, "little"), np.uint8)
    slots = bench.slots[:1]
    assert bench.records.generations(slots).tolist() == [2**40 - 1]
    generations = bench.store(slots)
    assert generations.tolist() == [0]
    assert bench.records.verify_data(slots, generations).tolist() == [1]
    bench.records.free(slots)
    bench.records.format_extent(0, 100)
    assert bench.records.scan()["slots"].size == 0


# --- checks ------------------------------------------------------------------------------------------------


def test_check_holds_until_the_slot_is_freed(bench: Bench) -> None:
    slots = bench.slots[:2]
    generations = bench.open(slots)
    assert bench.records.check_writing(slots, generations).tolist() == [1, 1]
    assert bench.records.check(slots, generations).tolist() == [0, 0]
    bench.records.set_data_checksums(slots, generations, sum_data(bench.pool, slots, SLOT_BYTES))
    bench.records.commit(slots, u64(1, 2))
    assert bench.records.check_writing(slots, generations).tolist() == [0, 0]
    assert bench.records.check(slots, generations).tolist() == [1, 1]
    assert bench.records.verify_data(slots, generations).tolist() == [1, 1]
    bench.records.free(slots[:1])
    assert bench.records.check(slots, generations).tolist() == [0, 1]
    assert bench.records.check(slots, generations + np.uint64(1)).tolist() == [0, 0]


def test_a_slot_for_other_data_bytes_fails_when_they_are_asked_for(bench: Bench) -> None:
    slots = bench.slots[:1]
    generations = bench.open(slots)
    sizes = [SLOT_BYTES, SLOT_BYTES + 1, SLOT_BYTES + 2**32]
    assert [bench.records.check_writing(slots, generations, size)[0] for size in sizes] == [1, 0, 0]
    bench.records.commit(slots, u64(1))
    assert [bench.records.check(slots, generations, size)[0] for size in sizes] == [1, 0, 0]


@pytest.mark.parametrize("byte", [0, 3, 8, 24, 40, 72, 76, 80, 84, 88, 96, 104])
def test_a_flipped_bit_in_any_field_of_a_record_is_noticed(bench: Bench, byte: int) -> None:
    slots = bench.slots[:1]
    generations = bench.store(slots)
    bench.pool[HEADER_AREA + PAGE + byte] ^= 1
    assert bench.records.check(slots, generations).tolist() == [0]
    assert bench.records.verify_data(slots, generations).tolist() == [0]
    assert not bench.records.scan()["intact"].any()


def test_a_flipped_bit_in_the_data_is_noticed_by_verifying_only(bench: Bench) -> None:
    slots = bench.slots[:2]
    generations = bench.store(slots)
    bench.pool[int(slots[1]) * PAGE + SLOT_BYTES - 1] ^= 0x80
    assert bench.records.check(slots, generations).tolist() == [1, 1]
    assert bench.records.verify_data(slots, generations).tolist() == [1, 0]


def test_what_lies_behind_the_data_bytes_does_not_matter(bench: Bench) -> None:
    slots = bench.slots[:1]
    generations = bench.store(slots)
    bench.pool[int(slots[0]) * PAGE + SLOT_BYTES] ^= 0xFF
    assert bench.records.verify_data(slots, generations).tolist() == [1]


def test_a_page_that_is_no_slot_is_never_good(bench: Bench) -> None:
    elsewhere = np.array(
        [0, 1, bench.slots[0] + 1, HEADER_AREA // PAGE, 0xFFFF_FFFF, (HEADER_AREA + MIB) // PAGE], np.uint32
    )
    zeros = np.zeros(len(elsewhere), np.uint64)
    assert not bench.records.check(elsewhere, zeros).any()
    assert not bench.records.check_writing(elsewhere, zeros).any()
    assert not bench.records.verify_data(elsewhere, zeros).any()
    for page in elsewhere.tolist():
        with pytest.raises(ValueError, match=rf"slot {page}: expected the first page of a slot"):
            bench.records.generations(np.array([page], np.uint32))


# --- refusals: named, and nothing changed -------------------------------------------------------------------


def refusals() -> list[tuple[str, Callable[[Bench], object], str]]:
    """(name, call, expected message); slots 0 and 1 are READY, 2 is WRITING, the others are FREE."""

    def pick(bench: Bench, *indexes: int) -> npt.NDArray[np.uint32]:
        return np.ascontiguousarray(bench.slots[list(indexes)])

    def opening(bench: Bench, **changed: object) -> object:
        values: dict[str, object] = {
            "slots": pick(bench, 3, 4),
            "writer": 3,
            "boot_nonce": NONCE,
            "transfer": 1,
            "namespace": SPACE,
            "group": 0,
            "shard": 0,
            "world": 1,
            "hashes": hashes(1, 2),
            "data_bytes": 10,
        }
        return bench.records.open(**(values | changed))  # type: ignore[arg-type]

    return [
        (
            "open a READY slot",
            lambda b: opening(b, slots=pick(b, 3, 0)),
            r"slot \d+: expected FREE, found READY \(generation 1, writer 3\)",
        ),
        ("open a WRITING slot", lambda b: opening(b, slots=pick(b, 3, 2)), "expected FREE, found WRITING"),
        (
            "open a slot twice",
            lambda b: opening(b, slots=pick(b, 3, 3)),
            "expected once in a batch, found twice",
        ),
        (
            "open no slot",
            lambda b: opening(b, slots=pick(b, 3, 4) + np.uint32(1)),
            "expected the first page of a slot",
        ),
        ("open with a hash missing", lambda b: opening(b, hashes=hashes(1)), "hashes has 1 rows; expected 2"),
        (
            "open with short hashes",
            lambda b: opening(b, hashes=np.zeros((2, 31), np.uint8)),
            "hashes has rows of 31",
        ),
        ("open by nobody", lambda b: opening(b, writer=0), "writer 0 is nobody"),
        ("open by too many", lambda b: opening(b, writer=65536), "writer 65536: expected at most 65535"),
        (
            "open a shard too many",
            lambda b: opening(b, shard=1),
            "shard 1: expected one below the world size, 1",
        ),
        (
            "open too long data",
            lambda b: opening(b, data_bytes=SLOT_BYTES + 1),
            "expected at most 5000 data bytes, found 5001",
        ),
        (
            "open with a short namespace",
            lambda b: opening(b, namespace=b"short"),
            "namespace has 5 bytes; expected 16",
        ),
        (
            "commit a FREE slot",
            lambda b: b.records.commit(pick(b, 2, 3), u64(1, 2)),
            "expected WRITING, found FREE",
        ),
        (
            "commit a READY slot",
            lambda b: b.records.commit(pick(b, 2, 0), u64(1, 2)),
            "expected WRITING, found READY",
        ),
        ("commit twice", lambda b: b.records.commit(pick(b, 2, 2), u64(1, 2)), "found twice"),
        (
            "commit with a clock missing",
            lambda b: b.records.commit(pick(b, 2), u64()),
            "clocks has 0 rows; expected 1",
        ),
        (
            "checksum with a wrong generation",
            lambda b: b.records.set_data_checksums(pick(b, 2), u64(2), u64(5)),
            r"expected WRITING with generation 2, found WRITING \(generation 1",
        ),
        (
            "checksum of a READY slot",
            lambda b: b.records.set_data_checksums(pick(b, 2, 0), u64(1, 1), u64(5, 5)),
            "expected WRITING with generation 1, found READY",
        ),
        ("free twice", lambda b: b.records.free(pick(b, 0, 1, 0)), "found twice"),
        (
            "free no slot",
            lambda b: b.records.free(np.array([b.slots[0], 0], np.uint32)),
            "slot 0: expected the first page",
        ),
        ("free by signed numbers", lambda b: b.records.free(b.slots[:1].astype(np.int64)), "slots"),
        (
            "format an extent with blocks",
            lambda b: b.records.format_extent(0, 64),
            "expected FREE, found READY",
        ),
        (
            "format an extent that is not there",
            lambda b: b.records.format_extent(2, 64),
            "extent 2: the pool has 2",
        ),
        (
            "format for slots of nothing",
            lambda b: b.records.format_extent(1, 0),
            "slot_bytes 0: expected 1 to",
        ),
    ]


@pytest.mark.parametrize(
    ("call", "message"), [pytest.param(call, text, id=name) for name, call, text in refusals()]
)
def test_a_refused_batch_names_the_fault_and_changes_nothing(
    bench: Bench, call: Callable[[Bench], object], message: str
) -> None:
    bench.store(bench.slots[:2])
    bench.open(bench.slots[2:3])
    before, steps = bench.pool.copy(), bench.records.persisted_steps
    with pytest.raises(ValueError, match=message):
        call(bench)
    assert np.array_equal(bench.pool, before)
    assert bench.records.persisted_steps == steps


@pytest.mark.parametrize(
    ("extent_bytes", "extents"),
    [(MIB, 3), (MIB, 0), (MIB + 4096, 1), (MIB // 2, 1), (2 << 30, 1), (MIB, 1 << 62)],
)
def test_a_pool_of_impossible_extents_is_not_made(extent_bytes: int, extents: int) -> None:
    pool = np.zeros(HEADER_AREA + 2 * MIB, np.uint8)
    with pytest.raises(ValueError, match="extent"):
        format_pool(pool, extent_bytes, extents, DIGEST)
    assert not pool.any()


@pytest.mark.parametrize("byte", [0, 7, 8, 16, 24, 32, 40, 56])
def test_a_damaged_header_is_no_pool(byte: int) -> None:
    pool = new_pool()
    pool[byte] ^= 1
    with pytest.raises(ValueError, match="header"):
        PoolRecords(pool)


def test_a_truncated_pool_is_no_pool() -> None:
    pool = new_pool()
    with pytest.raises(ValueError, match="do not fit a pool"):
        PoolRecords(pool[:-1])
    with pytest.raises(ValueError, match="has no header"):
        PoolRecords(pool[:PAGE])


def test_read_only_bytes_are_refused() -> None:
    pool = new_pool()
    pool.flags.writeable = False
    with pytest.raises(ValueError, match="pool"):
        PoolRecords(pool)


# --- steps: what the crash tests stop at --------------------------------------------------------------------


def test_every_persisted_step_is_counted(bench: Bench) -> None:
    counts = [bench.records.persisted_steps]
    slots = bench.slots[:2]
    generations = bench.open(slots)
    counts.append(bench.records.persisted_steps)
    bench.records.set_data_checksums(slots, generations, u64(1, 2))
    counts.append(bench.records.persisted_steps)
    bench.records.commit(slots, u64(1, 2))
    counts.append(bench.records.persisted_steps)
    bench.records.free(slots)
    counts.append(bench.records.persisted_steps)
    # word, two field groups; checksum; clock, record checksum, word; word. Two slots each.
    assert np.diff(counts).tolist() == [6, 2, 6, 2]
