"""Which blocks are written to disks, when, in which jobs, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kvtierd.core.actions import AssignExtent, FreeSlots, OpenSlots, PostDiskJob
from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.blocks.table import BlockFlag
from kvtierd.core.disk import writing
from kvtierd.core.stimuli import (
    CoreDisks,
    Drain,
    Owner,
    PartOutcome,
    PoolPolicy,
    Reconfigure,
    Tick,
    WriteMode,
)

from tests.unit.core.disk import SLAB, WRITE, DiskHost, flagged
from tests.unit.core.host import Host, Instance, keys

FULL = 56
LARGE = PoolGeometry(extents=16, extent_bytes=1 << 16, first_extent_offset=2 << 20)
"""A slab for four times what the pool holds."""
CLEAN, QUEUED = BlockFlag.CLEAN, BlockFlag.QUEUED
Make = Callable[..., DiskHost]


def ticks(host: Host, seconds: float) -> list[PostDiskJob]:
    """Time passes; the jobs that were posted meanwhile."""
    jobs = []
    for _ in range(round(seconds * 10)):
        host.now_s += 0.1
        host.do(Tick())
        jobs += host.of(PostDiskJob)
    return jobs


def full_and_quiet(host: DiskHost) -> Instance:
    """Its pool is full, of which the disk has nothing, and nothing has come for long."""
    one = host.instance()
    host.disk.pause()
    one.stored(*range(FULL))
    ticks(host, 120.0)
    host.disk.resume()
    return one


class TestThrough:
    def test_a_block_is_written_as_soon_as_it_is_stored(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        one.stored(1, 2, 3)
        [job] = disk_host.disk.jobs
        [opened] = disk_host.disk.opened
        kinds = [type(action).__name__ for action in disk_host.actions]
        assert kinds[-4:] == ["AssignExtent", "OpenSlots", "PostDiskJob", "Notify"]
        assert (job.kind, job.disk, job.worker) == (WRITE, 0, disk_host.disk.worker)
        assert int(opened.store) == int(job.job)
        assert opened.worker == disk_host.disk.worker
        assert np.array_equal(opened.hashes, keys(1, 2, 3))
        assert np.array_equal(opened.slots, job.disk_slots)
        assert opened.namespace == disk_host.machine.status().instances[0].namespace
        assert (opened.group, opened.shard, opened.world_size, opened.data_bytes) == (0, 0, 1, 4096)

    def test_the_head_of_a_sequence_is_the_most_recent(self, disk_host: DiskHost) -> None:
        disk_host.instance().stored(1, 2, 3)
        assert disk_host.disk.jobs[0].clocks.tolist() == [3, 2, 1]

    def test_it_is_queued_until_the_worker_has_said_so_and_then_clean(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        one.stored(1, 2)
        assert flagged(one, QUEUED, 1, 2) == [1, 2]
        assert flagged(one, CLEAN, 1, 2) == []
        disk_host.disk.finish_all()
        assert flagged(one, QUEUED, 1, 2) == []
        assert flagged(one, CLEAN, 1, 2) == [1, 2]
        assert disk_host.disk.holds(one, 1, 2) == [1, 2]
        counters = disk_host.disk.status.counters
        assert (counters.written_blocks, counters.written_bytes) == (2, 8192)

    def test_what_failed_is_freed_and_not_clean(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        one.stored(1, 2)
        slots = disk_host.disk.jobs[0].disk_slots
        disk_host.disk.finish(disk_host.disk.open_jobs()[0], failed=[1])
        [freed] = disk_host.of(FreeSlots)
        assert (freed.disk, freed.slots.tolist()) == (0, [slots[1]])
        assert flagged(one, CLEAN, 1, 2) == [1]
        assert disk_host.disk.holds(one, 1, 2) == [1]
        assert one.hits(1, 2) == [1, 2]

    def test_what_failed_is_written_when_it_is_not_pinned_any_more(self, disk_host: DiskHost) -> None:
        """A walk over what may be evicted does not see what is pinned."""
        one = disk_host.instance()
        one.stored(1, 2, 3)
        lease = one.lease(1, 2)
        disk_host.disk.fail(disk_host.disk.open_jobs()[0])
        disk_host.do(Tick())
        [job] = disk_host.of(PostDiskJob)
        assert len(job.disk_slots) == 1, "the third block is not pinned"
        disk_host.disk.finish_all()
        assert ticks(disk_host, 10.0) == []
        one.load(lease, [0, 1]).finish()
        ticks(disk_host, 3.0)
        disk_host.disk.finish_all()
        assert flagged(one, CLEAN, 1, 2, 3) == [1, 2, 3]

    def test_one_shard_that_failed_is_the_whole_block(self, disk_host: DiskHost) -> None:
        pair = disk_host.instance(sizes=((4096, 8192),))
        pair.stored(1, 2)
        disk_host.disk.finish(disk_host.disk.open_jobs()[0], failed=[3])
        assert disk_host.disk.holds(pair, 1, 2) == [1]

    def test_shards_travel_block_after_block_in_rank_order(self, disk_host: DiskHost) -> None:
        pair = disk_host.instance(sizes=((4096, 8192),))
        pair.stored(1, 2)
        [job] = disk_host.disk.jobs
        first, second = disk_host.disk.opened
        assert job.disk_slots.tolist() == [first.slots[0], second.slots[0], first.slots[1], second.slots[1]]
        assert job.clocks.tolist() == [2, 2, 1, 1]
        assert [opened.shard for opened in (first, second)] == [0, 1]

    def test_a_job_has_no_more_than_its_bytes(self, make_disk_host: Make) -> None:
        host = make_disk_host(policy={"job_bytes": 3 * 4096})
        host.instance().stored(*range(7))
        assert [len(job.disk_slots) for job in host.disk.jobs] == [3, 3, 1]

    def test_what_the_queue_has_no_room_for_is_written_when_it_has(self, make_disk_host: Make) -> None:
        host = make_disk_host(policy={"write_queue_bytes": 2 * 4096})
        one = host.instance()
        one.stored(*range(5))
        assert host.disk.status.writing_bytes == 2 * 4096
        host.disk.finish_all()
        for _ in range(3):
            ticks(host, 0.1)
            host.disk.finish_all()
        assert host.disk.holds(one, *range(5)) == list(range(5))

    def test_what_cannot_be_written_is_not_tried_again_at_once(self, make_disk_host: Make) -> None:
        host = make_disk_host(policy={"write_queue_bytes": 4096})
        one = host.instance()
        one.stored(*range(4))
        host.disk.finish(host.disk.open_jobs()[0], failed=[0])
        assert host.disk.open_jobs() == []
        assert len(ticks(host, 0.1)) == 1

    def test_a_block_larger_than_the_queue_is_written_alone(self, make_disk_host: Make) -> None:
        host = make_disk_host(policy={"write_queue_bytes": 100, "job_bytes": 100})
        host.instance().stored(1, 2)
        assert [len(job.disk_slots) for job in host.disk.jobs] == [1]

    def test_a_block_is_written_once_however_often_it_is_stored(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.stored_on_disk(one, 1)
        one.store(1).finish()
        assert disk_host.disk.jobs == []
        assert ticks(disk_host, 1.0) == []

    def test_what_was_stored_while_the_disk_was_off_is_written_later(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.disk.pause()
        one.stored(1, 2)
        assert disk_host.of(PostDiskJob) == []
        disk_host.disk.resume()
        assert len(ticks(disk_host, 0.2)) == 1

    def test_a_disk_of_which_it_is_not_known_what_it_holds_is_not_written(self, make_disk_host: Make) -> None:
        host = make_disk_host(start=False)
        one = host.instance()
        one.stored(1)
        host.disk.live()
        one.stored(2)
        ticks(host, 1.0)
        assert host.disk.status.jobs == 0
        assert host.disk.status.state == "starting"

    def test_nothing_is_written_while_draining(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        running = one.store(1)
        disk_host.do(Drain())
        running.finish()
        assert disk_host.disk.jobs == []
        assert ticks(disk_host, 1.0) == []

    def test_blocks_that_fit_no_extent_of_the_disk_stay_on_the_host(self, make_disk_host: Make) -> None:
        host = make_disk_host(slab=PoolGeometry(4, 1 << 14, 2 << 20))
        one = host.instance(sizes=((12288,),))
        one.stored(1, 2)
        ticks(host, 1.0)
        assert host.of(PostDiskJob) == []
        assert host.of(AssignExtent) == []

    @pytest.mark.parametrize("mode", WriteMode)
    def test_blocks_of_a_tenant_without_a_key_stay_on_the_host(
        self, make_disk_host: Make, mode: WriteMode
    ) -> None:
        keyed = frozenset([tag_of("keyed")])
        host = make_disk_host(mode=mode, policy={"tenants": keyed})
        one = host.instance("without", owner=Owner("without", 1000))
        one.stored(1, 2)
        one.lookup(1, 2)
        one.fill_pool(100)
        ticks(host, 1.0)
        host.do(Reconfigure(0, CoreDisks(mode=WriteMode.THROUGH), PoolPolicy.LRU, CoreDisks()))
        ticks(host, 1.0)
        assert host.disk.jobs == []
        other = host.instance("with", owner=Owner("keyed", 1001))
        other.stored(1, 2)
        assert sum(len(job.disk_slots) for job in host.disk.jobs) == 2, "the other's are written"


class TestWhatIsBeingWrittenGoesLast:
    def test_blocks_that_a_disk_has_go_in_its_place(self, make_disk_host: Make) -> None:
        host = make_disk_host(slab=LARGE)
        one = host.instance()
        host.stored_on_disk(one, *range(40))
        one.stored(*range(40, FULL))
        one.lookup(*range(40))
        one.stored(*range(100, 110))
        assert one.hits(*range(40, FULL)) == list(range(40, FULL)), "they are older, and on no disk yet"
        assert host.counters.evicted_unwritten_blocks == 0
        assert len(one.hits(*range(40))) == 30
        host.disk.finish_all()
        assert host.disk.holds(one, *range(FULL)) == list(range(FULL))

    def test_no_more_than_a_disk_has(self, make_disk_host: Make) -> None:
        host = make_disk_host(slab=LARGE)
        one = host.instance()
        host.stored_on_disk(one, 0, 1, 2)
        one.stored(*range(3, FULL))
        one.lookup(0, 1, 2)
        one.stored(*range(100, 110))
        assert one.hits(0, 1, 2) == []
        assert host.counters.evicted_blocks == 10
        assert host.counters.evicted_unwritten_blocks == 7
        assert one.hits(*range(3, FULL - 7)) == list(range(3, FULL - 7)), "the oldest of them have gone"

    def test_a_write_that_failed_keeps_nothing(self, make_disk_host: Make) -> None:
        host = make_disk_host(slab=LARGE)
        one = host.instance()
        host.stored_on_disk(one, *range(55))
        one.stored(55)
        one.lookup(*range(55))
        host.disk.fail(host.disk.open_jobs()[0])
        host.disk.pause()
        one.stored(100)
        assert one.hits(55) == [], "it is on its way no more"


class TestTheHostIsNotHeld:
    def test_a_block_may_be_evicted_while_it_is_written(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        one.stored(1)
        [job] = disk_host.disk.open_jobs()
        for number in range(100, 100 + FULL):
            one.stored(number)
        assert one.hits(1) == []
        disk_host.disk.finish(job)
        assert disk_host.disk.holds(one, 1) == [1], "its worker had it all"

    def test_a_later_block_of_the_same_key_is_clean_too(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        one.stored(1)
        [job] = disk_host.disk.open_jobs()
        for number in range(100, 100 + FULL):
            one.stored(number)
        one.stored(1)
        assert flagged(one, QUEUED, 1) == [], "the entry is another one"
        disk_host.disk.finish(job)
        assert flagged(one, CLEAN, 1) == [1]

    def test_a_block_stored_anew_is_clean_at_once_if_a_disk_has_it(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.stored_on_disk(one, 1)
        disk_host.evict_all(one)
        assert one.hits(1) == []
        one.stored(1)
        assert flagged(one, CLEAN, 1) == [1]
        assert disk_host.disk.jobs == []

    def test_condemned_blocks_are_not_written(self, make_disk_host: Make) -> None:
        host = make_disk_host(mode=WriteMode.ON_REUSE)
        one = host.instance()
        one.stored(1)
        host.disk.pause()
        lease = one.lease(1)
        one.load(lease, [0]).part(outcome=PartOutcome.FAILED, corrupt=True)
        host.disk.resume()
        assert one.lookup(1).hits == 0
        ticks(host, 1.0)
        assert host.disk.status.jobs == 0


@pytest.fixture
def large_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools are as large, in blocks, as those of which only a part is written ahead."""
    monkeypatch.setattr(writing, "KEPT_READY_MIN", 0)


