"""The policies from books: what is there never exceeds the room, and each does what it is known for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kvtierd.simulate import classic
from kvtierd.simulate.classic import Arc, Fifo, Policy, S3Fifo
from kvtierd.simulate.results import CLASSIC

from tests.unit.simulate.conftest import MakeTrace


@pytest.mark.parametrize("make", CLASSIC.values(), ids=CLASSIC)
@pytest.mark.parametrize("capacity", [1, 2, 7, 30])
@pytest.mark.parametrize("seed", range(4))
def test_as_much_is_kept_as_there_is_room_for(
    make: Callable[[int], Policy], capacity: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    policy = make(capacity)
    seen: set[int] = set()
    for block in random.zipf(1.3, 3_000).tolist():
        was_there, inserts = block in policy, policy.inserts
        policy.access(block)
        seen.add(block)
        assert block in policy
        assert policy.inserts == inserts + (not was_there)
        assert sum(each in policy for each in seen) <= capacity
    assert sum(each in policy for each in seen) == capacity


@pytest.mark.parametrize("make", CLASSIC.values(), ids=CLASSIC)
def test_with_room_for_everything_only_first_requests_miss(
    make: Callable[[int], Policy], make_trace: MakeTrace
) -> None:
    trace = make_trace(3)
    policy = make(trace.blocks)
    found = classic.hits(list(trace.paths()), policy)
    seen: set[int] = set()
    for path, hits in zip(trace.paths(), found, strict=True):
        assert hits == sum(block in seen for block in path.tolist())
        seen.update(path.tolist())
    assert policy.inserts == trace.blocks


def test_first_in_first_out_does_not_care_for_requests() -> None:
    policy = Fifo(3)
    for block in (1, 2, 3, 1, 1, 4):
        policy.access(block)
    assert 1 not in policy


@pytest.mark.parametrize("make", [Arc, S3Fifo])
def test_a_scan_does_not_drive_out_what_is_asked_for_often(make: Callable[[int], Policy]) -> None:
    policy = make(100)
    often = range(50)
    for _ in range(4):
        for block in often:
            policy.access(block)
    for block in range(1_000, 5_000):
        policy.access(block)
    assert all(block in policy for block in often)


def test_arc_gives_room_to_what_it_gave_up_too_early() -> None:
    """A loop a little longer than half of the room, after many blocks that are asked for twice."""
    policy = Arc(10)
    for block in (*range(10), *range(10)):
        policy.access(block)
    for _ in range(20):
        for block in range(100, 108):
            policy.access(block)
    assert all(block in policy for block in range(100, 108))


def test_s3_fifo_keeps_a_block_that_comes_back_soon_after_it_has_gone() -> None:
    policy = S3Fifo(20)
    for block in range(40):
        policy.access(block)
    gone = next(block for block in range(39, -1, -1) if block not in policy)
    policy.access(gone)
    for block in range(100, 110):
        policy.access(block)
    assert gone in policy
