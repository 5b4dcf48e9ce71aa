"""A disk and a store below one host: each has what it is to have, and lookups take it from where it is
first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvtierd.core.actions import ClearReply, PostDiskJob
from kvtierd.core.blocks.table import BlockFlag
from kvtierd.core.ids import SpaceId
from kvtierd.core.stimuli import ClearBlocks, CoreDisks, PoolPolicy, Reconfigure, Tick, WriteMode

from tests.unit.core.disk import READ, WRITE, flagged
from tests.unit.core.host import Instance, keys
from tests.unit.core.store import StoreHost

BLOCKS = (1, 2, 3, 4)
Make = Callable[..., StoreHost]
IN_STORE = BlockFlag.STORE_CLEAN


@pytest.fixture
def make(table: Any) -> Make:
    return lambda **options: StoreHost(table, **{"disks": 1, **options})


def space_of(host: StoreHost) -> SpaceId:
    [instance] = host.machine.core.instances.values()
    return instance.plans[0].space


def read_from(host: StoreHost, one: Instance, *numbers: int) -> list[int]:
    """Looks the blocks up, and returns from where they are being read, one number for each job."""
    one.lookup(*numbers)
    return [job.disk for job in host.of(PostDiskJob) if job.kind is READ]


class TestWriting:
    def test_each_has_what_its_own_policy_says(self, make: Make) -> None:
        host = make(mode=WriteMode.ON_REUSE)
        one = host.instance()
        host.stored_on_disk(one, *BLOCKS)
        disk, store = host.disks
        assert (disk.holds(one, *BLOCKS), store.holds(one, *BLOCKS)) == (list(BLOCKS), [])
        assert flagged(one, BlockFlag.CLEAN, *BLOCKS) == list(BLOCKS)
        assert flagged(one, IN_STORE, *BLOCKS) == []
        one.lookup(1, 2)
        assert [(job.disk, job.kind) for job in host.of(PostDiskJob)] == [(store.number, WRITE)]
        assert flagged(one, BlockFlag.STORE_QUEUED, *BLOCKS) == [1, 2]
        assert flagged(one, BlockFlag.QUEUED, *BLOCKS) == []
        store.finish_all()
        assert store.holds(one, *BLOCKS) == [1, 2]
        assert flagged(one, IN_STORE, *BLOCKS) == [1, 2]

    def test_what_only_one_of_them_could_write_is_tried_again_there_alone(self, make: Make) -> None:
        host = make()
        one = host.instance()
        one.stored(*BLOCKS)
        disk, store = host.disks
        disk.finish_all()
        for job in store.open_jobs():
            store.fail(job)
        assert flagged(one, BlockFlag.CLEAN, *BLOCKS) == list(BLOCKS)
        assert flagged(one, IN_STORE, *BLOCKS) == []
        host.do(Tick())
        assert {(job.disk, job.kind) for job in host.of(PostDiskJob)} == {(store.number, WRITE)}

    def test_what_one_of_them_has_is_not_lost(self, make: Make) -> None:
        host = make(mode=WriteMode.ON_REUSE)
        one = host.instance()
        host.stored_on_disk(one, *BLOCKS)
        host.evict_host(one)
        counters = host.counters
        assert counters.evicted_blocks > len(BLOCKS)
        assert counters.evicted_unwritten_blocks == counters.evicted_blocks - len(BLOCKS)

    def test_policies_are_changed_each_for_itself(self, make: Make) -> None:
        host = make(mode=WriteMode.ON_REUSE)
        one = host.instance()
        on_reuse, through = CoreDisks(mode=WriteMode.ON_REUSE), CoreDisks(mode=WriteMode.THROUGH)
        host.do(Reconfigure(0, on_reuse, PoolPolicy.LRU, through))
        one.stored(*BLOCKS)
        assert {job.disk for job in host.of(PostDiskJob)} == {host.store.number}


class TestLookups:
    def test_what_both_have_comes_from_the_disk(self, make: Make) -> None:
        host = make()
        one = host.instance()
        host.stored_on_disk(one, *BLOCKS)
        host.evict_host(one)
        assert read_from(host, one, *BLOCKS) == [0]
        host.disk.finish_all()
        assert one.hits(*BLOCKS) == list(BLOCKS)
        assert flagged(one, IN_STORE, *BLOCKS) == list(BLOCKS), "it is there as well, and not put there again"

    def test_what_the_disk_has_lost_comes_from_the_store(self, make: Make) -> None:
        host = make()
        one = host.instance()
        host.stored_on_disk(one, *BLOCKS)
        host.evict_host(one)
        one.lookup(*BLOCKS)
        [job] = host.disk.open_jobs(READ)
        host.disk.finish(job, corrupt=[0, 2])
        assert read_from(host, one, *BLOCKS) == [host.store.number]
        host.store.finish_all()
        assert one.hits(*BLOCKS) == list(BLOCKS)

    def test_only_what_has_come_up_whole_from_the_store_goes_to_the_disk(self, make: Make) -> None:
        host = make()
        one = host.instance()
        host.stored_on_disk(one, *BLOCKS)
        host.evict_host(one)
        one.lookup(*BLOCKS)
        [job] = host.disk.open_jobs(READ)
        host.disk.finish(job, corrupt=[0, 1, 2, 3])
        one.lookup(*BLOCKS)
        [job] = host.store.open_jobs(READ)
        host.store.finish(job, corrupt=[3])
        assert [(job.disk, job.kind) for job in host.of(PostDiskJob)] == [(0, WRITE)]
        assert flagged(one, BlockFlag.QUEUED, *BLOCKS) == [1, 2, 3]
        assert flagged(one, BlockFlag.STORE_QUEUED, *BLOCKS) == []

    @pytest.mark.parametrize("gone", [0, 1])
    def test_without_one_of_the_workers_the_other_goes_on(self, make: Make, gone: int) -> None:
        host = make()
        one = host.instance()
        host.stored_on_disk(one, *BLOCKS)
        host.evict_host(one)
        host.disks[gone].exit()
        assert read_from(host, one, *BLOCKS) == [1 - gone]
        host.disks[1 - gone].finish_all()
        assert one.hits(*BLOCKS) == list(BLOCKS)

    def test_a_prompt_comes_from_both(self, make: Make) -> None:
        host = make(mode=WriteMode.ON_REUSE)
        one = host.instance()
        host.watched()
        host.adopted(space_of(host), keys(3, 4))
        host.stored_on_disk(one, 1, 2)
        host.evict_host(one)
        assert read_from(host, one, *BLOCKS) == [0, host.store.number]
        assert one.lookup(*BLOCKS).hits == 0
        for disk in host.disks:
            disk.finish_all()
        assert one.hits(*BLOCKS) == list(BLOCKS)
        assert flagged(one, BlockFlag.CLEAN, *BLOCKS) == [1, 2]
        assert flagged(one, IN_STORE, *BLOCKS) == [3, 4]

    def test_no_block_is_begun_before_those_in_front_of_it(self, make: Make) -> None:
        """The disk's queue is full with two blocks, so what the store has behind the third has to wait."""
        host = make(mode=WriteMode.ON_REUSE, policy={"read_queue_bytes": 2 * 4096})
        one = host.instance()
        host.watched()
        host.adopted(space_of(host), keys(4))
        host.stored_on_disk(one, 1, 2, 3)
        host.evict_host(one)
        assert read_from(host, one, *BLOCKS) == [0]
        [job] = host.of(PostDiskJob)
        assert len(job.disk_slots) == 2

    def test_what_is_found_in_the_store_goes_to_the_disk_without_waiting_for_a_tick(self, make: Make) -> None:
        host = make(mode=WriteMode.ON_REUSE)
        one = host.instance()
        host.watched()
        host.adopted(space_of(host), keys(*BLOCKS))
        one.lookup(*BLOCKS)
        host.store.finish_all()
        assert {(job.disk, job.kind) for job in host.of(PostDiskJob)} == {(0, WRITE)}
        host.disk.finish_all()
        assert flagged(one, BlockFlag.CLEAN, *BLOCKS) == list(BLOCKS)

    @pytest.mark.parametrize(("disk", "store"), [(True, False), (False, True)])
    def test_whether_computing_is_faster_is_asked_of_each_by_itself(
        self, make: Make, disk: bool, store: bool
    ) -> None:
        host = make(mode=WriteMode.ON_REUSE)
        one = host.instance()
        host.watched()
        host.adopted(space_of(host), keys(*BLOCKS))
        policies = [CoreDisks(recompute_if_faster=each) for each in (disk, store)]
        host.do(Reconfigure(0, policies[0], PoolPolicy.LRU, policies[1]))
        [instance] = host.machine.core.instances.values()
        instance.prefill_tokens_per_s = 1e9
        one.lookup(*BLOCKS)
        [job] = host.store.open_jobs(READ)
        host.store.finish(job, failed=range(len(BLOCKS)), bytes=4096, busy_s=3.0)
        assert bool(read_from(host, one, *BLOCKS)) is not store


class TestClearing:
    def test_it_is_cleared_everywhere_and_counted_once(self, make: Make) -> None:
        host = make()
        one = host.instance()
        host.stored_on_disk(one, *BLOCKS)
        host.evict_host(one)
        space = space_of(host)
        there = host.machine.keys(space)
        assert len({bytes(key) for key in there}) == len(there)
        reply = host.do(ClearBlocks(space, keys(*BLOCKS)))
        assert isinstance(reply, ClearReply)
        assert (reply.cleared_blocks, reply.disk_bytes) == (len(BLOCKS), 2 * len(BLOCKS) * 4096)
        assert [disk.holds(one, *BLOCKS) for disk in host.disks] == [[], []]

    def test_a_dead_store_leaves_the_disk_as_it_is(self, make: Make) -> None:
        host = make()
        one = host.instance()
        host.stored_on_disk(one, *BLOCKS)
        host.store.exit()
        disk, store = host.disks
        assert (disk.holds(one, *BLOCKS), store.holds(one, *BLOCKS)) == (list(BLOCKS), [])
        assert flagged(one, BlockFlag.CLEAN, *BLOCKS) == list(BLOCKS)
        assert flagged(one, IN_STORE, *BLOCKS) == []
