"""The queries of lookups, prefetches and touches, checked whole. Pure.

Hashes stay one numpy array; where they have 32 bytes it is a view of the message's own bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from kvtier.v1 import cache_pb2

from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import HASH_BYTES_MAX, Epoch, Hashes, SessionId
from kvtierd.core.stimuli import BlockQuery, CoreLimits, MatchMode

QUERIES_MAX = 64
"""As many as a rank may name groups."""

_MODES = {
    cache_pb2.LOOKUP_MODE_PREFIX: MatchMode.PREFIX,
    cache_pb2.LOOKUP_MODE_EXACT: MatchMode.EXACT,
}


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request is converted."""

    session: SessionId
    epoch: Epoch
    """As the caller named it; the core refuses one that is over."""
    hash_bytes: int


def hashes_of(data: bytes, hash_bytes: int, field: str, count_max: int) -> Hashes:
    """Concatenated hashes as an (n, 32) array. Raises Refusal HASH_LENGTH or TOO_MANY_BLOCKS."""
    count, rest = divmod(len(data), hash_bytes)
    if rest:
        raise Refusal(
            Reason.HASH_LENGTH,
            f"hashes of this namespace have {hash_bytes} bytes: the length must be a multiple of it",
            field=field,
            value=f"{len(data)} bytes",
        )
    if count > count_max:
        raise Refusal(
            Reason.TOO_MANY_BLOCKS, f"at most {count_max} in one call: split it", field=field, value=count
        )
    given = np.frombuffer(data, np.uint8).reshape(count, hash_bytes)
    if hash_bytes == HASH_BYTES_MAX:
        return given
    padded = np.zeros((count, HASH_BYTES_MAX), np.uint8)
    padded[:, :hash_bytes] = given
    return padded


def is_joint(queries: Sequence[cache_pb2.GroupQuery]) -> bool:
    """Whether they are answered together. Refusal COUNT_MISMATCH if there are none, or too many."""
    _check_count(queries)
    return len(queries) > 1 or queries[0].mode == cache_pb2.LOOKUP_MODE_SUFFIX


def single_query_of(
    query: cache_pb2.GroupQuery, shared: bytes, caller: Caller, limits: CoreLimits
) -> tuple[int, Hashes, MatchMode]:
    """Group, hashes and mode of a query that is answered by itself."""
    mode = _MODES.get(query.mode)
    if mode is None:
        raise _refused(0, "mode", query.mode, "use LOOKUP_MODE_PREFIX or LOOKUP_MODE_EXACT")
    _check_no_window(0, query)
    [hashes] = _all_hashes([query], shared, caller, limits)
    return query.group, hashes, mode


def queries_of(
    queries: Sequence[cache_pb2.GroupQuery], shared: bytes, caller: Caller, limits: CoreLimits
) -> tuple[BlockQuery, ...]:
    """Queries that are answered together."""
    for index, query in enumerate(queries):
        if query.mode == cache_pb2.LOOKUP_MODE_SUFFIX:
            if not query.window_blocks:
                raise _refused(index, "window_blocks", 0, "LOOKUP_MODE_SUFFIX needs a window of 1 or more")
        elif query.mode == cache_pb2.LOOKUP_MODE_PREFIX:
            _check_no_window(index, query)
        else:
            raise _refused(
                index, "mode", query.mode, "several groups take LOOKUP_MODE_PREFIX or LOOKUP_MODE_SUFFIX"
            )
    found = _all_hashes(queries, shared, caller, limits)
    return tuple(
        BlockQuery(query.group, hashes, query.window_blocks)
        for query, hashes in zip(queries, found, strict=True)
    )


def touched_of(
    queries: Sequence[cache_pb2.GroupQuery], shared: bytes, caller: Caller, limits: CoreLimits
) -> tuple[BlockQuery, ...]:
    """Of several groups, each by itself: a window as wide as the query stands for exact mode."""
    _check_count(queries)
    for index, query in enumerate(queries):
        if query.mode not in _MODES:
            raise _refused(index, "mode", query.mode, "use LOOKUP_MODE_PREFIX or LOOKUP_MODE_EXACT")
        _check_no_window(index, query)
    found = _all_hashes(queries, shared, caller, limits)
    return tuple(
        BlockQuery(query.group, hashes, len(hashes) if _MODES[query.mode] is MatchMode.EXACT else 0)
        for query, hashes in zip(queries, found, strict=True)
    )


def _all_hashes(
    queries: Sequence[cache_pb2.GroupQuery], shared: bytes, caller: Caller, limits: CoreLimits
) -> list[Hashes]:
    """Of each query; those of one stride are one array."""
    most = limits.lookup_hashes_max
    strides: dict[int, Hashes] = {}
    if shared:
        strides[1] = hashes_of(shared, caller.hash_bytes, "hashes", most)
    found: list[Hashes] = []
    total = 0
    for index, query in enumerate(queries):
        stride = query.hash_stride
        if not stride:
            found.append(hashes_of(query.hashes, caller.hash_bytes, f"queries[{index}].hashes", most))
        elif query.hashes:
            raise _refused(index, "hashes", f"{len(query.hashes)} bytes", "leave it empty with a hash_stride")
        else:
            if stride not in strides:
                fine = strides.get(1, _NONE)
                strides[stride] = np.ascontiguousarray(fine[stride - 1 :: stride])
            found.append(strides[stride])
        total += len(found[-1])
    if total > most:
        raise Refusal(
            Reason.TOO_MANY_BLOCKS,
            f"at most {most} in one call, of all groups together: split it",
            field="queries",
            value=total,
        )
    return found


_NONE = np.zeros((0, HASH_BYTES_MAX), np.uint8)


def _check_count(queries: Sequence[cache_pb2.GroupQuery]) -> None:
    if not 1 <= len(queries) <= QUERIES_MAX:
        raise Refusal(
            Reason.COUNT_MISMATCH,
            f"one query for each group, 1 to {QUERIES_MAX}",
            field="queries",
            value=len(queries),
        )


def _check_no_window(index: int, query: cache_pb2.GroupQuery) -> None:
    if query.window_blocks:
        raise _refused(
            index, "window_blocks", query.window_blocks, "only LOOKUP_MODE_SUFFIX has a window: leave it 0"
        )


def _refused(index: int, field: str, value: object, message: str) -> Refusal:
    return Refusal(Reason.MODE_UNSUPPORTED, message, field=f"queries[{index}].{field}", value=value)