class TestBack:
    def test_nothing_is_written_while_the_pool_has_room(self, make_disk_host: Make) -> None:
        host = make_disk_host(mode=WriteMode.BACK)
        host.instance().stored(*range(8))
        assert ticks(host, 60.0) == []

    def test_the_coldest_are_written_before_they_go(self, make_disk_host: Make, large_pool: None) -> None:
        host = make_disk_host(mode=WriteMode.BACK, policy={"clean_ahead_s": 2.0})
        one = full_and_quiet(host)
        [job] = ticks(host, 0.1)[:1]
        assert len(job.disk_slots) >= 4
        host.disk.finish_all()
        tail = list(range(FULL - 4, FULL))
        assert host.disk.holds(one, *tail) == tail, "a batch's tail is its coldest"
        assert flagged(one, CLEAN, 0) == []
        one.stored(100, 101)
        assert host.counters.evicted_blocks == 2
        assert host.counters.evicted_unwritten_blocks == 0

    def test_more_is_written_ahead_the_faster_blocks_go(self, make_disk_host: Make, large_pool: None) -> None:
        ahead = []
        for every_s in (0.1, 10.0):
            host = make_disk_host(mode=WriteMode.BACK, policy={"clean_ahead_s": 2.0})
            one = full_and_quiet(host)
            for number in range(100, 110):
                one.stored(number)
                ticks(host, every_s)
                host.disk.finish_all()
            ahead.append(len(flagged(one, CLEAN, *range(110))))
        assert ahead[0] > ahead[1] > 0

    def test_what_fills_a_pool_at_once_is_written_at_once(self, make_disk_host: Make) -> None:
        """As much may come again before the next tick, and what was stored last may go first."""
        host = make_disk_host(mode=WriteMode.BACK, slab=LARGE)
        one = host.instance()
        one.stored(*range(40))
        host.disk.finish_all()
        one.stored(*range(100, 116))
        host.disk.finish_all()
        one.lookup(*range(40))
        one.stored(*range(200, 240))
        assert host.counters.evicted_blocks == 40
        assert host.counters.evicted_unwritten_blocks == 0

    def test_what_is_stored_between_ticks_is_written_between_ticks(self, make_disk_host: Make) -> None:
        host = make_disk_host(mode=WriteMode.BACK, slab=LARGE)
        one = host.instance()
        for first in range(0, 4 * FULL, 8):
            one.stored(*range(first, first + 8))
            host.disk.finish_all()
        assert host.counters.evicted_blocks == 3 * FULL
        assert host.counters.evicted_unwritten_blocks == 0

    def test_however_slowly_blocks_come_a_small_pool_is_written(self, make_disk_host: Make) -> None:
        """A pace tells nothing of the one long prompt that takes all of the pool."""
        host = make_disk_host(mode=WriteMode.BACK, slab=LARGE)
        one = full_and_quiet(host)
        ticks(host, 0.1)
        host.disk.finish_all()
        for number in range(100, 100 + FULL):
            one.stored(number)
            ticks(host, 5.0)
            host.disk.finish_all()
        assert host.disk.holds(one, *range(100, 100 + FULL)) == list(range(100, 100 + FULL))

    def test_stores_that_end_together_are_all_written(self, make_disk_host: Make) -> None:
        host = make_disk_host(mode=WriteMode.BACK, slab=LARGE)
        one = host.instance()
        several = [one.store(*range(first, first + 14)) for first in range(0, FULL, 14)]
        for store in several:
            store.finish()
        host.disk.finish_all()
        assert host.disk.holds(one, *range(FULL)) == list(range(FULL))

    def test_a_long_walk_is_left_to_the_tick(
        self, make_disk_host: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writing, "WALKED_ALWAYS", 0)
        monkeypatch.setattr(writing, "WALKED_PER_STORED", 1)
        monkeypatch.setattr(writing, "KEPT_READY_MIN", 0)
        host = make_disk_host(mode=WriteMode.BACK, slab=LARGE)
        one = full_and_quiet(host)
        ticks(host, 0.1)
        host.disk.finish_all()
        one.stored(100)
        assert host.disk.jobs == []
        assert len(ticks(host, 0.1)) == 1

    def test_what_goes_before_a_disk_has_it_is_counted(self, make_disk_host: Make) -> None:
        host = make_disk_host(mode=WriteMode.BACK)
        one = host.instance()
        one.stored(*range(FULL))
        one.stored(100, 101)
        assert host.counters.evicted_unwritten_blocks == 2

    @pytest.mark.parametrize("mode", list(WriteMode))
    def test_a_small_disk_is_not_written_round_and_round(self, make_disk_host: Make, mode: WriteMode) -> None:
        host = make_disk_host(
            mode=mode, slab=PoolGeometry(1, 1 << 16, 2 << 20), policy={"clean_ahead_s": 1e6}
        )
        one, two = host.instance("one"), host.instance("two", sizes=((8192,),), fields=b"other")
        for first in range(0, 40, 4):
            one.stored(*range(first, first + 4))
            two.stored(first)
            one.lookup(first)
        stored_bytes = host.counters.stored_bytes
        for _ in range(500):
            ticks(host, 0.1)
            host.disk.finish_all()
        before = host.disk.status.counters.written_bytes
        assert before <= 2 * stored_bytes
        ticks(host, 5.0)
        assert host.disk.status.counters.written_bytes == before, "nothing new has come"


