"""A pool that is small beside what is asked for, and a disk that has room for all of it: what was stored once
is found again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.daemon.conftest import Start
from tests.support.conversations import BLOCK_BYTES, Conversations, Shape, Talker
from tests.support.process import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

POOL_BLOCKS = 96
TURNS = 100
FOUND_AT_LEAST = 0.99
SHAPES = {
    "short": Shape(),
    "most of the pool": Shape(grows=(4, 16), longest=70),
    "more than the pool": Shape(grows=(8, 24), longest=120),
    "many, seldom again": Shape(conversations=40, grows=(5, 16), longest=20, zipf=0.3),
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_what_was_stored_is_found_again(start: Start, folder: Path, shape: Shape) -> None:
    """Each turn begins when the disk has done what it was given, however slow this machine is: so the test
    sees whether it is given everything in time, and not how fast it is."""
    daemon = start(
        pool__size=f"{2 + POOL_BLOCKS * BLOCK_BYTES // (1 << 20)}MiB",
        pool__extent_size="1MiB",
        disk__paths=folder,
        disk__size="130MiB",
        disk__extent_size="1MiB",
    )
    daemon.may_complain = shape.longest > POOL_BLOCKS  # that it leases part of a prefix at a time
    talker = Talker(daemon.socket, "talker", shape.longest)
    for names in Conversations(shape, seed=5).turns(TURNS):
        until(lambda: not daemon.status().disks[0].writing_bytes, "nothing is on its way to the disk")
        talker.turn(names)
    counters, tally = daemon.status().counters, talker.tally
    talker.close()
    assert len(tally.stored) > 2 * POOL_BLOCKS
    assert counters.promoted_blocks > 0
    lost = f"{tally.possible - tally.found} of {tally.possible} blocks, in turns {tally.losses}"
    assert tally.share >= FOUND_AT_LEAST, f"{lost}; {counters.evicted_unwritten_blocks} went unwritten"
