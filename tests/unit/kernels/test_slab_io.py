"""SlabIo against real files: every byte where it belongs, every row's error its own."""

from __future__ import annotations

import errno
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from mmap import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtier_kernels import PAGE_BYTES, SharedWords, SlabIo, xxh3_64

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
FILE_PAGES = 700
"""More than two of the largest operations, which are of 1 MiB."""
DEADLINE_S = 60


def u64(*values: int) -> U64:
    return np.array(values, np.uint64)


def pages(*numbers: int) -> U64:
    return u64(*(number * PAGE_BYTES for number in numbers))


def memory_of(count: int) -> U8:
    """Memory that begins at a page, filled so that no two pages are alike."""
    memory = np.frombuffer(mmap(-1, count * PAGE_BYTES), np.uint8)
    memory.view(np.uint64)[:] = np.random.default_rng(count).integers(0, 1 << 63, count * PAGE_BYTES // 8)
    return memory


def read(io: SlabIo, memory: U8, in_memory: U64, in_file: U64, lengths: U64) -> npt.NDArray[np.int32]:
    """The errors. The sums, each of another part of its row, are those of what is in memory then."""
    data_bytes = lengths - np.arange(len(lengths), dtype=np.uint64) * np.uint64(7) % np.uint64(PAGE_BYTES)
    errors, sums = io.read(memory, in_memory, in_file, lengths, data_bytes)
    assert sums.dtype == np.uint64
    assert sums.shape == lengths.shape
    for error, found, at, size in zip(
        errors, sums.tolist(), in_memory.tolist(), data_bytes.tolist(), strict=True
    ):
        assert found == (0 if error else xxh3_64(memory[at : at + size]))
    return errors


class Slab:
    """A file of random bytes, open, and what we believe is in it."""

    def __init__(self, path: Path, mode: str) -> None:
        self.path = path
        self.direct = os.O_DIRECT if mode == "direct" else 0
        self.expected = memory_of(FILE_PAGES).copy()
        path.write_bytes(self.expected.tobytes())
        self.fd = self.open(os.O_RDWR)

    def open(self, flags: int) -> int:
        try:
            return os.open(self.path, flags | self.direct)
        except OSError as error:
            if error.errno == errno.EINVAL:
                pytest.skip(f"the file system of {self.path.parent} refuses O_DIRECT")
            raise

    def bytes(self) -> U8:
        return np.frombuffer(self.path.read_bytes(), np.uint8)


@pytest.fixture(params=["direct", "buffered"])
def slab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Slab]:
    slab = Slab(tmp_path / "slab", request.param)
    yield slab
    os.close(slab.fd)


# --- where the bytes go ------------------------------------------------------------------------------------


