"""Gather and scatter move exactly the bytes that numpy would, and nothing when anything is wrong."""

import mmap
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_kernels import PAGE_BYTES, CopyPlan, copy_variants, xxh3_64

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]


def u32(*values: int) -> U32:
    return np.array(values, np.uint32)


def u64(*values: int) -> npt.NDArray[np.uint64]:
    return np.array(values, np.uint64)


@dataclass
class Case:
    """An engine's mapping, a pool, and which blocks go with which slots."""

    mapping: U8
    bases: list[int]
    strides: list[int]
    sizes: list[int]
    num_blocks: int
    pool: U8
    block_ids: U32
    slots: U32

    def plan(self, variant: str | None = None) -> CopyPlan:
        planes = u64(*self.bases), u64(*self.strides), u64(*self.sizes)
        return CopyPlan(self.mapping, *planes, self.num_blocks, variant)

    def fragment(self, mapping: U8, block: int, plane: int) -> U8:
        start = self.bases[plane] + block * self.strides[plane]
        return mapping[start : start + self.sizes[plane]]

    def slot(self, pool: U8, slot: int) -> U8:
        return pool[slot * PAGE_BYTES : slot * PAGE_BYTES + sum(self.sizes)]

    def gathered(self) -> U8:
        """What the pool holds after gather, by numpy."""
        pool = self.pool.copy()
        for block, slot in zip(self.block_ids.tolist(), self.slots.tolist(), strict=True):
            fragments = [self.fragment(self.mapping, block, plane) for plane in range(len(self.bases))]
            self.slot(pool, slot)[:] = np.concatenate(fragments)
        return pool

    def scattered(self) -> U8:
        """What the mapping holds after scatter, by numpy."""
        mapping = self.mapping.copy()
        for block, slot in zip(self.block_ids.tolist(), self.slots.tolist(), strict=True):
            start = 0
            for plane, size in enumerate(self.sizes):
                self.fragment(mapping, block, plane)[:] = self.slot(self.pool, slot)[start : start + size]
                start += size
        return mapping


sizes = st.one_of(
    st.integers(1, 700),
    st.sampled_from([511, 512, 513, 1024, 4095, 4096, 4097, 4352, 8192, 9000, 18432, 40000]),
)
# Whole cache lines: what engines have, and what is copied and summed piece by piece.
line_sizes = st.one_of(
    st.integers(8, 80).map(lambda lines: 64 * lines), st.sampled_from([8192, 18432, 65536])
)


