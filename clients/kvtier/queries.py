"""What is asked about blocks: of which groups, in which mode, and how it is sent.

Lookups, prefetches and touches carry one list of hashes, and for each group a query that says which of them
are its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvtier.errors import KvtierError, Reason
from kvtier.retention import milliseconds
from kvtier.v1 import cache_pb2

Hashes = bytes | Sequence[bytes] | npt.NDArray[np.uint8]
"""Block hashes in sequence order: concatenated, as a list, or as a uint8 array of shape (n, hash_bytes)."""

BlockIds = Sequence[int] | npt.NDArray[np.integer]
"""Numbers of the engine's blocks: a list, or an integer array of shape (n,)."""


class LookupMode(Enum):
    """Which blocks a lookup is about. The numbers are those of kvtier.v1.LookupMode."""

    PREFIX = 1
    """The leading run of blocks that can all be read."""
    EXACT = 3
    """Every block by itself."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks of a store that follow each other in one prompt, without a gap. Raises KvtierError MALFORMED for
    less than one block."""

    blocks: int
    previous: bytes = b""
    """The hash of the block before the first; empty if that is the first of its prompt, or if it is not
    known."""

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise KvtierError(Reason.MALFORMED, "must be at least 1", field="chain.blocks", value=self.blocks)


@dataclass(frozen=True, slots=True)
class GroupQuery:
    """What is asked about one group. Raises KvtierError MALFORMED, naming the field, for values that make no
    sense."""

    group: int
    window_blocks: int = 0
    """How many of a prefix's last blocks are needed: those of a sliding window, or 1 for the state of a
    recurrent layer. 0 means all of them."""
    hash_stride: int = 1
    """How many of the hashes make one block of this group, whose hash is the last of them."""
    mode: LookupMode = LookupMode.PREFIX
    """PREFIX, or EXACT for every block by itself, which is possible only for a lookup of this group alone."""

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
        if self.window_blocks and self.mode is LookupMode.EXACT:
            message = "exact mode has no window: leave it 0"
            raise KvtierError(
                Reason.MALFORMED, message, field="query.window_blocks", value=self.window_blocks
            )

    def to_proto(self) -> cache_pb2.GroupQuery:
        """Returns the query of a lookup or a prefetch, which refers to the hashes of the request."""
        suffix = self.window_blocks > 0
        mode = cache_pb2.LOOKUP_MODE_SUFFIX if suffix else cache_pb2.LookupMode.ValueType(self.mode.value)
        return cache_pb2.GroupQuery(
            group=self.group, mode=mode, window_blocks=self.window_blocks, hash_stride=self.hash_stride
        )


@lru_cache(maxsize=256)
def one_query(group: int, mode: LookupMode = LookupMode.PREFIX) -> tuple[GroupQuery, ...]:
    """Returns a query about one group, in blocks of its own."""
    return (GroupQuery(group, mode=mode),)


def check_queries(queries: Sequence[GroupQuery]) -> None:
    """Raises KvtierError if these queries cannot be asked together."""
    if not queries or len({query.group for query in queries}) != len(queries):
        message = "one query for each group, and one at least"
        raise KvtierError(Reason.UNKNOWN_GROUP, message, field="queries", value=len(queries))
    if len(queries) > 1 and any(query.mode is LookupMode.EXACT for query in queries):
        message = "exact mode is for one group: look the others up by themselves"
        raise KvtierError(Reason.MODE_UNSUPPORTED, message, field="queries", value=len(queries))


def hashes_max(queries: Sequence[GroupQuery], count_max: int) -> int:
    """Returns how many hashes a lookup may carry if the daemon takes `count_max` blocks in all."""
    return int(count_max / sum(1 / query.hash_stride for query in queries))


