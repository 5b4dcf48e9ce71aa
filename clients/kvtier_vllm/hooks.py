"""Interfaces of vLLM that differ between the releases 0.29 to 0.33, or that are replaced at run time.

docs/design/connector.md lists every interface that the connector uses and that vLLM does not promise to keep,
with the releases in which each was seen, what it is for, and what is done without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any


def block_table(output: Any, request: str) -> Sequence[Sequence[int]] | None:
    """Returns the block ids of a request that is scheduled in this step, group by group, or None if vLLM does
    not tell them."""
    state = output.kv_connector_block_state
    if hasattr(state, "get_block_ids"):
        found: Sequence[Sequence[int]] | None = state.get_block_ids(request)
        return found
    of_step: dict[str, Sequence[Sequence[int]]] = state.block_ids  # 0.29
    return of_step.get(request)


def around_reset(pool: Any, before: Callable[[], object], after: Callable[[bool], object]) -> None:
    """Calls `before` whenever vLLM is about to reset a block pool, which vLLM refuses while a block is used,
    and then `after` with whether it was reset. vLLM itself tells connectors only if it is asked to, and only
    afterwards."""
    reset = getattr(pool, "reset_prefix_cache", None)
    if reset is None:
        return

    def settled_reset() -> Any:
        before()
        done = reset()
        after(bool(done))
        return done

    pool.reset_prefix_cache = settled_reset


if TYPE_CHECKING:
    KVConnectorTransferResults = Any
else:
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    except ImportError:

        @dataclass
        class KVConnectorTransferResults:
            """The class of the same name in vLLM 0.30, for vLLM 0.29."""

            finished_sending: set[str] = field(default_factory=set)
            finished_recving: set[str] = field(default_factory=set)
            failed_recving: set[str] = field(default_factory=set)


try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    CACHE_HIT_SOURCE: Any = CacheHitSource.HOST
except ImportError:
    CACHE_HIT_SOURCE = None
