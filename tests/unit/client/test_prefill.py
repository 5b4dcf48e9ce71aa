"""An engine's prefill rate as its scheduler sees it: close to the truth on long prompts, never above it, and
not misled by pauses, small steps, or steps that overlap."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_vllm.scheduler.prefill import SAMPLES_MIN, PrefillMeter

RATE = 20_000.0
DECODE_S = 0.01
OVERHEAD_S = 0.001


class Engine:
    """Computes one step after the other; with `in_flight` 2 it schedules the next meanwhile."""

    def __init__(self, in_flight: int = 1) -> None:
        self.now_s = 0.0
        self.meter = PrefillMeter(steps_in_flight=in_flight, clock=lambda: self.now_s)
        self._in_flight = in_flight
        self._free_s = 0.0
        self._ends_s: list[float] = []

    def step(self, prompt_tokens: int, other_tokens: int = 0) -> None:
        if len(self._ends_s) >= self._in_flight:
            self.now_s = max(self.now_s, self._ends_s[-self._in_flight])
        self.meter.step(prompt_tokens, other_tokens)
        self.now_s += OVERHEAD_S
        self._free_s = max(self._free_s, self.now_s) + prompt_tokens / RATE + bool(other_tokens) * DECODE_S
        self._ends_s.append(self._free_s)

    def pause(self, seconds: float) -> None:
        """Nothing to do."""
        self.step(0)
        self.now_s = max(self.now_s, self._free_s) + seconds

    def run(self, steps: Iterable[tuple[int, int]]) -> float:
        for prompt_tokens, other_tokens in steps:
            self.step(prompt_tokens, other_tokens)
        return self.meter.tokens_per_s


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_long_prompts_tell_the_rate(in_flight: int) -> None:
    found = Engine(in_flight).run([(2048, 0)] * 40)
    assert 0.8 * RATE < found <= RATE


def test_nothing_is_said_before_there_is_enough() -> None:
    engine = Engine()
    for _ in range(SAMPLES_MIN):
        engine.step(2048)
        assert engine.meter.tokens_per_s == 0
    engine.step(1)
    assert engine.meter.tokens_per_s > 0


def test_small_steps_and_steps_of_decodes_say_nothing() -> None:
    assert Engine().run([(511, 0)] * 100) == 0
    assert Engine().run([(0, 256), (600, 700)] * 100) == 0


def test_decodes_beside_prompts_do_little_harm() -> None:
    assert Engine().run([(2000, 48)] * 40) > 0.8 * RATE


@pytest.mark.parametrize("in_flight", [1, 2])
def test_single_prompts_with_pauses_between_them_tell_something(in_flight: int) -> None:
    engine = Engine(in_flight)
    for _ in range(20):
        engine.step(4096)
        engine.step(0, 1)
        engine.pause(30)
    assert 0.3 * RATE < engine.meter.tokens_per_s <= RATE


def test_a_slower_engine_is_noticed() -> None:
    engine = Engine()
    engine.run([(2048, 0)] * 100)
    for _ in range(100):
        engine.step(1024)
        engine._free_s += 1024 / RATE  # the clock of the GPU is halved
        engine._ends_s[-1] = engine._free_s
    assert engine.meter.tokens_per_s < 0.6 * RATE


@given(
    st.lists(
        st.tuples(st.integers(0, 4096), st.integers(0, 300), st.sampled_from([0.0, 0.0, 0.01, 5.0])),
        max_size=120,
    ),
    st.integers(1, 3),
)
def test_it_is_never_too_high(steps: list[tuple[int, int, float]], in_flight: int) -> None:
    engine = Engine(in_flight)
    for prompt_tokens, other_tokens, pause_s in steps:
        engine.step(prompt_tokens, other_tokens)
        if pause_s:
            engine.pause(pause_s)
        assert engine.meter.tokens_per_s <= RATE * 1.0001
