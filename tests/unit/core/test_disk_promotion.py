"""Lookups beyond the host: what disks have is pending, and is brought up once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kvtierd.core.actions import (
    CommitSlots,
    FreeSlots,
    LookupReply,
    OpenSlots,
    QuarantineSlots,
)
from kvtierd.core.blocks.table import BlockFlag
from kvtierd.core.errors import Reason
from kvtierd.core.maintenance.explain import BlockVerdict
from kvtierd.core.state.waiting import WAITING_S
from kvtierd.core.stimuli import (
    BlockQuery,
    CoreIntegrity,
    CoreLimits,
    Drain,
    EndSession,
    PartOutcome,
    PrefetchBlocks,
    Resume,
    Tick,
    Verify,
)
from kvtierd.core.transfers import ahead

from tests.unit.core.disk import READ, DiskHost, flagged
from tests.unit.core.host import Instance, Told, keys, released

MISS, PENDING, HIT = 0, 1, 2
EXISTS, STILL_PENDING, THROTTLED = 1, 2, 3
FULL = 56
Make = Callable[..., DiskHost]


def cold(host: DiskHost, *numbers: int, **options: Any) -> Instance:
    """An instance whose blocks only disks have."""
    one = host.instance(**options)
    host.stored_on_disk(one, *numbers)
    host.evict_all(one)
    assert one.hits(*numbers) == []
    return one


def told(instance: Instance, *numbers: int, **options: Any) -> list[int]:
    return list(instance.lookup(*numbers, **options).states.tolist())


class TestOneBlock:
    def test_is_pending_while_it_is_read_and_a_hit_afterwards(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1)
        reply = one.lookup(1, lease=True)
        assert (reply.hits, reply.states.tolist(), reply.lease) == (0, [PENDING], None)
        [job] = disk_host.disk.jobs
        [opened] = [action for action in disk_host.of(OpenSlots) if action.disk is None]
        assert (job.kind, job.host_slots.tolist()) == (READ, opened.slots.tolist())
        assert (opened.worker, int(opened.store)) == (disk_host.disk.worker, int(job.job))
        assert np.array_equal(opened.hashes, keys(1))
        disk_host.now_s += 0.25
        disk_host.disk.finish(job.job)
        [committed] = disk_host.of(CommitSlots)
        assert committed.slots.tolist() == [job.host_slots.tolist()]
        assert told(one, 1) == [HIT]
        assert (disk_host.counters.promoted_blocks, disk_host.counters.promoted_bytes) == (1, 4096)
        counters = disk_host.disk.status.counters
        assert (counters.read_blocks, counters.reads, counters.read_s) == (1, 1, 0.25)

    def test_keeps_its_copy_and_is_clean(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1)
        one.lookup(1)
        disk_host.disk.finish_all()
        assert disk_host.disk.holds(one, 1) == [1]
        assert flagged(one, BlockFlag.CLEAN, 1) == [1]
        assert flagged(one, BlockFlag.VERIFY, 1) == [], "its data has just been compared"

    def test_is_verified_before_its_load_where_all_are(self, make_disk_host: Make) -> None:
        host = make_disk_host(integrity=CoreIntegrity(Verify.ALWAYS))
        one = cold(host, 1)
        one.lookup(1)
        host.disk.finish_all()
        assert flagged(one, BlockFlag.VERIFY, 1) == [1]

    def test_is_read_once_however_many_wait(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1)
        two = disk_host.instance("another")
        one.lookup(1)
        assert told(two, 1) == [PENDING]
        assert disk_host.disk.jobs == []
        disk_host.disk.finish_all()
        assert told(two, 1) == told(one, 1) == [HIT]

    def test_with_all_shards_or_not_at_all(self, disk_host: DiskHost) -> None:
        pair = cold(disk_host, 1, sizes=((4096, 8192),))
        pair.lookup(1)
        [job] = disk_host.disk.jobs
        assert [len(opened.slots) for opened in disk_host.of(OpenSlots)] == [1, 1]
        disk_host.disk.finish(job.job, failed=[1], error="input/output error")
        assert pair.hits(1) == []
        [freed] = [action for action in disk_host.of(FreeSlots) if action.disk is None]
        assert sorted(freed.slots) == sorted(job.host_slots)

    def test_outlives_the_instance_that_asked(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1)
        one.lookup(1)
        disk_host.do(EndSession(one.scheduler, "died"))
        disk_host.do(released(one))
        disk_host.disk.finish_all()
        two = disk_host.instance("another")
        assert told(two, 1) == [HIT]

    def test_is_nobodys_when_its_instance_has_gone_and_it_fails(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1)
        one.lookup(1)
        [job] = disk_host.disk.open_jobs(READ)
        disk_host.do(EndSession(one.scheduler, "died"))
        disk_host.do(released(one))
        disk_host.disk.fail(job)
        assert disk_host.machine.status().blocks.writing == 0


class TestARun:
    def test_is_promoted_as_far_as_host_and_disks_have_it(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1, 2, 3, 5)
        one.stored(2)
        reply = one.lookup(1, 2, 3, 4, 5)
        assert (reply.hits, reply.states.tolist()) == (0, [PENDING])
        assert [len(job.disk_slots) for job in disk_host.disk.jobs] == [2]
        disk_host.disk.finish_all()
        assert told(one, 1, 2, 3, 4, 5) == [HIT, HIT, HIT, MISS]

    def test_what_comes_after_a_store_under_way_is_promoted_too(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 2)
        running = one.store(1)
        assert told(one, 1, 2) == [PENDING]
        assert len(disk_host.disk.jobs) == 1
        disk_host.disk.finish_all()
        running.finish()
        assert told(one, 1, 2) == [HIT, HIT]

    def test_the_hits_in_front_of_it_are_leased(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 2)
        one.stored(1)
        reply = one.lookup(1, 2, lease=True)
        assert (reply.hits, reply.states.tolist()) == (1, [HIT, PENDING])
        assert reply.lease is not None

    @pytest.mark.parametrize("lease", [False, True])
    def test_does_not_evict_the_hits_in_front_of_it(self, make_disk_host: Make, lease: bool) -> None:
        host = make_disk_host(limits=CoreLimits(leased_fraction_max=1.0))
        one = cold(host, *range(30))
        one.lookup(*range(20))
        host.disk.finish_all()
        one.store(*range(100, 136))  # WRITING: only the 20 may go
        reply = one.lookup(*range(30), lease=lease)
        assert reply.states.tolist() == [HIT] * 20 + [MISS], "there is no room for the rest"
        assert one.hits(*range(20)) == list(range(20))

    def test_of_many_blocks_is_read_in_jobs(self, make_disk_host: Make) -> None:
        host = make_disk_host(policy={"job_bytes": 4 * 4096})
        one = cold(host, *range(10))
        one.lookup(*range(10))
        assert [len(job.disk_slots) for job in host.disk.jobs] == [4, 4, 2]

    def test_is_promoted_no_further_than_the_queue_has_room(self, make_disk_host: Make) -> None:
        host = make_disk_host(policy={"read_queue_bytes": 3 * 4096})
        one = cold(host, *range(8))
        assert told(one, *range(8)) == [PENDING]
        assert host.disk.status.reading_bytes == 3 * 4096
        assert told(one, *range(8)) == [PENDING]
        assert host.disk.jobs == [], "the queue is full"
        host.disk.finish(host.disk.open_jobs(READ)[0])
        assert told(one, *range(8)) == [HIT] * 3 + [PENDING]
        assert host.disk.status.reading_bytes == 3 * 4096, "and goes on by itself"

    def test_longer_than_an_instance_may_lease_is_not_promoted_to_its_end(self, make_disk_host: Make) -> None:
        host = make_disk_host(limits=CoreLimits(leased_fraction_max=0.5))
        one = cold(host, *range(40))
        for _ in range(3):
            one.lookup(*range(40))
            host.disk.finish_all()
        assert told(one, *range(40)) == [HIT] * 26 + [MISS], "15/16 of half of the pool's 56 blocks"
        assert host.of(OpenSlots) == []

    def test_is_looked_at_in_windows(self, make_disk_host: Make) -> None:
        host = make_disk_host(limits=CoreLimits(leased_fraction_max=1.0))
        one = cold(host, *range(45))
        one.lookup(*range(45))
        assert sum(len(job.disk_slots) for job in host.disk.jobs) == 32, "half of the pool"
        host.disk.finish_all()
        one.lookup(*range(45))
        host.disk.finish_all()
        assert told(one, *range(45)) == [HIT] * 45


class TestExact:
    def test_each_block_for_itself(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1, 3)
        one.stored(2)
        assert told(one, 1, 2, 3, 4, 1, exact=True) == [PENDING, HIT, PENDING, MISS, PENDING]
        assert [len(job.disk_slots) for job in disk_host.disk.jobs] == [2]
        disk_host.disk.finish_all()
        assert told(one, 1, 2, 3, 4, exact=True) == [HIT, HIT, HIT, MISS]

    def test_what_comes_late_is_a_miss_where_not_all_hits_can_be_leased(self, make_disk_host: Make) -> None:
        host = make_disk_host(limits=CoreLimits(leased_fraction_max=0.001))
        one = cold(host, 1)
        one.lookup(1)
        host.now_s += 10.1
        host.do(Tick())
        one.stored(2, 3)
        reply = one.lookup(1, 2, 3, exact=True, lease=True)
        assert reply.states.tolist() == [MISS, HIT, MISS]
        assert reply.lease_refused is not None

    def test_what_finds_no_room_is_a_miss(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1, 2)
        one.store(*range(200, 255))  # WRITING: one slot is left to be had
        assert told(one, 1, 2, exact=True) == [PENDING, MISS]


class TestNotPromoted:
    def test_while_draining(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1)
        disk_host.do(Drain())
        assert told(one, 1) == [MISS]
        assert disk_host.actions == []
        disk_host.do(Resume())
        assert told(one, 1) == [PENDING]

    def test_for_an_instance_that_is_not_ready(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1)
        two = disk_host.instance("another", worker=None)
        assert told(two, 1) == [MISS]
        assert one.hits(1) == []
        assert disk_host.disk.status.jobs == 0

    def test_when_the_host_has_no_room(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1)
        one.store(*range(200, 200 + FULL))
        assert told(one, 1) == [MISS]
        assert disk_host.disk.jobs == []

    def test_from_a_disk_that_is_off(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1)
        disk_host.disk.pause()
        assert told(one, 1) == [MISS]
        disk_host.disk.resume()
        assert told(one, 1) == [PENDING]


class TestFailure:
    def test_what_cannot_be_read_is_a_miss_and_not_asked_for_again(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1)
        one.lookup(1)
        disk_host.disk.fail(disk_host.disk.open_jobs()[0])
        assert told(one, 1) == [MISS]
        assert disk_host.disk.status.counters.errors == 1
        assert disk_host.disk.holds(one, 1) == [1], "perhaps it can be read later"

    def test_what_cannot_be_read_is_written_anew_when_it_is_stored(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1)
        one.lookup(1)
        disk_host.disk.fail(disk_host.disk.open_jobs()[0])
        one.stored(1)
        assert len(disk_host.disk.jobs) == 1
        disk_host.disk.finish_all()
        disk_host.evict_all(one)
        assert told(one, 1) == [PENDING]

    def test_what_does_not_match_is_gone_and_its_slot_set_aside(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1, 2)
        one.lookup(1, 2)
        [job] = disk_host.disk.jobs
        disk_host.disk.finish(job.job, corrupt=[0])
        [aside] = disk_host.of(QuarantineSlots)
        assert (aside.disk, aside.slots.tolist()) == (0, [job.disk_slots[0]])
        assert told(one, 1) == [MISS]
        assert one.hits(2) == [2]
        assert disk_host.counters.corrupt_on_disk == 1
        assert disk_host.counters.integrity_failures == 1
        status = disk_host.disk.status
        assert (status.counters.corrupt_blocks, status.corrupt_slots, status.blocks) == (1, 1, 1)
        [explanation] = disk_host.machine.explain(keys(1)[0].tobytes()).explanations
        assert explanation.verdict is BlockVerdict.CORRUPT

    def test_only_the_shard_that_does_not_match_is_set_aside(self, disk_host: DiskHost) -> None:
        pair = cold(disk_host, 1, sizes=((4096, 8192),))
        pair.lookup(1)
        [job] = disk_host.disk.jobs
        disk_host.disk.finish(job.job, corrupt=[1])
        [aside] = disk_host.of(QuarantineSlots)
        assert aside.slots.tolist() == [job.disk_slots[1]]
        freed: dict[int | None, list[int]] = {
            action.disk: action.slots.tolist() for action in disk_host.of(FreeSlots)
        }
        assert freed[0] == [job.disk_slots[0]]
        assert sorted(freed[None]) == sorted(job.host_slots)

    def test_a_report_that_makes_no_sense_fails_everything(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1, 2)
        one.lookup(1, 2)
        disk_host.disk.finish(disk_host.disk.open_jobs()[0], failed=[7])
        assert one.hits(1, 2) == []

    def test_what_takes_too_long_is_a_miss_until_it_is_there(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1)
        one.lookup(1)
        disk_host.now_s += 10.1
        disk_host.do(Tick())
        assert told(one, 1) == [MISS]
        assert told(one, 1, exact=True) == [MISS]
        assert one.store(1).results == [STILL_PENDING]
        disk_host.disk.finish_all()
        assert told(one, 1) == [HIT]

    def test_what_a_lost_worker_was_to_read_is_a_miss_and_freed_when_it_is_gone(
        self, disk_host: DiskHost
    ) -> None:
        one = cold(disk_host, 1)
        one.lookup(1)
        slots = disk_host.disk.jobs[0].host_slots
        worker = disk_host.disk.worker
        disk_host.disk.lose()
        assert disk_host.of(FreeSlots) == [], "it may still be reading"
        assert told(one, 1) == [MISS]
        disk_host.disk.live()
        assert told(one, 1) == [MISS]
        disk_host.disk.exit(worker)
        [freed] = disk_host.of(FreeSlots)
        assert freed.slots.tolist() == slots.tolist()
        assert told(one, 1) == [PENDING], "and is read again"


class TestStores:
    def test_of_a_block_that_is_being_promoted_are_pending(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1)
        one.lookup(1)
        assert one.store(1).results == [STILL_PENDING]
        disk_host.disk.finish_all()
        assert one.store(1).results == [EXISTS]

    def test_find_room_beside_promotions(self, make_disk_host: Make) -> None:
        host = make_disk_host(limits=CoreLimits(leased_fraction_max=1.0))
        one = cold(host, *range(50))
        one.lookup(*range(50))
        assert host.disk.status.reading_bytes == 32 * 4096
        assert one.store(*range(200, 224)).results == [0] * 24


def prefetch(instance: Instance, *numbers: int, exact: bool = False) -> Told:
    queries = (BlockQuery(0, keys(*numbers), exact=exact),)
    reply = instance.host.do(PrefetchBlocks(instance.scheduler, instance.epoch, queries))
    assert isinstance(reply, LookupReply)
    return Told(reply, len(numbers), exact=exact)


class TestPrefetch:
    def test_promotes_as_a_lookup_does_and_counts_no_lookup(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1, 2)
        before = disk_host.counters.lookups
        assert prefetch(one, 1, 2, 3).states.tolist() == [PENDING]
        disk_host.disk.finish_all()
        assert prefetch(one, 1, 2, 3).states.tolist() == [HIT, HIT, MISS]
        assert disk_host.counters.lookups == before
        assert told(one, 1, 2) == [HIT, HIT]

    def test_tells_what_the_host_has_where_there_are_no_disks(self, host: Any) -> None:
        one = host.instance()
        one.stored(1)
        assert prefetch(one, 1, 2).states.tolist() == [HIT, MISS]
        assert prefetch(one, 2, 1, exact=True).states.tolist() == [MISS, HIT]

    def test_does_nothing_while_draining(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1)
        disk_host.do(Drain())
        assert prefetch(one, 1, 2, exact=True).states.tolist() == [MISS, MISS]

    def test_is_checked_as_a_lookup_is(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        stimulus = PrefetchBlocks(one.scheduler, one.epoch, (BlockQuery(0, keys(1)[:, :31]),))
        assert disk_host.reason(stimulus) is Reason.MALFORMED


class TestGoingOn:
    """A prompt of which a disk's queue has room for some comes up as a whole, and nobody has to ask again."""

    @pytest.fixture
    def host(self, make_disk_host: Make) -> DiskHost:
        return make_disk_host(policy={"read_queue_bytes": 4 * 4096, "job_bytes": 4096})

    @pytest.mark.parametrize("exact", [False, True])
    @pytest.mark.parametrize("ask", [prefetch, Instance.lookup])
    def test_after_one_question(self, host: DiskHost, ask: Callable[..., Told], exact: bool) -> None:
        one = cold(host, *range(10))
        assert PENDING in ask(one, *range(10), exact=exact).states
        host.disk.finish_all()
        assert one.hits(*range(10)) == list(range(10))
        assert host.counters.promoted_blocks == 10
        assert len(host.ahead) == 0

    def test_once_half_of_the_queue_is_empty(self, host: DiskHost) -> None:
        one = cold(host, *range(10))
        prefetch(one, *range(10))
        begun = host.disk.open_jobs()
        host.disk.finish(begun[0])
        assert host.disk.open_jobs() == begun[1:]
        host.disk.finish(begun[1])
        assert len(host.disk.open_jobs()) == 4

    def test_prompts_take_turns(self, host: DiskHost) -> None:
        one = cold(host, *range(40))
        prefetch(one, *range(10))
        prefetch(one, *range(20, 30))
        for _ in range(4):
            host.disk.finish(host.disk.open_jobs()[0])
        assert host.disk.status.reading_bytes == 4 * 4096
        host.disk.finish_all()
        assert one.hits(*range(10)) == list(range(10))
        assert one.hits(*range(20, 30)) == list(range(20, 30))

    def test_not_for_an_instance_that_has_gone(self, host: DiskHost) -> None:
        one = cold(host, *range(10))
        prefetch(one, *range(10))
        host.do(EndSession(one.scheduler, "died"))
        host.do(released(one))
        host.disk.finish_all()
        assert host.counters.promoted_blocks == 4
        assert len(host.ahead) == 0

    def test_not_while_draining(self, host: DiskHost) -> None:
        one = cold(host, *range(10))
        prefetch(one, *range(10))
        host.do(Drain())
        host.disk.finish_all()
        host.do(Resume())
        host.do(Tick())
        assert host.counters.promoted_blocks == 4

    def test_not_a_minute_later(self, host: DiskHost) -> None:
        one = cold(host, *range(10))
        prefetch(one, *range(10))
        host.now_s += WAITING_S
        host.disk.finish_all()
        assert host.counters.promoted_blocks == 4

    def test_not_for_who_says_that_the_host_will_do(self, host: DiskHost) -> None:
        one = cold(host, *range(10))
        prefetch(one, *range(10))
        one.lookup(*range(10), host_only=True)
        host.disk.finish_all()
        assert host.counters.promoted_blocks == 4

    def test_not_where_computing_is_faster_by_now(self, host: DiskHost) -> None:
        one = cold(host, *range(10))
        prefetch(one, *range(10))
        [instance] = host.machine.core.instances.values()
        instance.prefill_tokens_per_s = 1e9
        for job in host.disk.open_jobs():
            host.disk.finish(job, bytes=4096, busy_s=1.0)
        assert host.disk.open_jobs() == []
        assert host.counters.promoted_blocks == 4

    def test_with_a_disk_that_is_back(self, host: DiskHost) -> None:
        one = cold(host, *range(10))
        prefetch(one, *range(10))
        host.disk.lose()
        host.disk.exit()
        host.disk.resume()
        host.do(Tick())
        host.disk.finish_all()
        assert one.hits(*range(10)) == list(range(10))

    def test_of_so_many_hashes_at_most(self, host: DiskHost, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ahead, "HASHES_MAX", 25)
        one = cold(host, *range(40))
        for first in range(0, 40, 10):
            prefetch(one, *range(first, first + 10))
        assert len(host.ahead) == 2
        host.disk.finish_all()
        assert one.hits(*range(20, 40)) == list(range(20, 40))
        assert one.hits(*range(10)) == list(range(4))
        assert one.hits(*range(10, 20)) == []

    def test_a_message_is_not_kept_for_it(self, host: DiskHost) -> None:
        one = cold(host, *range(10))
        hashes = keys(*range(10))
        host.do(PrefetchBlocks(one.scheduler, one.epoch, (BlockQuery(0, hashes),)))
        hashes[:] = 0
        host.disk.finish_all()
        assert one.hits(*range(10)) == list(range(10))


