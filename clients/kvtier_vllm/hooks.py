"""Every interface of vLLM that the connector uses and that vLLM does not promise to keep: in which of the
releases 0.29 to 0.33 each was seen, what it is for, and what is done without it.

Everything else of vLLM's is reached through these. Other releases are refused, or get a namespace of their
own (see `namespace`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

ALL = "0.29 to 0.33"


@dataclass(frozen=True, slots=True)
class Hook:
    """One interface of vLLM."""

    name: str
    seen_in: str
    use: str
    without: str = "not supported"


HOOKS = (
    Hook("KVConnectorBase_V1, SupportsHMA", ALL, "the connector itself; hybrid models"),
    Hook("KVConnectorMetadata (pickled)", ALL, "what the scheduler tells the workers in each step"),
    Hook("get_num_new_matched_tokens → (None, _)", ALL, "a request whose answer is on its way"),
    Hook("update_state_after_alloc called again with 0", ALL, "after an asynchronous load"),
    Hook(
        "SchedulerOutput.kv_connector_block_state",
        ALL,
        "block tables of running requests",
        "0.29 has those of requests that got blocks in this step: a full block is stored with the next one",
    ),
    Hook("bind_connector_metadata before the forward pass", ALL, "the load doorbell, once blocks are zeroed"),
    Hook("wait_for_save in every step", ALL, "the store doorbell"),
    Hook("has_connector_metadata, asked around each layer", ALL, "layers that wait for nothing"),
    Hook("handle_preemptions before blocks are overwritten", ALL, "the fence of stores"),
    Hook("get_block_ids_with_load_errors", ALL, "failed loads of one KV cache group"),
    Hook(
        "KVConnectorTransferResults, get_transfer_results",
        "0.30 to 0.33",
        "failed loads of several groups",
        "get_finished, and hybrid models are refused",
    ),
    Hook(
        "get_mem_pool_context",
        "0.31 to 0.33",
        "a CPU engine's KV cache is shared memory from the start",
        "an engine on a CPU goes on without kvtier; on a GPU it is not needed",
    ),
    Hook("get_required_kvcache_layout", ALL, "`contiguous_blocks`"),
    Hook(
        "_cache_hit_source, CacheHitSource",
        "0.32 to 0.33",
        "vLLM's own metric of cached tokens by source",
        "loaded tokens are counted without a source",
    ),
    Hook(
        "supports_sleep_mode, unregister_kv_caches, restore_kv_caches",
        "0.33",
        "engines that sleep",
        "sleep mode is refused",
    ),
    Hook("KVConnectorStats, KVConnectorPromMetrics", ALL, "the log line and vllm:kvtier_* metrics"),
    Hook("take_events, BlockStored, BlockRemoved", ALL, "KV events, where they are enabled"),
    Hook("Request.num_in_flight_tokens", ALL, "what failed loads of another connector cannot spoil any more"),
    Hook(
        "KVConnectorFactory.register_connector, _registry",
        ALL,
        "our statistics, within those of a MultiConnector",
    ),
    Hook("Request.kv_transfer_params", ALL, "what a request says of its own stores and loads"),
    Hook("reset_cache", ALL, "a new generation of the namespace"),
    Hook("bind_gpu_block_pool; BlockPool.touch, free_blocks, ref_cnt", ALL, "blocks that stores still read"),
    Hook(
        "BlockPool.reset_prefix_cache, called by its attribute",
        ALL,
        "what stores hold comes back before vLLM looks whether all blocks are free",
        "a reset right after a request may be refused",
    ),
    Hook(
        "has_pending_block_frees",
        "0.30 to 0.33",
        "waiting for blocks that come back at once",
        "requests are preempted instead",
    ),
    Hook(
        "KVConnectorWorkerMetadata, KVConnectorOutput.kv_connector_worker_meta",
        ALL,
        "results of audits; weights that have changed",
    ),
    Hook(
        "BlockPool.get_new_blocks, touch, free_blocks, evict_blocks",
        ALL,
        "blocks that stores and audits hold",
    ),
    Hook("on_new_request", ALL, "prefetching for the queue"),
    Hook("KVCacheConfig, KVCacheTensor, *Spec", ALL, "where the blocks of each group lie"),
    Hook(
        "KVCacheSpec.dcp_sharded",
        "0.31 to 0.33",
        "blocks whose tokens are spread over the ranks of a context",
        "decode context parallelism is refused",
    ),
    Hook(
        "lora.worker_manager.WorkerLoRAManager._load_adapter, wrapped",
        ALL,
        "which files the workers have read an adapter from",
        "kvtier is off for engines with LoRA",
    ),
    Hook(
        "WorkerBase and the model runners: calls that change weights, and load_weights of models, wrapped",
        ALL,
        "weights that change without a reset",
        "kvtier is off for the engine",
    ),
    Hook("vllm.v1.core.kv_cache_utils: block hashes", ALL, "the keys; NONE_HASH from a fixed seed"),
)


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
