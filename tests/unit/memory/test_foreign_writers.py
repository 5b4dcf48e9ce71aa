"""Writers in other pid namespaces, as containers have: nobody can see whether they are gone, or need to."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvtierd.memory.errors import PoolLocked
from kvtierd.memory.host_pool import HostPool

from tests.unit.memory.containers import COUNT, KEPT, PAGE_BYTES, SIZE, Container, fill, opened
from tests.unit.memory.plain_pool import MIB


@pytest.fixture
def filled(shm_dir: Path) -> Path:
    path = shm_dir / "pool"
    fill(path)
    return path


@pytest.fixture
def container(filled: Path) -> Iterator[Container]:
    container = Container(filled)
    yield container
    container.close()


def test_while_a_container_has_the_pool_nobody_else_gets_it(filled: Path, container: Container) -> None:
    with pytest.raises(PoolLocked), HostPool.open(filled, SIZE, MIB, lock_timeout_s=0.2):
        pass
    container.kill()


def test_what_a_killed_container_was_writing_is_free_at_once_and_the_rest_is_kept(
    filled: Path, container: Container
) -> None:
    container.kill()
    with opened(filled) as pool:
        assert pool.start.recovered_blocks == KEPT
        assert (pool.start.quarantined_slots, pool.quarantined_slots) == (0, 0)
        assert len(pool.recovered.quarantined) == 0
        kept = pool.recovered.slots.tolist()
        assert all((pool.array[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES] == 0x11).all() for slot in kept)
        states = pool.records.scan()["states"]
        assert (states == 2).sum() == KEPT
        assert (states == 1).sum() == 0
        assert os.fstat(pool.fd).st_blocks * 512 >= SIZE - MIB, "nothing of the file is left without memory"


def test_a_copy_that_a_device_ends_later_lands_in_nobodys_memory(filled: Path) -> None:
    container = Container(filled, pin=True)
    container.kill()
    with opened(filled) as pool:
        slots = pool.geometry.slots_of(0, PAGE_BYTES)[8 : 8 + COUNT]
        data = np.concatenate(
            [pool.array[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES] for slot in slots.tolist()]
        )
        assert not data.any(), "new memory is zero"
        for slot in slots.tolist():
            pool.array[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES] = 0x77
        assert container.read_pages() == b"\xaa" * (COUNT * PAGE_BYTES), "the device has the old pages still"
    container.close()


def test_a_start_that_was_killed_between_cutting_out_and_putting_in_is_made_good(
    filled: Path, container: Container
) -> None:
    container.kill()
    with filled.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        first = 2 * MIB + MIB - COUNT * PAGE_BYTES  # some of the first extent's slots, whichever
        pages.madvise(mmap.MADV_REMOVE, first, COUNT * PAGE_BYTES)
        assert os.fstat(file.fileno()).st_blocks * 512 < len(pages)
    with opened(filled) as pool:
        assert (pool.start.recovered_blocks, pool.quarantined_slots) == (KEPT, 0)
        assert os.fstat(pool.fd).st_blocks * 512 >= len(pool.array)


def test_writers_of_other_namespaces_use_up_no_ids(filled: Path) -> None:
    numbers = []
    for _ in range(3):
        container = Container(filled)
        container.kill()
        container.close()
        with opened(filled) as pool:
            numbers.append(pool.register_writer(os.getpid()))
    assert len(set(numbers)) == 1, numbers
