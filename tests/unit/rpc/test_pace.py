"""A tenant that has used more of the event loop than its share waits, and nobody else does."""

import asyncio
import itertools
from collections.abc import Callable

import pytest
from kvtierd.rpc.pace import ALLOWED_S, PART, LoopPace


class World:
    """A clock that sleeps move."""

    def __init__(self, tenants: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.tenants = tenants
        self.pace = LoopPace(lambda: self.tenants, lambda: self.now_s)
        self.slept_s = 0.0
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.now_s += seconds


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], World]:
    return lambda tenants: World(tenants, monkeypatch)


async def test_a_busy_tenant_gets_its_share_and_others_never_wait(world: Callable[[int], World]) -> None:
    two = world(2)
    started_s = two.now_s
    spent_s = 0.0
    for _ in range(100):
        await two.pace.wait("busy")
        two.now_s += 0.03
        spent_s += 0.03
        two.pace.spent("busy", 0.03)
    part = spent_s / (two.now_s - started_s)
    assert part == pytest.approx(PART, rel=0.1)
    slept_s = two.slept_s
    await two.pace.wait("other")
    two.pace.spent("other", 0.001)
    await two.pace.wait("other")
    assert two.slept_s == slept_s


async def test_tenants_that_want_little_take_nothing_from_one_that_wants_much(
    world: Callable[[int], World],
) -> None:
    crowd = world(200)
    started_s, spent_s = crowd.now_s, 0.0
    for number in range(100):
        crowd.pace.spent(f"idle {number}", 0.00002)  # a heartbeat
        await crowd.pace.wait("busy")
        crowd.now_s += 0.03
        spent_s += 0.03
        crowd.pace.spent("busy", 0.03)
    assert spent_s / (crowd.now_s - started_s) > PART / 2


async def test_short_calls_are_not_delayed(world: Callable[[int], World]) -> None:
    two = world(2)
    for _ in range(1_000):
        await two.pace.wait("engine")
        two.pace.spent("engine", 0.0001)
        two.now_s += 0.001
    assert two.slept_s == 0


async def test_a_tenant_that_is_alone_has_all_of_it(world: Callable[[int], World]) -> None:
    one = world(1)
    for _ in range(10):
        await one.pace.wait("alone")
        one.pace.spent("alone", 1.0)
    assert one.slept_s == 0


async def test_calls_of_one_tenant_wait_one_behind_the_other(world: Callable[[int], World]) -> None:
    """However many calls a tenant makes at once, they are not all let go when its debt is paid."""
    two = world(2)
    two.pace.spent("busy", 1.0)
    done: list[float] = []

    async def call() -> None:
        await two.pace.wait("busy")
        two.pace.spent("busy", 0.03)
        done.append(two.now_s)

    await asyncio.gather(*(call() for _ in range(4)))
    assert done[0] == pytest.approx(100 + (1.0 - ALLOWED_S) / PART)
    assert all(later - earlier > 0.1 for earlier, later in itertools.pairwise(done))
