"""What is found, in which order it stays, and how leases hold it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Epoch, LeaseId, SessionId
from kvtierd.core.stimuli import (
    BlockQuery,
    CoreLimits,
    EndSession,
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
        reply = one.lookup(1, 2, 3, 4, exact=True)
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

    @pytest.mark.parametrize("exact", [False, True])
    def test_an_instance_that_is_not_ready_misses(self, host: Host, exact: bool) -> None:
        host.instance("one").stored(1)
        twin = host.instance("twin", worker=None)
        reply = twin.lookup(1, exact=exact, lease=True)
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
        touch = TouchBlocks(one.scheduler, one.epoch, (BlockQuery(0, keys(*range(16), 999, 17)),))
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
            touch = TouchBlocks(session, epoch, (BlockQuery(0, hashes),))
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
        ttl_s = CoreLimits().lease_ttl_s
        host.now_s += ttl_s - 1
        host.do(RenewSession(one.scheduler))
        host.now_s += ttl_s - 1
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
        host.now_s += CoreLimits().lease_ttl_s + 1
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

    def test_their_number_is_limited_and_what_they_do_not_hold_is_no_hit(
        self, make_host: Callable[..., Host]
    ) -> None:
        host = make_host(CoreLimits(leases_max=1))
        one = host.instance()
        one.stored(1)
        one.lease(1)
        reply = one.lookup(1, lease=True)
        assert (reply.hits, reply.lease, reply.readable) == (0, None, 1)
        assert reply.states.tolist() == [PENDING], "others may be released in a moment"
        assert isinstance(reply.lease_refused, Refusal)
        assert reply.lease_refused.reason is Reason.LEASE_LIMIT

    def test_they_end_with_their_epoch(self, host: Host, one: Instance) -> None:
        one.lease(1, 2, 3)
        host.do(EndSession(one.scheduler, "died"))
        assert host.machine.status().leases == 0
        again = host.instance("twin")
        assert again.lookup(1, 2, 3).hits == 3

    def test_exact_leases_hold_the_hits_only(self, host: Host, one: Instance) -> None:
        reply = one.lookup(1, 9, 3, exact=True, lease=True)
        assert reply.lease is not None
        assert host.machine.status().leased_blocks == 2
        load = one.load(reply.lease, [5, 6])
        assert len(load.posts[0].slots) == 2


class TestLeaseRoom:
    """Of 56 blocks leases and loads hold 53 at most (95 %), of one instance alone 49 (15/16 of that)."""

    def full(self, host: Host, *names: str) -> list[Instance]:
        """Instances of one namespace, and blocks 0 to 55 in a row."""
        instances = [host.instance(name) for name in names]
        for first in range(0, 56, 8):
            instances[0].stored(*range(first, first + 8))
        one = instances[0]
        host.do(TouchBlocks(one.scheduler, one.epoch, (BlockQuery(0, keys(*range(56))),)))
        return instances

    def test_the_longest_prefix_that_fits_is_leased(self, host: Host) -> None:
        [one] = self.full(host, "one")
        reply = one.lookup(*range(56), lease=True)
        assert (reply.hits, reply.readable) == (49, 56)
        assert reply.states.tolist() == [HIT] * 49 + [MISS], "it will never be longer at once"
        assert reply.lease_refused is not None
        assert reply.lease_refused.reason is Reason.LEASE_LIMIT
        assert "limits.leased_fraction_max" in str(reply.lease_refused)
        assert reply.lease is not None
        one.load(reply.lease, list(range(49)))

    def test_a_prefix_of_the_whole_pool_is_loaded_in_parts(self, host: Host) -> None:
        [one] = self.full(host, "one")
        done = 0
        loads = 0
        while done < 56:
            reply = one.lookup(*range(done, 56), lease=True)
            assert reply.lease is not None
            load = one.load(reply.lease, list(range(done, done + reply.hits)))
            load.finish()
            done, loads = done + reply.hits, loads + 1
        assert loads == 2
        assert host.counters.loaded_blocks == 56

    def test_blocks_beyond_the_lease_stay_as_long_as_those_it_holds(self, host: Host) -> None:
        [one] = self.full(host, "one")
        lease = one.lookup(*range(56), lease=True).lease
        assert lease is not None
        one.stored(100, 101)
        assert one.hits(*range(56)) == list(range(54)), "the tail goes first"

    def test_what_several_leases_hold_is_counted_once(self, host: Host) -> None:
        one, twin = self.full(host, "one", "twin")
        for _ in range(20):
            assert one.lookup(*range(40), lease=True).hits == 40
            assert twin.lookup(*range(40), lease=True).hits == 40

    def test_a_running_load_counts_until_it_has_ended(self, host: Host) -> None:
        [one] = self.full(host, "one")
        load = one.load(one.lease(*range(49)), list(range(49)))
        reply = one.lookup(*range(49, 56), lease=True)
        assert reply.hits == 0
        assert reply.states.tolist() == [PENDING], "asked again in a moment there is room"
        load.finish()
        assert one.lookup(*range(49, 56), lease=True).hits == 7

    def test_stores_find_room_beside_all_leases_and_loads(self, host: Host) -> None:
        one, two, three = self.full(host, "one", "two", "three")
        for start, instance in ((0, one), (16, two), (32, three), (0, two), (16, three), (32, one)):
            instance.lookup(*range(start, 56), lease=True)
        assert one.store(100, 101, 102).results == [0, 0, 0]

    def test_several_share_what_one_alone_may_hold(self, host: Host) -> None:
        """Each asks for more again and again, one block at a time, until nobody gets any more."""
        instances = self.full(host, "one", "two", "three")
        wanted = iter(range(56))
        got = {instance.name: 0 for instance in instances}
        left = list(instances)
        block = next(wanted)
        while left:
            for instance in list(left):
                if instance.lookup(block, lease=True).hits:
                    got[instance.name] += 1
                    block = next(wanted)
                else:
                    left.remove(instance)
        assert sum(got.values()) == 51
        assert set(got.values()) == {17}

    def test_a_newcomer_finds_room_beside_one_that_holds_all_it_may(self, host: Host) -> None:
        one, two = self.full(host, "one", "two")
        leases = [one.lease(*range(start, start + 7)) for start in range(0, 49, 7)]
        assert one.lookup(50, lease=True).hits == 0
        assert two.lookup(*range(49, 56), lease=True).hits == 3
        host.do(ReleaseLeases(one.scheduler, one.epoch, tuple(leases[:4])))
        assert two.lookup(*range(28), lease=True).hits == 27, "what has come free is shared anew"

    def test_one_block_can_always_be_loaded(self, make_host: Callable[..., Host]) -> None:
        host = make_host(CoreLimits(leased_fraction_max=0.001))
        one = host.instance()
        one.stored(1, 2)
        reply = one.lookup(1, 2, lease=True)
        assert (reply.hits, reply.readable) == (1, 2)

    def test_exact_leases_hold_the_first_that_fit(self, host: Host) -> None:
        [one] = self.full(host, "one")
        reply = one.lookup(999, *range(56), lease=True, exact=True)
        assert reply.hits == 49
        assert reply.states.tolist() == [MISS] + [HIT] * 49 + [MISS] * 7

    def test_misses_for_want_of_room_are_counted_as_such(self, host: Host) -> None:
        [one] = self.full(host, "one")
        before = host.counters.lookup_hits
        one.lookup(*range(56), 999, 998, lease=True)
        counters = host.counters
        assert counters.lookup_hits - before == 49
        assert (counters.missed_lease_limit, counters.missed_absent, counters.missed_beyond) == (7, 1, 1)
        assert counters.refused_leases == 1

    def test_an_epoch_that_ends_lets_go(self, host: Host) -> None:
        one, two = self.full(host, "one", "two")
        one.lease(*range(49))
        host.do(EndSession(one.scheduler, "died"))
        assert two.lookup(*range(56), lease=True).hits == 49
