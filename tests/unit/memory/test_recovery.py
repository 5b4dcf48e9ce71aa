"""What recovery accepts after a restart, compared with a plain oracle on random mixtures, and on
any garbage."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt
from hypothesis import example, given
from hypothesis import strategies as st
from kvtier_kernels import PoolRecords, xxh3_64
from kvtierd.core.stimuli import Recovered
from kvtierd.memory.recovery import NOBODY, Recovery, free_proven, recover

from tests.unit.memory.copies import ALIVE, GONE, SLOT_BYTES, THOROUGH, Copy, copies, gone, write
from tests.unit.memory.plain_pool import (
    FREE,
    HEADER_AREA,
    MIB,
    PAGE,
    READY,
    WRITING,
    PlainRecord,
    new_pool,
    read_records,
    u64,
)

Key = tuple[bytes, int, int, bytes]
"""Namespace, group, world size, hash."""


def expected(records: list[PlainRecord]) -> dict[Key, tuple[int, ...]]:
    """Key of every block to be recovered, to its slots in rank order; by reading plainly."""
    shards: defaultdict[tuple[Key, tuple[int, int]], dict[int, PlainRecord]] = defaultdict(dict)
    for record in records:
        if record.state == READY and record.checksum_fits:
            key = (record.namespace, record.group, record.world, record.block_hash)
            shards[key, (record.boot_nonce, record.transfer)][record.shard] = record
    best: dict[Key, tuple[tuple[int, int], tuple[int, ...]]] = {}
    for (key, (_, transfer)), found in shards.items():
        if sorted(found) == list(range(key[2])):
            age = (max(record.clock for record in found.values()), transfer)
            best[key] = max(
                best.get(key, ((-1, -1), ())), (age, tuple(found[rank].slot for rank in sorted(found)))
            )
    return {key: slots for key, (_, slots) in best.items()}


def blocks_of(recovered: Recovered) -> dict[Key, tuple[int, ...]]:
    found = {}
    at = 0
    for space, block_hash in zip(recovered.spaces.tolist(), recovered.hashes, strict=True):
        namespace, group, world = recovered.namespaces[space]
        slots = tuple(recovered.slots[at : at + world].tolist())
        at += world
        key = (bytes(namespace), group, world, block_hash.tobytes())
        assert key not in found, "one key twice"
        found[key] = slots
    assert at == len(recovered.slots)
    return found


def assert_accounted(pool: npt.NDArray[np.uint8], recovered: Recovered) -> None:
    """Every slot is free, or holds a shard of a recovered block, or is in quarantine or set aside."""
    kept = set(recovered.slots.tolist())
    quarantined = set(recovered.quarantined.tolist()) | set(recovered.corrupt.tolist())
    assert len(kept) == len(recovered.slots)
    for record in read_records(pool):
        expected_state = READY if record.slot in kept else WRITING if record.slot in quarantined else FREE
        assert record.state == expected_state, record
        kept.discard(record.slot)
        quarantined.discard(record.slot)
    assert not kept
    assert not quarantined


def ages(pool: npt.NDArray[np.uint8], recovered: Recovered) -> list[int]:
    clock = {record.slot: record.clock for record in read_records(pool)}
    return [clock[slots[0]] for slots in blocks_of(recovered).values()]


@THOROUGH
@given(mixture=st.lists(copies, max_size=14), seed=st.integers(0, 3))
def test_exactly_the_whole_blocks_are_recovered_and_every_slot_accounted(
    mixture: list[Copy], seed: int
) -> None:
    pool = new_pool()
    records = PoolRecords(pool)
    write(records, pool, mixture, seed)
    before = list(read_records(pool))
    want = expected(before)

    result = recover(records, gone)

    recovered = result.recovered
    assert blocks_of(recovered) == want
    writing = {r.slot for r in before if r.state == WRITING and r.writer == ALIVE}
    assert set(recovered.quarantined.tolist()) == writing
    set_aside = {r.slot for r in before if r.state == WRITING and r.writer == NOBODY}
    assert set(recovered.corrupt.tolist()) == set_aside
    assert_accounted(pool, recovered)
    assert ages(pool, recovered) == sorted(ages(pool, recovered))
    believed = [record.clock for record in before if record.state == READY and record.checksum_fits]
    assert recovered.clock == max(believed, default=0)
    assert result.blocks == len(want)
    assert result.data_bytes == 1000 * len(recovered.slots)
    kept = len(recovered.slots) + len(writing) + len(set_aside)
    assert result.discarded == sum(r.state != FREE for r in before) - kept
    assert [(e.extent, e.slot_bytes) for e in recovered.extents] == list(enumerate(SLOT_BYTES))
    assert_same(recover(records, gone), result, discarded=0)


def assert_same(again: Recovery, before: Recovery, discarded: int) -> None:
    """A second recovery finds what the first left, and has nothing more to free."""
    assert blocks_of(again.recovered) == blocks_of(before.recovered)
    assert set(again.recovered.quarantined.tolist()) == set(before.recovered.quarantined.tolist())
    assert set(again.recovered.corrupt.tolist()) == set(before.recovered.corrupt.tolist())
    assert (again.blocks, again.data_bytes, again.discarded) == (before.blocks, before.data_bytes, discarded)


def test_the_younger_of_two_copies_wins_and_the_other_is_freed() -> None:
    pool = new_pool()
    records = PoolRecords(pool)
    write(
        records,
        pool,
        [
            Copy(1, 2, 0, 0, clock=50, writer=GONE, shards=("ready", "ready")),
            Copy(1, 2, 0, 0, clock=60, writer=GONE, shards=("ready", "ready")),
            Copy(1, 2, 0, 0, clock=70, writer=GONE, shards=("ready", "writing")),
            Copy(1, 2, 1, 0, clock=1, writer=GONE, shards=("ready", "ready")),
        ],
        seed=0,
    )
    result = recover(records, gone)
    assert result.blocks == 2
    assert result.discarded == 4
    assert sorted(record.clock for record in read_records(pool) if record.state == READY) == [1, 1, 60, 60]
    assert result.recovered.clock == 70


def test_quarantined_slots_are_freed_once_their_writer_is_gone_and_no_others() -> None:
    pool = new_pool()
    records = PoolRecords(pool)
    write(records, pool, [Copy(1, 3, 0, 0, 1, ALIVE, ("writing", "ready", "writing"))], seed=0)
    result = recover(records, gone)
    quarantined, writers = result.recovered.quarantined, result.quarantined_writers
    assert len(quarantined) == 2
    assert not free_proven(records, quarantined, writers, lambda writer: False).any()
    assert len(records.scan()["slots"]) == 2
    assert free_proven(records, quarantined, writers, lambda writer: writer == ALIVE).all()
    assert len(records.scan()["slots"]) == 0


def test_a_million_times_nothing_is_nothing() -> None:
    result = recover(PoolRecords(new_pool()), gone)
    assert (result.blocks, result.discarded, result.recovered.clock) == (0, 0, 0)
    assert result.recovered.extents == ()
    assert result.recovered.hashes.shape == (0, 32)


# --- garbage ------------------------------------------------------------------------------------------------


def busy_pool() -> npt.NDArray[np.uint8]:
    pool = new_pool()
    mixture = [Copy(key, 1 + key % 2, 0, 0, key, GONE, ("ready",) * (1 + key % 2)) for key in range(20)]
    write(PoolRecords(pool), pool, mixture, seed=0)
    return pool


BUSY = busy_pool()
# Where lies matter: extent headers and slot tables.
METADATA = [
    offset
    for extent in range(2)
    for offset in range(HEADER_AREA + extent * MIB, HEADER_AREA + extent * MIB + 2 * PAGE)
]

flips = st.lists(st.tuples(st.sampled_from(METADATA), st.integers(0, 7)), min_size=1, max_size=40)
words = st.lists(
    st.tuples(
        st.sampled_from([offset for offset in METADATA if offset % 8 == 0]),
        st.one_of(
            st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2, 4096, MIB, 2**32 - 1, 2**63, 2**64 - 4096])
        ),
    ),
    min_size=1,
    max_size=20,
)


def assert_survived(pool: npt.NDArray[np.uint8]) -> None:
    """Whatever the bytes say: nothing crashes, every number points into the pool, and all slots are accounted
    for.
    """
    records = PoolRecords(pool)
    original = {record.slot: record for record in read_records(BUSY)}
    result = recover(records, gone)
    for extent in result.recovered.extents:
        info = records.extent_info(extent.extent)
        assert info is not None
        assert info[3] >= HEADER_AREA
        assert info[3] + info[1] * info[2] <= len(pool)
    for (_, _, _, block_hash), slots in blocks_of(result.recovered).items():
        for slot in slots:
            assert original[slot].block_hash == block_hash, "a block under another block's hash"
    pages = np.array(sorted(original), np.uint32)
    generations = u64(*(original[page].generation for page in pages.tolist()))
    for check in (records.check, records.check_writing, records.verify_data):
        assert set(check(pages, generations).tolist()) <= {0, 1}
    left = records.scan()
    assert set(left["slots"].tolist()) == set(result.recovered.slots.tolist()) | set(
        result.recovered.quarantined.tolist()
    )


@THOROUGH
@given(flipped=flips)
def test_flipped_bits_lose_blocks_but_never_mix_them_up(flipped: list[tuple[int, int]]) -> None:
    pool = BUSY.copy()
    for offset, bit in flipped:
        pool[offset] ^= 1 << bit
    assert_survived(pool)


@THOROUGH
@given(written=words)
@example(written=[(HEADER_AREA + 32, 2**64 - 1)])
@example(written=[(HEADER_AREA + 16, 0)])
def test_lies_in_headers_and_records_are_survived(written: list[tuple[int, int]]) -> None:
    pool = BUSY.copy()
    for offset, value in written:
        pool[offset : offset + 8] = np.frombuffer(value.to_bytes(8, "little"), np.uint8)
    assert_survived(pool)


@THOROUGH
@given(seed=st.integers(0, 2**32 - 1), where=st.sampled_from(["tables", "extents", "everything"]))
def test_random_bytes_are_survived(seed: int, where: str) -> None:
    pool = BUSY.copy()
    random = np.random.default_rng(seed)
    start = {"tables": PAGE, "extents": 0, "everything": 0}[where]
    length = 4 * PAGE if where == "tables" else MIB - start
    for extent in range(2):
        base = HEADER_AREA + extent * MIB + start
        pool[base : base + length] = random.integers(0, 256, length, np.uint8)
    if where == "everything":
        pool[64:HEADER_AREA] = random.integers(0, 256, HEADER_AREA - 64, np.uint8)
    assert_survived(pool)


@THOROUGH
@given(
    slot_bytes=st.integers(0, 2**64 - 1),
    count=st.integers(0, 2**64 - 1),
    data_offset=st.integers(0, 2**64 - 1),
)
@example(slot_bytes=8192, count=2**60, data_offset=8192)
@example(slot_bytes=2**64 - 4095, count=1, data_offset=8192)
def test_an_extent_header_that_lies_with_a_fitting_checksum_is_not_believed(
    slot_bytes: int, count: int, data_offset: int
) -> None:
    pool = BUSY.copy()
    page = bytearray(pool[HEADER_AREA : HEADER_AREA + PAGE].tobytes())
    honest = bytes(page)
    page[16:24] = slot_bytes.to_bytes(8, "little")
    page[32:40] = count.to_bytes(8, "little")
    page[40:48] = data_offset.to_bytes(8, "little")
    page[48:56] = xxh3_64(bytes(page[:48])).to_bytes(8, "little")
    pool[HEADER_AREA : HEADER_AREA + PAGE] = np.frombuffer(bytes(page), np.uint8)
    records = PoolRecords(pool)
    assert (records.extent_info(0) is None) == (bytes(page) != honest)
    assert_survived(pool)
