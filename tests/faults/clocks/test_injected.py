"""Clocks that jump, under the real core and the real sessions: what heartbeats keep alive stays, whatever the
clock does between two readings, and the rest ends after as much time as the daemon has lived."""

import random
from collections import Counter
from pathlib import Path

import pytest
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.stimuli import RenewSession, Tick
from kvtierd.service.steady import GAP_S, SteadyClock

from tests.faults.bad_requests.front import LIMITS, Front
from tests.faults.bad_requests.guest import Guest, Kind

HOURS_S = 3_600.0
SEED = random.SystemRandom().randrange(1, 2**32)
JUMPS = 300
SILENCE_S = 30.0

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 50_000.0

    def __call__(self) -> float:
        return self.now_s


def jump(chance: random.Random) -> float:
    """Hours on or back, or a moment."""
    kind = chance.randrange(4)
    if kind == 0:
        return chance.uniform(1, 24) * HOURS_S
    if kind == 1:
        return -chance.uniform(1, 10) * HOURS_S
    return chance.uniform(0, GAP_S)


async def test_a_clock_that_jumps_ends_no_lease_no_session_and_no_transfer_that_is_kept(
    shm_dir: Path, count: Counter[str]
) -> None:
    print(f"KVTIER_SEED={SEED}")
    chance = random.Random(SEED)
    hands = Hands()
    front = await Front(shm_dir / "pool", clock=SteadyClock(hands), silence_s=SILENCE_S).start()
    guest = Guest(front, Kind("engine", ((4_096,),)), chance, count)
    try:
        await guest.attach()
        for _ in range(8):
            await guest.store()
        while not guest.leases:
            guest.lease(0, guest.some_hashes(0))
        guest.hold()
        held = len(guest.leases)
        for _ in range(JUMPS):
            hands.now_s += jump(chance)
            front.cache.handle(Tick())
            front.sessions.end_silent()
            count["clock_jumps"] += 1
            assert len(front.machine.core.leases) == held, "a lease has ended by a jump"
            assert len(front.machine.core.transfers) == 1, "a transfer has ended by a jump"
            assert guest.scheduler.ended is None, "a session has ended by a jump"
            front.cache.handle(RenewSession(guest.scheduler.id))  # the heartbeat that was on its way
            front.sessions.heard(guest.scheduler)
        await guest.check_everything()
        await guest.leave(Refusal(Reason.EPOCH_ENDED, "the test ends"))
    finally:
        await front.close()


async def test_who_is_silent_is_ended_after_the_time_that_the_daemon_has_lived(
    shm_dir: Path, count: Counter[str]
) -> None:
    chance = random.Random(SEED)
    hands = Hands()
    clock = SteadyClock(hands)
    front = await Front(shm_dir / "pool", clock=clock, silence_s=SILENCE_S).start()
    guest = Guest(front, Kind("engine", ((4_096,),)), chance, count)
    try:
        await guest.attach()
        while not guest.leases:
            await guest.store()
            guest.lease(0, guest.some_hashes(0))
        since_s, lease_ended_s, session_ended_s = clock(), 0.0, 0.0
        lived_s = 0.0
        while not session_ended_s:
            step_s = jump(chance)
            hands.now_s += step_s
            lived_s += min(max(0.0, step_s), GAP_S)
            front.cache.handle(Tick())
            front.sessions.end_silent()
            count["clock_jumps"] += 1
            assert abs(clock() - since_s - lived_s) < 1e-3
            if not lease_ended_s and not front.machine.core.leases:
                lease_ended_s = lived_s
            if guest.scheduler.ended:
                session_ended_s = lived_s
            assert lived_s < 3 * max(SILENCE_S, LIMITS.lease_ttl_s), "nothing ever ends"
        assert SILENCE_S <= session_ended_s <= SILENCE_S + 2 * GAP_S
        assert lease_ended_s == min(session_ended_s, lease_ended_s), "its leases outlived it"
    finally:
        await front.close()


@pytest.mark.parametrize(
    "steps", [[-HOURS_S], [HOURS_S, -2 * HOURS_S, HOURS_S], [-1.0] * 100, [0.5, -0.5] * 100]
)
def test_a_clock_that_goes_back_is_not_followed(steps: list[float]) -> None:
    hands = Hands()
    clock = SteadyClock(hands)
    shown = clock()
    for step_s in steps:
        hands.now_s += step_s
        before, shown = shown, clock()
        assert before <= shown <= before + GAP_S
    hands.now_s += 0.25
    assert abs(clock() - shown - 0.25) < 1e-6


def test_every_reading_counts_what_it_should() -> None:
    """A long life of jumps loses and wins nothing but the jumps."""
    chance = random.Random(SEED)
    hands = Hands()
    clock = SteadyClock(hands)
    first, lived_s = clock(), 0.0
    for _ in range(100_000):
        step_s = jump(chance)
        hands.now_s += step_s
        clock()
        lived_s += min(max(0.0, step_s), GAP_S)
    assert abs(clock() - first - lived_s) < 0.5
