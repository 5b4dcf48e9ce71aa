"""Descriptors and planes are believed once every byte of every block has its place inside the mapping."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.stimuli import GroupGeometry
from kvtierd.rpc import memory_check
from kvtierd.rpc.memory_check import (
    F_SEAL_FUTURE_WRITE,
    F_SEAL_SHRINK,
    F_SEAL_WRITE,
    Descriptor,
    GroupPlace,
    PlanePlace,
)

F_ADD_SEALS = 1033
PAGE = 4096
BASE = "groups[0].planes[0].base_offset"
STRIDE = "groups[0].planes[0].block_stride_bytes"


def sound(size_bytes: int = 1 << 20) -> Descriptor:
    return Descriptor(regular=True, size_bytes=size_bytes, seals=F_SEAL_SHRINK, writable=True)


def geometry(*fragments: int) -> GroupGeometry:
    return GroupGeometry(1, 16, 0, tuple((size, "") for size in fragments))


def place(num_blocks: int, *planes: tuple[int, int], group: int = 0) -> GroupPlace:
    return GroupPlace(group, num_blocks, tuple(PlanePlace(*plane) for plane in planes))


def reason_of(
    found: Descriptor, mapping_bytes: int, places: list[GroupPlace], shapes: list[GroupGeometry]
) -> tuple[Reason, str]:
    with pytest.raises(Refusal) as refusal:
        memory_check.check_memory(found, mapping_bytes, places, shapes)
    assert refusal.value.message
    return refusal.value.reason, refusal.value.field


@contextmanager
def memfd(size_bytes: int, seals: int) -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        if seals:
            fcntl.fcntl(fd, F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


class TestDescriptor:
    def test_a_memfd_sealed_against_shrinking_is_accepted(self) -> None:
        with memfd(8 * PAGE, F_SEAL_SHRINK) as fd:
            found = memory_check.inspect(fd)
        assert found == Descriptor(True, 8 * PAGE, F_SEAL_SHRINK, True)
        memory_check.check_descriptor(found)

    def test_a_memfd_that_could_shrink_is_refused(self) -> None:
        with memfd(PAGE, 0) as fd, pytest.raises(Refusal) as refusal:
            memory_check.check_descriptor(memory_check.inspect(fd))
        assert refusal.value.reason is Reason.MAPPING_NOT_SEALED

    @pytest.mark.parametrize("seal", [F_SEAL_WRITE, F_SEAL_FUTURE_WRITE])
    def test_a_memfd_that_cannot_be_written_is_refused(self, seal: int) -> None:
        with memfd(PAGE, F_SEAL_SHRINK | seal) as fd, pytest.raises(Refusal) as refusal:
            memory_check.check_descriptor(memory_check.inspect(fd))
        assert refusal.value.reason is Reason.MAPPING_INVALID

    def test_a_read_only_descriptor_is_refused(self) -> None:
        with memfd(PAGE, F_SEAL_SHRINK) as fd:
            readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            try:
                with pytest.raises(Refusal) as refusal:
                    memory_check.check_descriptor(memory_check.inspect(readable))
            finally:
                os.close(readable)
        assert refusal.value.reason is Reason.MAPPING_INVALID

    def test_pipes_and_plain_files_are_refused(self, tmp_path: os.PathLike[str]) -> None:
        reading, writing = os.pipe()
        file = os.open(os.path.join(tmp_path, "file"), os.O_RDWR | os.O_CREAT)
        try:
            for fd in (reading, writing, file):
                with pytest.raises(Refusal):
                    memory_check.check_descriptor(memory_check.inspect(fd))
        finally:
            for fd in (reading, writing, file):
                os.close(fd)


class TestWords:
    def test_room_for_every_word_is_enough(self) -> None:
        memory_check.check_words(sound(8 * 10), 3, 7)

    @pytest.mark.parametrize(("doorbells", "parts"), [(4, 7), (0, 11)])
    def test_one_word_too_many_is_refused(self, doorbells: int, parts: int) -> None:
        with pytest.raises(Refusal) as refusal:
            memory_check.check_words(sound(8 * 10), doorbells, parts)
        assert refusal.value.reason is Reason.MAPPING_INVALID

    @pytest.mark.parametrize(
        ("doorbells", "parts"), [(0, 0), (65_537, 1), (1, 65_537), (2**32 - 1, 2**32 - 1)]
    )
    def test_absurd_counts_are_refused_whatever_the_descriptor(self, doorbells: int, parts: int) -> None:
        with pytest.raises(Refusal) as refusal:
            memory_check.check_words(sound(1 << 40), doorbells, parts)
        assert refusal.value.reason is Reason.WORD_INDEX_RANGE


class TestPlanes:
    def test_a_plane_that_ends_with_the_mapping_fits(self) -> None:
        memory_check.check_memory(sound(), 1000, [place(10, (0, 100))], [geometry(100)])
        memory_check.check_memory(sound(), 1000, [place(10, (50, 95), (0, 100))], [geometry(95, 64)])

    @pytest.mark.parametrize(
        ("mapping_bytes", "where", "shape", "reason", "field"),
        [
            (999, place(10, (0, 100)), geometry(100), Reason.PLANE_BEYOND_MAPPING, BASE),
            (1000, place(10, (1, 100)), geometry(100), Reason.PLANE_BEYOND_MAPPING, BASE),
            (1000, place(11, (0, 100)), geometry(100), Reason.PLANE_BEYOND_MAPPING, BASE),
            (1000, place(5, (2000, 9), (0, 100)), geometry(9, 9), Reason.PLANE_BEYOND_MAPPING, BASE),
            (1000, place(2, (0, 2**63)), geometry(9), Reason.STRIDE_OVERFLOW, STRIDE),
            (1000, place(2**32 - 1, (0, 2**62)), geometry(9), Reason.STRIDE_OVERFLOW, STRIDE),
            (1000, place(1, (2**64 - 1, 1)), geometry(9), Reason.STRIDE_OVERFLOW, STRIDE),
            (1000, place(2, (0, 99)), geometry(100), Reason.LAYOUT_INVALID, STRIDE),
            (1000, place(2, (0, 0)), geometry(100), Reason.LAYOUT_INVALID, STRIDE),
            (1000, place(0, (0, 100)), geometry(100), Reason.LAYOUT_INVALID, "groups[0].num_blocks"),
            (1000, place(2**32, (0, 100)), geometry(100), Reason.LAYOUT_INVALID, "groups[0].num_blocks"),
            (1000, place(2, (0, 100)), geometry(100, 100), Reason.COUNT_MISMATCH, "groups[0].planes"),
            (1000, place(2, (0, 100), group=1), geometry(100), Reason.UNKNOWN_GROUP, "groups"),
            (0, place(2, (0, 100)), geometry(100), Reason.MAPPING_INVALID, "mapping_bytes"),
            (2**20 + 1, place(2, (0, 100)), geometry(100), Reason.MAPPING_INVALID, "mapping_bytes"),
        ],
    )  # fmt: skip
    def test_what_does_not_fit_is_refused_by_field(
        self, mapping_bytes: int, where: GroupPlace, shape: GroupGeometry, reason: Reason, field: str
    ) -> None:
        assert reason_of(sound(), mapping_bytes, [where], [shape]) == (reason, field)

    def test_every_group_of_hello_is_placed_once(self) -> None:
        shapes = [geometry(8), geometry(8)]
        assert reason_of(sound(), 1000, [place(1, (0, 8))], shapes)[0] is Reason.UNKNOWN_GROUP
        twice = [place(1, (0, 8)), place(1, (0, 8))]
        assert reason_of(sound(), 1000, twice, shapes)[0] is Reason.UNKNOWN_GROUP

    @given(
        mapping_bytes=st.integers(1, 1 << 20),
        blocks=st.integers(1, 2**33),
        base=st.integers(0, 2**64 - 1) | st.integers(0, 1 << 20),
        stride=st.integers(0, 2**64 - 1) | st.integers(0, 1 << 12),
        fragment=st.integers(1, 1 << 12),
    )
    def test_whatever_is_accepted_lies_inside(
        self, mapping_bytes: int, blocks: int, base: int, stride: int, fragment: int
    ) -> None:
        try:
            memory_check.check_memory(
                sound(), mapping_bytes, [place(blocks, (base, stride))], [geometry(fragment)]
            )
        except Refusal:
            return
        for block in {0, 1, blocks - 1} & set(range(blocks)):
            assert 0 <= base + block * stride <= mapping_bytes - fragment
        assert blocks == 1 or stride >= fragment
