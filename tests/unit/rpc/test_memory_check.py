"""Descriptors and planes are accepted only if every byte of every block has its place inside the mapping."""

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier.v1 import side_pb2
from kvtier.v1.side_pb2 import GroupMemory
from kvtierd.cache import DeviceRange
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.stimuli import GroupGeometry
from kvtierd.rpc import memory_check
from kvtierd.rpc.memory_check import (
    F_SEAL_FUTURE_WRITE,
    F_SEAL_SHRINK,
    F_SEAL_WRITE,
    Descriptor,
)

F_ADD_SEALS = 1033
PAGE = 4096
HUGE = 2 << 20
BASE = "groups[0].planes[0].base_offset"
STRIDE = "groups[0].planes[0].block_stride_bytes"


def sound(size_bytes: int = 1 << 20) -> Descriptor:
    return Descriptor(
        regular=True, size_bytes=size_bytes, allocated_bytes=size_bytes, seals=F_SEAL_SHRINK, writable=True
    )


def geometry(*fragments: int) -> GroupGeometry:
    return GroupGeometry(1, 16, 0, tuple((size, "") for size in fragments))


def place(num_blocks: int, *planes: tuple[int, int], group: int = 0) -> GroupMemory:
    placed = [side_pb2.Plane(base_offset=base, block_stride_bytes=stride) for base, stride in planes]
    return GroupMemory(group=group, num_blocks=num_blocks, planes=placed)


def reason_of(
    found: Descriptor, mapping_bytes: int, places: list[GroupMemory], shapes: list[GroupGeometry]
) -> tuple[Reason, str]:
    with pytest.raises(Refusal) as refusal:
        memory_check.check_memory(found, mapping_bytes, places, shapes, sparse=False)
    assert refusal.value.message
    return refusal.value.reason, refusal.value.field


@contextmanager
def memfd(size_bytes: int, seals: int, flags: int = 0) -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
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
        assert found == Descriptor(True, 8 * PAGE, 0, F_SEAL_SHRINK, True)
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


class TestDevice:
    def test_a_gpu_is_named_as_nvidia_smi_prints_it_and_nothing_is_the_cpu(self) -> None:
        assert memory_check.device_name("") == memory_check.device_name("cpu") == "cpu"
        gpu = "GPU-0123abcd-45ef-6789-abcd-0123456789ab"
        assert memory_check.device_name(gpu) == gpu

    @pytest.mark.parametrize(
        "name",
        [
            "0",
            "CPU",
            "cuda:0",
            "GPU-",
            "GPU-0123ABCD-45EF-6789-ABCD-0123456789AB",
            "GPU-0123abcd-45ef-6789-abcd-0123456789a",
            "GPU-0123abcd-45ef-6789-abcd-0123456789abc",
            "GPU-0123abcd-45ef-6789-abcd-0123456789ab\n",
            "GPU-0123abcd45ef6789abcd0123456789ab",
            "GPU-٠١٢٣abcd-45ef-6789-abcd-0123456789ab",
            "gpu-0123abcd-45ef-6789-abcd-0123456789ab",
            "x" * 10_000,
        ],
    )
    def test_what_no_device_is_called_is_refused(self, name: str) -> None:
        with pytest.raises(Refusal) as refusal:
            memory_check.device_name(name)
        assert (refusal.value.reason, refusal.value.field) == (Reason.DEVICE_UNKNOWN, "device")
        assert "nvidia-smi -L" in refusal.value.message
        assert len(refusal.value.value) <= 120

    def test_a_mig_instance_is_told_what_to_change(self) -> None:
        with pytest.raises(Refusal, match="MIG off") as refusal:
            memory_check.device_name("MIG-0123abcd-45ef-6789-abcd-0123456789ab")
        assert refusal.value.reason is Reason.DEVICE_UNAVAILABLE


class TestChunks:
    def test_each_descriptor_has_its_size(self) -> None:
        memory_check.check_chunks(2, [1, 2**62])

    @pytest.mark.parametrize(
        ("count", "sizes", "reason", "field"),
        [
            (0, [], Reason.COUNT_MISMATCH, "bytes"),
            (0, [1], Reason.COUNT_MISMATCH, "bytes"),
            (2, [1], Reason.COUNT_MISMATCH, "bytes"),
            (1, [1, 1], Reason.COUNT_MISMATCH, "bytes"),
            (2, [1, 0], Reason.DEVICE_MEMORY_INVALID, "bytes[1]"),
            (1, [2**63], Reason.DEVICE_MEMORY_INVALID, "bytes[0]"),
        ],
    )
    def test_what_does_not_match_is_refused(
        self, count: int, sizes: list[int], reason: Reason, field: str
    ) -> None:
        with pytest.raises(Refusal) as refusal:
            memory_check.check_chunks(count, sizes)
        assert (refusal.value.reason, refusal.value.field) == (reason, field)


