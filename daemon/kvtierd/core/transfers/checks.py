"""Checks of hashes and queries, before anything is looked up."""

from collections.abc import Sequence

import numpy as np

from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import HASH_BYTES_MAX, Hashes
from kvtierd.core.stimuli import BlockQuery

_U8 = np.dtype(np.uint8)


def check_queries(queries: Sequence[BlockQuery], count_max: int, *, together: bool) -> None:
    """Raises Refusal COUNT_MISMATCH, MALFORMED, MODE_UNSUPPORTED, UNKNOWN_GROUP or TOO_MANY_BLOCKS.
    `together`: the queries get one answer, not one each."""
    if not queries:
        raise Refusal(Reason.COUNT_MISMATCH, "one query at least", field="queries", value=0)
    hashes = 0
    for index, query in enumerate(queries):
        check_hashes(query.hashes, count_max)
        hashes += len(query.hashes)
        if query.window_blocks < 0:
            raise Refusal(
                Reason.MALFORMED,
                "a window has 1 block or more; 0 for none",
                field=f"queries[{index}].window_blocks",
                value=query.window_blocks,
            )
        if query.exact and (query.window_blocks or (together and len(queries) > 1)):
            raise Refusal(
                Reason.MODE_UNSUPPORTED,
                "blocks that are asked for by themselves make no prefix with others",
                field=f"queries[{index}].exact",
                value=True,
            )
    if len(queries) == 1:
        return
    if len({query.group for query in queries}) < len(queries):
        groups = [query.group for query in queries]
        raise Refusal(Reason.UNKNOWN_GROUP, "name each group once", field="queries", value=groups)
    if hashes > count_max:
        raise Refusal(
            Reason.TOO_MANY_BLOCKS,
            f"at most {count_max} in one call, of all groups together",
            field="queries",
            value=hashes,
        )


def check_hashes(hashes: Hashes, count_max: int) -> None:
    """Raises Refusal MALFORMED or TOO_MANY_BLOCKS."""
    if hashes.dtype != _U8 or hashes.ndim != 2 or hashes.shape[1] != HASH_BYTES_MAX:
        raise Refusal(
            Reason.MALFORMED,
            f"hashes are rows of {HASH_BYTES_MAX} bytes, padded with zeros",
            field="hashes",
            value=f"{hashes.dtype} {hashes.shape}",
        )
    if not hashes.flags.c_contiguous:
        raise Refusal(
            Reason.MALFORMED, "hashes must lie one after another", field="hashes", value=hashes.strides
        )
    if len(hashes) > count_max:
        raise Refusal(
            Reason.TOO_MANY_BLOCKS,
            f"at most {count_max} in one call: split it",
            field="hashes",
            value=len(hashes),
        )
