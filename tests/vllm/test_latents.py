"""MLA at vLLM's scheduler: the latents are the same on every rank, are stored once, and come back to all.

A real engine has them only where vLLM caches the prefixes of MLA models on a processor, which it does on one
with AMX (test_families.py, test_parallel.py); this runs everywhere.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.daemon import DaemonHost
from tests.vllm.context_engine import ContextEngine, all_came_back, context_config
from tests.vllm.context_engine import host as host
from tests.vllm.mini_engine import LAYERS, TOKENS, WrongKV
from tests.vllm.mini_rig import compute, wait_ready
from tests.vllm.rig import flip_a_byte_of_every_block, kv_transfer_config, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
__all__ = ["host"]

LATENT = 64
"""Numbers of a token in each layer."""
BLOCKS = 48
BLOCK_BYTES = LAYERS * TOKENS * LATENT * 2


def latents() -> Any:
    """A KVCacheConfig of one group."""
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MLAAttentionSpec

    names = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=LATENT, dtype=torch.bfloat16)
    tensor = KVCacheTensor(
        size=BLOCKS * BLOCK_BYTES,
        layers=names,
        layer_stride=BLOCKS * TOKENS * LATENT * 2,
        block_stride=TOKENS * LATENT * 2,
    )
    return KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_latents_are_stored_once_and_loaded_by_every_rank(
    host: DaemonHost, model: Any, patience: dict[str, Any], monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr("kvtier_vllm.connector.ATTACH_WAIT_S", 0.0)  # a rank alone is never ready
    options = patience | {"salt": f"latents {ranks}", "lookup_budget_ms": 1_000}
    transfer = kv_transfer_config(host.socket, **options)
    engine = ContextEngine(context_config(model, transfer, ranks=ranks, spread=1), BLOCKS, latents())
    try:
        wait_ready(engine)
        tokens = prompt(10 * TOKENS + 5)
        before = host.status().counters
        assert compute(engine, "computed", tokens, max_tokens=2) == 0
        after = host.status().counters
        assert after.stored_blocks - before.stored_blocks == 10
        assert after.stored_bytes - before.stored_bytes == 10 * BLOCK_BYTES, "and not by each rank"
        engine.forget()
        assert compute(engine, "loaded", tokens, max_tokens=2) == 10 * TOKENS
        all_came_back(engine)
        engine.forget()
        assert flip_a_byte_of_every_block(host.daemon.pool) >= 10
        engine.add("spoilt", tokens)
        with pytest.raises(WrongKV, match="spoilt, rank 0"):
            engine.run()
    finally:
        flip_a_byte_of_every_block(host.daemon.pool)
        engine.close()
