"""How long and where blocks are kept, as far as a store asks for it."""

import math
from dataclasses import dataclass

from kvtier.errors import KvtierError, Reason
from kvtier.v1 import cache_pb2

SECONDS_MAX = 1e9
"""The longest time that is accepted."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long and where a store wants its blocks to be kept, including those that are there already. If a
    block was stored with several of these, the daemon takes what keeps it longer and in more tiers. None of
    it outlives the daemon.

    Raises KvtierError MALFORMED, naming the field, for values that make no sense.
    """

    hold_s: float = 0.0
    """How many seconds the blocks are not evicted, from when they can be read, rounded up to whole seconds,
    and as far as the daemon has room for it and its settings allow. At most `ttl_s`, if that is not 0."""
    ttl_s: float = 0.0
    """After how many seconds the blocks are dropped, counted from when they were last stored with such a
    time, and as soon as nothing uses them; the daemon rounds up, by a few seconds at most. Such blocks stay
    on the host. 0: no such limit."""
    host_only: bool = False
    """Whether the blocks are kept from being written to disks. A copy already on a disk stays."""

    def __post_init__(self) -> None:
        check_seconds("retention.hold_s", self.hold_s)
        check_seconds("retention.ttl_s", self.ttl_s)
        if 0 < self.ttl_s < self.hold_s:
            message = f"must be at most ttl_s, which is {self.ttl_s}"
            raise KvtierError(Reason.MALFORMED, message, field="retention.hold_s", value=self.hold_s)

    @property
    def plain(self) -> bool:
        """Whether nothing special is asked for."""
        return not (self.hold_s or self.ttl_s or self.host_only)

    def to_proto(self) -> cache_pb2.Retention:
        """Returns it as it is sent with a store."""
        return cache_pb2.Retention(
            hold_ms=milliseconds(self.hold_s), ttl_ms=milliseconds(self.ttl_s), host_only=self.host_only
        )


def check_seconds(field: str, seconds: float) -> None:
    """Raises KvtierError MALFORMED unless this is a number of seconds from 0 to 1e9."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    # The condition is written so that NaN is refused too.
    if not (number and 0 <= seconds <= SECONDS_MAX):
        message = f"must be a number of seconds from 0 to {SECONDS_MAX:g}"
        raise KvtierError(Reason.MALFORMED, message, field=field, value=seconds)


def milliseconds(seconds: float) -> int:
    """Returns the time in milliseconds, rounded up, so that less than a millisecond does not become 0."""
    return math.ceil(seconds * 1_000)
