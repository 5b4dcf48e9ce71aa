"""The KV memory of an engine, as vLLM allocates it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from kvtier_vllm.worker.kv_memory import SharedKVMemory

BLOCKS, TOKENS, HEADS, HEAD_SIZE, LAYERS = 5, 16, 2, 32, 3
PAGE_BYTES = HEADS * TOKENS * 2 * HEAD_SIZE * 2  # K and V of one layer's block in bfloat16


def spec(**changes: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    plain = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    return replace(plain, **changes)


def config(across_layers: bool, groups: list[Any] | None = None) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    names = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
    tensor = KVCacheTensor(
        size=BLOCKS * LAYERS * PAGE_BYTES,
        layers=names,
        layer_stride=PAGE_BYTES if across_layers else PAGE_BYTES * BLOCKS,
        block_stride=PAGE_BYTES * LAYERS if across_layers else PAGE_BYTES,
    )
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(names, one) for one in groups or [spec()]],
    )


def allocate(kv_cache_config: Any, layout: str, memory: SharedKVMemory | None = None) -> dict[str, Any]:
    import torch
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    with memory.allocation_context() if memory is not None else contextlib.nullcontext():
        return dict(allocate_kv_cache(kv_cache_config, torch.device("cpu"), KVCacheLayout[layout]))


@pytest.fixture
def memory() -> Any:
    memory = SharedKVMemory(BLOCKS * LAYERS * PAGE_BYTES)
    yield memory
    memory.close()
