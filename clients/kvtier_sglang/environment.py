"""Which variables of the environment are part of what an engine's pages are.

SGLang 0.5.23 reads some 770 of them. Most say how something is computed, logged or reached, but others
change the bytes of a page: a layout of the cache, the dtype of a state, a cast to fewer bits. As with
arguments, each one counts that is set to something else than its default, unless it is known to change
nothing.
"""

from __future__ import annotations

import os
import re
from typing import Any

from kvtier_engine.rendering import Unnameable, digest_of, text_of

PREFIXES = ("SGLANG_", "SGL_", "AITER_", "ROCM_QUICK_REDUCE_")
"""Beginnings of the names of variables that count although SGLang does not list them."""
_WITHOUT_EFFECT = """
    BACKUP_PORT_BASE BLOCK_NONZERO_RANK_CHILDREN CACHE_DIR CHECK_KV_PAGE_INVARIANTS CPU_OMP_THREADS_BIND
    CRASH_ON_.* CUDA_COREDUMP.* CUTE_AOT_CACHE_DIR DATA_PARALLEL_BUDGET_INTERVAL DETECT_SLOW_RANK DG_CACHE_DIR
    DIAG_BYPASS_HEALTH_GENERATE DISAGG.* DISABLE_OUTLINES_DISK_CACHE DISTRIBUTED_INIT_METHOD_OVERRIDE
    EMBEDDING_POOL_SIZE_MB EMPTY_CACHE_INTERVAL ENABLE_ASYNC_ASSERT ENABLE_COLOCATED_BATCH_GEN
    ENABLE_CUDA_GRAPH_CAPTURE_TRACE ENABLE_DISAGG.* ENABLE_FAILED_SESSION_PROBE
    ENABLE_HEALTH_ENDPOINT_GENERATION ENABLE_HICACHE_.* ENABLE_METRICS_.* ENABLE_NAN_LOGITS_CHECK
    ENABLE_NVTX_.* ENABLE_RANK_CONSENSUS_CHECKER ENABLE_REQUEST_.* ENABLE_STRICT_MEM_CHECK_.*
    ENABLE_TORCH_INFERENCE_MODE ENABLE_TP_MEMORY_INBALANCE_CHECK ENABLE_TREE_CACHE_SANITY_CHECK
    ENABLE_WAITING_PREFIX_REFRESH ENCODER_(GRPC|RECV|SEND|HTTP|REQ)_TIMEOUT.* EXA_.*
    EXPERT_DISTRIBUTION_RECORDER_DIR EXPOSE_OWN_ENV_VARS FAILED_SESSION_.* FORCE_SHUTDOWN
    FORCE_STREAM_INTERVAL FORWARD_UNKNOWN_TOOLS GRAMMAR_.* GRAPH_BATCH_CAPTURE GRPC_.* HICACHE_.*
    HOST_IP HTTP_SERVER_APP_PATH INIT_NEW_TOKEN_RATIO INVARIANT_CHECK IS_FIRST_RANK_ON_NODE IS_IN_CI.*
    JIT_CACHE_.* JIT_LOG_.* KILLPG_ON_SCHEDULER_EXCEPTION LOAD_SNAPSHOT_USE_ZMQ LOG_.* LOCAL_IP_NIC
    MAX_BATCH_REQS_PER_HTTP_REQ MAX_NEW_TOKENS_LIMIT MEM_PROFILE_MAX_ENTRIES MIN_NEW_TOKEN_RATIO_FACTOR
    MOONCAKE_.* NEW_TOKEN_RATIO_DECAY_STEPS CLIP_MAX_NEW_TOKENS_ESTIMATION NUMA_BIND_V2 AUTO_NUMA_BIND
    ONE_VISIBLE_DEVICE_PER_PROCESS OTLP_.* PARALLEL_PROMPT_ENCODE.* PORT PREFETCH_BLOCK_SIZE_MB
    PREFILL_DELAYER_.* PROFILE_.* PYSPY_DUMP_BEFORE_CRASH RAY_BUNDLE_INDICES RECORD_STEP_TIME
    FLASHINFER_WORKSPACE_SIZE MM_FEATURE_CACHE_MB RUN_ID SYMM_MEM_PREALLOC_GB_SIZE VLM_CACHE_SIZE_MB
    REQUEST_STATE_WAIT_TIMEOUT REQ_(WAITING|RUNNING)_TIMEOUT RETRACT_DECODE_STEPS ROLE_NAMESPACES.*
    RUST_.* SCHEDULER_.* SET_CPU_AFFINITY SKIP_SGL_KERNEL_VERSION_CHECK SORT_WEIGHT_FILES TCP_STORE_PORT
    TIMEOUT_KEEP_ALIVE TOOL_STRICT_LEVEL TORCH_PROFILER_DIR TRACE_.* TRITON_LOAD_WARNING_THRESHOLD_GB
    TRITON_SLOW_COMPILE_THRESHOLD_SECS UNIFIED_RADIX_TREE_CORE_BACKEND USE_CPU_ENGINE
    USE_MESSAGE_QUEUE_BROADCASTER USE_MODELSCOPE USE_PICKLE_IPC UVICORN_.* WARMUP_TIMEOUT WEIGHT_CACHE_.*
    ZMQ_.*
"""
_HARMLESS = re.compile(f"(SGLANG|SGL)_({'|'.join(_WITHOUT_EFFECT.split())})")
OTHERS_WITHOUT_EFFECT = frozenset(
    (
        "ASCEND_NPU_PHY_ID",
        "DISABLE_OPENAPI_DOC",
        "ENABLE_ASCEND_TRANSFER_WITH_MOONCAKE",
        "EXA_API_KEY",
        "HF_HUB_DISABLE_XET",
        "IS_H200",
    )
)
"""Variables without SGLang's prefix that it lists, and that change no byte of a page."""


def variables_of(registry: object) -> dict[str, str]:
    """Returns the variables that count, as text by "env." and their names.

    registry: SGLang's `environ.envs`, whose fields parse values and know defaults.

    Raises Unnameable, which names the variable, for a value that cannot be told from others.
    """
    listed = _fields(registry)
    found = {}
    for name in sorted(os.environ):
        field = listed.get(name)
        if (field is None and not name.startswith(PREFIXES)) or _changes_nothing(name):
            continue
        value: Any = os.environ[name]
        if field is not None:  # not `if field`, which SGLang forbids
            value = field.get()
            if value == (field.default() if callable(field.default) else field.default):
                continue
        try:
            secret = getattr(field, "secret", False)
            found[f"env.{name}"] = digest_of(value) if secret else text_of(value)
        except Unnameable as error:
            raise Unnameable(f"the variable {name} is {error}") from error
    return found


def _changes_nothing(name: str) -> bool:
    return name in OTHERS_WITHOUT_EFFECT or name.startswith("MOONCAKE_") or bool(_HARMLESS.fullmatch(name))


def _fields(registry: object) -> dict[str, Any]:
    found = vars(type(registry)) | vars(registry)
    return {name: each for name, each in found.items() if hasattr(each, "parse") and hasattr(each, "default")}