# (pages of room before it, pages of its own) of each slot, in the order of the file: many are neighbours.
slots_in_file = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 1, 3]), st.sampled_from([1, 2, 5, 40])), min_size=1, max_size=16
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(slots=slots_in_file, depth=st.sampled_from([1, 2, 32]), seed=st.integers(0, 1 << 32))
def test_slots_go_to_their_places_and_come_back(
    slab: Slab, slots: list[tuple[int, int]], depth: int, seed: int
) -> None:
    order = random.Random(seed)
    ends = np.cumsum([gap + length for gap, length in slots])
    rows = list(range(len(slots)))
    order.shuffle(rows)
    lengths = pages(*(slots[row][1] for row in rows))
    in_file = pages(*ends[rows].tolist()) - lengths
    in_memory = np.empty_like(lengths)
    order.shuffle(rows)
    in_memory[rows] = np.cumsum(lengths[rows]) - lengths[rows]
    memory = memory_of(int(lengths.sum()) // PAGE_BYTES)
    memory.flags.writeable = False
    for at, to, length in zip(in_memory.tolist(), in_file.tolist(), lengths.tolist(), strict=True):
        slab.expected[to : to + length] = memory[at : at + length]

    with SlabIo(slab.fd, depth) as io:
        errors = io.write(memory, in_memory, in_file, lengths)
        assert errors.dtype == np.int32
        assert errors.tolist() == [0] * len(slots)
        assert np.array_equal(slab.bytes(), slab.expected)
        back = memory_of(len(memory) // PAGE_BYTES + 1)
        behind = back[len(memory) :].copy()
        assert not read(io, back, in_memory, in_file, lengths).any()
    assert np.array_equal(back[: len(memory)], memory)
    assert np.array_equal(back[len(memory) :], behind)


def test_slots_longer_than_an_operation_are_whole(slab: Slab) -> None:
    memory = memory_of(660)
    where, lengths = pages(20, 620), pages(600, 60)
    with SlabIo(slab.fd, 2) as io:
        assert not io.write(memory, pages(60, 0), where, lengths).any()
        slab.expected[20 * PAGE_BYTES : 680 * PAGE_BYTES] = np.roll(memory, -60 * PAGE_BYTES)
        assert np.array_equal(slab.bytes(), slab.expected)
        memory[:] = 0
        assert not read(io, memory, pages(0, 600), where, lengths).any()
    assert np.array_equal(memory, slab.expected[20 * PAGE_BYTES : 680 * PAGE_BYTES])


def test_many_more_rows_than_fit_in_flight_all_arrive(slab: Slab) -> None:
    every_other = np.arange(0, FILE_PAGES, 2, dtype=np.uint64) * np.uint64(PAGE_BYTES)
    memory = memory_of(FILE_PAGES)
    with SlabIo(slab.fd, 3) as io:
        assert not read(
            io, memory, every_other[::-1].copy(), every_other, np.full_like(every_other, 4096)
        ).any()
    found = memory.reshape(FILE_PAGES, PAGE_BYTES)[::2]
    assert np.array_equal(found[::-1], slab.expected.reshape(FILE_PAGES, PAGE_BYTES)[::2])


def test_a_page_may_be_read_to_several_places(slab: Slab) -> None:
    memory = memory_of(4)
    with SlabIo(slab.fd, 8) as io:
        assert not read(io, memory, pages(0, 1, 2), pages(7, 6, 6), pages(1, 1, 2)).any()
    expected = slab.expected.reshape(-1, PAGE_BYTES)
    assert np.array_equal(memory.reshape(-1, PAGE_BYTES), expected[[7, 6, 6, 7]])


def test_a_batch_of_nothing_is_nothing(slab: Slab) -> None:
    with SlabIo(slab.fd, 1) as io:
        errors = read(io, memory_of(1), u64(), u64(), u64())
    assert errors.shape == (0,)
    assert errors.dtype == np.int32


# --- errors ------------------------------------------------------------------------------------------------


def test_what_lies_beyond_the_end_fails_alone(slab: Slab) -> None:
    """Rows 0 to 3 follow each other and are one operation; the file ends inside row 2."""
    memory = memory_of(12)
    end = FILE_PAGES - 5
    with SlabIo(slab.fd, 4) as io:
        errors = read(
            io, memory, pages(0, 2, 4, 8, 10), pages(end, end + 2, end + 4, end + 6, 3), pages(2, 2, 2, 2, 2)
        )
    assert errors.tolist() == [0, 0, errno.EIO, errno.EIO, 0]
    assert np.array_equal(memory[: 4 * PAGE_BYTES], slab.expected[end * PAGE_BYTES :][: 4 * PAGE_BYTES])
    assert np.array_equal(memory[10 * PAGE_BYTES :], slab.expected[3 * PAGE_BYTES : 5 * PAGE_BYTES])


def test_one_missing_piece_fails_a_long_slot(slab: Slab) -> None:
    with SlabIo(slab.fd, 4) as io:
        errors = read(
            io, memory_of(FILE_PAGES + 2), pages(0, FILE_PAGES + 1), pages(0, 1), pages(FILE_PAGES + 1, 1)
        )
    assert errors.tolist() == [errno.EIO, 0]


@pytest.mark.parametrize(("flags", "method"), [(os.O_RDONLY, "write"), (os.O_WRONLY, "read")])
def test_a_descriptor_for_the_other_direction_is_an_error_of_each_row(
    slab: Slab, flags: int, method: str
) -> None:
    fd = slab.open(flags)
    try:
        with SlabIo(fd, 4) as io:
            rows = memory_of(4), pages(0, 1, 2), pages(0, 1, 9), pages(1, 1, 2)
            errors = read(io, *rows) if method == "read" else io.write(*rows)
    finally:
        os.close(fd)
    assert errors.tolist() == [errno.EBADF] * 3
    assert np.array_equal(slab.bytes(), slab.expected)


def test_a_file_that_may_grow_no_further_fails_the_rows_beyond(slab: Slab) -> None:
    """The four rows follow each other, so that they are one operation first."""
    memory = memory_of(8)
    end = FILE_PAGES - 4
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with SlabIo(slab.fd, 4) as io:
        # Python ignores SIGXFSZ.
        resource.setrlimit(resource.RLIMIT_FSIZE, ((FILE_PAGES - 1) * PAGE_BYTES, before[1]))
        try:
            errors = io.write(
                memory, pages(0, 2, 4, 6), pages(end, end + 2, end + 4, end + 6), pages(2, 2, 2, 2)
            )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        # The limit lies in the middle of row 1.
        assert errors.tolist() == [0, errno.EIO, errno.EFBIG, errno.EFBIG]
        again = io.write(memory, pages(0, 2, 4, 6), pages(end, end + 2, end + 4, end + 6), pages(2, 2, 2, 2))
    assert again.tolist() == [0, 0, 0, 0]
    assert np.array_equal(slab.bytes()[end * PAGE_BYTES :], memory)


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "where", "lengths", "message"),
    [
        (u64(0, 100), pages(0, 1), pages(1, 1), "memory_offsets[1] is 100; expected a multiple of 4096"),
        (pages(0, 1), u64(0, 512), pages(1, 1), "file_offsets[1] is 512; expected a multiple of 4096"),
        (pages(0, 1), pages(0, 1), u64(4096, 5000), "lengths[1] is 5000; expected a multiple of 4096"),
        (pages(0, 1), pages(0, 1), pages(1, 0), "lengths[1] is 0; expected a page or more"),
        (
            pages(0, 3),
            pages(0, 1),
            pages(1, 2),
            "memory_offsets[1] is 12288 and lengths[1] is 8192, but memory has 16384 bytes",
        ),
        (
            pages(0, 5),
            pages(0, 1),
            pages(1, 1),
            "memory_offsets[1] is 20480 and lengths[1] is 4096, but memory",
        ),
        (
            pages(0, 1),
            pages(0, 1),
            u64(4096, (1 << 64) - 4096),
            "lengths[1] is 18446744073709547520, but memory",
        ),
        (u64(0, (1 << 64) - 4096), pages(0, 1), pages(1, 1), "memory_offsets[1] is 18446744073709547520 and"),
        (
            pages(0, 1),
            u64(0, (1 << 63) - 4096),
            pages(1, 1),
            "file_offsets[1] is 9223372036854771712 and lengths[1] is 4096; expected an end below 2^63",
        ),
        (pages(0, 1), u64(0, (1 << 64) - 4096), pages(1, 1), "expected an end below 2^63"),
        (
            pages(0, 1),
            pages(0),
            pages(1, 1),
            "file_offsets has 1 rows; expected 2, one for each of memory_offsets",
        ),
        (
            pages(0, 1),
            pages(0, 1),
            pages(1),
            "lengths has 1 rows; expected 2, one for each of memory_offsets",
        ),
        (pages(0, 1), pages(0, 1), np.array([4096, 4096]), "lengths has elements of format 'l'"),
    ],
)
@pytest.mark.parametrize("method", ["read", "write"])
def test_a_refusal_names_argument_index_and_value_and_moves_nothing(
    slab: Slab, method: str, at: U64, where: U64, lengths: U64, message: str
) -> None:
    memory = memory_of(4)
    before = memory.copy()
    with SlabIo(slab.fd, 4) as io, pytest.raises(ValueError, match=re.escape(message)):
        getattr(io, method)(memory, at, where, lengths, *([pages(1, 1)] if method == "read" else []))
    assert np.array_equal(memory, before)
    assert np.array_equal(slab.bytes(), slab.expected)


