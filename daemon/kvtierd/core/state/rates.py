"""How fast something goes, as measured lately."""

HALF_LIFE_S = 10.0
"""A measurement that is this old counts half."""
STALE_S = 60.0
"""After this long without a measurement nothing counts as known, so that what was slow once gets another
chance."""


class Rate:
    """Bytes per second of busy time: an average in which large and recent measurements count most."""

    __slots__ = ("_at_s", "_bytes", "_seconds")

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._at_s = 0.0

    def measured(self, now_s: float, count: int, seconds: float) -> None:
        """Moving `count` bytes took `seconds`; ignored if either is not positive."""
        if count <= 0 or not seconds > 0:
            return
        kept = 0.0 if now_s - self._at_s > STALE_S else 0.5 ** ((now_s - self._at_s) / HALF_LIFE_S)
        self._bytes = self._bytes * kept + count
        self._seconds = self._seconds * kept + seconds
        self._at_s = now_s

    def seconds(self, now_s: float, count: int) -> float:
        """How long `count` bytes take; 0 if that is not known."""
        rate = self.bytes_per_s(now_s)
        return count / rate if rate else 0.0

    def bytes_per_s(self, now_s: float) -> float:
        """The average; 0 if it is not known."""
        if not self._seconds or now_s - self._at_s > STALE_S:
            return 0.0
        return self._bytes / self._seconds


RISE_S = 1.0
"""How soon a pace follows when things get faster."""
FALL_S = 5.0
"""How soon a pace follows when things get slower."""


class Pace:
    """How many per second of something there are. It is counted elsewhere, and the count is looked at now and
    then."""

    __slots__ = ("_at_s", "_seen", "per_s")

    def __init__(self, now_s: float, seen: int) -> None:
        self.per_s = 0.0
        self._seen = seen
        self._at_s = now_s

    def look(self, now_s: float, seen: int) -> None:
        """The count is `seen` now."""
        since_s = now_s - self._at_s
        if since_s > 0:
            lately = (seen - self._seen) / since_s
            settle_s = RISE_S if lately > self.per_s else FALL_S
            self.per_s += (lately - self.per_s) * min(1.0, since_s / settle_s)
            self._seen, self._at_s = seen, now_s
