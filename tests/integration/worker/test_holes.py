"""A worker takes no memory for an engine: a copy from or to a hole fails, and nothing is allocated."""

import mmap
import os

import pytest
from kvtierd.core.actions import Direction
from kvtierd.core.stimuli import PartOutcome

from tests.integration.worker.devices import ON_CPU, Memfd, on
from tests.integration.worker.rig import Client, Layout, Rig

pytestmark = on(ON_CPU)

PAGES = Layout(num_blocks=64, fragments=(4 * mmap.PAGESIZE,))
"""A block is four whole pages."""


def allocated(client: Client) -> int:
    assert isinstance(client.cache, Memfd)
    return os.fstat(client.cache.fd).st_blocks * 512


def punch(client: Client, first: int, pages: int) -> None:
    assert isinstance(client.cache, Memfd)
    with mmap.mmap(client.cache.fd, client.layout.mapping_bytes) as mapping:
        mapping.madvise(mmap.MADV_REMOVE, first * mmap.PAGESIZE, pages * mmap.PAGESIZE)


@pytest.mark.parametrize("direction", [Direction.STORE, Direction.LOAD])
@pytest.mark.parametrize("page", [0, 3], ids=["first", "last"])
async def test_a_hole_fails_the_parts_that_touch_it_and_no_other(
    rig: Rig, direction: Direction, page: int
) -> None:
    client, other = await rig.client(PAGES), await rig.client(PAGES)
    client.fill(1)
    other.fill(2)
    stored = await rig.store(client, [1, 2])
    whole = allocated(client)
    punch(client, 4 * 7 + page, 1)
    slots = rig.open(2, PAGES.slot_bytes) if direction is Direction.STORE else stored
    part, _ = rig.post(client, direction, [9, 7], slots)
    finished = await rig.finished(part)
    assert finished.outcome == PartOutcome.FAILED
    assert "MAPPING_INVALID: a block lies in a hole of the memfd" in finished.message
    assert f"[memfd offset={(4 * 7 + page) * mmap.PAGESIZE}]" in finished.message
    assert allocated(client) == whole - mmap.PAGESIZE, "the worker took memory"
    for sound in (client, other):
        part, _ = rig.post(sound, Direction.LOAD, [8, 6], stored)
        assert (await rig.finished(part)).outcome == PartOutcome.DONE
        assert sound.block(8) == client.block(1)
    client.memory[(4 * 7 + page) * mmap.PAGESIZE] = 1  # its owner writes there
    part, _ = rig.post(client, Direction.LOAD, [9, 7], stored)
    assert (await rig.finished(part)).outcome == PartOutcome.DONE


async def test_looking_for_holes_leaves_the_owners_file_offset_alone(rig: Rig) -> None:
    client = await rig.client(PAGES)
    assert isinstance(client.cache, Memfd)
    punch(client, 0, 4)
    client.fill(1)
    punch(client, 0, 4)
    os.lseek(client.cache.fd, 5, os.SEEK_SET)
    await rig.store(client, [20])
    assert os.lseek(client.cache.fd, 0, os.SEEK_CUR) == 5


async def test_a_worker_is_killed_for_memory_before_the_front_is(rig: Rig) -> None:
    def score(pid: int) -> int:
        with open(f"/proc/{pid}/oom_score_adj") as file:
            return int(file.read())

    assert score(rig.handle.pid) == min(score(os.getpid()) + 100, 1000)
