"""Decides whether a prefix is loaded sooner than it is computed, by what this engine has measured of both.

A load ends with a step of the engine, and only the next step computes what is left of the prompt. An engine
with nothing else to do makes such steps in a millisecond. One that computes other requests makes its steps as
long as those take, so a small hit comes later than if it had been computed beside them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

STEPS_MAX = 16
"""How many lengths of steps are remembered."""
LOADS_MIN, LOADS_MAX = 4, 64
"""How many loads are needed for a judgement, and how many are remembered."""
LOAD_AGE_MAX_S = 60.0
"""Older loads do not count, so that what was once too slow is tried again."""
IN_DOUBT = 1.5
"""A load is preferred if it takes up to this many times as long as computing, because others need not share
their steps with it, and the measurements are not exact."""


class Worth:
    """Compares loading with computing. It is told of every step and load; what is not known speaks for
    loading."""

    def __init__(
        self, tokens_per_s: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`tokens_per_s` returns the prompt tokens that this engine computes in a second; 0: not known."""
        self._tokens_per_s = tokens_per_s
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=STEPS_MAX)
        self._usual_s: float | None = None
        """Their median; None if it was not asked for since the last of them."""
        self._began_s: float | None = None
        """When the last step was scheduled; None if it computed nothing."""
        self._loads: deque[tuple[float, int, float]] = deque(maxlen=LOADS_MAX)
        """For each load when it ended, its tokens, and its seconds."""

    def step(self, computes: bool) -> None:
        """Takes note of a step. `computes` says whether it has a request."""
        now_s = self._clock()
        if self._began_s is not None:
            self._steps.append(now_s - self._began_s)
            self._usual_s = None
        self._began_s = now_s if computes else None

    def loaded(self, tokens: int, seconds: float) -> None:
        """Takes note of a load that has succeeded. `seconds` are from its submission until the end of the
        step in which that was seen."""
        self._loads.append((self._clock(), tokens, seconds))

    @property
    def token_s(self) -> float:
        """The seconds in which a token of a prompt is computed; 0 if that is not known."""
        rate = self._tokens_per_s()
        return 1.0 / rate if rate > 0 else 0.0

    @property
    def step_s(self) -> float:
        """The usual seconds of a step that computes something, of late; 0 if that is not known."""
        if self._usual_s is None:
            self._usual_s = statistics.median(self._steps) if self._steps else 0.0
        return self._usual_s

    def least_tokens(self) -> int:
        """Returns the fewest tokens that are worth loading: fewer are computed sooner, beside requests that
        are being computed. 1 if nothing is known that would speak against loading.

        A load is taken to last at least one step, and no longer than the quickest of those that were as large
        or larger. If it is larger than all of them, it is worth a try.
        """
        if len(self._loads) < LOADS_MIN:
            return 1
        token_s, step_s = self.token_s, self.step_s
        oldest_s = self._clock() - LOAD_AGE_MAX_S
        loads = sorted((tokens, seconds) for ended_s, tokens, seconds in self._loads if ended_s > oldest_s)
        if not token_s or not step_s or len(loads) < LOADS_MIN:
            return 1
        quickest_s = math.inf
        bounds: list[tuple[int, float]] = []
        for tokens, seconds in reversed(loads):
            quickest_s = min(quickest_s, seconds)
            bounds.append((tokens, quickest_s))
        of_a_step = step_s / (IN_DOUBT * token_s)
        """The tokens that are computed sooner than one more step ends."""
        least = math.ceil(of_a_step)
        for tokens, seconds in reversed(bounds):
            least_here = max(least, math.ceil(max(1, round(seconds / step_s)) * of_a_step))
            if least_here <= tokens:
                return least_here
            least = max(least, tokens + 1)
        return max(1, least)
