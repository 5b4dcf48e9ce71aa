"""Retention: blocks that are held for a time, dropped after one, or kept off the disks; and what is evicted
first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kvtierd.core.blocks.retention import DUE_MAX, LOOKED_AT_LEAST, Round
from kvtierd.core.maintenance.explain import BlockVerdict
from kvtierd.core.stimuli import (
    NOBODY,
    BlockQuery,
    ClearBlocks,
    CoreLimits,
    EndSession,
    PartOutcome,
    RetentionRequest,
    Tick,
    TouchBlocks,
    WriteMode,
)

from tests.unit.core.disk import DiskHost
from tests.unit.core.host import Host, Instance, keys, released

MakeHost = Callable[..., Host]
MakeDiskHost = Callable[..., DiskHost]
FOREVER_MS = 1 << 40
POOL = 56
"""Blocks of 4 KiB in the pool."""
HELD_MAX = 16
"""A quarter of its bytes, headers included."""


def store(one: Instance, *numbers: int, **retention: object) -> None:
    assert one.store(*numbers, retention=RetentionRequest(**retention)).finish().succeeded.all()  # type: ignore[arg-type]


def touch(one: Instance, *numbers: int, hold_ms: int = 0, cold: bool = False) -> None:
    queries = (BlockQuery(0, keys(*numbers), exact=True),)
    one.host.do(TouchBlocks(one.scheduler, one.epoch, queries, hold_ms, cold))


def churn(one: Instance, blocks: int = 2 * POOL, first: int = 1_000) -> None:
    """Others are stored, as many as would evict everything."""
    for number in range(first, first + blocks, 4):
        one.stored(*range(number, number + 4))


def wait(host: Host, seconds: float) -> None:
    host.now_s += seconds
    host.do(Tick())


def held(host: Host) -> int:
    return host.machine.status().held_blocks


class TestHolds:
    def test_what_is_held_outlives_a_storm_and_then_goes_as_others_do(self, host: Host) -> None:
        one = host.instance()
        store(one, 1, 2, 3, hold_ms=60_000)
        one.stored(4, 5)
        churn(one)
        assert one.hits(1, 2, 3, 4, 5) == [1, 2, 3]
        assert (held(host), host.machine.status().held_bytes) == (3, 3 * 4096)
        wait(host, 63)
        assert held(host) == 0
        assert one.hits(1, 2, 3) == [1, 2, 3], "it is not dropped"
        churn(one, first=2_000)
        assert one.hits(1, 2, 3) == []
        assert host.counters.unheld_blocks == 0

    def test_a_touch_holds_and_prolongs_and_never_shortens(self, host: Host) -> None:
        one = host.instance()
        one.stored(1, 2)
        touch(one, 1, 2, 99, hold_ms=10_000)
        touch(one, 1, hold_ms=60_000)
        touch(one, 1, hold_ms=1_000)
        wait(host, 15)
        assert held(host) == 1
        churn(one)
        assert one.hits(1, 2) == [1]
        wait(host, 60)
        assert held(host) == 0

    def test_groups_are_held_together(self, host: Host) -> None:
        one = host.instance(sizes=((4096,), (4096,)))
        one.stored(1, 2)
        one.stored(1, 2, group=1)
        queries = (BlockQuery(0, keys(1, 2)), BlockQuery(1, keys(1, 2), exact=True))
        host.do(TouchBlocks(one.scheduler, one.epoch, queries, hold_ms=10_000))
        assert held(host) == 4

    def test_no_longer_than_is_configured(self, make_host: MakeHost) -> None:
        host = make_host(CoreLimits(hold_s_max=5.0))
        one = host.instance()
        store(one, 1, hold_ms=FOREVER_MS)
        wait(host, 8)
        assert held(host) == 0

    def test_no_more_than_is_configured_and_the_head_before_the_tail(self, host: Host) -> None:
        one = host.instance()
        run = tuple(range(HELD_MAX + 4))
        store(one, *run, hold_ms=60_000)
        assert (held(host), host.counters.unheld_blocks) == (HELD_MAX, 4)
        churn(one)
        assert one.hits(*run) == list(run[:HELD_MAX])
        wait(host, 63)
        store(one, 7_000, hold_ms=60_000)
        assert held(host) == 1, "there is room again"

    def test_a_prefix_that_grows_keeps_its_order_when_its_hold_ends(self, host: Host) -> None:
        one = host.instance()
        one.stored(*range(8))
        touch(one, *range(4), hold_ms=10_000)
        touch(one, *range(8), hold_ms=60_000)
        wait(host, 15)
        wait(host, 60)
        one.stored(*range(100, 100 + POOL - 8))
        one.stored(200, 201)
        assert one.hits(*range(8)) == [0, 1, 2, 3, 4, 5]

    def test_what_another_store_is_writing_is_held_when_it_is_there(self, host: Host) -> None:
        one, two = host.instance(), host.instance("two")
        running = one.store(1, 2)
        second = two.store(1, retention=RetentionRequest(hold_ms=60_000))
        assert second.results == [2]
        running.finish()
        second.finish()
        assert held(host) == 1
        failed = one.store(5)
        two.store(5, retention=RetentionRequest(hold_ms=60_000)).finish()
        failed.part(outcome=PartOutcome.FAILED)
        one.stored(5)
        assert held(host) == 1, "the wish went with the block"

    def test_what_is_being_promoted_is_held_when_it_is_there(self, make_disk_host: MakeDiskHost) -> None:
        host = make_disk_host()
        one = host.instance()
        host.stored_on_disk(one, 1)
        host.evict_all(one)
        one.lookup(1)
        jobs = host.disk.jobs
        assert one.store(1, retention=RetentionRequest(hold_ms=60_000)).results == [2]
        host.disk.finish(jobs[0].job)
        assert held(host) == 1

    def test_blocks_that_are_there_already_are_held_by_a_store(self, host: Host) -> None:
        one = host.instance()
        one.stored(1, 2)
        one.store(1, 2, 3, 3, retention=RetentionRequest(hold_ms=60_000)).finish()
        assert held(host) == 3

    def test_what_a_store_lost_is_not_held(self, host: Host) -> None:
        one = host.instance()
        one.stored(1)
        running = one.store(1, 2, 3, 4, retention=RetentionRequest(hold_ms=60_000))
        running.part(outcome=PartOutcome.FAILED, failed=[1])
        assert held(host) == 3
        assert one.hits(1, 2, 3, 4) == [1, 2, 4] or one.hits(1, 2, 3, 4) == [1, 3, 4]
        one.store(8, 9, retention=RetentionRequest(hold_ms=60_000)).part(outcome=PartOutcome.FAILED)
        assert held(host) == 3

    def test_a_hold_outlives_its_engine_and_hinders_no_load(self, host: Host) -> None:
        one = host.instance()
        store(one, 1, 2, hold_ms=60_000)
        running = one.load(one.lease(1, 2), [3, 4])
        assert running.finish().succeeded.all()
        host.do(EndSession(one.scheduler, "died"))
        host.do(released(one))
        again = host.instance()
        assert (held(host), again.hits(1, 2)) == (2, [1, 2])

    def test_corrupt_blocks_are_let_go_at_once(self, host: Host) -> None:
        one = host.instance()
        store(one, 1, 2, hold_ms=FOREVER_MS)
        running = one.load(one.lease(1, 2), [3, 4])
        running.part(outcome=PartOutcome.FAILED, failed=[1], corrupt=True)
        assert (one.hits(1, 2), held(host)) == ([1], 1)
        assert host.machine.status().corrupt_slots == 1

    def test_an_operator_clears_what_is_held(self, host: Host) -> None:
        one = host.instance()
        store(one, 1, 2, hold_ms=FOREVER_MS)
        lease = one.lease(1)
        space = host.machine.core.names[NOBODY, one.name].plans[0].space
        reply = host.do(ClearBlocks(space, keys(1, 2)))
        assert (reply.cleared_blocks, reply.held_blocks) == (1, 1)  # type: ignore[union-attr]
        assert (held(host), one.hits(1, 2)) == (0, [1])
        assert lease


class TestNothingIsKeptOut:
    def test_another_model_finds_room_where_each_extent_has_a_held_block(self, make_host: MakeHost) -> None:
        host = make_host(CoreLimits(held_fraction_max=1.0))
        one = host.instance()
        one.stored(*range(POOL))
        touch(one, *range(0, POOL, 14), hold_ms=FOREVER_MS)
        assert held(host) == 4
        wait(host, 60)
        other = host.instance("other", sizes=((12_288,),), fields=b"other")
        other.stored(1, 2, 3, 4)
        assert (held(host), host.counters.unheld_blocks) == (3, 1), "one extent is enough"

    def test_a_store_finds_room_where_all_is_held_and_those_that_end_first_go(
        self, make_host: MakeHost
    ) -> None:
        host = make_host(CoreLimits(held_fraction_max=1.0))
        one = host.instance()
        one.stored(*range(POOL))
        touch(one, *range(8, POOL), hold_ms=900_000)
        touch(one, *range(8), hold_ms=60_000)
        one.stored(100, 101, 102)
        assert one.hits(*range(8)) == [0, 1, 2, 3, 4], "a tail before its head"
        assert one.hits(*range(8, POOL)) == list(range(8, POOL))
        assert host.counters.unheld_blocks == 3

    def test_leases_are_not_broken_with_them(self, make_host: MakeHost) -> None:
        host = make_host(CoreLimits(held_fraction_max=1.0, leased_fraction_max=1.0))
        one = host.instance()
        one.stored(*range(POOL))
        one.lease(*range(POOL - 6))
        touch(one, *range(POOL), hold_ms=FOREVER_MS)
        running = one.store(*range(100, 110))
        assert running.results == [0] * 6 + [3] * 4, "the last are throttled"
        assert one.hits(*range(POOL)) == list(range(POOL - 6))
        assert (held(host), host.counters.unheld_blocks) == (POOL - 6, 6), "and nothing is let go in vain"

    def test_only_what_nothing_else_pins_goes(self, make_host: MakeHost) -> None:
        host = make_host(CoreLimits(held_fraction_max=1.0, leased_fraction_max=1.0))
        one = host.instance()
        one.stored(*range(POOL))
        touch(one, *range(8), hold_ms=60_000)
        one.lease(*range(8))
        touch(one, *range(8, POOL), hold_ms=900_000)
        one.stored(100)
        assert host.counters.unheld_blocks == 1
        assert one.hits(*range(POOL)) == list(range(POOL - 1))

    def test_a_store_that_finds_some_room_is_content(self, make_host: MakeHost) -> None:
        host = make_host(CoreLimits(held_fraction_max=1.0))
        one = host.instance()
        store(one, *range(16), hold_ms=60_000)
        running = one.store(*range(100, 150))
        assert running.results.count(3) == 10
        assert held(host) == 16

    def test_shards_are_counted(self, make_host: MakeHost) -> None:
        host = make_host(CoreLimits(held_fraction_max=1.0))
        one = host.instance(sizes=((4096,) * 4,))
        one.stored(*range(14))
        for number in range(14):
            touch(one, number, hold_ms=60_000 + number * 2_000)
        one.stored(100)
        assert host.counters.unheld_blocks == 1
        assert one.hits(*range(14)) == list(range(1, 14)), "the one that would have ended first"

    def test_a_promotion_breaks_no_holds(self, make_disk_host: MakeDiskHost) -> None:
        host = make_disk_host(limits=CoreLimits(held_fraction_max=1.0))
        one = host.instance()
        host.stored_on_disk(one, 1, 2)
        host.evict_all(one)
        for number in one.hits(*range(10_000, 10_064)):
            touch(one, number, hold_ms=FOREVER_MS)
        assert held(host) == POOL
        one.lookup(1, 2)
        assert held(host) == POOL


class TestTimes:
    def test_a_block_goes_when_its_time_is_over(self, host: Host) -> None:
        one = host.instance()
        store(one, 1, 2, ttl_ms=10_000)
        one.stored(3)
        wait(host, 9)
        assert one.hits(1, 2, 3) == [1, 2, 3]
        wait(host, 3)
        assert one.hits(1, 2, 3) == [3]
        assert host.counters.expired_blocks == 2
        [explanation] = host.machine.explain(keys(1)[0].tobytes()).explanations
        assert explanation.verdict is BlockVerdict.EXPIRED
        one.stored(1)
        wait(host, 1_000)
        assert one.hits(1) == [1], "the new block has no time"

    def test_time_counts_from_when_it_is_ready(self, host: Host) -> None:
        one = host.instance()
        running = one.store(1, retention=RetentionRequest(ttl_ms=10_000))
        wait(host, 60)
        assert running.finish().succeeded.all()
        wait(host, 9)
        assert one.hits(1) == [1]
        wait(host, 3)
        assert one.hits(1) == []

    @pytest.mark.parametrize("first", [{"ttl_ms": 5_000}, {"ttl_ms": 5_000, "host_only": True}])
    @pytest.mark.parametrize("ready", [True, False])
    def test_who_wants_it_for_longer_has_it_longer(
        self, host: Host, first: dict[str, object], ready: bool
    ) -> None:
        one, two = host.instance(), host.instance("two")
        running = one.store(1, 2, 3, retention=RetentionRequest(**first))  # type: ignore[arg-type]
        if ready:
            running.finish()
        two.store(1).finish()
        two.store(2, retention=RetentionRequest(ttl_ms=60_000)).finish()
        if not ready:
            running.finish()
        wait(host, 10)
        assert one.hits(1, 2, 3) == [1, 2]
        wait(host, 60)
        assert one.hits(1, 2, 3) == [1]

    def test_a_shorter_wish_for_a_block_without_a_time_changes_nothing(self, host: Host) -> None:
        one = host.instance()
        one.stored(1)
        store(one, 1, 2, ttl_ms=1_000)
        wait(host, 60)
        assert one.hits(1, 2) == [1]

    def test_what_is_leased_or_loaded_goes_afterwards(self, host: Host) -> None:
        one = host.instance()
        store(one, 1, 2, ttl_ms=1_000)
        running = one.load(one.lease(1, 2), [3, 4])
        wait(host, 5)
        assert one.hits(1, 2) == [1, 2]
        assert running.finish().succeeded.all()
        wait(host, 2)
        assert one.hits(1, 2) == []

    def test_a_block_that_took_the_place_of_another_is_not_taken_for_it(self, host: Host) -> None:
        one = host.instance()
        store(one, *range(8), ttl_ms=30_000)
        churn(one)
        assert one.hits(*range(8)) == []
        there = one.hits(*range(1_000, 1_000 + 2 * POOL))
        wait(host, 60)
        assert one.hits(*range(1_000, 1_000 + 2 * POOL)) == there
        assert host.counters.expired_blocks == 0

    def test_many_times_are_over_at_once(self, host: Host) -> None:
        one = host.instance()
        for number in range(48):
            store(one, number, ttl_ms=1_000)
        for _ in range(2):
            wait(host, 3)
        assert one.hits(*range(48)) == []


class TestDisks:
    @pytest.mark.parametrize("mode", WriteMode)
    @pytest.mark.parametrize("retention", [{"host_only": True}, {"ttl_ms": 600_000}])
    def test_it_is_not_written(
        self, make_disk_host: MakeDiskHost, mode: WriteMode, retention: dict[str, object]
    ) -> None:
        host = make_disk_host(mode=mode)
        one = host.instance()
        store(one, 1, 2, **retention)
        one.lookup(1, 2)
        one.stored(*range(10, 60))
        for _ in range(3):
            wait(host, 1)
            host.disk.finish_all()
            churn(one, 8, first=int(host.now_s) * 100)
        assert one.hits(1, 2) == []
        table = host.disk.core.blocks.table
        space = host.machine.core.names[NOBODY, one.name].plans[0].space
        assert not table.lookup(space, keys(1, 2))[1].any()

    def test_who_stores_it_without_the_wish_has_it_written(self, make_disk_host: MakeDiskHost) -> None:
        host = make_disk_host(mode=WriteMode.BACK)
        one = host.instance()
        store(one, 1, host_only=True)
        store(one, 2, ttl_ms=60_000)
        one.stored(1, 2)
        one.stored(*range(10, 10 + POOL - 4))
        wait(host, 1)
        host.disk.finish_all()
        space = host.machine.core.names[NOBODY, one.name].plans[0].space
        assert host.disk.core.blocks.table.lookup(space, keys(1, 2))[1].all()

    def test_what_a_disk_has_gets_no_time(self, make_disk_host: MakeDiskHost) -> None:
        host = make_disk_host()
        one = host.instance()
        host.stored_on_disk(one, 1)
        host.evict_all(one)
        assert one.hits(1) == []
        store(one, 1, ttl_ms=1_000)
        wait(host, 10)
        assert one.hits(1) == [1]

    def test_what_comes_to_a_disk_after_all_gets_no_time(self, make_disk_host: MakeDiskHost) -> None:
        host = make_disk_host()
        one = host.instance()
        one.stored(1)
        jobs = host.disk.jobs
        assert jobs
        space = host.machine.core.names[NOBODY, one.name].plans[0].space
        blocks = host.machine.core.blocks
        entries, _ = blocks.table.lookup(space, keys(1))
        blocks.actions = []
        blocks.evict(blocks.domain_of(entries), entries)
        store(one, 1, ttl_ms=5_000)
        host.disk.finish(jobs[0].job)
        wait(host, 10)
        assert one.hits(1) == [1]

    def test_a_lookup_of_the_host_alone_has_nothing_promoted(self, make_disk_host: MakeDiskHost) -> None:
        host = make_disk_host()
        one = host.instance()
        host.stored_on_disk(one, 1, 2)
        host.evict_all(one)
        for exact in (False, True):
            assert not one.lookup(1, 2, exact=exact, host_only=True).states.any()
        assert not one.lookup_groups((0, (1, 2)), host_only=True).groups[0].states.any()
        assert not host.disk.jobs
        assert one.lookup(1, 2).states.tolist() == [1]
        assert host.disk.jobs


class TestLowPriority:
    def test_it_goes_first_the_tail_before_the_head(self, host: Host) -> None:
        one = host.instance()
        one.stored(*range(POOL))
        touch(one, 40, 41, 42, cold=True)
        one.stored(100, 101)
        assert one.hits(*range(POOL)) == [number for number in range(POOL) if number not in (41, 42)]
        one.stored(102)
        assert one.hits(40) == []

    def test_whoever_uses_it_makes_it_warm_again(self, host: Host) -> None:
        one = host.instance()
        one.stored(*range(POOL))
        touch(one, 40, cold=True)
        one.lookup(40)
        one.stored(100)
        assert one.hits(40) == [40]

    def test_it_makes_no_model_look_young(self, host: Host) -> None:
        """Between models ages decide: cold blocks, used a moment ago, must not protect older ones behind
        them."""
        one, two = host.instance(), host.instance("two", fields=b"other")
        one.stored(*range(28))
        wait(host, 100)
        two.stored(*range(20))
        wait(host, 100)
        one.stored(*range(100, 108))
        touch(one, *range(100, 108), cold=True)
        blocks = host.machine.core.blocks
        space = host.machine.core.names[NOBODY, "engine"].plans[0].space
        entries, _ = blocks.table.lookup(space, keys(*range(100, 108)))
        oldest, _ = blocks.table.lookup(space, keys(0))
        assert (blocks.used_at[entries] <= blocks.used_at[oldest]).all()

    def test_what_is_held_or_leased_is_left_alone(self, host: Host) -> None:
        one = host.instance()
        store(one, 1, hold_ms=FOREVER_MS)
        one.stored(2)
        one.lease(2)
        touch(one, 1, 2, cold=True)
        churn(one)
        assert one.hits(1, 2) == [1, 2]


class TestRounds:
    def test_everything_is_looked_at_part_by_part(self) -> None:
        times = np.zeros(LOOKED_AT_LEAST * 25, np.uint32)
        times[[0, 7, LOOKED_AT_LEAST * 20]] = 5, 6, 5
        rounds = Round(times)
        assert sum(len(rounds.due(4)) for _ in range(10)) == 0
        assert sorted(entry for _ in range(10) for entry in rounds.due(5).tolist()) == [
            0,
            LOOKED_AT_LEAST * 20,
        ]
        times[0] = times[LOOKED_AT_LEAST * 20] = 0
        assert sorted(entry for _ in range(10) for entry in rounds.due(9).tolist()) == [7]

    def test_no_more_than_so_many_at_once_and_none_is_forgotten(self) -> None:
        times = np.ones(3 * DUE_MAX + 5, np.uint32)
        rounds = Round(times)
        found = [rounds.due(1) for _ in range(40)]
        assert max(map(len, found)) <= DUE_MAX
        assert set(np.concatenate(found).tolist()) == set(range(len(times)))
