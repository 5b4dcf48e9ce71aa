"""A new daemon takes over what an old one has left on disks, before or after the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from kvtierd.core.actions import FreeSlots
from kvtierd.core.blocks.table import BlockFlag
from kvtierd.core.ids import NamespaceDigest
from kvtierd.core.state.disks import Level
from kvtierd.core.stimuli import Recovered, RecoveredExtent, Tick

from tests.unit.core.disk import SLAB, DiskHost, flagged
from tests.unit.core.host import NONE, keys
from tests.unit.core.recovering import digest_of

MISS, PENDING, HIT = 0, 1, 2
SLOTS = SLAB.slots_of(0, 4096).tolist()
Make = Callable[..., DiskHost]


def found(
    digest: NamespaceDigest,
    numbers: Sequence[int],
    *,
    slots: Sequence[int] = SLOTS,
    corrupt: Sequence[int] = (),
) -> Recovered:
    """Blocks of 4 KiB, the first the oldest."""
    return Recovered(
        extents=(RecoveredExtent(0, 4096),),
        namespaces=((digest, 0, 1),),
        spaces=np.zeros(len(numbers), np.uint32),
        hashes=keys(*numbers),
        slots=np.array(slots[: len(numbers)], np.uint32),
        clock=100,
        quarantined=NONE,
        corrupt=np.array(corrupt, np.uint32),
    )


@pytest.fixture
def digest(table: Any) -> NamespaceDigest:
    return digest_of(table)


def test_blocks_of_a_disk_are_promoted(make_disk_host: Make, digest: NamespaceDigest) -> None:
    host = make_disk_host(start=False)
    one = host.instance()
    assert one.lookup(1).states.tolist() == [MISS]
    host.disk.start(found(digest, [1, 2]))
    assert host.disk.status.state == "live"
    assert host.disk.status.blocks == 2
    assert one.lookup(1, 2).states.tolist() == [PENDING]
    host.disk.finish_all()
    assert one.lookup(1, 2).states.tolist() == [HIT, HIT]


@pytest.mark.parametrize("disk_first", [False, True])
def test_blocks_that_pool_and_disk_have_are_clean(
    make_disk_host: Make, digest: NamespaceDigest, disk_first: bool
) -> None:
    host = make_disk_host(start=False)
    if disk_first:
        host.disk.start(found(digest, [1, 2]))
    host.do(found(digest, [2, 3]))
    if not disk_first:
        host.disk.start(found(digest, [1, 2]))
    one = host.instance()
    assert flagged(one, BlockFlag.CLEAN, 2, 3) == [2]
    host.do(Tick())
    [job] = host.disk.jobs
    assert len(job.disk_slots) == 1, "a recovered block may be written; its checksum travels with it"


def test_what_was_stored_before_the_disk_came_is_clean_if_it_has_it(
    make_disk_host: Make, digest: NamespaceDigest
) -> None:
    host = make_disk_host(start=False)
    one = host.instance()
    one.stored(1, 2)
    host.disk.start(found(digest, [2]))
    assert flagged(one, BlockFlag.CLEAN, 1, 2) == [2]


def test_blocks_on_another_disk_than_theirs_are_freed(make_disk_host: Make, digest: NamespaceDigest) -> None:
    host = make_disk_host(disks=2, start=False)
    one = host.instance()
    numbers = list(range(14))
    host.disks[0].start(found(digest, numbers))
    [freed] = host.of(FreeSlots)
    place = Level.place(host.machine.core.below.levels[0], keys(*numbers))
    mine = [number for number in numbers if place[number] == 0]
    assert 0 < len(mine) < 14
    assert freed.disk == 0
    assert freed.slots.tolist() == [slot for slot, disk in zip(SLOTS, place, strict=False) if disk != 0]
    assert host.disks[0].holds(one, *numbers) == mine


def test_the_oldest_are_given_up_if_the_table_is_too_small(table: Any, digest: NamespaceDigest) -> None:
    host = DiskHost(table, start=False)
    small = host.machine.core.below.all[0].blocks
    small.capacity = 3
    one = host.instance()
    host.disk.start(found(digest, [1, 2, 3, 4, 5]))
    assert host.disk.holds(one, 1, 2, 3, 4, 5) == [3, 4, 5]


def test_slots_that_were_set_aside_stay_so(make_disk_host: Make, digest: NamespaceDigest) -> None:
    host = make_disk_host(start=False)
    host.disk.start(found(digest, [1], corrupt=SLOTS[5:7]))
    assert host.disk.status.corrupt_slots == 2
    assert host.disk.status.used_bytes == 4096


def test_the_youngest_of_a_disk_stay_longest(make_disk_host: Make, digest: NamespaceDigest) -> None:
    host = make_disk_host(start=False, slab=type(SLAB)(1, 1 << 16, 2 << 20))
    one = host.instance()
    host.disk.start(found(digest, list(range(14))))
    host.stored_on_disk(one, 100)
    assert host.disk.holds(one, *range(14)) == list(range(1, 14))
