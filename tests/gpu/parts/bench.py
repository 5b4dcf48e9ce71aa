"""What a step is given: where its rows go, how much time it has, and whether the driver is the fake one."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tests.gpu.record import Row, append_row, load

T = TypeVar("T")
KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


class Unavailable(Exception):
    """This machine cannot run the step; the message says why. The step counts as skipped."""


class Bench:
    """One step's run."""

    def __init__(self, rows: Path, seconds: float, fake: bool) -> None:
        self._rows = rows
        self._end = time.monotonic() + seconds
        self.fake = fake

    def row(self, **fields: object) -> Row:
        """Keeps one finding, at once: it outlives this process."""
        row = {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}
        append_row(self._rows, row)
        return row

    def left_s(self, keep_s: float = 3.0) -> float:
        """Seconds until the step is killed, less what it needs to end by itself."""
        return self._end - keep_s - time.monotonic()

    def pick(self, real: T, fake: T) -> T:
        """A size, for a real GPU or for the fake driver."""
        return fake if self.fake else real

    def earlier(self, step: str, **wanted: object) -> list[Row]:
        """Rows of a step that ran before, in the same run."""
        path = os.environ.get("KVTIER_GPU_RECORD")
        return load(Path(path)).rows(step, **wanted) if path else []


def seconds_of(call: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def median_s(call: Callable[[], object], times: int, warm_up: int = 1) -> float:
    """The median of `times` calls, after some that do not count."""
    for _ in range(warm_up):
        call()
    return statistics.median(seconds_of(call) for _ in range(times))


def gb_per_s(n_bytes: int, seconds: float) -> float:
    """10^9 bytes per second."""
    return n_bytes / seconds / 1e9


def percentile(values: Sequence[float], percent: float) -> float:
    """Of at least one value; the nearest one above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
