"""A pool gets its memory while engines use it: what there is can be used, and nothing else."""

from __future__ import annotations

import pytest
from kvtier_kernels import BlockTable as NativeTable
from kvtierd.core.actions import AssignExtent, InstanceView, Notify
from kvtierd.core.stimuli import Owner, PoolPopulated

from tests.unit.core.host import GEOMETRY, Host
from tests.unit.core.recovering import recovered

PER_EXTENT = 14
"""4 KiB slots in an extent."""
ACCEPTED, THROTTLED = 0, 3


@pytest.fixture
def host() -> Host:
    return Host(NativeTable, populated=1)


def test_stores_use_what_has_memory_and_evict_rather_than_wait(host: Host) -> None:
    one = host.instance()
    one.stored(*range(PER_EXTENT))
    one.stored(100)
    assert host.counters.evicted_blocks == 1
    assert [each.extent for each in host.of(AssignExtent)] == []


def test_extents_are_used_from_the_moment_in_which_they_have_memory(host: Host) -> None:
    one = host.instance()
    one.stored(*range(PER_EXTENT))
    host.do(PoolPopulated(3))
    status = host.machine.status()
    assert (status.extents, status.extents_free) == (3, 2)
    one.store(*range(100, 100 + PER_EXTENT + 1)).finish()
    assert host.counters.evicted_blocks == 0
    assert one.hits(*range(PER_EXTENT)) == list(range(PER_EXTENT))
    host.do(PoolPopulated(GEOMETRY.extents, complete=True))
    assert host.machine.status().extents_free == 1


def test_what_is_recovered_lies_in_what_has_memory(host: Host) -> None:
    host.do(recovered([], [], extents=[(0, 4096)]))
    status = host.machine.status()
    assert (status.extents, status.extents_free) == (1, 0)


def test_leases_may_hold_a_fraction_of_what_has_memory(host: Host) -> None:
    budget = host.machine.core.lease_budget
    before = budget.leasable_bytes
    host.do(PoolPopulated(GEOMETRY.extents, complete=True))
    assert budget.leasable_bytes == pytest.approx(4 * before, abs=4)


def test_tenants_share_what_has_memory(host: Host) -> None:
    one = host.instance(owner=Owner("a", 0))
    late = host.instance("late", owner=Owner("b", 1))
    one.stored(*range(PER_EXTENT))
    host.now_s += 100
    assert late.store(*range(100, 100 + PER_EXTENT // 2 - 1)).results == [ACCEPTED] * (PER_EXTENT // 2 - 1)


def views(host: Host) -> list[InstanceView]:
    return [each.event for each in host.of(Notify) if isinstance(each.event, InstanceView)]


def test_clients_hear_what_will_fit_and_then_what_does(host: Host) -> None:
    one = host.instance()
    assert one.scheduler is not None
    instance = host.machine.core.sessions[one.scheduler].instance
    budget = host.machine.core.lease_budget
    whole = budget.prefix_tokens(instance.plans)
    host.do(PoolPopulated(2))
    assert (views(host), budget.prefix_tokens(instance.plans)) == ([], whole)
    host.do(PoolPopulated(2, complete=True))
    assert [view.prefix_tokens_max for view in views(host)] == [whole // 2] * len(instance.sessions)
    assert all(view.ready for view in views(host))


def test_a_pool_that_is_complete_has_nothing_to_tell(host: Host) -> None:
    host.instance()
    host.do(PoolPopulated(GEOMETRY.extents, complete=True))
    assert views(host) == []