def at_offset(offset: int, content: U8) -> U8:
    """The same content at an address this far from a page: 0 is how a real pool lies."""
    room = np.zeros(len(content) + 2 * PAGE_BYTES, np.uint8)
    start = -room.ctypes.data % PAGE_BYTES + offset
    room[start : start + len(content)] = content
    return room[start : start + len(content)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Planes one after the other or interleaved block by block, with gaps, at any alignment."""
    planes = draw(st.lists(draw(st.sampled_from([sizes, line_sizes])), min_size=1, max_size=6))
    num_blocks = draw(st.integers(1, 5))
    offset = draw(st.integers(0, 130))
    gap = draw(st.sampled_from([0, 0, 1, 64, 77]))
    if draw(st.booleans()):  # interleaved: all planes share one stride
        stride = sum(planes) + gap
        strides = [stride] * len(planes)
        bases = [offset + sum(planes[:p]) for p in range(len(planes))]
        mapping_bytes = offset + stride * num_blocks
    else:
        strides = [size + gap for size in planes]
        bases = [offset + num_blocks * sum(strides[:p]) for p in range(len(planes))]
        mapping_bytes = offset + num_blocks * sum(strides)
    pages = -(-sum(planes) // PAGE_BYTES)
    chosen = draw(st.permutations(range(num_blocks)))[: draw(st.integers(0, num_blocks))]
    places = draw(st.permutations(range(num_blocks)))[: len(chosen)]
    pool_bytes = PAGE_BYTES * (1 + pages * num_blocks)
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    return Case(
        mapping=random.integers(0, 256, mapping_bytes, dtype=np.uint8),
        bases=bases,
        strides=strides,
        sizes=planes,
        num_blocks=num_blocks,
        pool=at_offset(
            draw(st.sampled_from([0, 0, 1, 32])), random.integers(0, 256, pool_bytes, dtype=np.uint8)
        ),
        block_ids=u32(*chosen),
        slots=u32(*(1 + pages * place for place in places)),
    )


@settings(max_examples=200, deadline=None)
@given(cases(), st.booleans(), st.sampled_from(copy_variants()))
def test_gather_is_what_numpy_does(case: Case, with_checksums: bool, variant: str) -> None:
    plan = case.plan(variant)
    assert plan.slot_bytes == sum(case.sizes)
    expected = case.gathered()
    mapping = case.mapping.copy()
    checksums = np.zeros(len(case.slots), np.uint64) if with_checksums else None
    plan.gather(case.block_ids, case.pool, case.slots, checksums)
    assert (case.pool == expected).all()
    assert (case.mapping == mapping).all()
    sums = [xxh3_64(case.slot(case.pool, slot)) for slot in case.slots.tolist()]
    assert plan.checksums(case.pool, case.slots).tolist() == sums
    if checksums is not None:
        assert checksums.tolist() == sums


@settings(max_examples=200, deadline=None)
@given(cases(), st.sampled_from(copy_variants()))
def test_scatter_is_what_numpy_does(case: Case, variant: str) -> None:
    expected = case.scattered()
    pool = case.pool.copy()
    pool.flags.writeable = False  # a load needs no right to write into the pool
    case.plan(variant).scatter(case.block_ids, pool, case.slots)
    assert (case.mapping == expected).all()


def small() -> Case:
    """Two planes of 3 blocks: fragments of 600 and 5000 bytes; a pool of three slots of two pages."""
    random = np.random.default_rng(5)
    return Case(
        mapping=random.integers(0, 256, 20000, dtype=np.uint8),
        bases=[0, 2000],
        strides=[600, 6000],
        sizes=[600, 5000],
        num_blocks=3,
        pool=random.integers(0, 256, 7 * PAGE_BYTES, dtype=np.uint8),
        block_ids=u32(2, 0),
        slots=u32(1, 5),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_ids": u32(0, 3)}, "block_ids[1] is 3; the engine has 3 blocks"),
        ({"block_ids": u32(0, 0xFFFF_FFFF)}, "block_ids[1] is 4294967295; the engine has 3 blocks"),
        ({"slots": u32(1, 0)}, "slots[1] is 0: a slot of 5600 bytes is not inside the pool of 28672"),
        ({"slots": u32(1, 6)}, "slots[1] is 6: a slot of 5600 bytes is not inside the pool of 28672"),
        ({"slots": u32(1, 7)}, "slots[1] is 7: a slot of 5600 bytes is not inside the pool of 28672"),
        ({"slots": u32(1, 0xFFFF_FFFF)}, "slots[1] is 4294967295: a slot of 5600 bytes is not"),
        ({"slots": u32(1)}, "slots has 1 elements; expected 2, one for each of block_ids"),
        (
            {"slots": u32(1, 3).astype(np.int64)},
            "slots has elements of format 'l' and 8 bytes; expected uint32",
        ),
        ({"block_ids": u32(1, 2).reshape(2, 1)}, "block_ids has 2 dimensions; expected 1"),
    ],
)
@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_a_refused_copy_moves_no_byte(change: dict[str, Any], message: str, direction: str) -> None:
    case = small()
    plan = case.plan()
    before = case.mapping.copy(), case.pool.copy()
    arguments = {"block_ids": case.block_ids, "pool": case.pool, "slots": case.slots} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(plan, direction)(**arguments)
    assert (case.mapping == before[0]).all()
    assert (case.pool == before[1]).all()


def test_targets_that_overlap_are_refused() -> None:
    case = small()
    plan, before = case.plan(), (case.mapping.copy(), case.pool.copy())
    for slots, message in (
        (u32(3, 3), "slots[1] is 3, which overlaps slots[0], 3"),
        (u32(4, 3), "slots[0] is 4, which overlaps slots[1], 3"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            plan.gather(u32(0, 1), case.pool, slots)
    with pytest.raises(ValueError, match=re.escape("block_ids[2] is 1, which repeats block_ids[0], 1")):
        plan.scatter(u32(1, 0, 1), case.pool, u32(1, 3, 5))
    assert (case.mapping == before[0]).all()
    assert (case.pool == before[1]).all()


def test_one_block_may_go_to_many_slots_and_one_slot_to_many_blocks() -> None:
    case = small()
    plan = case.plan()
    plan.gather(u32(1, 1), case.pool, u32(1, 3))
    assert (case.slot(case.pool, 1) == case.slot(case.pool, 3)).all()
    plan.scatter(u32(0, 2), case.pool, u32(3, 3))
    assert (case.fragment(case.mapping, 0, 1) == case.fragment(case.mapping, 1, 1)).all()
    assert (case.fragment(case.mapping, 2, 0) == case.fragment(case.mapping, 1, 0)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [64], [64], 17), "fragment_bytes[0] is 64: block 16 would end beyond the mapping of 1024"),
        (([1], [64], [64], 16), "fragment_bytes[0] is 64: block 15 would end beyond the mapping of 1024"),
        (([0, 0], [64, 64], [64, 65], 2), "block_strides[1] is 64, less than fragment_bytes[1], 65"),
        (([0], [0], [1], 2), "block_strides[0] is 0, less than fragment_bytes[0], 1"),
        (([0], [64], [0], 1), "fragment_bytes[0] is 0"),
        (([1025], [64], [1], 1), "base_offsets[0] is 1025, beyond the mapping of 1024"),
        (([(1 << 64) - 1], [64], [64], 2), f"base_offsets[0] is {(1 << 64) - 1}, beyond the mapping"),
        (([8], [(1 << 64) - 8], [8], 2), f"block_strides[0] is {(1 << 64) - 8}: block 1 would begin beyond"),
        (([0], [1 << 62], [8], 5), f"block_strides[0] is {1 << 62}: block 4 would begin beyond the mapping"),
        (
            ([0, 8], [64, 64], [64, (1 << 64) - 8], 1),
            f"fragment_bytes[1] is {(1 << 64) - 8}: block 0 would end",
        ),
        (([0], [1], [1], 0), "num_blocks is 0; expected 1 to 2^32"),
        (([0], [1], [1], (1 << 32) + 1), "num_blocks is 4294967297; expected 1 to 2^32"),
        (([], [], [], 1), "base_offsets names 0 planes; expected 1 to 65536"),
        (([0, 1], [64], [64, 64], 1), "block_strides has 1 rows; expected 2, one for each of base_offsets"),
        (([0, 1], [64, 64], [64], 1), "fragment_bytes has 1 rows; expected 2, one for each of base_offsets"),
    ],
)
def test_planes_that_leave_the_mapping_are_refused_by_name(
    arguments: tuple[list[int], list[int], list[int], int], message: str
) -> None:
    bases, strides, fragment_bytes, num_blocks = arguments
    with pytest.raises(ValueError, match=re.escape(message)):
        CopyPlan(np.zeros(1024, np.uint8), u64(*bases), u64(*strides), u64(*fragment_bytes), num_blocks)


def test_one_block_that_fills_the_mapping_is_accepted_with_any_stride() -> None:
    assert CopyPlan(np.zeros(1024, np.uint8), u64(0), u64(0), u64(1024), 1).slot_bytes == 1024


def test_buffers_that_cannot_be_written_or_have_gaps_are_refused() -> None:
    case = small()
    plan, slots, ids = case.plan(), case.slots, case.block_ids
    with pytest.raises(ValueError, match="mapping of type bytes is not a C-contiguous writable buffer"):
        CopyPlan(bytes(1024), u64(0), u64(64), u64(64), 1)
    with pytest.raises(ValueError, match="pool of type bytes is not a C-contiguous writable buffer"):
        plan.gather(ids, bytes(case.pool), slots)
    with pytest.raises(ValueError, match=r"pool of type .* is not a C-contiguous buffer"):
        plan.scatter(ids, np.zeros(1 << 20, np.uint8)[::2], slots)
    with pytest.raises(ValueError, match="checksums has 1 rows; expected 2, one for each of block_ids"):
        plan.gather(ids, case.pool, slots, u64(0))
    with pytest.raises(ValueError, match="pool overlaps the engine's mapping"):
        plan.gather(ids, case.mapping, slots - slots + u32(1, 1))
    with pytest.raises(ValueError, match=re.escape("slots[1] is 6: a slot of 5600 bytes")):
        plan.checksums(case.pool, u32(5, 6))


def test_the_mapping_cannot_be_closed_under_its_plan() -> None:
    with mmap.mmap(-1, 1 << 16) as mapping:
        plan = CopyPlan(mapping, u64(0), u64(4096), u64(4096), 16)
        with pytest.raises(BufferError):
            mapping.close()
        del plan


def test_threads_copy_disjoint_blocks_at_once() -> None:
    blocks, size, threads = 64, 3 * PAGE_BYTES, 4
    random = np.random.default_rng(9)
    mapping = random.integers(0, 256, blocks * size, dtype=np.uint8)
    original = mapping.copy()
    plan = CopyPlan(mapping, u64(0), u64(size), u64(size), blocks)
    pool = np.zeros(blocks * size + PAGE_BYTES, np.uint8)

    def there_and_back(number: int) -> None:
        ids = np.arange(number, blocks, threads, dtype=np.uint32)
        slots = 1 + 3 * ids[::-1].copy()
        for _ in range(20):
            plan.gather(ids, pool, slots)
            plan.scatter(ids, pool, slots)

    workers = [threading.Thread(target=there_and_back, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert (mapping == original).all()


def test_the_fastest_variant_is_the_default_and_unknown_ones_are_refused() -> None:
    assert set(copy_variants()) <= {"avx512", "avx2", "sse2", "memcpy"}
    with pytest.raises(ValueError, match="variant is 'mmx', which this machine does not have"):
        small().plan("mmx")


class TestHoles:
    """Blocks of 1.5 pages in a memfd of 16 pages; block b touches the pages 1.5 b to 1.5 b + 1."""

    @pytest.fixture
    def fd(self) -> Iterator[int]:
        fd = os.memfd_create("test")
        os.ftruncate(fd, 16 * PAGE_BYTES)
        yield fd
        os.close(fd)

    def first_hole(self, fd: int, *block_ids: int) -> int | None:
        size = PAGE_BYTES * 3 // 2
        mapping = np.zeros(16 * PAGE_BYTES, np.uint8)  # nothing is read from it
        return CopyPlan(mapping, u64(0), u64(size), u64(size), 10).first_hole(u32(*block_ids), fd)

    def test_every_page_that_a_block_touches_has_to_be_there(self, fd: int) -> None:
        assert self.first_hole(fd, 3, 1) == 4 * PAGE_BYTES
        os.pwrite(fd, b"x", 4 * PAGE_BYTES)
        assert self.first_hole(fd, 3, 1) == 5 * PAGE_BYTES
        os.pwrite(fd, b"x", 6 * PAGE_BYTES - 1)
        assert self.first_hole(fd, 3) is None
        assert self.first_hole(fd, 3, 1) == PAGE_BYTES
        assert self.first_hole(fd) is None
        assert os.fstat(fd).st_blocks * 512 == 2 * PAGE_BYTES, "looking allocates nothing"

    def test_what_was_only_reserved_counts_as_a_hole(self, fd: int) -> None:
        os.posix_fallocate(fd, 0, 2 * PAGE_BYTES)
        assert self.first_hole(fd, 0) == 0
        with mmap.mmap(fd, 16 * PAGE_BYTES) as mapping:
            mapping.madvise(23)
        assert self.first_hole(fd, *range(10)) is None

    def test_a_file_that_cannot_say_has_holes(self) -> None:
        pipe = os.pipe()
        try:
            assert self.first_hole(pipe[0], 0) == 0
        finally:
            os.close(pipe[0])
            os.close(pipe[1])

    def test_blocks_that_are_not_there_are_refused(self, fd: int) -> None:
        with pytest.raises(ValueError, match="block_ids"):
            self.first_hole(fd, 10)
