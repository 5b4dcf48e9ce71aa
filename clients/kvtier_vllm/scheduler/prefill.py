"""Learns from the engine's own steps how fast it computes prompts.

The daemon promotes blocks from a disk only if that is quicker than computing them. A figure that is too high
would lose hits, one that is too low costs some waiting. So this errs on the low side: a step's time is
measured from its own beginning to a moment at which it has surely ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_vllm.scheduler.tracking import TrackedRequest

STEP_TOKENS_MIN = 512
"""The fewest prompt tokens of a step that is measured: smaller steps are mostly overhead."""
RUN_MAX = 16
"""How many steps in a row are looked at together."""
SAMPLES_MIN, SAMPLES_MAX = 4, 64
PERCENTILE = 0.75
"""The percentile of the samples that is taken: pauses and slow steps make many samples too low, and hardly
anything makes one too high."""
ELAPSED_MIN_S = 1e-4


def tokens_of_step(output: Any, requests: Mapping[str, TrackedRequest]) -> tuple[int, int]:
    """Returns the tokens of prompts in a SchedulerOutput, and all other tokens."""
    of_prompts = scheduled_tokens = 0
    for request_id, scheduled in output.num_scheduled_tokens.items():
        scheduled_tokens += scheduled
        tracked = requests.get(request_id)
        if tracked is not None:
            request = tracked.request
            of_prompts += max(0, min(scheduled, request.num_prompt_tokens - request.num_computed_tokens))
    return of_prompts, scheduled_tokens - of_prompts


class PrefillMeter:
    """Measures the intervals between steps. It is told of every step when the step is scheduled."""

    def __init__(
        self,
        *,
        steps_in_flight: int = 1,
        step_tokens_min: int = STEP_TOKENS_MIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`steps_in_flight` is 1 for an engine that schedules one step after the other. When a step is
        scheduled, all but `steps_in_flight` - 1 of the steps before it have ended."""
        self._in_flight = steps_in_flight
        self.step_tokens_min = step_tokens_min
        """Steps with fewer prompt tokens are not measured."""
        self._clock = clock
        self._steps: deque[tuple[float, int]] = deque(maxlen=RUN_MAX + steps_in_flight - 1)
        """When each step was scheduled, and its prompt tokens, or 0 for one that is not measured."""
        self._samples: deque[float] = deque(maxlen=SAMPLES_MAX)

    def step(self, prompt_tokens: int, other_tokens: int) -> bool:
        """Takes note of a step with these numbers of tokens. Returns whether `tokens_per_s` may
        have changed."""
        now_s = self._clock()
        sampled = False
        if len(self._steps) >= self._in_flight and self._steps[-self._in_flight][1]:
            rate = self._rate(now_s)
            if rate:
                self._samples.append(rate)
                sampled = True
        says_something = prompt_tokens >= self.step_tokens_min and prompt_tokens >= other_tokens
        self._steps.append((now_s, prompt_tokens if says_something else 0))
        return sampled

    @property
    def tokens_per_s(self) -> float:
        """The prompt tokens per second; 0 until enough is known."""
        if len(self._samples) < SAMPLES_MIN:
            return 0.0
        return sorted(self._samples)[int(PERCENTILE * (len(self._samples) - 1))]

    def _rate(self, now_s: float) -> float:
        """Returns the best rate of the runs of steps that end with the last one that is over. A longer run
        suffers less from a step that is still in flight, a shorter one less from a pause before it."""
        best, tokens = 0.0, 0
        for index in range(len(self._steps) - self._in_flight, -1, -1):
            began_s, step_tokens = self._steps[index]
            if not step_tokens:
                break
            tokens += step_tokens
            if now_s - began_s >= ELAPSED_MIN_S:
                best = max(best, tokens / (now_s - began_s))
        return best
