"""What a lookup, a prefetch or a touch asks of the daemon, as it travels."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.joint import JOINT_LOOKUP, GroupQuery
from kvtier.retention import RETENTION, milliseconds
from kvtier.v1 import cache_pb2


@dataclass(frozen=True, slots=True)
class Ask:
    """How blocks are asked for."""

    prefetch: bool = False
    """Have them promoted, and tell what a lookup would."""
    lease: bool = False
    host_only: bool = False
    """What only lower tiers have is a miss, and is not promoted. Needs `RETENTION`."""

    def body(
        self, queries: Sequence[cache_pb2.GroupQuery], hashes: bytes = b""
    ) -> dict[str, cache_pb2.LookupRequest | cache_pb2.PrefetchRequest]:
        """Of the message, by its name. `hashes`: those that all queries share."""
        if self.prefetch:
            return {"prefetch": cache_pb2.PrefetchRequest(queries=queries, hashes=hashes)}
        request = cache_pb2.LookupRequest(
            queries=queries, hashes=hashes, lease=self.lease, host_only=self.host_only
        )
        return {"lookup": request}


@dataclass(frozen=True, slots=True)
class Touch:
    """What the daemon is told of blocks that were used, or that will not be used again."""

    hashes: bytes
    queries: Sequence[GroupQuery] = ()
    """Of several groups; empty: of `group` alone."""
    group: int = 0
    hold_s: float = 0.0
    cold: bool = False
    """They are not in use: the first to be evicted."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Features that the daemon must have."""
        joint = (JOINT_LOOKUP,) if self.queries else ()
        return joint + ((RETENTION,) if self.cold or self.hold_s else ())

    def to_proto(self, hash_bytes: int, count_max: int) -> cache_pb2.TouchRequest:
        """As much of it as the daemon takes, which is so many hashes of all groups together."""
        request = cache_pb2.TouchRequest(hold_ms=milliseconds(self.hold_s), cold=self.cold)
        if self.queries:
            self._add_groups(request, hash_bytes, count_max // len(self.queries))
        elif self.cold:
            # Each block by itself, so that one that is gone spares none behind it; and the tail goes first.
            last = self.hashes[max(0, len(self.hashes) - count_max * hash_bytes) :]
            request.queries.add(group=self.group, mode=cache_pb2.LOOKUP_MODE_EXACT, hashes=last)
        else:
            first = self.hashes[: count_max * hash_bytes]
            request.queries.add(group=self.group, mode=cache_pb2.LOOKUP_MODE_PREFIX, hashes=first)
        return request

    def _add_groups(self, request: cache_pb2.TouchRequest, hash_bytes: int, most: int) -> None:
        """Of a window its last blocks, of other groups the prefix."""
        hashes = self.hashes
        request.hashes = hashes[: most * hash_bytes]
        for query in self.queries:
            if not query.window_blocks:
                request.queries.add(
                    group=query.group, mode=cache_pb2.LOOKUP_MODE_PREFIX, hash_stride=query.hash_stride
                )
                continue
            end = len(hashes) // hash_bytes // query.hash_stride
            first = max(0, end - min(query.window_blocks, most))
            numbers = [(index + 1) * query.hash_stride - 1 for index in range(first, end)]
            last = b"".join(hashes[number * hash_bytes : (number + 1) * hash_bytes] for number in numbers)
            request.queries.add(group=query.group, mode=cache_pb2.LOOKUP_MODE_EXACT, hashes=last)