class TestOnReuse:
    def test_a_block_is_written_when_it_is_found_again(self, make_disk_host: Make) -> None:
        host = make_disk_host(mode=WriteMode.ON_REUSE)
        one = host.instance()
        one.stored(1, 2)
        assert host.disk.jobs == []
        one.lookup(1)
        [job] = host.disk.jobs
        assert len(job.disk_slots) == 1
        one.lookup(1)
        assert host.disk.jobs == []
        assert flagged(one, BlockFlag.REUSED, 1, 2) == [1]

    def test_what_found_no_room_is_written_before_it_goes(self, make_disk_host: Make) -> None:
        host = make_disk_host(mode=WriteMode.ON_REUSE, policy={"write_queue_bytes": 4096})
        one = host.instance()
        one.stored(*range(FULL))
        one.lookup(54, 55)
        host.disk.finish_all()
        assert len(host.disk.holds(one, 54, 55)) == 1
        for number in range(100, 100 + FULL):
            one.stored(number)
            ticks(host, 0.1)
            host.disk.finish_all()
        assert host.disk.holds(one, 54, 55) == [54, 55]
        assert host.disk.status.counters.written_blocks == 2, "the others were never found"


class TestRoomOnTheDisk:
    @pytest.fixture
    def small(self, make_disk_host: Make) -> DiskHost:
        """A disk of 14 blocks."""
        return make_disk_host(slab=PoolGeometry(1, 1 << 16, 2 << 20))

    def test_the_least_recent_give_way(self, small: DiskHost) -> None:
        one = small.instance()
        for number in range(14):
            small.stored_on_disk(one, number)
        one.stored(14, 15)
        [freed] = [action for action in small.of(FreeSlots) if action.disk == 0]
        [opened] = small.disk.opened
        assert sorted(freed.slots) == sorted(opened.slots)
        small.disk.finish_all()
        assert small.disk.holds(one, *range(16)) == list(range(2, 16))
        assert small.disk.status.counters.evicted_blocks == 2

    def test_what_has_gone_from_the_disk_is_clean_no_more(self, small: DiskHost) -> None:
        one = small.instance()
        for number in range(15):
            small.stored_on_disk(one, number)
        assert flagged(one, CLEAN, 0, 1) == [1]

    def test_what_the_host_evicts_becomes_recent_on_the_disk(self, small: DiskHost) -> None:
        one = small.instance()
        for number in range(14):
            small.stored_on_disk(one, number)
        small.disk.pause()
        lease = one.lookup(*range(1, 14), lease=True).lease  # 0 is the only one that may go
        assert lease is not None
        for number in range(100, 100 + FULL - 13):
            one.stored(number)
        assert one.hits(0, 1) == [1]
        small.disk.resume()
        one.stored(200)
        small.disk.finish_all()
        assert small.disk.holds(one, 0, 1, 2) == [0, 2]

    def test_extents_change_their_size_as_those_of_the_pool_do(self, make_disk_host: Make) -> None:
        host = make_disk_host(slab=PoolGeometry(2, 1 << 16, 2 << 20))
        one, two = host.instance("one"), host.instance("two", sizes=((8192,),), fields=b"other")
        host.stored_on_disk(one, *range(28))
        host.now_s += 600.0
        host.stored_on_disk(two, 1, 2)
        assert host.disk.holds(two, 1, 2) == [1, 2]
        assert host.disk.status.counters.reclaimed_extents == 1
        assert [size.slot_bytes for size in host.disk.status.sizes] == [4096, 8192]

    def test_used_bytes_are_those_of_its_blocks(self, small: DiskHost) -> None:
        one = small.instance()
        small.stored_on_disk(one, 1, 2, 3)
        status = small.disk.status
        assert (status.used_bytes, status.blocks) == (3 * 4096, 3)
        assert status.capacity_bytes == 1 << 16