def ipc(size_bytes: int, offset: int = 0, handle: bytes = bytes(64)) -> DeviceRange:
    return DeviceRange(bytes=size_bytes, offset=offset, ipc_handle=handle, buffer_id=7)


def of_chunks(size_bytes: int, count: int, offset: int = 0) -> DeviceRange:
    return DeviceRange(bytes=size_bytes, offset=offset, chunks=count)


class TestRanges:
    """One plane of 10 blocks of 100 bytes, unless something else is said."""

    def check(
        self,
        ranges: list[DeviceRange],
        chunks: list[int] | None = None,
        mapping_bytes: int | None = None,
        where: GroupMemory | None = None,
    ) -> None:
        if mapping_bytes is None:
            mapping_bytes = sum(part.bytes for part in ranges)
        where = where or place(10, (0, 100))
        fragments = [100] * len(where.planes)
        memory_check.check_ranges(ranges, chunks or [], mapping_bytes, [where], [geometry(*fragments)])

    def test_ranges_one_after_another_are_the_mapping(self) -> None:
        self.check([ipc(1000)])
        self.check([ipc(1000, 2**40), ipc(1, 5)])
        self.check([of_chunks(1000, 2, offset=599)], [600, 1000])
        self.check([ipc(500), of_chunks(1000, 1), ipc(7)], [1000], where=place(10, (500, 100)))
        self.check([of_chunks(10, 1), of_chunks(990, 2)], [10, 500, 500], where=place(5, (10, 100)))

    @pytest.mark.parametrize(
        ("ranges", "chunks", "field"),
        [
            ([], [], "ranges"),
            ([ipc(1)] * 4_097, [], "ranges"),
            ([ipc(0), ipc(1000)], [], "ranges[0].bytes"),
            ([ipc(1000, 2**63 - 1000)], [], "ranges[0].bytes"),
            ([ipc(1000), ipc(2**64 - 1)], [], "ranges[1].bytes"),
            ([ipc(1000, handle=bytes(63))], [], "ranges[0].ipc.handle"),
            ([ipc(1000, handle=bytes(65))], [], "ranges[0].ipc.handle"),
            ([ipc(1000, handle=b"")], [], "ranges[0].ipc.handle"),
            ([ipc(1000)], [1], "ranges"),
            ([of_chunks(1000, 1)], [1000, 1000], "ranges"),
            ([of_chunks(1000, 2)], [1000], "ranges[0].chunks.count"),
            ([of_chunks(1000, 1), of_chunks(1000, 1)], [1000], "ranges[1].chunks.count"),
            ([of_chunks(1000, 2**32 - 1)], [1000], "ranges[0].chunks.count"),
            ([of_chunks(1000, 2, offset=600)], [600, 1000], "ranges[0].chunks.offset"),
            ([of_chunks(1000, 1, offset=1)], [1000], "ranges[0].bytes"),
            ([of_chunks(1000, 2)], [1000, 1], "ranges[0].bytes"),
        ],
    )  # fmt: skip
    def test_what_is_no_memory_of_a_gpu_is_refused_by_field(
        self, ranges: list[DeviceRange], chunks: list[int], field: str
    ) -> None:
        with pytest.raises(Refusal) as refusal:
            self.check(ranges, chunks)
        assert (refusal.value.reason, refusal.value.field) == (Reason.DEVICE_MEMORY_INVALID, field)

    @pytest.mark.parametrize("mapping_bytes", [0, 999, 1001, 2**64 - 1])
    def test_their_sum_is_the_mapping(self, mapping_bytes: int) -> None:
        with pytest.raises(Refusal) as refusal:
            self.check([ipc(400), ipc(600)], mapping_bytes=mapping_bytes, where=place(1, (0, 1)))
        assert (refusal.value.reason, refusal.value.field) == (Reason.MAPPING_INVALID, "mapping_bytes")

    def test_a_mapping_beyond_all_measure_is_refused(self) -> None:
        with pytest.raises(Refusal) as refusal:
            self.check([ipc(2**62), ipc(2**62)])
        assert refusal.value.field == "mapping_bytes"

    @pytest.mark.parametrize(
        ("where", "field"),
        [
            (place(10, (1, 100)), BASE),
            (place(10, (500, 100)), BASE),
            (place(11, (0, 100)), BASE),
            (place(1, (950, 100)), BASE),
            (place(11, (1000, 100)), BASE),
            (place(1, (2000, 100)), BASE),
            (place(2, (0, 2**63)), STRIDE),
        ],
    )
    def test_no_plane_crosses_from_one_range_to_the_next(self, where: GroupMemory, field: str) -> None:
        with pytest.raises(Refusal) as refusal:
            self.check([ipc(1000), ipc(1000)], where=where)
        assert refusal.value.reason in (Reason.PLANE_BEYOND_MAPPING, Reason.STRIDE_OVERFLOW)
        assert refusal.value.field == field

    @given(
        sizes=st.lists(st.integers(1, 2_000), min_size=1, max_size=8),
        blocks=st.integers(1, 20),
        base=st.integers(0, 4_000),
        stride=st.integers(100, 200),
    )
    def test_whatever_is_accepted_lies_inside_one_range(
        self, sizes: list[int], blocks: int, base: int, stride: int
    ) -> None:
        try:
            self.check([ipc(size) for size in sizes], where=place(blocks, (base, stride)))
        except Refusal:
            accepted = False
        else:
            accepted = True
        touched = set()
        start = 0
        for index, size in enumerate(sizes):
            for block in range(blocks):
                if base + block * stride < start + size and base + block * stride + 100 > start:
                    touched.add(index)
            start += size
        assert accepted == (len(touched) == 1 and base + (blocks - 1) * stride + 100 <= start)


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


