"""What is sooner loaded than computed: nothing speaks against loading until enough is known, and a hit that
is small beside the steps that its load would take is computed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_vllm.scheduler.worth import IN_DOUBT, LOAD_AGE_MAX_S, LOADS_MIN, STEPS_MAX, Worth

RATE = 10_000.0
STEP_S = 0.01


class Engine:
    def __init__(self, rate: float = RATE) -> None:
        self.now_s, self.rate = 100.0, rate
        self.worth = Worth(lambda: self.rate, clock=lambda: self.now_s)

    def steps(self, count: int = STEPS_MAX, seconds: float = STEP_S, computes: bool = True) -> None:
        for _ in range(count + 1):
            self.worth.step(computes)
            self.now_s += seconds

    def loads(self, tokens: int, seconds: float, count: int = LOADS_MIN) -> None:
        for _ in range(count):
            self.worth.loaded(tokens, seconds)


def test_everything_is_loaded_until_all_is_known() -> None:
    engine = Engine(rate=0.0)
    engine.loads(1_000, STEP_S)
    engine.steps()
    assert engine.worth.least_tokens() == 1, "no prefill rate"
    engine = Engine()
    engine.steps()
    engine.loads(1_000, STEP_S, LOADS_MIN - 1)
    assert engine.worth.least_tokens() == 1, "too few loads"
    engine = Engine()
    engine.loads(1_000, STEP_S)
    engine.steps(computes=False)
    assert engine.worth.least_tokens() == 1, "no step"
    assert engine.worth.step_s == 0


def test_a_load_is_worth_the_steps_that_it_takes() -> None:
    engine = Engine()
    engine.steps()
    engine.loads(1_000, 0.9 * STEP_S)
    assert engine.worth.least_tokens() == math.ceil(STEP_S * RATE / IN_DOUBT) == 67
    engine.loads(1_000, 0.1 * STEP_S)
    assert engine.worth.least_tokens() == 67, "it takes a step at least"
    engine = Engine()
    engine.steps()
    engine.loads(1_000, 3.1 * STEP_S)
    assert engine.worth.least_tokens() == pytest.approx(200, abs=1)
    engine.steps(seconds=10 * STEP_S)
    assert engine.worth.least_tokens() == pytest.approx(667, abs=1), "steps are longer now"


def test_what_is_larger_than_any_load_is_loaded() -> None:
    engine = Engine()
    engine.steps()
    engine.loads(32, STEP_S)
    assert engine.worth.least_tokens() == 67
    engine.loads(50, 100 * STEP_S)  # slow, and says nothing of larger ones
    assert engine.worth.least_tokens() == 67
    engine.loads(100, 2 * STEP_S)
    assert engine.worth.least_tokens() == 101


def test_old_loads_are_forgotten() -> None:
    engine = Engine()
    engine.loads(1_000, 50 * STEP_S)
    engine.steps()
    assert engine.worth.least_tokens() > 1_000
    engine.now_s += LOAD_AGE_MAX_S
    assert engine.worth.least_tokens() == 1


@given(
    loads=st.lists(st.tuples(st.integers(1, 5_000), st.floats(1e-4, 1.0)), min_size=LOADS_MIN, max_size=64),
    rate=st.floats(1.0, 1e6),
    step_s=st.floats(1e-3, 0.5),
)
def test_what_is_left_to_computing_is_computed_sooner(
    loads: list[tuple[int, float]], rate: float, step_s: float
) -> None:
    engine = Engine(rate)
    engine.steps(seconds=step_s)
    for tokens, seconds in loads:
        engine.loads(tokens, seconds, 1)
    least = engine.worth.least_tokens()
    assert 1 <= least <= max(1 + max(tokens for tokens, _ in loads), step_s * rate + 2)
    for tokens, _ in loads:
        if tokens < least:
            quickest = min(seconds for larger, seconds in loads if larger >= tokens)
            lasts_s = max(1, round(quickest / engine.worth.step_s)) * engine.worth.step_s
            assert lasts_s > IN_DOUBT * tokens / rate or lasts_s == pytest.approx(IN_DOUBT * tokens / rate)
