"""When the event loop is full, tenants that use more than an even part of it wait, and nobody else does."""

import asyncio
import itertools
from collections.abc import Callable

import pytest
from kvtierd.rpc.pace import ALLOWED_S, BRIEF_S, LONG_COUNTS, MESSAGE_S, PART, WAIT_S_MAX, LoopPace

CALL_S = BRIEF_S + MESSAGE_S
"""What a brief call counts for, and how long it keeps the loop with what gRPC does for it."""


class _Held(Exception):
    """A call would have to wait now."""


class World:
    """A clock that calls and sleeps move. The loop handles one call at a time."""

    def __init__(self, tenants: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.tenants = tenants
        self.pace = LoopPace(lambda: self.tenants, lambda: self.now_s)
        self.slept_s = 0.0
        self._wait_in_vain = False
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        if self._wait_in_vain:
            raise _Held
        self.slept_s += seconds
        self.now_s += seconds

    async def use(self, tenant: str, calls: int, seconds: float = BRIEF_S, pause_s: float = 0.0) -> float:
        """Makes calls one after the other, each of which takes so long to handle, with pauses between them.
        Returns which part of the time they had the loop."""
        started_s = self.now_s
        for _ in range(calls):
            await self.pace.wait(tenant)
            self.now_s += seconds + MESSAGE_S
            self.pace.spent(tenant, seconds)
            self.now_s += pause_s
        return calls * (seconds + MESSAGE_S) / (self.now_s - started_s)

    async def quarrel(self, parts: dict[str, float], seconds: float) -> dict[str, float]:
        """Every tenant wants a part of the loop for brief calls, and makes none while its own one waits. All
        are served in turn, for so long. Returns the part that each had."""
        started_s, self._wait_in_vain = self.now_s, True
        had = dict.fromkeys(parts, 0.0)
        next_s = dict.fromkeys(parts, started_s)
        while self.now_s < started_s + seconds:
            idle = True
            for tenant, part in parts.items():
                if next_s[tenant] > self.now_s:
                    continue
                try:
                    await self.pace.wait(tenant)
                except _Held:
                    continue
                next_s[tenant] = max(next_s[tenant] + CALL_S / part, self.now_s - 1)
                self.now_s += CALL_S
                self.pace.spent(tenant, BRIEF_S)
                had[tenant] += CALL_S
                idle = False
            if idle:
                self.now_s += CALL_S / 10
        self._wait_in_vain = False
        return {tenant: time_s / seconds for tenant, time_s in had.items()}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], World]:
    return lambda tenants: World(tenants, monkeypatch)


async def test_a_tenant_that_wants_everything_has_its_part_and_another_never_waits(
    world: Callable[[int], World],
) -> None:
    two = world(2)
    had = await two.quarrel({"flood": 2.0, "victim": 0.4}, 10.0)
    assert had["flood"] == pytest.approx(PART, rel=0.15)
    assert had["victim"] == pytest.approx(0.4, rel=0.05)


async def test_users_who_flood_together_share_that_part(world: Callable[[int], World]) -> None:
    """None of them uses half of the loop, and together they would leave nothing to the others."""
    crowd = world(20)
    floods = {f"flood {number}": 0.4 for number in range(5)}
    await crowd.quarrel(floods | {"victim": 0.12}, 5.0)
    had = await crowd.quarrel(floods | {"victim": 0.12}, 5.0)
    assert sum(had[name] for name in floods) == pytest.approx(PART, rel=0.2)
    assert had["victim"] == pytest.approx(0.12, rel=0.05)


@pytest.mark.parametrize("parts", [(0.3, 0.25), (0.05,) * 10, (0.55, 0.01)])
async def test_nobody_waits_while_the_loop_is_not_full(
    world: Callable[[int], World], parts: tuple[float, ...]
) -> None:
    some = world(len(parts))
    had = await some.quarrel({f"tenant {number}": part for number, part in enumerate(parts)}, 10.0)
    assert list(had.values()) == [pytest.approx(part, rel=0.05) for part in parts]


async def test_long_calls_count_for_more_than_their_time(world: Callable[[int], World]) -> None:
    two = world(2)
    two.pace.spent("other", BRIEF_S)
    long_s = 0.002
    counted_s = MESSAGE_S + BRIEF_S + LONG_COUNTS * (long_s - BRIEF_S)
    two.pace.spent("heavy", 0.05)
    await two.use("heavy", 10, long_s)
    part = await two.use("heavy", 1_000, long_s)
    assert part == pytest.approx(PART * (long_s + MESSAGE_S) / counted_s, rel=0.1)


async def test_calls_that_cost_nothing_to_handle_count_for_what_grpc_does(
    world: Callable[[int], World],
) -> None:
    two = world(2)
    two.pace.spent("flood", 0.05)
    await two.use("flood", 10, 0.0)
    assert await two.use("flood", 1_000, 0.0) < PART * 1.1


async def test_a_heavy_tenant_that_has_paid_is_held_up_no_more(world: Callable[[int], World]) -> None:
    two = world(2)
    two.pace.spent("heavy", 0.1)
    await two.use("heavy", 1)
    slept_s = two.slept_s
    assert slept_s
    two.now_s += ALLOWED_S / PART + 1
    await two.use("heavy", 1_000, pause_s=CALL_S)
    assert two.slept_s == slept_s


async def test_heavy_tenants_that_went_away_take_nothing_from_the_others(
    world: Callable[[int], World],
) -> None:
    crowd = world(200)
    for number in range(50):
        crowd.pace.spent(f"gone {number}", 0.1)
    crowd.now_s += 1_000
    crowd.pace.spent("heavy", 0.1)
    await crowd.use("heavy", 1_000)
    assert await crowd.use("heavy", 1_000) == pytest.approx(PART, rel=0.15)


async def test_nobody_waits_for_longer_than_a_second(world: Callable[[int], World]) -> None:
    """A session must not end as silent because its tenant has used much."""
    two = world(2)
    two.pace.spent("busy", 100.0)
    await two.pace.wait("busy")
    assert two.slept_s == pytest.approx(WAIT_S_MAX)


async def test_a_tenant_that_is_alone_has_all_of_it(world: Callable[[int], World]) -> None:
    one = world(1)
    await one.use("alone", 10, 1.0)
    assert one.slept_s == 0


async def test_calls_of_one_tenant_wait_one_behind_the_other(world: Callable[[int], World]) -> None:
    """However many calls a tenant makes at once, they are not all let go when its debt is paid."""
    two = world(2)
    two.pace.spent("busy", 0.04)
    counted_s = MESSAGE_S + BRIEF_S + LONG_COUNTS * (0.04 - BRIEF_S)
    done: list[float] = []

    async def call() -> None:
        await two.pace.wait("busy")
        two.pace.spent("busy", 0.03)
        done.append(two.now_s)

    await asyncio.gather(*(call() for _ in range(4)))
    assert done[0] == pytest.approx(100 + (counted_s - ALLOWED_S) / PART, abs=0.002)
    assert all(later - earlier > 0.1 for earlier, later in itertools.pairwise(done))