class TestAllocated:
    """What a worker copies from or to is memory of its owner's, never the daemon's."""

    def is_refused(self, fd: int) -> bool:
        """Whether it is refused, both as words and as memory, with what was found and what to do."""
        found = memory_check.inspect(fd)
        answers = {
            self.answer(lambda: memory_check.check_words(found, 8, 8)),
            self.answer(
                lambda: memory_check.check_memory(
                    found, PAGE, [place(4, (0, 1024))], [geometry(1024)], sparse=False
                )
            ),
        }
        assert len(answers) == 1
        return answers == {f"MAPPING_INVALID descriptor.allocated_bytes={found.allocated_bytes}"}

    def answer(self, check: Callable[[], None]) -> str:
        try:
            check()
        except Refusal as refusal:
            return f"{refusal.reason.name} {refusal.field}={refusal.value}"
        return ""

    def test_a_memfd_that_has_no_memory_is_refused_however_large(self) -> None:
        with memfd(1 << 40, F_SEAL_SHRINK) as fd:
            assert self.is_refused(fd)

    @pytest.mark.parametrize("size_bytes", [8 * PAGE, 7 * PAGE + 1])
    def test_reserved_or_written_memory_is_accepted(self, size_bytes: int) -> None:
        with memfd(size_bytes, F_SEAL_SHRINK) as fd:
            os.posix_fallocate(fd, 0, size_bytes)
            assert not self.is_refused(fd)
        with memfd(size_bytes, F_SEAL_SHRINK) as fd:
            os.pwrite(fd, bytes(size_bytes), 0)
            assert not self.is_refused(fd)

    def test_one_page_that_is_missing_is_enough_for_a_refusal(self) -> None:
        with memfd(8 * PAGE, F_SEAL_SHRINK) as fd:
            os.posix_fallocate(fd, 0, 7 * PAGE)
            assert self.is_refused(fd)
            os.posix_fallocate(fd, 0, 8 * PAGE)
            assert not self.is_refused(fd)
            with mmap.mmap(fd, 8 * PAGE) as mapping:
                mapping.madvise(mmap.MADV_REMOVE, 3 * PAGE, PAGE)
            assert self.is_refused(fd)

    def test_huge_pages_count_as_others_do(self) -> None:
        try:
            with memfd(HUGE, F_SEAL_SHRINK, os.MFD_HUGETLB) as fd:
                assert self.is_refused(fd)
                os.posix_fallocate(fd, 0, HUGE)
                assert not self.is_refused(fd)
        except OSError:
            pytest.skip("this machine has no huge page to spare")

    def test_memory_that_is_said_to_be_sparse_may_be(self) -> None:
        with memfd(1 << 40, F_SEAL_SHRINK) as fd:
            found = memory_check.inspect(fd)
        memory_check.check_memory(found, 1 << 40, [place(4, (0, 1024))], [geometry(1024)], sparse=True)


class TestPlanes:
    def test_a_plane_that_ends_with_the_mapping_fits(self) -> None:
        for where, shape in (
            (place(10, (0, 100)), geometry(100)),
            (place(10, (50, 95), (0, 100)), geometry(95, 64)),
        ):
            memory_check.check_memory(sound(), 1000, [where], [shape], sparse=False)

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
        self, mapping_bytes: int, where: GroupMemory, shape: GroupGeometry, reason: Reason, field: str
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
                sound(), mapping_bytes, [place(blocks, (base, stride))], [geometry(fragment)], sparse=False
            )
        except Refusal:
            return
        for block in {0, 1, blocks - 1} & set(range(blocks)):
            assert 0 <= base + block * stride <= mapping_bytes - fragment
        assert blocks == 1 or stride >= fragment
