"""Load or recompute: what would take longer to bring than to compute is told to be a miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvtierd.core.errors import Reason
from kvtierd.core.state.rates import Rate
from kvtierd.core.stimuli import RenewSession

from tests.unit.core.disk import READ, DiskHost
from tests.unit.core.host import Instance

MISS, PENDING, HIT = 0, 1, 2
Make = Callable[..., DiskHost]
FAST, SLOW = 1e12, 16.0
"""Tokens of a prompt computed in a second; a block has 16."""


def computes(instance: Instance, tokens_per_s: float) -> None:
    instance.host.do(RenewSession(instance.scheduler, tokens_per_s))


def load_once(instance: Instance, number: int, copied_bytes: int, copy_s: float) -> None:
    running = instance.load(instance.lease(number), [0])
    running.part(copied_bytes=copied_bytes, copy_s=copy_s)


def read_once(host: DiskHost, instance: Instance, number: int, seconds: float) -> None:
    """The disk shows how fast it reads."""
    host.stored_on_disk(instance, number)
    host.evict_all(instance)
    instance.lookup(number)
    [job] = host.disk.open_jobs(READ)
    host.disk.finish(job, bytes=4096, busy_s=seconds)


class TestHits:
    def test_that_load_slower_than_they_are_computed_are_misses(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.stored_on_disk(one, 1, 2)
        load_once(one, 1, 4096, 0.5)
        computes(one, 16 * 1.9)  # 0.53 s
        assert one.lookup(1, 2).hits == 2
        computes(one, 16 * 2.1)  # 0.48 s
        reply = one.lookup(1, 2, lease=True)
        assert (reply.hits, reply.states.tolist(), reply.lease) == (0, [MISS], None)
        assert disk_host.counters.recompute_blocks == 2
        assert one.lookup(1, 2, exact=True).states.tolist() == [MISS, MISS]

    def test_of_unknown_speed_are_hits(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.stored_on_disk(one, 1)
        computes(one, FAST)
        assert one.lookup(1).hits == 1

    def test_are_hits_for_an_engine_of_unknown_speed(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.stored_on_disk(one, 1)
        load_once(one, 1, 4096, 1000.0)
        assert one.lookup(1).hits == 1

    def test_are_tried_again_when_nothing_was_measured_for_a_while(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        disk_host.stored_on_disk(one, 1)
        load_once(one, 1, 4096, 1000.0)
        computes(one, SLOW)
        assert one.lookup(1).hits == 0
        disk_host.now_s += 61.0
        assert one.lookup(1).hits == 1

    def test_are_compared_only_if_asked_to(self, make_disk_host: Make) -> None:
        host = make_disk_host(policy={"recompute_if_faster": False})
        one = host.instance()
        host.stored_on_disk(one, 1)
        load_once(one, 1, 4096, 1000.0)
        computes(one, FAST)
        assert one.lookup(1).hits == 1

    def test_are_not_compared_without_disks(self, host: Any) -> None:
        one = host.instance()
        one.stored(1)
        load_once(one, 1, 4096, 1000.0)
        computes(one, FAST)
        assert one.lookup(1).hits == 1

    def test_load_at_the_pace_of_the_slowest_device(self, disk_host: DiskHost) -> None:
        pair = disk_host.instance(sizes=((4096, 4096),))
        disk_host.stored_on_disk(pair, 1)
        running = pair.load(pair.lease(1), [0])
        running.part(0, copied_bytes=4096, copy_s=0.1)
        running.part(1, copied_bytes=4096, copy_s=0.1)
        computes(pair, 16 / 0.15)  # two ranks share one device: 0.2 s
        assert pair.lookup(1).hits == 0


class TestPromotions:
    def test_that_take_longer_than_computing_are_misses(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        read_once(disk_host, one, 1, 0.5)
        disk_host.stored_on_disk(one, 2, 3)
        disk_host.evict_all(one, 20_000)
        computes(one, 16 * 2.1)
        assert one.lookup(2, 3).states.tolist() == [MISS]
        assert disk_host.disk.jobs == []
        assert disk_host.counters.recompute_blocks == 2
        assert one.lookup(2, 3, exact=True).states.tolist() == [MISS, MISS]
        computes(one, 16 * 1.9)
        assert one.lookup(2, 3).states.tolist() == [PENDING]

    def test_wait_for_what_is_on_its_way_before_them(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        read_once(disk_host, one, 1, 0.5)
        disk_host.stored_on_disk(one, 2, 3)
        disk_host.evict_all(one, 20_000)
        computes(one, 16 * 1.5)
        assert one.lookup(2).states.tolist() == [PENDING], "0.5 s against 0.67"
        assert one.lookup(3).states.tolist() == [MISS], "1 s against 0.67"

    def test_leave_the_hits_in_front_of_them_alone(self, disk_host: DiskHost) -> None:
        one = disk_host.instance()
        read_once(disk_host, one, 1, 0.5)
        disk_host.stored_on_disk(one, 3)
        disk_host.evict_all(one, 20_000)
        one.stored(2)
        computes(one, FAST)
        assert one.lookup(2, 3).states.tolist() == [HIT, MISS]


class TestSpeedOfAnEngine:
    def test_is_declared_when_its_scheduler_attaches(self, disk_host: DiskHost) -> None:
        one = disk_host.instance(worker=None, processes=[])
        one.attach(0, prefill_tokens_per_s=123.0)
        [instance] = disk_host.machine.core.instances.values()
        assert instance.prefill_tokens_per_s == 123.0
        computes(one, 0.0)
        assert instance.prefill_tokens_per_s == 123.0, "0 is nothing new"
        computes(one, 456.0)
        assert instance.prefill_tokens_per_s == 456.0

    def test_is_not_what_a_rank_says(self, disk_host: DiskHost) -> None:
        one = disk_host.instance(together=False)
        disk_host.do(RenewSession(one.sessions[0], 123.0))
        [instance] = disk_host.machine.core.instances.values()
        assert instance.prefill_tokens_per_s == 0.0

    @pytest.mark.parametrize("nonsense", [-1.0, float("nan"), float("inf")])
    def test_is_a_number(self, disk_host: DiskHost, nonsense: float) -> None:
        one = disk_host.instance()
        assert disk_host.reason(RenewSession(one.scheduler, nonsense)) is Reason.MALFORMED
        two = disk_host.instance("two", worker=None, processes=[])
        assert disk_host.reason(two.hello(0, prefill_tokens_per_s=nonsense)) is Reason.MALFORMED


class TestRate:
    def test_is_bytes_over_seconds_and_large_measurements_count_most(self) -> None:
        rate = Rate()
        rate.measured(0.0, 1_000, 1.0)
        rate.measured(0.0, 999_000, 9.0)
        assert rate.bytes_per_s(0.0) == 100_000
        assert rate.seconds(0.0, 200_000) == 2.0

    def test_follows_what_is_measured_now(self) -> None:
        rate = Rate()
        rate.measured(0.0, 1_000, 1.0)
        rate.measured(50.0, 100, 1.0)
        assert 100 < rate.bytes_per_s(50.0) < 200

    def test_ignores_what_measures_nothing(self) -> None:
        rate = Rate()
        rate.measured(0.0, 0, 1.0)
        rate.measured(0.0, 1, 0.0)
        assert rate.bytes_per_s(0.0) == 0.0
