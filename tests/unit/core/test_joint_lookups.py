"""Several groups looked up together: what they can all serve, one lease for each or none, and what of it is
brought up from disks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kvtierd.core.actions import LookupReply
from kvtierd.core.errors import Reason
from kvtierd.core.ids import LeaseId
from kvtierd.core.stimuli import (
    NOBODY,
    BlockQuery,
    CoreLimits,
    Drain,
    PrefetchBlocks,
    ReleaseLeases,
    RenewSession,
    Resume,
    TouchBlocks,
)

from tests.unit.core.disk import READ, DiskHost
from tests.unit.core.host import Host, Instance, keys

MISS, PENDING, HIT = 0, 1, 2
TWO: dict[str, Any] = {"sizes": ((4096,), (4096,))}
PREFIX = [1, 2, 3, 4, 5, 6]


def both(host: Host, **options: Any) -> Instance:
    """Group 0: full attention, group 1: to be asked with a window of 2 blocks."""
    return host.instance(**TWO | options)


def hits(reply: LookupReply) -> list[int]:
    return [answer.hits for answer in reply.groups]


def states(reply: LookupReply) -> list[list[int]]:
    return [answer.states.tolist() for answer in reply.groups]


def leases(reply: LookupReply) -> list[LeaseId]:
    found = [answer.lease for answer in reply.groups]
    assert None not in found
    return [lease for lease in found if lease is not None]


class TestWhatIsFound:
    def test_the_longest_prefix_that_both_can_serve(self, host: Host) -> None:
        one = both(host)
        one.stored(1, 2, 3, 4, 5)
        one.stored(3, 4, 6, group=1)
        reply = one.lookup_groups((0, PREFIX), (2, PREFIX))
        assert hits(reply) == [4, 4]
        assert states(reply) == [[HIT] * 4, [MISS, MISS, HIT, HIT]]

    def test_groups_of_other_block_sizes(self, host: Host) -> None:
        one = both(host, block_tokens=(16, 32))
        one.stored(*PREFIX)
        one.stored(22, 24, group=1)
        assert hits(one.lookup_groups((0, PREFIX), (1, [22, 24, 26]))) == [4, 2]
        assert hits(one.lookup_groups((0, PREFIX[:5]), (1, [22, 24, 26]))) == [4, 2]
        assert hits(one.lookup_groups((0, PREFIX[:3]), (1, [22, 24, 26]))) == [2, 1]

    def test_a_window_alone(self, host: Host) -> None:
        one = host.instance()
        one.stored(3, 4)
        assert hits(one.lookup_groups((2, PREFIX))) == [4]

    def test_a_block_in_the_making_is_what_a_longer_prefix_waits_for(self, host: Host) -> None:
        one = both(host)
        one.stored(1, 2, 3, 4)
        one.stored(1, 2, group=1)
        running = one.store(3, 4, group=1)
        reply = one.lookup_groups((0, PREFIX), (2, PREFIX))
        assert hits(reply) == [2, 2]
        assert states(reply) == [[HIT] * 4, [HIT, HIT, PENDING, PENDING]]
        running.finish()
        assert hits(one.lookup_groups((0, PREFIX), (2, PREFIX))) == [4, 4]

    def test_nothing_is_pending_that_makes_no_longer_prefix(self, host: Host) -> None:
        one = both(host)
        one.stored(1, 2)
        one.stored(1, 2, group=1)
        one.store(4, group=1)
        reply = one.lookup_groups((0, PREFIX), (2, PREFIX))
        assert states(reply) == [[HIT, HIT], [HIT, HIT]]

    def test_an_instance_that_is_not_ready_or_draining_misses(self, host: Host) -> None:
        both(host).stored(1)
        twin = both(host, name="twin", worker=None)
        assert hits(twin.lookup_groups((0, [1]), (2, [1]), lease=True)) == [0, 0]
        host.do(Drain())
        assert states(twin.lookup_groups((0, [1]), (2, [1]), lease=True)) == [[], []]

    def test_what_makes_no_sense_is_refused(self, make_host: Callable[..., Host]) -> None:
        host = make_host(CoreLimits(lookup_hashes_max=4))
        one = both(host)
        query = BlockQuery(0, keys(1))

        def reason(*queries: BlockQuery) -> Reason:
            return host.reason(one.lookup_groups_of(queries=queries))

        assert reason() is Reason.COUNT_MISMATCH
        assert reason(query, query) is Reason.UNKNOWN_GROUP
        assert reason(query, BlockQuery(2, keys(1))) is Reason.UNKNOWN_GROUP
        assert reason(query, BlockQuery(1, keys(1), -1)) is Reason.MALFORMED
        assert reason(query, BlockQuery(1, np.zeros((1, 16), np.uint8))) is Reason.MALFORMED
        assert reason(query, BlockQuery(1, keys(1, 2, 3, 4))) is Reason.TOO_MANY_BLOCKS
        assert reason(query, BlockQuery(1, keys(1), exact=True)) is Reason.MODE_UNSUPPORTED
        assert reason(BlockQuery(0, keys(1), 1, exact=True)) is Reason.MODE_UNSUPPORTED


class TestLeases:
    def test_hold_what_the_prefix_needs_and_no_more(self, host: Host) -> None:
        one = both(host)
        one.stored(1, 2, 3, 4)
        one.stored(1, 2, 3, 4, group=1)
        reply = one.lookup_groups((0, PREFIX), (2, PREFIX), lease=True)
        assert [answer.lease_first for answer in reply.groups] == [0, 2]
        table = host.machine.core.blocks.table
        for group, pins in ((0, [1, 1, 1, 1]), (1, [0, 0, 1, 1])):
            space = host.machine.core.names[NOBODY, "engine"].plans[group].space
            entries, _ = table.lookup(space, keys(1, 2, 3, 4))
            assert table.pins(entries).tolist() == pins
        one.load(leases(reply)[1], [7, 8], group=1).finish()
        host.do(ReleaseLeases(one.scheduler, one.epoch, tuple(leases(reply))))
        assert host.machine.status().leases == 0

    def test_are_granted_to_all_groups_or_to_none(self, make_host: Callable[..., Host]) -> None:
        host = make_host(CoreLimits(leases_max=1))
        one = both(host)
        one.stored(1, 2, 3, 4)
        one.stored(1, 2, 3, 4, group=1)
        reply = one.lookup_groups((0, PREFIX), (2, PREFIX), lease=True)
        assert hits(reply) == [0, 0]
        assert states(reply) == [[PENDING] * 4, [MISS, MISS, PENDING, PENDING]]
        assert [answer.lease for answer in reply.groups] == [None, None]
        assert reply.lease_refused is not None
        assert reply.lease_refused.reason is Reason.LEASE_LIMIT
        assert host.machine.status().leases == 0

    @pytest.mark.parametrize(("blocks", "fits"), [(3, 1), (5, 3), (6, 4), (7, 5), (8, 6)])
    def test_hold_the_longest_prefix_that_there_is_room_for(
        self, make_host: Callable[..., Host], blocks: int, fits: int
    ) -> None:
        """A prefix of n blocks costs n of the one group, and a window of two of the other."""
        host = make_host(CoreLimits(leased_fraction_max=16 / 15 * blocks / 56 + 0.001))
        one = both(host)
        one.stored(*PREFIX)
        one.stored(*PREFIX, group=1)
        reply = one.lookup_groups((0, PREFIX), (2, PREFIX), lease=True)
        assert hits(reply) == [fits, fits]
        assert len(leases(reply)) == 2
        assert (reply.lease_refused is None) == (fits == 6)
        if fits < 6:
            assert states(reply)[0] == [HIT] * fits, "never more, so there is nothing to wait for"
            counters = host.counters
            assert (counters.missed_lease_limit, counters.refused_leases) == (2 * (6 - fits), 1)
        one.load(leases(reply)[0], list(range(fits)), group=0)

    def test_of_several_groups_fit_together_or_not_at_all(self, make_host: Callable[..., Host]) -> None:
        """What the twin shares with the other counts as its own while the last group gets its lease: that
        must not take the room from it which there was for all."""
        host = make_host(CoreLimits(leased_fraction_max=20.1 / 56))
        one = both(host)
        run = tuple(range(1, 16))
        one.stored(*run)
        one.stored(*run, group=1)
        one.lookup_groups((0, PREFIX), (2, PREFIX), lease=True)
        reply = both(host, name="twin").lookup_groups((0, run), (2, run), lease=True)
        assert hits(reply) == [15, 15]
        assert len(leases(reply)) == 2

    def test_that_find_no_room_beside_others_are_worth_waiting_for(
        self, make_host: Callable[..., Host]
    ) -> None:
        host = make_host(CoreLimits(leased_fraction_max=10 / 56))
        one = both(host)
        one.stored(*PREFIX)
        one.stored(*PREFIX, group=1)
        one.stored(*range(10, 17))
        lease = one.lease(*range(10, 17))
        reply = one.lookup_groups((0, PREFIX), (2, PREFIX), lease=True)
        assert hits(reply) == [0, 0]
        assert states(reply)[0] == [PENDING] * 6
        host.do(ReleaseLeases(one.scheduler, one.epoch, (lease,)))
        reply = one.lookup_groups((0, PREFIX), (2, PREFIX), lease=True)
        assert hits(reply) == [6, 6]

    @pytest.mark.parametrize("draining", [False, True])
    def test_touch_keeps_what_several_groups_use(self, host: Host, draining: bool) -> None:
        one = both(host)
        one.stored(1, 2)
        one.stored(1, 2, group=1)
        for first in range(100, 152, 4):
            one.stored(*range(first, first + 4))
        queries = (BlockQuery(0, keys(1, 2)), BlockQuery(1, keys(2), 2))
        if draining:
            host.do(Drain())
        host.do(TouchBlocks(one.scheduler, one.epoch, queries))
        host.do(Resume())
        one.stored(*range(200, 220))
        assert (one.hits(1, 2), one.hits(1, 2, group=1)) == ([1, 2], [2])


def on_disk(host: DiskHost, **options: Any) -> Instance:
    """Both groups have six blocks, on the disk only."""
    one = both(host, **options)
    for group in (0, 1):
        one.stored(*PREFIX, group=group)
        host.disk.finish_all()
    host.evict_all(one)
    assert one.hits(*PREFIX) == one.hits(*PREFIX, group=1) == []
    return one


class TestDisks:
    def test_only_what_a_window_needs_is_brought_up(self, disk_host: DiskHost) -> None:
        one = on_disk(disk_host)
        reply = one.lookup_groups((0, PREFIX), (2, PREFIX), lease=True)
        assert hits(reply) == [0, 0]
        assert states(reply) == [[PENDING] * 6, [MISS] * 4 + [PENDING] * 2]
        disk_host.disk.finish_all()
        assert one.hits(*PREFIX, group=1) == [5, 6]
        reply = one.lookup_groups((0, PREFIX), (2, PREFIX), lease=True)
        assert hits(reply) == [6, 6]
        assert len(leases(reply)) == 2

    def test_nothing_is_brought_up_for_a_prefix_that_another_group_ends(self, disk_host: DiskHost) -> None:
        one = on_disk(disk_host)
        reply = one.lookup_groups((0, PREFIX), (2, [1, 90, 3, 91, 5, 92]))
        assert states(reply) == [[PENDING], [PENDING]]
        disk_host.disk.finish_all()
        assert (one.hits(*PREFIX), one.hits(*PREFIX, group=1)) == ([1], [1])

    @pytest.mark.parametrize("window", [0, 2])
    def test_what_comes_is_waited_for_where_the_host_has_no_room_for_all(
        self, disk_host: DiskHost, window: int
    ) -> None:
        one = on_disk(disk_host)
        one.stored(*PREFIX, group=1)
        assert one.lookup(*PREFIX, group=1, lease=True).hits == 6
        one.store(*range(100, 148))  # WRITING: besides what is leased, two slots are left
        reply = one.lookup_groups((0, PREFIX), (window, PREFIX))
        assert states(reply) == [[PENDING] * 2, [HIT] * 2]
        disk_host.disk.finish_all()
        assert hits(one.lookup_groups((0, PREFIX), (window, PREFIX))) == [2, 2]

    def test_a_window_of_what_comes_is_not_waited_for_if_nothing_brings_it_up(
        self, disk_host: DiskHost
    ) -> None:
        one = on_disk(disk_host)
        one.stored(5, 6, group=1)
        one.store(*range(100, 152))  # WRITING: with the last window's blocks, two slots are left
        assert states(one.lookup_groups((0, PREFIX), (2, PREFIX))) == [[], []]
        disk_host.disk.finish_all()
        assert (one.hits(*PREFIX), one.hits(*PREFIX, group=1)) == ([1, 2], [5, 6])

    def test_prefetch_brings_up_and_leases_nothing(self, disk_host: DiskHost) -> None:
        one = on_disk(disk_host)
        queries = (BlockQuery(0, keys(*PREFIX)), BlockQuery(1, keys(*PREFIX), 2))
        reply = disk_host.do(PrefetchBlocks(one.scheduler, one.epoch, queries))
        assert isinstance(reply, LookupReply)
        assert hits(reply) == [0, 0]
        disk_host.disk.finish_all()
        assert hits(one.lookup_groups((0, PREFIX), (2, PREFIX))) == [6, 6]
        assert disk_host.machine.status().leases == 0

    def test_no_longer_prefix_is_waited_for_than_can_be_leased(
        self, make_disk_host: Callable[..., DiskHost]
    ) -> None:
        host = make_disk_host(limits=CoreLimits(leased_fraction_max=7 / 56))
        one = on_disk(host)
        reply = one.lookup_groups((0, PREFIX), (2, PREFIX))
        assert [len(told) for told in states(reply)] == [4, 4]
        host.disk.finish_all()
        assert len(leases(one.lookup_groups((0, PREFIX), (2, PREFIX), lease=True))) == 2

    def test_what_is_being_stored_is_waited_for_although_no_more_can_be_leased(
        self, make_host: Callable[..., Host]
    ) -> None:
        one = both(make_host(CoreLimits(leased_fraction_max=4.5 / 56)))
        one.stored(1, 2)
        one.stored(1, 2, group=1)
        one.store(3, group=0)
        one.store(3, group=1)
        assert states(one.lookup_groups((0, PREFIX), (0, PREFIX))) == [[HIT, HIT, PENDING]] * 2

    def test_a_promotion_that_takes_longer_than_computing_is_not_begun(self, disk_host: DiskHost) -> None:
        one = on_disk(disk_host)
        disk_host.machine.core.below.all[0].rates[READ].measured(disk_host.now_s, 4096, 1.0)
        disk_host.do(RenewSession(one.scheduler, 20.0))  # 96 tokens take 4.8 s, 8 blocks to read 8 s
        assert states(one.lookup_groups((0, PREFIX), (2, PREFIX))) == [[], []]
        assert disk_host.disk.open_jobs(READ) == []
        disk_host.do(RenewSession(one.scheduler, 10.0))
        assert states(one.lookup_groups((0, PREFIX), (2, PREFIX)))[0] == [PENDING] * 6