@dataclass(frozen=True, slots=True)
class Touch:
    """Which blocks the daemon is told to keep longer, or to evict first."""

    hashes: bytes
    queries: Sequence[GroupQuery]
    hold_s: float = 0.0
    cold: bool = False
    """Whether the blocks are to be evicted first, instead of later."""

    def to_proto(self, hash_bytes: int, count_max: int) -> cache_pb2.TouchRequest:
        """Returns the request, with as much as the daemon takes, which is `count_max` blocks of all groups
        together: a window's last blocks, else the beginning of the prefix, and of cold blocks the end."""
        request = cache_pb2.TouchRequest(hold_ms=milliseconds(self.hold_s), cold=self.cold)
        most = count_max // len(self.queries)
        for query in self.queries:
            if self.cold or query.window_blocks:
                # In exact mode, a missing block does not keep those behind it from being touched; and a cold
                # prefix loses its tail first.
                last = self._last(query, hash_bytes, min(query.window_blocks or most, most))
                request.queries.add(group=query.group, mode=cache_pb2.LOOKUP_MODE_EXACT, hashes=last)
            else:
                request.hashes = self.hashes[: most * hash_bytes]
                request.queries.add(
                    group=query.group, mode=cache_pb2.LOOKUP_MODE_PREFIX, hash_stride=query.hash_stride
                )
        return request

    def _last(self, query: GroupQuery, hash_bytes: int, most: int) -> bytes:
        """Returns the hashes of the last `most` blocks of a group."""
        end, stride = len(self.hashes) // hash_bytes // query.hash_stride, query.hash_stride
        first = max(0, end - most)
        if stride == 1:
            return self.hashes[first * hash_bytes : end * hash_bytes]
        numbers = [(index + 1) * stride - 1 for index in range(first, end)]
        return b"".join(self.hashes[number * hash_bytes : (number + 1) * hash_bytes] for number in numbers)


def join_hashes(hashes: Hashes, hash_bytes: int) -> bytes:
    """Returns the hashes as one bytes object. Raises KvtierError HASH_LENGTH if one has another length."""
    if isinstance(hashes, bytes):
        if len(hashes) % hash_bytes:
            raise KvtierError(
                Reason.HASH_LENGTH,
                f"concatenated hashes must be a multiple of {hash_bytes} bytes",
                field="hashes",
                value=f"{len(hashes)} bytes",
            )
        return hashes
    if isinstance(hashes, np.ndarray):
        if hashes.dtype != np.uint8 or hashes.ndim != 2 or hashes.shape[1] != hash_bytes:
            raise KvtierError(
                Reason.HASH_LENGTH,
                f"an array of hashes is uint8 of shape (n, {hash_bytes})",
                field="hashes",
                value=f"{hashes.dtype} {hashes.shape}",
            )
        return hashes.tobytes()
    for index, value in enumerate(hashes):
        if len(value) != hash_bytes:
            raise KvtierError(
                Reason.HASH_LENGTH,
                f"must be {hash_bytes} bytes, as the namespace says",
                field=f"hashes[{index}]",
                value=f"{len(value)} bytes",
            )
    return b"".join(hashes)


def list_block_ids(block_ids: BlockIds, count_max: int, *, distinct: bool) -> list[int]:
    """Returns the block ids as a list. Raises KvtierError BLOCK_ID_RANGE for an id that is not below
    `count_max`, and BLOCK_ID_DUPLICATE for one that occurs twice, if they must be `distinct`."""
    ids: list[int] = block_ids.tolist() if isinstance(block_ids, np.ndarray) else list(block_ids)
    if ids and not (min(ids) >= 0 and max(ids) < count_max):
        index = next(index for index, value in enumerate(ids) if not 0 <= value < count_max)
        raise KvtierError(
            Reason.BLOCK_ID_RANGE,
            f"must be at least 0 and below {count_max}",
            field=f"block_ids[{index}]",
            value=ids[index],
        )
    if distinct and len(set(ids)) != len(ids):
        seen: set[int] = set()
        for index, value in enumerate(ids):
            if value in seen:
                raise KvtierError(
                    Reason.BLOCK_ID_DUPLICATE,
                    "two blocks cannot be loaded to one place",
                    field=f"block_ids[{index}]",
                    value=value,
                )
            seen.add(value)
    return ids
