"""What is found, in which order it stays, and how leases hold it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Epoch, LeaseId, SessionId
from kvtierd.core.stimuli import (
    CoreLimits,
    EndSession,
    LookupMode,
    ReleaseLeases,
    RenewSession,
    Tick,
    TouchBlocks,
)

from tests.unit.core.host import SCHEDULER, Host, Instance, keys

MISS, PENDING, HIT = 0, 1, 2


class TestLookup:
    def test_prefix_mode_tells_the_leading_run_and_what_ended_it(self, host: Host) -> None:
        one = host.instance()
        one.stored(1, 2, 4)
        reply = one.lookup(1, 2, 3, 4)
        assert (reply.hits, reply.states.tolist()) == (2, [HIT, HIT, MISS])
        one.store(3)
        assert one.lookup(1, 2, 3, 4).states.tolist() == [HIT, HIT, PENDING]

    def test_a_prefix_that_hits_wholly_has_no_end(self, host: Host) -> None:
        one = host.instance()
        one.stored(1, 2)
        assert one.lookup(1, 2).states.tolist() == [HIT, HIT]
        assert one.lookup().states.tolist() == []

    def test_exact_mode_tells_every_block_by_itself(self, host: Host) -> None:
        one = host.instance()
        one.stored(1, 4)
        one.store(3)
        reply = one.lookup(1, 2, 3, 4, mode=LookupMode.EXACT)
        assert (reply.hits, reply.states.tolist()) == (2, [HIT, MISS, PENDING, HIT])

    def test_groups_do_not_see_each_others_blocks(self, host: Host) -> None:
        two = host.instance(sizes=((4096,), (4096,)))
        two.stored(1)
        assert two.lookup(1, group=1).hits == 0
        assert host.reason(two.lookup_of(np.zeros((1, 32), np.uint8), group=2)) is Reason.UNKNOWN_GROUP

    def test_instances_of_one_namespace_share_blocks_and_others_do_not(self, host: Host) -> None:
        host.instance("one").stored(1)
        assert host.instance("twin", together=False).lookup(1).hits == 1
        assert host.instance("stranger", fields=b"other").lookup(1).hits == 0

    @pytest.mark.parametrize("mode", LookupMode)
    def test_an_instance_that_is_not_ready_misses(self, host: Host, mode: LookupMode) -> None:
        host.instance("one").stored(1)
        twin = host.instance("twin", worker=None)
        reply = twin.lookup(1, mode=mode, lease=True)
        assert (reply.hits, reply.states.tolist(), reply.lease) == (0, [MISS], None)

    def test_only_the_scheduler_of_the_current_epoch_asks(self, host: Host) -> None:
        one = host.instance(together=False)
        hashes = np.zeros((1, 32), np.uint8)
        assert host.reason(one.lookup_of(hashes, session=one.sessions[0])) is Reason.ROLE
        assert host.reason(one.lookup_of(hashes, session=SessionId(999))) is Reason.NOT_ATTACHED
        assert host.reason(one.lookup_of(hashes, epoch=Epoch(999))) is Reason.WRONG_EPOCH

    def test_too_many_or_malformed_hashes_are_refused(self, make_host: Callable[..., Host]) -> None:
        host = make_host(CoreLimits(lookup_hashes_max=2))
        one = host.instance()
        assert host.reason(one.lookup_of(np.zeros((3, 32), np.uint8))) is Reason.TOO_MANY_BLOCKS
        assert host.reason(one.lookup_of(np.zeros((2, 16), np.uint8))) is Reason.MALFORMED
        assert host.reason(one.lookup_of(np.zeros((4, 32), np.uint8)[::2])) is Reason.MALFORMED

    def test_lookups_are_counted_by_batch(self, host: Host) -> None:
        one = host.instance()
        one.stored(1, 2)
        one.lookup(1, 2, 3)
        counters = host.counters
        assert (counters.lookups, counters.lookup_hashes, counters.lookup_hits) == (1, 3, 2)


class TestRecency:
    """56 blocks fit; each test fills the pool and stores some more."""

    def full(self, host: Host) -> Instance:
        one = host.instance()
        for first in range(0, 56, 8):
            one.stored(*range(first, first + 8))
        return one

    def test_the_oldest_batch_goes_first_and_its_tail_before_its_head(self, host: Host) -> None:
        one = self.full(host)
        one.stored(100, 101, 102)
        assert one.hits(*range(8)) == [0, 1, 2, 3, 4]

    def test_a_lookup_keeps_what_it_has_found(self, host: Host) -> None:
        one = self.full(host)
        assert one.lookup(0, 1, 2).hits == 3
        one.stored(*range(100, 113))
        assert one.hits(*range(16)) == [0, 1, 2], "the rest of the first batch, then the second"
        one.stored(*range(200, 240))
        assert one.hits(0, 1, 2) == [0, 1, 2]
        one.stored(300, 301)
        assert one.hits(0, 1, 2) == [0], "again the tail before the head"

    def test_a_touch_keeps_a_prefix_of_several_stores_in_order_and_is_no_lookup(self, host: Host) -> None:
        one = self.full(host)
        before = host.counters.lookups
        touch = TouchBlocks(one.scheduler, one.epoch, 0, keys(*range(16), 999, 17), LookupMode.PREFIX)
        assert host.do(touch) is None
        assert host.counters.lookups == before
        one.stored(*range(100, 140))
        assert one.hits(*range(16)) == list(range(16)), "everything else was older"
        one.stored(*range(200, 206))
        assert one.hits(*range(16)) == list(range(10)), "the tail of the second store goes first"

    def test_a_touch_is_checked_like_a_lookup(self, host: Host) -> None:
        one = host.instance(together=False)
        hashes = keys(1)
        for session, epoch, reason in (
            (one.sessions[0], one.epoch, Reason.ROLE),
            (one.scheduler, Epoch(999), Reason.WRONG_EPOCH),
        ):
            touch = TouchBlocks(session, epoch, 0, hashes, LookupMode.PREFIX)
            assert host.reason(touch) is reason

    def test_a_leased_block_is_recent_when_it_is_released(self, host: Host) -> None:
        one = self.full(host)
        lease = one.lease(0, 1, 2)
        one.stored(*range(100, 113))
        assert one.hits(0, 1, 2, *range(8, 16)) == [0, 1, 2], "held"
        host.do(ReleaseLeases(one.scheduler, one.epoch, (lease,)))
        one.stored(*range(200, 240))
        assert one.hits(0, 1, 2) == [0, 1, 2]


class TestLeases:
    @pytest.fixture
    def one(self, host: Host) -> Instance:
        one = host.instance()
        one.stored(1, 2, 3)
        return one

    def test_a_lookup_without_hits_grants_none(self, host: Host, one: Instance) -> None:
        reply = one.lookup(9, lease=True)
        assert (reply.lease, reply.lease_refused) == (None, None)
        assert host.machine.status().leases == 0

    def test_released_leases_are_gone_and_releasing_twice_is_safe(self, host: Host, one: Instance) -> None:
        lease = one.lease(1, 2)
        assert host.machine.status().leased_blocks == 2
        for _ in range(2):
            host.do(ReleaseLeases(one.scheduler, one.epoch, (lease, LeaseId(999))))
        assert host.machine.status().leased_blocks == 0
        assert host.reason(one.load_of(lease, [0])) is Reason.UNKNOWN_LEASE

    def test_another_instance_neither_loads_nor_releases_them(self, host: Host, one: Instance) -> None:
        twin = host.instance("twin")
        lease = one.lease(1)
        assert host.reason(twin.load_of(lease, [0])) is Reason.FOREIGN
        host.do(ReleaseLeases(twin.scheduler, twin.epoch, (lease,)))
        assert host.machine.status().leases == 1

    def test_they_expire_after_the_schedulers_silence(self, host: Host, one: Instance) -> None:
        lease = one.lease(1)
        host.now_s += 9
        host.do(RenewSession(one.scheduler))
        host.now_s += 9
        host.do(Tick())
        assert host.machine.status().leases == 1
        host.now_s += 2
        host.do(Tick())
        assert host.machine.status().leases == 0
        assert host.counters.expired_leases == 1
        assert host.reason(one.load_of(lease, [0])) is Reason.LEASE_EXPIRED

    def test_a_ranks_heartbeat_does_not_keep_them(self, host: Host) -> None:
        one = host.instance(together=False)
        one.stored(1)
        one.lease(1)
        host.now_s += 11
        host.do(RenewSession(one.sessions[0]))
        host.do(Tick())
        assert host.machine.status().leases == 0

    def test_no_renewal_keeps_them_for_ever(self, make_host: Callable[..., Host]) -> None:
        host = make_host(CoreLimits(lease_lifetime_s=30.0))
        one = host.instance(together=False)
        one.stored(1)
        one.lease(1)
        for _ in range(4):
            host.now_s += 7
            host.do(RenewSession(one.sessions[SCHEDULER]))
            host.do(Tick())
        assert host.machine.status().leases == 1
        one.lease(1)
        host.now_s += 3
        host.do(Tick())
        assert host.machine.status().leases == 1, "only the older one is too old"

    def test_their_number_is_limited_and_hits_are_told_anyway(self, make_host: Callable[..., Host]) -> None:
        host = make_host(CoreLimits(leases_max=1))
        one = host.instance()
        one.stored(1)
        one.lease(1)
        reply = one.lookup(1, lease=True)
        assert (reply.hits, reply.lease) == (1, None)
        assert isinstance(reply.lease_refused, Refusal)
        assert reply.lease_refused.reason is Reason.LEASE_LIMIT

    def test_their_bytes_are_limited(self, host: Host) -> None:
        one = host.instance()
        one.stored(*range(16))
        one.lease(*range(16))
        reply = one.lookup(0, lease=True)
        assert reply.lease_refused is not None, "a quarter of 256 KiB is 16 blocks"
        assert reply.lease_refused.reason is Reason.LEASE_LIMIT
        assert host.instance("twin").lookup(0, lease=True).lease is not None, "each instance has its own"

    def test_they_end_with_their_epoch(self, host: Host, one: Instance) -> None:
        one.lease(1, 2, 3)
        host.do(EndSession(one.scheduler, "died"))
        assert host.machine.status().leases == 0
        again = host.instance("twin")
        assert again.lookup(1, 2, 3).hits == 3

    def test_exact_leases_hold_the_hits_only(self, host: Host, one: Instance) -> None:
        reply = one.lookup(1, 9, 3, mode=LookupMode.EXACT, lease=True)
        assert reply.lease is not None
        assert host.machine.status().leased_blocks == 2
        load = one.load(reply.lease, [5, 6])
        assert len(load.posts[0].slots) == 2
