"""Tenants share a pool: nobody evicts or leases what is guaranteed to another, and nothing lies idle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_kernels import BlockTable as NativeTable
from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.blocks.tenants import TenantShare, TierShares
from kvtierd.core.errors import Reason
from kvtierd.core.ids import TenantTag
from kvtierd.core.stimuli import CoreLimits, EndSession, Owner, Recovered, RecoveredExtent

from tests.unit.core.host import GEOMETRY, Host, Instance, keys, released

ACCEPTED, THROTTLED = 0, 3
FULL = 56
"""4 KiB slots in the pool."""
HALF = FULL // 2
A, B, C = (Owner(tenant, uid) for uid, tenant in enumerate("abc"))


@pytest.fixture
def host() -> Host:
    return Host(NativeTable)


def engine(host: Host, owner: Owner, name: str = "engine", **options: Any) -> Instance:
    return host.instance(name, owner=owner, **options)


def flood(one: Instance, count: int = 4 * FULL, first: int = 1_000) -> None:
    """Stores block after block, as fast as it can."""
    for number in range(first, first + count, 8):
        one.store(*range(number, number + 8)).finish()
        one.host.now_s += 1


def gone(one: Instance) -> None:
    one.host.do(EndSession(one.scheduler, "stopped"))
    one.host.do(released(one))


def used(host: Host, owner: Owner) -> int:
    """Blocks of a tenant."""
    tag = tag_of(owner.tenant)
    return sum(each.blocks for each in host.machine.core.blocks.domains.by_id.values() if each.tenant == tag)


class TestRoom:
    def test_a_tenant_has_everything_while_nobody_else_wants_it(self, host: Host) -> None:
        one, _idle = engine(host, A), engine(host, B)
        one.stored(*range(FULL))
        assert used(host, A) == FULL

    def test_who_comes_later_gets_its_part_however_busy_the_other_is(self, host: Host) -> None:
        one, late = engine(host, A), engine(host, B)
        flood(one)
        for first in range(0, HALF - 4, 4):
            late.stored(*range(first, first + 4))
            flood(one, 16, first=10_000 + 100 * first)
        assert late.hits(*range(HALF - 4)) == list(range(HALF - 4))
        assert used(host, A) == FULL - (HALF - 4), "and the other has all the rest"

    def test_nobody_is_evicted_below_its_part(self, host: Host) -> None:
        victim, attacker = engine(host, A), engine(host, B)
        victim.stored(*range(FULL))
        flood(attacker)
        assert used(host, A) == HALF
        more = [engine(host, B, f"more {number}") for number in range(8)]
        for each in more:
            flood(each, FULL)
        assert used(host, A) == HALF, "however many engines a tenant has"

    def test_within_a_tenant_the_oldest_go_first_as_ever(self, host: Host) -> None:
        one, other = engine(host, A), engine(host, A, "other", fields=b"other model")
        one.stored(*range(FULL))
        flood(other)
        assert used(host, A) == FULL
        assert one.hits(*range(FULL)) == []

    def test_a_tenant_without_engines_is_promised_nothing(self, host: Host) -> None:
        left = engine(host, A)
        left.stored(*range(FULL))
        gone(left)
        flood(engine(host, B))
        assert used(host, A) == 0

    def test_other_block_sizes_are_no_way_around_it(self, host: Host) -> None:
        victim = engine(host, A)
        victim.stored(*range(HALF))
        attacker = engine(host, B, sizes=((8192,),))
        flood(attacker)
        assert victim.hits(*range(HALF)) == list(range(HALF))
        assert used(host, B) == 14, "two extents of the four"

    def test_a_tenant_that_is_owed_room_gets_extents_of_another_size(self, host: Host) -> None:
        attacker, late = engine(host, A, sizes=((8192,),)), engine(host, B)
        flood(attacker)
        for first in range(0, HALF - 4, 4):
            late.stored(*range(first, first + 4))
        assert late.hits(*range(HALF - 4)) == list(range(HALF - 4))


class TestConfigured:
    def test_a_guarantee_holds_without_engines(self) -> None:
        host = Host(NativeTable, shares={"a": TenantShare(0.5)})
        left = engine(host, A)
        left.stored(*range(FULL))
        gone(left)
        flood(engine(host, B))
        assert used(host, A) == HALF
        back = engine(host, A)
        assert len(back.hits(*range(FULL))) == HALF

    def test_the_others_share_what_is_left(self) -> None:
        host = Host(NativeTable, shares={"a": TenantShare(0.5)})
        one, other = engine(host, B), engine(host, C)
        one.stored(*range(FULL))
        flood(other)
        assert used(host, B) == FULL // 4

    def test_a_limit_is_kept_even_while_there_is_room(self) -> None:
        host = Host(NativeTable, shares={"a": TenantShare(0.0, 0.25)})
        one = engine(host, A)
        assert one.store(*range(20)).finish().succeeded.tolist() == [1] * 13 + [0] * 7
        flood(one)
        assert used(host, A) == 13
        assert one.hits(*range(13)) == [], "it makes room for its own by its own"
        assert host.machine.status().extents_free == 3


def test_blocks_of_an_earlier_daemon_count_as_their_tenants() -> None:
    earlier = Host(NativeTable)
    engine(earlier, A).stored(1)
    [(digest, _)] = earlier.machine.core.blocks.spaces.ids
    host = Host(NativeTable)
    host.do(
        Recovered(
            (RecoveredExtent(0, 4096),),
            ((digest, 0, 1),),
            np.zeros(1, np.uint32),
            keys(1),
            GEOMETRY.slots_of(0, 4096)[:1],
            1,
            np.empty(0, np.uint32),
        )
    )
    assert used(host, A) == 1
    assert engine(host, A).hits(1) == [1]
    assert engine(host, B).hits(1) == []


class TestLeases:
    def leases(self, host: Host, owner: Owner, instances: int) -> int:
        """Blocks that so many engines of a tenant lease, one at a time and as much as they can."""
        first = engine(host, owner)
        first.stored(*range(HALF))
        engines = [first, *(engine(host, owner, f"more {number}") for number in range(instances - 1))]
        leased = 0
        for number in range(HALF):
            reply = engines[number % instances].lookup(number, lease=True)
            leased += reply.lease is not None
        return leased

    def test_the_leases_of_many_engines_leave_room_for_another_tenant(self, host: Host) -> None:
        victim = engine(host, B)
        victim.stored(*range(100, 100 + HALF))
        assert self.leases(host, A, 6) <= HALF
        assert victim.lookup(*range(100, 100 + 8), lease=True).lease is not None

    def test_what_is_reserved_cannot_be_leased_by_others(self) -> None:
        host = Host(NativeTable, shares={"b": TenantShare(0.75)})
        assert self.leases(host, A, 1) < FULL // 4 + 1


class TestUnderWay:
    def test_the_engines_of_a_tenant_share_what_may_be_under_way(self) -> None:
        host = Host(NativeTable, CoreLimits(tenant_transfers_max=3, tenant_blocks_max=8))
        one, more, other = engine(host, A), engine(host, A, "more"), engine(host, B)
        running = [one.store(1), one.store(2), more.store(3)]
        refusal = host.refused(more.store_of(4))
        assert (refusal.reason, refusal.field) == (Reason.QUEUE_FULL, "block_ids")
        assert "tenant 'a'" in refusal.message
        other.stored(4)
        running.pop().finish()
        assert host.refused(more.store_of(*range(10, 17))).reason is Reason.QUEUE_FULL, "2 + 7 blocks"
        more.stored(*range(10, 16))
        for each in running:
            each.finish()
        assert not host.machine.core.under_way


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(1, 12), st.booleans()), max_size=40
    )
)
def test_no_store_takes_what_is_guaranteed_to_others(steps: list[tuple[int, int, int, bool]]) -> None:
    host = Host(NativeTable, shares={"c": TenantShare(0.3, 0.6)})
    one = [engine(host, A), engine(host, B), engine(host, C), engine(host, B, "large", sizes=((8192,),))]
    core = host.machine.core
    least = {owner.tenant: tag_of(owner.tenant) for owner in (A, B, C)}

    def taken() -> dict[TenantTag, int]:
        now = TierShares(core.tenants, core.blocks.domains, core.blocks.slots).now()
        return {tag: now.used[tag] for tag in least.values()}

    for number, (who, chain, count, wait) in enumerate(steps):
        before = taken()
        keys = [1_000 * chain + 10 * number + index for index in range(count)]
        one[who].store(*keys).finish()
        after = taken()
        for tag in least.values():
            if tag != tag_of(one[who].owner.tenant) and after[tag] < before[tag]:
                assert after[tag] >= int(core.tenants.least(tag) * GEOMETRY.capacity_bytes)
            most = core.tenants.most(tag)
            assert after[tag] <= most * GEOMETRY.capacity_bytes or most == 1
        host.now_s += 30 * wait
