"""What an engine tells the daemon with the next heartbeat."""

from collections import deque

from kvtier.v1 import cache_pb2

TOLD_MAX = 1_000_000_000
"""The most lookups, and hashes, that one heartbeat may report; the daemon accepts no more."""
AUDITS_TOLD_MAX, AUDITS_KEPT_MAX = 16, 256
"""The most audits in one heartbeat, and the most that wait for one. The oldest are dropped."""


class News:
    """Collects what is to be told between two heartbeats."""

    def __init__(self, prefill_tokens_per_s: float) -> None:
        """`prefill_tokens_per_s` is the rate that is known so far; 0 means that it is not known."""
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.prefill_is_news = False
        """Whether the daemon has not heard of the rate."""
        self.audits: deque[cache_pb2.Audit] = deque(maxlen=AUDITS_KEPT_MAX)
        """Audits to tell: a block was computed, and compared with what is stored."""
        self._lookups = self._hashes = 0
        """Lookups that the index has answered, of which the daemon has not heard."""

    def prefill(self, tokens_per_s: float) -> None:
        """Notes the rate as measured lately; 0 is ignored."""
        if tokens_per_s == 0:
            return
        self.prefill_is_news |= tokens_per_s != self.prefill_tokens_per_s
        self.prefill_tokens_per_s = tokens_per_s

    def spared(self, hashes: int) -> None:
        """Notes that a lookup of so many hashes was answered here."""
        self._lookups += 1
        self._hashes += hashes

    def take(self) -> cache_pb2.Heartbeat:
        """Returns a heartbeat with all that is new since the last one."""
        news, self.prefill_is_news = self.prefill_is_news, False
        lookups, self._lookups = self._lookups, 0
        hashes, self._hashes = self._hashes, 0
        return cache_pb2.Heartbeat(
            prefill_tokens_per_s=self.prefill_tokens_per_s if news else 0,
            index_lookups=min(lookups, TOLD_MAX),
            index_hashes=min(hashes, TOLD_MAX),
            audits=[self.audits.popleft() for _ in range(min(len(self.audits), AUDITS_TOLD_MAX))],
        )
