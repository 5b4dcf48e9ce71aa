"""How much may be written to a disk: so many bytes a second, so that reads find room beside them, and so many
times its size a day, so that its flash lasts."""

from kvtierd.core.stimuli import CoreDisks

DAY_S = 86_400.0
BURST_S = 1.0
"""Of the bytes a second: what was not written may be written later, for this long."""
SAVED_S = 6 * 3_600.0
"""Of the bytes a day: a quiet night may be made up for."""
SAVED_AT_START_S = 1_800.0
"""A daemon starts with what is saved in this time, so that starting it again and again writes little more."""


class WriteBudget:
    """What one disk may still be written. It goes below zero by the last batch."""

    __slots__ = ("_at_s", "_daily", "_seen", "_short", "_size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._at_s: float | None = None
        self._seen = (0, 0.0)
        self._short = self._daily = 0.0

    def bytes_left(self, policy: CoreDisks, now_s: float) -> int | None:
        """How many bytes may be written now; None for any number."""
        limits = (policy.write_bytes_per_s, policy.writes_per_day)
        if not any(limits):
            self._seen = limits
            return None
        per_s, daily_per_s = float(limits[0]), limits[1] * self._size_bytes / DAY_S
        if self._at_s is None or limits != self._seen:
            self._short, self._daily = per_s * BURST_S, daily_per_s * SAVED_AT_START_S
        else:
            since_s = now_s - self._at_s
            self._short = min(self._short + per_s * since_s, per_s * BURST_S)
            self._daily = min(self._daily + daily_per_s * since_s, daily_per_s * SAVED_S)
        self._at_s, self._seen = now_s, limits
        left = [each for each, limit in zip((self._short, self._daily), limits, strict=True) if limit]
        return max(0, int(min(left)))

    def spend(self, written: int) -> None:
        """So many bytes are written; fewer than 0: they were not, after all."""
        self._short -= written
        self._daily -= written
