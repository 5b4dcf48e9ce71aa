"""A clock that counts only the time in which the daemon ran."""

import time
from collections.abc import Callable

GAP_S = 1.0
"""The longest time between two readings that counts in full. The daemon reads its clock twice a
second at least."""


class SteadyClock:
    """A monotonic clock that stands still while the process does (SIGSTOP, a frozen host, a stuck loop).

    It is for deadlines that others have to meet: when a stopped daemon goes on, it has not yet read the
    heartbeats that were sent to it meanwhile. Read the clock at least every second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()
        self._skipped_s = 0.0

    def __call__(self) -> float:
        """The time in seconds; it never goes back, whatever the clock behind it does."""
        now_s = self._clock()
        passed_s = now_s - self._last_s
        self._skipped_s += passed_s - min(max(0.0, passed_s), GAP_S)
        self._last_s = now_s
        return now_s - self._skipped_s
