"""How long, and where, blocks are kept: what a store may ask of them besides."""

import math
from dataclasses import dataclass

from kvtier.errors import KvtierError, Reason
from kvtier.v1 import cache_pb2

SECONDS_MAX = 1e9
"""Longer times are not believed."""


@dataclass(frozen=True, slots=True)
class Retention:
    """What is asked of all blocks of a store, also of those that are there already. Of different requests for
    one block the daemon grants the one that keeps it longer, in more tiers; none outlives the daemon.

    Raises KvtierError MALFORMED, naming the field, for what makes no sense.
    """

    hold_s: float = 0.0
    """The blocks are not evicted for so many seconds from when they can be read, rounded up to whole ones, as
    far as the daemon has room for it and its settings allow. At most `ttl_s`, if that is not 0."""
    ttl_s: float = 0.0
    """The blocks are dropped so many seconds after they were stored, or stored again with a time, as soon as
    nothing uses them; the daemon rounds up, by a few seconds at most. Such blocks stay on the host. 0: they
    live as any others."""
    host_only: bool = False
    """The blocks are not written to disks. A copy that is there already stays."""

    def __post_init__(self) -> None:
        check_seconds("retention.hold_s", self.hold_s)
        check_seconds("retention.ttl_s", self.ttl_s)
        if 0 < self.ttl_s < self.hold_s:
            message = f"must be at most ttl_s, which is {self.ttl_s}"
            raise KvtierError(Reason.MALFORMED, message, field="retention.hold_s", value=self.hold_s)

    @property
    def plain(self) -> bool:
        """Whether nothing is asked."""
        return not (self.hold_s or self.ttl_s or self.host_only)

    def to_proto(self) -> cache_pb2.Retention:
        """As it travels with a store."""
        return cache_pb2.Retention(
            hold_ms=milliseconds(self.hold_s), ttl_ms=milliseconds(self.ttl_s), host_only=self.host_only
        )


def check_seconds(field: str, seconds: float) -> None:
    """Raises KvtierError MALFORMED for what is no time to keep something."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    # Written so that NaN is refused too.
    if not (number and 0 <= seconds <= SECONDS_MAX):
        message = f"must be a number of seconds from 0 to {SECONDS_MAX:g}"
        raise KvtierError(Reason.MALFORMED, message, field=field, value=seconds)


def milliseconds(seconds: float) -> int:
    """Rounded up: less than a millisecond is still asked for."""
    return math.ceil(seconds * 1_000)