class TestManyDisks:
    def test_each_block_has_its_disk_and_all_shards_are_there(self, make_disk_host: Make) -> None:
        host = make_disk_host(disks=2)
        pair = host.instance(sizes=((4096, 4096),))
        pair.stored(*range(20))
        opened = host.of(OpenSlots)
        for disk in host.disks:
            counts = {len(each.slots) for each in opened if each.disk == disk.number}
            assert len(counts) == 1, "both ranks' shards"
        for disk in host.disks:
            disk.finish_all()
        held = [host.disks[number].holds(pair, *range(20)) for number in range(2)]
        assert sorted(held[0] + held[1]) == list(range(20))
        assert min(map(len, held)) > 3

    def test_a_disk_that_is_off_does_not_hold_up_the_other(self, make_disk_host: Make) -> None:
        host = make_disk_host(disks=2, policy={"write_queue_bytes": 4096})
        one = host.instance()
        host.disks[0].pause()
        one.stored(*range(30))
        for _ in range(30):
            host.disks[1].finish_all()
            ticks(host, 0.1)
        assert len(host.disks[1].holds(one, *range(30))) > 8
        assert len(host.disks[1].holds(one, *range(30))) == host.disks[1].status.counters.written_blocks


def test_without_disks_there_is_no_disk_tier(host: Host) -> None:
    one: Any = host.instance()
    one.stored(*range(FULL))
    one.stored(100)
    assert host.machine.status().disks == ()
    assert host.counters.evicted_unwritten_blocks == 0
    assert SLAB.extents == 4