@pytest.mark.parametrize(
    ("data_bytes", "message"),
    [
        (u64(4096, 4097), "data_bytes[1] is 4097, but lengths[1] is 4096"),
        (u64(4096), "data_bytes has 1 rows; expected 2, one for each of memory_offsets"),
    ],
)
def test_what_is_not_read_is_not_summed(slab: Slab, data_bytes: U64, message: str) -> None:
    memory = memory_of(4)
    before = memory.copy()
    with SlabIo(slab.fd, 4) as io, pytest.raises(ValueError, match=re.escape(message)):
        io.read(memory, pages(0, 1), pages(0, 1), pages(1, 1), data_bytes)
    assert np.array_equal(memory, before)


def test_rows_that_would_overwrite_each_other_are_refused(slab: Slab) -> None:
    memory = memory_of(8)
    before = memory.copy()
    with SlabIo(slab.fd, 4) as io:
        message = "file_offsets[0] is 28672, inside what row 1 covers: 12288 bytes from 20480"
        with pytest.raises(ValueError, match=re.escape(message)):
            io.write(memory, pages(0, 4), pages(7, 5), pages(2, 3))
        message = "memory_offsets[0] is 8192, inside what row 1 covers: 12288 bytes from 0"
        with pytest.raises(ValueError, match=re.escape(message)):
            read(io, memory, pages(2, 0), pages(7, 5), pages(2, 3))
        assert not io.write(memory, pages(2, 0), pages(7, 5), pages(2, 2)).any()
    slab.expected[5 * PAGE_BYTES : 9 * PAGE_BYTES] = memory[: 4 * PAGE_BYTES]
    assert np.array_equal(memory, before)
    assert np.array_equal(slab.bytes(), slab.expected)


