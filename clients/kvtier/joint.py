"""Lookups over several groups together: what is asked, as it travels."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.errors import KvtierError, Reason
from kvtier.v1 import cache_pb2

JOINT_LOOKUP = "joint-lookup"
"""Feature of a daemon that answers for several groups together."""


@dataclass(frozen=True, slots=True)
class GroupQuery:
    """What a joint lookup asks of one group."""

    group: int
    window_blocks: int = 0
    """Only the last so many blocks of a prefix are needed (a sliding window; 1 for the state of a recurrent
    layer); 0: all of them."""
    hash_stride: int = 1
    """A block of this group has as many tokens as so many of the hashes: its hash is the last of them."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("group", self.group, 0),
            ("window_blocks", self.window_blocks, 0),
            ("hash_stride", self.hash_stride, 1),
        ):
            if not least <= value < 2**32:
                raise KvtierError(
                    Reason.MALFORMED, f"must be at least {least}", field=f"query.{name}", value=value
                )

    def to_proto(self) -> cache_pb2.GroupQuery:
        """With the hashes of the request."""
        mode = cache_pb2.LOOKUP_MODE_SUFFIX if self.window_blocks else cache_pb2.LOOKUP_MODE_PREFIX
        return cache_pb2.GroupQuery(
            group=self.group, mode=mode, window_blocks=self.window_blocks, hash_stride=self.hash_stride
        )


def hashes_max(queries: Sequence[GroupQuery], count_max: int) -> int:
    """How many hashes a joint lookup may carry, if the daemon takes `count_max` of all groups together."""
    return int(count_max / sum(1 / query.hash_stride for query in queries))