class TestExplain:
    def verdict(self, host: DiskHost, number: int) -> BlockVerdict:
        [explanation] = host.machine.explain(keys(number)[0].tobytes()).explanations
        return explanation.verdict

    def test_says_that_only_a_disk_has_it(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1)
        assert self.verdict(disk_host, 1) is BlockVerdict.ON_DISK
        one.lookup(1)
        assert self.verdict(disk_host, 1) is BlockVerdict.BEING_WRITTEN
        disk_host.disk.finish_all()
        assert self.verdict(disk_host, 1) is BlockVerdict.READABLE

    def test_says_that_it_was_evicted_where_a_lookup_misses(self, disk_host: DiskHost) -> None:
        cold(disk_host, 1)
        disk_host.disk.pause()
        assert self.verdict(disk_host, 1) is BlockVerdict.EVICTED


class TestALoad:
    def test_of_what_was_promoted(self, disk_host: DiskHost) -> None:
        one = cold(disk_host, 1, 2)
        one.lookup(1, 2)
        disk_host.disk.finish_all()
        reply = one.lookup(1, 2, lease=True)
        assert reply.lease is not None
        running = one.load(reply.lease, [0, 1])
        assert running.posts[0].verify is None
        assert running.finish().succeeded.tolist() == [1, 1]

    def test_that_finds_the_host_corrupt_leaves_the_disk_to_be_asked(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.stored_on_disk(one, 1)
        running = one.load(one.lease(1), [0])
        running.part(outcome=PartOutcome.FAILED, corrupt=True)
        assert told(one, 1) == [PENDING]