def test_memory_must_begin_at_a_page_and_be_writable_for_a_read(slab: Slab) -> None:
    memory = memory_of(3)
    with SlabIo(slab.fd, 4) as io:
        with pytest.raises(ValueError, match="memory does not begin at a page"):
            read(io, memory[8:], pages(0), pages(0), pages(1))
        memory.flags.writeable = False
        with pytest.raises(ValueError, match=r"memory of type .* is not a C-contiguous writable buffer"):
            read(io, memory, pages(0), pages(0), pages(1))
        with pytest.raises(ValueError, match="memory has elements of format"):
            io.write(memory.view(np.uint64), pages(0), pages(0), pages(1))


def test_a_depth_is_at_least_one_and_at_most_what_the_machine_gives(slab: Slab) -> None:
    for depth in (0, (1 << 20) + 1):
        with pytest.raises(ValueError, match=f"depth is {depth}; expected 1 to 1048576"):
            SlabIo(slab.fd, depth)
    given = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    if given >= 1 << 20:
        pytest.skip(f"this machine gives {given} asynchronous operations, more than one can ask for")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(
        OSError, match=rf"no room for {given + 1} asynchronous operations: fs\.aio-max-nr"
    ) as refused:
        SlabIo(slab.fd, given + 1)
    assert refused.value.errno == errno.EAGAIN
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_no_descriptor_is_an_error_at_once() -> None:
    with pytest.raises(OSError, match="descriptor -1") as refused:
        SlabIo(-1, 4)
    assert refused.value.errno == errno.EBADF


# --- its life ----------------------------------------------------------------------------------------------


def contexts() -> int:
    """Contexts for asynchronous operations that this process has."""
    return Path("/proc/self/maps").read_text().count("/[aio]")


