"""Blocks go to a disk and come back, and nothing that is not theirs ever does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.integration.disk.conftest import NewFront
from tests.integration.disk.rig import MIB, Block, Front


@pytest.mark.parametrize("data_bytes", [1, 4_096, 4_097, 65_536, 100_001, MIB - 9_000])
def test_a_block_that_was_written_is_read_back(front: Front, data_bytes: int):
    disk = front.write(front.store(Block(1, data_bytes)), front.store(Block(2, data_bytes)))
    front.assert_reads_back(*disk)


def test_blocks_of_many_sizes_up_to_4_mib(new_front: NewFront):
    front = new_front(size_bytes=60 * MIB, extent_bytes=8 * MIB, pool_bytes=60 * MIB)
    front.pool.close()
    front.__dict__["pool"] = type(front.pool).open(None, 66 * MIB, 8 * MIB, lock_timeout_s=1)
    front.start()
    sizes = [4_096, 5_000, 65_536, 700_001, 4 * MIB]
    disk = [front.write(front.store(Block(key, size)))[0] for key, size in enumerate(sizes)]
    front.assert_reads_back(*disk)


def test_a_restart_finds_what_was_written(new_front: NewFront):
    front = new_front()
    assert front.start().cold_reason == "there was no slab yet"
    blocks = [Block(key, 30_000) for key in range(20)] + [Block(100, 200_000, world=2)]
    front.write(*[front.store(block) for block in blocks])
    assert front.worker.stop() == 0
    front = new_front()
    assert front.start().cold_reason == ""
    found = front.recovered(blocks)
    assert {place.block for place in found} == set(blocks)
    front.assert_reads_back(*found)
