"""What the shadow of the pool is told, and when it begins anew."""

from __future__ import annotations

import pytest
from kvtier_kernels import BlockTable as NativeTable
from kvtierd.core.state import size_shadow
from kvtierd.core.status import ShadowStatus
from kvtierd.core.stimuli import (
    CoreDisks,
    PoolPolicy,
    PoolPopulated,
    Reconfigure,
    RenewSession,
    SubmittedChain,
    Tick,
)

from tests.unit.core.host import Host, Instance

SLOTS_PER_EXTENT = 14


@pytest.fixture(autouse=True)
def _says_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_shadow, "SAMPLED_MIN", 1)


def ready(populated: int | None = None) -> tuple[Host, Instance]:
    host = Host(NativeTable, populated=populated)
    return host, host.instance()


def shadow(host: Host) -> ShadowStatus:
    return host.machine.status().shadow


def test_nothing_is_said_before_enough_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_shadow, "SAMPLED_MIN", 5)
    host, one = ready()
    one.store(1, 2).finish()
    one.lookup(1, 2, 3, 4)
    assert shadow(host) == ShadowStatus(False, 0.0, 0.0, 0.0, 0.0, 4, 1)
    one.lookup(5)
    assert shadow(host).known


def test_it_is_told_of_prefixes_that_are_asked_for_the_first_time() -> None:
    host, one = ready()
    one.store(1, 2).finish()
    one.lookup(1, 2, 3, 4)
    assert shadow(host) == ShadowStatus(True, 0.5, 0.5, 0.5, 0.5, 4, 1)
    one.lookup(1, 2, again=True)
    one.lookup(1, 2, exact=True)
    assert shadow(host).asked == 4


def test_of_groups_with_windows_it_is_told_nothing() -> None:
    host = Host(NativeTable)
    one = host.instance(sizes=((4096,), (4096,)))
    one.lookup_groups((0, [1, 2]), (1, [1, 2]))
    blocks = host.machine.core.shadow.native
    one.store(1, 2, group=1).finish()
    assert blocks.stats()["blocks"] == 0
    one.store(1, 2, group=0).finish()
    assert blocks.stats()["blocks"] == 2
    assert shadow(host).asked == 2


def test_lookups_that_clients_did_not_send_count_as_misses() -> None:
    """Of a pool of twice the size they count as hits where it has what is then stored."""
    host, one = ready()
    half = range(4 * SLOTS_PER_EXTENT)
    one.store(*half).finish()
    one.store(*range(100, 100 + len(half))).finish()
    assert one.hits(*half) == []
    host.do(RenewSession(one.scheduler, index_lookups=2, index_hashes=20))
    chains = (SubmittedChain(10), SubmittedChain(10))
    one.store(*range(10), *range(200, 210), chains=chains).finish()
    assert shadow(host) == ShadowStatus(True, 0.0, 0.0, 0.5, 0.0, 20, 1)


def test_an_hour_ago_weighs_half() -> None:
    host, one = ready()
    host.do(Tick())
    one.lookup(1, 2)
    host.now_s += size_shadow.HALF_LIFE_S
    host.do(Tick())
    assert shadow(host).asked == 1
    host.do(Tick())
    assert shadow(host).asked == 1


def test_it_begins_anew_with_another_policy_once_the_pool_was_turned_over() -> None:
    host, one = ready()
    one.store(1, 2).finish()
    one.lookup(1, 2)
    host.do(Reconfigure(0, CoreDisks(), PoolPolicy.LRU, CoreDisks()))
    assert shadow(host).asked == 2, "nothing has changed"
    host.do(Reconfigure(0, CoreDisks(), PoolPolicy.REUSE, CoreDisks()))
    for _ in range(4 * SLOTS_PER_EXTENT + 1):  # twice the pool, by two blocks
        assert not shadow(host).known
        one.lookup(1, 2)
    one.lookup(1, 2, 3)
    said = shadow(host)
    assert (said.half, said.now, said.twice, said.actual) == pytest.approx((2 / 3,) * 4)
    assert said.asked == 3


def test_a_pool_that_gets_more_memory_is_a_pool_of_another_size() -> None:
    host, one = ready(populated=1)
    one.store(*range(SLOTS_PER_EXTENT)).finish()
    one.lookup(*range(SLOTS_PER_EXTENT))
    assert shadow(host).half == pytest.approx(1 / 2)
    host.do(PoolPopulated(4, complete=True))
    assert not shadow(host).known
    one.lookup(*range(SLOTS_PER_EXTENT))
    assert shadow(host).half == 1