def test_it_keeps_its_file_and_gives_all_back_when_it_is_closed(slab: Slab) -> None:
    descriptors, before = len(os.listdir("/proc/self/fd")), contexts()
    fd = slab.open(os.O_RDONLY)
    io = SlabIo(fd, 4)
    os.close(fd)
    other = os.open("/dev/null", os.O_RDONLY)
    assert other == fd
    memory = memory_of(1)
    assert read(io, memory, pages(0), pages(3), pages(1)).tolist() == [0]
    assert np.array_equal(memory, slab.expected[3 * PAGE_BYTES : 4 * PAGE_BYTES])
    os.close(other)
    assert contexts() == before + 1
    io.close()
    io.close()
    assert contexts() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    for call in (partial(io.read, data_bytes=pages(1)), io.write):
        with pytest.raises(ValueError, match="this SlabIo is closed"):
            call(memory, pages(0), pages(3), pages(1))


def test_a_forgotten_one_gives_all_back_too(slab: Slab) -> None:
    before = contexts(), len(os.listdir("/proc/self/fd"))
    SlabIo(slab.fd, 4)
    assert (contexts(), len(os.listdir("/proc/self/fd"))) == before


def test_completions_leave_their_time_in_the_word(slab: Slab) -> None:
    words = np.zeros(3, np.uint64)
    io = SlabIo(slab.fd, 4, SharedWords(words, 3), 1)
    assert words.tolist() == [0, 0, 0]
    start_ns = time.monotonic_ns()
    read(io, memory_of(2), pages(0, 1), pages(3, 9), pages(1, 1))
    first_ns = int(words[1])
    assert start_ns <= first_ns <= time.monotonic_ns()
    io.write(memory_of(1), pages(0), pages(3), pages(1))
    assert first_ns < words[1] <= time.monotonic_ns()
    assert words[[0, 2]].tolist() == [0, 0]
    io.close()


def test_a_word_that_is_not_there_is_refused(slab: Slab) -> None:
    with pytest.raises(ValueError, match="progress_index is 3; there are 3 words"):
        SlabIo(slab.fd, 4, SharedWords(np.zeros(3, np.uint64), 3), 3)


def test_a_call_holds_on_until_its_operations_end_and_nobody_else_comes_in() -> None:
    """A pipe gives nothing before somebody writes to it."""
    reader, writer = os.pipe()
    memory, page = memory_of(1), bytes(range(256)) * 16
    results: list[int] = []

    def read_in_thread() -> None:
        while not results:
            with suppress(RuntimeError):  # the question below, whether this is inside, was inside itself
                results.extend(read(io, memory, pages(0), pages(0), pages(1)).tolist())

    with SlabIo(reader, 1) as io:
        thread = threading.Thread(target=read_in_thread)
        thread.start()
        refusal = ""
        deadline = time.monotonic() + DEADLINE_S
        while not refusal and time.monotonic() < deadline:  # the other may not be inside yet
            time.sleep(0.001)
            try:
                io.write(memory, u64(), u64(), u64())
            except RuntimeError as error:
                refusal = str(error)
        assert "SlabIo is in use by another thread" in refusal
        with pytest.raises(RuntimeError, match="in use by another thread"):
            io.close()
        assert thread.is_alive()
        assert not results
        os.write(writer, page)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert results == [0]
        assert memory.tobytes() == page

        os.write(writer, page[:100])
        assert read(io, memory, pages(0), pages(0), pages(1)).tolist() == [errno.EIO]
    os.close(reader)
    os.close(writer)


def test_signals_do_not_end_a_call_early(slab: Slab) -> None:
    memory = memory_of(FILE_PAGES)
    rows = np.arange(0, FILE_PAGES, dtype=np.uint64) * np.uint64(PAGE_BYTES)
    seen = 0

    def count(*_: object) -> None:
        nonlocal seen
        seen += 1

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        deadline = time.monotonic() + DEADLINE_S
        with SlabIo(slab.fd, 2) as io:
            while seen < 100 and time.monotonic() < deadline:
                memory[:] = 0
                assert not read(io, memory, rows, rows[::-1].copy(), np.full_like(rows, PAGE_BYTES)).any()
                back = memory.reshape(FILE_PAGES, PAGE_BYTES)[::-1]
                assert np.array_equal(back, slab.expected.reshape(FILE_PAGES, PAGE_BYTES))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen >= 100
