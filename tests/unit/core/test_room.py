"""What is evicted when something new comes: victims, extents of other sizes, entries of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtierd.core.actions import AssignExtent, FreeSlots, OpenSlots, PostPart
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.core.stimuli import EndSession, PartOutcome

from tests.unit.core.host import GEOMETRY, Host, released

ACCEPTED, EXISTS, PENDING, THROTTLED = 0, 1, 2, 3
FULL = 56
"""4 KiB slots in the pool."""


def test_free_extents_are_assigned_before_anything_is_evicted(host: Host) -> None:
    one = host.instance()
    extents = []
    for first in range(0, FULL, 8):
        one.stored(*range(first, first + 8))
        extents += [assigned.extent for assigned in host.of(AssignExtent)]
    assert host.counters.evicted_blocks == 0
    assert host.machine.status().extents_free == 0
    assert one.hits(*range(FULL)) == list(range(FULL))


def test_victims_are_freed_before_their_slots_are_opened_again(host: Host) -> None:
    one = host.instance()
    one.stored(*range(FULL))
    one.store(100, 101)
    assert [type(action) for action in host.actions] == [FreeSlots, OpenSlots, PostPart]
    assert sorted(host.of(FreeSlots)[0].slots) == sorted(host.of(OpenSlots)[0].slots)
    assert host.counters.evicted_blocks == 2


def test_a_store_larger_than_the_pool_keeps_the_head_of_the_prefix(host: Host) -> None:
    one = host.instance()
    running = one.store(*range(FULL + 4))
    assert running.results == [ACCEPTED] * FULL + [THROTTLED] * 4
    assert host.counters.throttled_blocks == 4
    assert running.finish().succeeded.tolist() == [1] * FULL + [0] * 4


def test_blocks_that_are_pinned_or_written_do_not_go(host: Host) -> None:
    one = host.instance()
    one.stored(*range(8))
    lease = one.lease(*range(8))
    running = one.store(*range(100, 148))
    assert one.store(200).results == [THROTTLED]
    running.finish()
    assert one.store(*range(200, 249)).results == [ACCEPTED] * 48 + [THROTTLED]
    one.load(lease, range(8)).finish()
    assert one.store(300).results == [ACCEPTED]


def test_a_store_does_not_evict_the_prefix_that_it_extends(host: Host) -> None:
    one = host.instance()
    one.stored(1, 2)
    one.stored(*range(100, 100 + FULL - 2))
    running = one.store(1, 2, *range(200, 200 + FULL - 2))
    assert running.results == [EXISTS] * 2 + [ACCEPTED] * (FULL - 2)
    assert one.store(300).results == [THROTTLED], "nor does another while it runs"
    running.finish()
    one.store(300, 301)
    assert one.hits(1, 2, 200) == [1, 2, 200], "and afterwards its tail goes first"
    assert one.hits(252, 253) == []


def test_a_block_goes_with_all_its_shards(host: Host) -> None:
    pair = host.instance(sizes=((4096, 4096),))
    pair.stored(*range(FULL // 2))
    pair.store(100)
    assert len(host.of(FreeSlots)[0].slots) == 2


def test_a_shard_without_room_throttles_the_whole_block(host: Host) -> None:
    pair = host.instance(sizes=((4096, 1 << 15),))
    # Three extents of one large slot each are left when the small ones have one.
    running = pair.store(1, 2, 3, 4)
    assert running.results == [ACCEPTED] * 3 + [THROTTLED]


class TestOtherSizes:
    def test_an_idle_models_extents_are_eaten_up_one_by_one(self, host: Host) -> None:
        old = host.instance("old")
        for first in range(0, FULL, 14):
            old.stored(*range(first, first + 14))
            host.now_s += 60
        host.do(EndSession(old.scheduler, "stopped"))
        host.do(released(old))
        new = host.instance("new", fields=b"new", sizes=((8192,),))
        for first in range(0, 28, 7):
            host.now_s += 60
            new.stored(*range(first, first + 7))
        assert host.counters.reclaimed_extents == 4, "all of the pool is the new model's"
        assert new.hits(*range(28)) == list(range(28))

    def test_extents_are_taken_coldest_first_and_freed_before_they_change(self, host: Host) -> None:
        old = host.instance("old")
        for first in range(0, FULL, 14):
            old.stored(*range(first, first + 14))
            host.now_s += 60
        old.load(old.lease(0), [0]).finish()  # the first extent is warm again
        host.now_s += 60
        new = host.instance("new", fields=b"new", sizes=((8192,),))
        new.store(1)
        assert [type(action) for action in host.actions] == [FreeSlots, AssignExtent, OpenSlots, PostPart]
        assert old.hits(*range(FULL)) == [*range(14), *range(28, FULL)]

    def test_two_busy_models_do_not_take_extents_from_each_other(self, host: Host) -> None:
        one = host.instance("one")
        two = host.instance("two", fields=b"two", sizes=((8192,),))
        for step in range(40):
            host.now_s += 0.01
            one.stored(*range(step * 7, step * 7 + 7))
            two.stored(*range(step * 3, step * 3 + 3))
        assert host.counters.reclaimed_extents == 0
        assert len(host.machine.status().sizes) == 2

    def test_an_extent_with_a_pinned_block_is_left_alone(self, host: Host) -> None:
        old = host.instance("old")
        for first in range(0, FULL, 14):
            old.stored(*range(first, first + 14))
            host.now_s += 60
        old.lease(0)
        new = host.instance("new", fields=b"new", sizes=((8192,),))
        assert new.store(1).results == [ACCEPTED]
        assert old.hits(0, 1, 14, 15) == [0, 1]

    def test_extents_without_blocks_change_their_size_before_anything_is_evicted(self, host: Host) -> None:
        old = host.instance("old")
        old.store(*range(28)).part(0, PartOutcome.FAILED)
        new = host.instance("new", fields=b"new", sizes=((8192,),))
        new.stored(*range(28))
        assert (host.counters.evicted_blocks, host.counters.reclaimed_extents) == (0, 0)

    def test_a_world_of_another_size_shares_slots_by_age(self, host: Host) -> None:
        old = host.instance("old")
        old.stored(*range(FULL))
        host.now_s += 600
        pair = host.instance("pair", sizes=((4096, 4096),))
        for first in range(0, 28, 7):
            host.now_s += 1
            pair.stored(*range(first, first + 7))
        assert pair.hits(*range(28)) == list(range(28)), "the idle one's blocks went, not its own"
        assert old.hits(*range(FULL)) == []

    def test_all_of_the_table_of_pinned_extents_throttles(self, host: Host) -> None:
        old = host.instance("old")
        old.store(*range(FULL))
        new = host.instance("new", fields=b"new", sizes=((8192,),))
        assert new.store(1).results == [THROTTLED]


class TestTableFull:
    def small(self, make_host: Callable[..., Host], table: Any, capacity: int) -> Host:
        pages = (GEOMETRY.first_extent_offset + GEOMETRY.capacity_bytes) // PAGE_BYTES
        return Host(table(capacity, pages))

    def test_the_oldest_blocks_make_way(self, make_host: Callable[..., Host], table: Any) -> None:
        host = self.small(make_host, table, 8)
        one = host.instance()
        one.stored(*range(4))
        one.stored(*range(4, 8))
        assert one.store(100, 101).results == [ACCEPTED] * 2
        assert one.hits(*range(8)) == [0, 1, 4, 5, 6, 7]

    def test_blocks_of_other_models_do_as_well(self, make_host: Callable[..., Host], table: Any) -> None:
        host = self.small(make_host, table, 8)
        host.instance("old").stored(*range(8))
        host.now_s += 60
        new = host.instance("new", fields=b"new", sizes=((8192,),))
        new.stored(*range(8))

    def test_more_than_the_table_is_throttled(self, make_host: Callable[..., Host], table: Any) -> None:
        host = self.small(make_host, table, 8)
        one = host.instance()
        one.stored(0, 1)
        running = one.store(0, 1, *range(2, 12), 2, 11)
        assert running.results == [EXISTS] * 2 + [ACCEPTED] * 6 + [THROTTLED] * 4 + [PENDING, THROTTLED]


def test_extents_that_could_not_be_taken_are_tried_again_later(make_host: Callable[..., Host]) -> None:
    geometry = PoolGeometry(extents=1, extent_bytes=1 << 16, first_extent_offset=2 << 20)
    host = make_host(None, geometry)
    old = host.instance("old")
    running = old.store(0)
    new = host.instance("new", fields=b"new", sizes=((8192,),))
    assert new.store(1).results == [THROTTLED]
    running.finish()
    assert new.store(1).results == [THROTTLED], "it was looked at a moment ago"
    host.now_s += 2
    assert new.store(1).results == [ACCEPTED]