class TestAnotherPolicyWhileItRuns:
    def test_through_writes_what_was_stored_before_it(self, make_disk_host: Make) -> None:
        disk_host = make_disk_host(mode=WriteMode.BACK)
        one = disk_host.instance()
        one.stored(*range(4))
        assert disk_host.disk.jobs == []
        disk_host.do(Reconfigure(0, CoreDisks(mode=WriteMode.THROUGH), PoolPolicy.LRU, CoreDisks()))
        ticks(disk_host, 0.1)
        disk_host.disk.finish_all()
        assert disk_host.disk.holds(one, *range(4)) == list(range(4))
        one.stored(4)
        disk_host.disk.finish_all()
        assert disk_host.disk.holds(one, 4) == [4]

    def test_back_stops_writing_at_once(self, make_disk_host: Make) -> None:
        host = make_disk_host()
        host.do(Reconfigure(0, CoreDisks(), PoolPolicy.LRU, CoreDisks()))
        host.instance().stored(*range(4))
        assert host.disk.jobs == []

    def test_queues_stay_as_they_were_at_the_start(self, make_disk_host: Make) -> None:
        host = make_disk_host(policy={"write_queue_bytes": 8192})
        host.do(Reconfigure(0, CoreDisks(mode=WriteMode.THROUGH), PoolPolicy.LRU, CoreDisks()))
        host.instance().stored(*range(5))
        assert host.disk.status.writing_bytes <= 8192
