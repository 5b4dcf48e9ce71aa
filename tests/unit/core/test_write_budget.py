"""How much may be written to a disk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvtierd.core.disk.write_budget import BURST_S, DAY_S, SAVED_AT_START_S, SAVED_S, WriteBudget
from kvtierd.core.stimuli import CoreDisks

SIZE = 1 << 30


def test_without_limits_any_number_may_be_written() -> None:
    budget = WriteBudget(SIZE)
    budget.spend(1 << 50)
    assert budget.bytes_left(CoreDisks(), 5.0) is None


def test_a_second_of_writing_may_come_at_once_and_then_it_is_the_rate() -> None:
    budget, policy = WriteBudget(SIZE), CoreDisks(write_bytes_per_s=1_000)
    assert budget.bytes_left(policy, 0.0) == 1_000
    budget.spend(1_000)
    assert budget.bytes_left(policy, 0.0) == 0
    assert budget.bytes_left(policy, 0.25) == 250
    assert budget.bytes_left(policy, 100.0) == 1_000


def test_what_was_not_written_after_all_may_be_written() -> None:
    budget, policy = WriteBudget(SIZE), CoreDisks(write_bytes_per_s=1_000)
    budget.bytes_left(policy, 0.0)
    budget.spend(900)
    budget.spend(-400)
    assert budget.bytes_left(policy, 0.0) == 500


def test_a_disk_that_may_be_written_once_a_day_starts_with_half_an_hour_and_saves_six() -> None:
    budget, policy = WriteBudget(SIZE), CoreDisks(writes_per_day=1.0)
    assert budget.bytes_left(policy, 0.0) == int(SIZE * SAVED_AT_START_S / DAY_S)
    assert budget.bytes_left(policy, 10 * DAY_S) == int(SIZE * SAVED_S / DAY_S)


def test_the_smaller_limit_holds() -> None:
    budget = WriteBudget(SIZE)
    assert budget.bytes_left(CoreDisks(write_bytes_per_s=10, writes_per_day=1.0), 0.0) == 10


def test_another_limit_begins_anew() -> None:
    budget = WriteBudget(SIZE)
    budget.bytes_left(CoreDisks(write_bytes_per_s=1_000), 0.0)
    budget.spend(50_000)
    assert budget.bytes_left(CoreDisks(write_bytes_per_s=2_000), 0.0) == 2_000
    assert budget.bytes_left(CoreDisks(), 0.0) is None
    assert budget.bytes_left(CoreDisks(write_bytes_per_s=2_000), 0.0) == 2_000


@given(
    st.lists(st.tuples(st.floats(0, 5_000), st.integers(0, 1 << 20)), max_size=60),
    st.sampled_from([(5_000, 0.0), (0, 2.0), (5_000, 2.0), (200_000, 0.5)]),
)
def test_no_more_is_written_than_the_limits_allow(
    steps: list[tuple[float, int]], limits: tuple[int, float]
) -> None:
    per_s, per_day = limits
    policy = CoreDisks(write_bytes_per_s=per_s, writes_per_day=per_day)
    budget, now_s, written = WriteBudget(SIZE), 0.0, 0
    for wait_s, wanted in steps:
        now_s += wait_s
        if not budget.bytes_left(policy, now_s):
            continue
        if per_s:  # the batch that begins now may go beyond it
            assert written <= per_s * (now_s + BURST_S) + 1
        if per_day:
            assert written <= per_day * SIZE * (now_s + SAVED_AT_START_S) / DAY_S + 1
        budget.spend(wanted)
        written += wanted
