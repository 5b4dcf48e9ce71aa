"""A pool file gets its memory area by area. What has none is never touched, whatever happens meanwhile."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from kvtier_kernels import PoolRecords
from kvtierd.memory import pool_file
from kvtierd.memory.host_pool import HostPool
from kvtierd.memory.pool_file import HEADER_AREA_BYTES, memory_end, whole_areas

from tests.unit.memory.plain_pool import MIB, SPACE, hashes, u64

EXTENTS = 7
SIZE = HEADER_AREA_BYTES + EXTENTS * MIB
AREA_EXTENTS = 2
MISSING_OFFSET = 80


@pytest.fixture(autouse=True)
def small_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_file, "AREA_BYTES", AREA_EXTENTS * MIB)


@pytest.fixture
def path(shm_dir: Path) -> Path:
    return shm_dir / "pool"


@contextmanager
def opened(path: Path | None) -> Iterator[HostPool]:
    with HostPool.open(path, SIZE, MIB, lock_timeout_s=10) as pool:
        yield pool


def allocated(pool: HostPool) -> int:
    return os.fstat(pool.fd).st_blocks * 512


def store(pool: HostPool, extent: int, number: int) -> None:
    """One block, in the first slot of an extent."""
    pool.records.format_extent(extent, 4096)
    slots = pool.geometry.slots_of(extent, 4096)[:1]
    writer = pool.register_writer(os.getpid())
    pool.records.open(slots, writer, pool.boot_nonce, number, SPACE, 0, 0, 1, hashes(number), 4096)
    pool.records.commit(slots, u64(number))


def populate(pool: HostPool, start: int, end: int) -> subprocess.CompletedProcess[str]:
    """By the program."""
    arguments = {
        "--daemon-pid": os.getpid(),
        "--pool-fd": pool.fd,
        "--start": start,
        "--end": end,
        "--area-bytes": AREA_EXTENTS * MIB,
    }
    command = [sys.executable, "-m", "kvtierd.memory.populate_rest"]
    command += [str(word) for pair in arguments.items() for word in pair]
    return subprocess.run(
        command, pass_fds=[pool.fd], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_new_pool_has_memory_for_its_first_area_only(path: Path) -> None:
    with opened(path) as pool:
        assert len(pool.array) == SIZE
        assert (pool.populated_extents, pool.populated_bytes) == (AREA_EXTENTS, AREA_EXTENTS * MIB)
        assert allocated(pool) == HEADER_AREA_BYTES + AREA_EXTENTS * MIB
        assert memory_end(pool.records) == allocated(pool)


def test_nothing_touches_what_has_no_memory(path: Path) -> None:
    with opened(path) as pool:
        before = allocated(pool)
        pool.records.scan()
        assert pool.records.extent_info(AREA_EXTENTS) is None
        beyond = pool.geometry.slots_of(AREA_EXTENTS, 4096)[:1]
        assert pool.records.check(beyond, u64(1)).tolist() == [0]
        with pytest.raises(ValueError, match="extent 2: only 2 have memory"):
            pool.records.format_extent(AREA_EXTENTS, 4096)
        assert allocated(pool) == before


def test_what_has_memory_only_grows_and_by_whole_areas(path: Path) -> None:
    with opened(path) as pool:
        assert pool.populated(HEADER_AREA_BYTES + 3 * MIB) == 2
        assert pool.populated(HEADER_AREA_BYTES + 4 * MIB) == 4
        with pytest.raises(ValueError, match="populated 2: expected 4 or more"):
            pool.populated(HEADER_AREA_BYTES + 2 * MIB)
        assert pool.populated(SIZE) == EXTENTS, "the last area is a shorter one"
        assert whole_areas(pool.geometry, SIZE - 1) == 6


def test_every_process_sees_it(path: Path) -> None:
    with opened(path) as pool, mmap.mmap(pool.fd, SIZE) as mapping:
        records = PoolRecords(np.frombuffer(mapping, np.uint8))
        assert memory_end(records) == HEADER_AREA_BYTES + 2 * MIB
        pool.populated(HEADER_AREA_BYTES + 4 * MIB)
        assert memory_end(records) == HEADER_AREA_BYTES + 4 * MIB
        del records


def test_the_program_gets_the_rest_and_says_how_far_it_is(path: Path) -> None:
    with opened(path) as pool:
        store(pool, 0, 1)
        before = pool.array[: memory_end(pool.records)].copy()
        result = populate(pool, memory_end(pool.records), SIZE)
        assert (result.returncode, result.stderr) == (0, "")
        assert [int(line) for line in result.stdout.split()] == [6 * MIB, 8 * MIB, SIZE]
        assert allocated(pool) == SIZE
        assert np.array_equal(pool.array[: len(before)], before)


def test_a_start_in_the_middle_goes_on_from_there(path: Path) -> None:
    with opened(path) as pool:
        pool.populated(HEADER_AREA_BYTES + 4 * MIB)
        store(pool, 3, 7)
        pool.array[HEADER_AREA_BYTES + 4 * MIB] = 1  # it was populated, and not yet noted
    with opened(path) as pool:
        assert (pool.start.warm, pool.start.recovered_blocks, pool.populated_extents) == (True, 1, 4)
        assert allocated(pool) == HEADER_AREA_BYTES + 4 * MIB, "counting blocks tells of holes again"
        assert pool.populated(SIZE) == EXTENTS
    with opened(path) as pool:
        assert (pool.start.recovered_blocks, pool.populated_extents) == (1, EXTENTS)
        assert allocated(pool) == SIZE, "what is noted has memory"


def test_a_hole_in_what_had_memory_is_filled_however_much_lies_beyond(path: Path) -> None:
    with opened(path) as pool:
        pool.populated(HEADER_AREA_BYTES + 4 * MIB)
        pool.array[HEADER_AREA_BYTES::4096] = 1
    punch = ["fallocate", "-p", "-o", str(HEADER_AREA_BYTES + MIB), "-l", str(MIB), str(path)]
    subprocess.run(punch, check=True)
    with opened(path) as pool:
        assert allocated(pool) == HEADER_AREA_BYTES + 4 * MIB


def test_a_pool_that_stays_short_gives_back_what_it_cannot_use(path: Path) -> None:
    with opened(path) as pool:
        pool.array[HEADER_AREA_BYTES + 2 * MIB] = 1
        pool.no_more("the disk is full")
        assert (pool.shortage, pool.populated_extents) == ("the disk is full", 2)
        assert allocated(pool) == HEADER_AREA_BYTES + 2 * MIB


def test_a_pool_of_an_earlier_version_has_all_its_memory(path: Path) -> None:
    with opened(path) as pool:
        pool.populated(SIZE)
        assert pool.array[MISSING_OFFSET : MISSING_OFFSET + 8].tolist() == [0] * 8


@pytest.mark.parametrize("word", [(EXTENTS, ~EXTENTS), (3, 0), (0, ~0), (1, 1)])
def test_a_header_that_does_not_say_what_has_memory_is_a_cold_start(
    path: Path, word: tuple[int, int]
) -> None:
    with opened(path) as pool:
        pool.array[MISSING_OFFSET : MISSING_OFFSET + 8].view(np.uint32)[:] = [
            part & 0xFFFF_FFFF for part in word
        ]
        assert pool.populated_extents == 0
        assert len(pool.records.scan()["extents"]) == 0
    with opened(path) as pool:
        assert "it does not say which extents have memory" in pool.start.cold_reason
        [missing, inverted] = struct.unpack_from(
            "<2I", pool.array[MISSING_OFFSET : MISSING_OFFSET + 8].tobytes()
        )
        assert (missing, inverted) == (EXTENTS - AREA_EXTENTS, ~missing & 0xFFFF_FFFF)


def test_a_pool_without_a_path_grows_as_well() -> None:
    with opened(None) as pool:
        assert pool.populated_extents == AREA_EXTENTS
        assert allocated(pool) == HEADER_AREA_BYTES + AREA_EXTENTS * MIB
        assert populate(pool, memory_end(pool.records), SIZE).returncode == 0
        assert pool.populated(SIZE) == EXTENTS
