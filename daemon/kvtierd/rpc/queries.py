"""The queries of lookups, prefetches and touches, converted and completely checked. Pure functions.

Hashes stay one numpy array; where they have 32 bytes, it is a view of the message's own bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from kvtier.v1 import cache_pb2

from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import HASH_BYTES_MAX, Epoch, Hashes, SessionId
from kvtierd.core.stimuli import BlockQuery, CoreLimits

QUERIES_MAX = 64
"""As many as a rank may have groups."""

_NAMES = cache_pb2.LookupMode.items()
_BY_ITSELF = {mode: name for name, mode in _NAMES if mode != cache_pb2.LOOKUP_MODE_UNSPECIFIED}
_TOGETHER = {mode: name for mode, name in _BY_ITSELF.items() if mode != cache_pb2.LOOKUP_MODE_EXACT}
_TOUCHED = {mode: name for mode, name in _BY_ITSELF.items() if mode != cache_pb2.LOOKUP_MODE_SUFFIX}
"""The modes that each kind of call may use, and their names."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The session on whose behalf a request is converted."""

    session: SessionId
    epoch: Epoch
    """As the caller named it; the core refuses one that has ended."""
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


def queries_of(
    queries: Sequence[cache_pb2.GroupQuery],
    shared: bytes,
    caller: Caller,
    limits: CoreLimits,
    *,
    touched: bool = False,
) -> tuple[BlockQuery, ...]:
    """The queries of a lookup or a prefetch, or of a touch. Several groups of a lookup are answered together,
    and then none may be in exact mode; groups that are touched do not depend on each other."""
    modes = _TOUCHED if touched else _TOGETHER if len(queries) > 1 else _BY_ITSELF
    if not 1 <= len(queries) <= QUERIES_MAX:
        raise Refusal(
            Reason.COUNT_MISMATCH,
            f"one query for each group, 1 to {QUERIES_MAX}",
            field="queries",
            value=len(queries),
        )
    for index, query in enumerate(queries):
        mode, window = query.mode, query.window_blocks
        if mode not in modes:
            raise _refused(index, "mode", mode, f"use {' or '.join(modes.values())}")
        if mode == cache_pb2.LOOKUP_MODE_SUFFIX and not window:
            raise _refused(index, "window_blocks", 0, "LOOKUP_MODE_SUFFIX needs a window of 1 or more")
        if mode != cache_pb2.LOOKUP_MODE_SUFFIX and window:
            message = "only LOOKUP_MODE_SUFFIX has a window: leave it 0"
            raise _refused(index, "window_blocks", window, message)
    found = _all_hashes(queries, shared, caller, limits)
    exact = cache_pb2.LOOKUP_MODE_EXACT
    return tuple(
        [
            BlockQuery(query.group, hashes, query.window_blocks, query.mode == exact)
            for query, hashes in zip(queries, found, strict=True)
        ]
    )


def _all_hashes(
    queries: Sequence[cache_pb2.GroupQuery], shared: bytes, caller: Caller, limits: CoreLimits
) -> list[Hashes]:
    """The hashes of each query. Queries with the same stride share one array."""
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


def _refused(index: int, field: str, value: object, message: str) -> Refusal:
    return Refusal(Reason.MODE_UNSUPPORTED, message, field=f"queries[{index}].{field}", value=value)
