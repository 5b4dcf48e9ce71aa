"""Which pools an engine's cache consists of, and which caches are refused: by stand-ins for SGLang's classes,
which are told apart by their names."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvtier_sglang.pools import UnsupportedPool, check_components, is_replicated, pools_of

pytestmark = pytest.mark.sglang
PAGE, PAGES, LAYERS, STATES = 4, 6, 2, 5


def buffers(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(PAGE * PAGES, *shape).to(torch.bfloat16) for _ in range(LAYERS)]


class MHATokenToKVPool:
    def __init__(self, layout: str = "nhd", quantized: bool = False) -> None:
        self.k_buffer, self.v_buffer = buffers(2, 8), buffers(2, 8)
        self.kv_cache_layout, self.is_quantized_kv_cache = layout, quantized


class MLATokenToKVPool:
    def __init__(self) -> None:
        self.kv_buffer, self.kv_scale_buffer = buffers(1, 24), None


class SWAKVPool:
    def __init__(self) -> None:
        self.full_kv_pool, self.swa_kv_pool = MHATokenToKVPool(), MHATokenToKVPool()


class HybridLinearKVPool:
    def __init__(self, full: Any) -> None:
        self.full_kv_pool = full


class UnifiedMHATokenToKVPool(MHATokenToKVPool):
    """Of another class, whose rows may be somebody else's."""


@dataclass
class MambaState:
    conv: list[torch.Tensor]
    temporal: torch.Tensor
    replayssm_d: torch.Tensor | None = None


def params(*, states: bool = False, **changes: Any) -> Any:
    cache = MambaState(
        [torch.randn(LAYERS, STATES, 6, 3)],
        torch.randn(LAYERS, STATES, 2, 4, 4),
        changes.pop("replay", None),
    )
    pool = SimpleNamespace(
        mamba_cache=cache, num_mamba_layers=LAYERS, _slot_siblings=changes.pop("siblings", ())
    )
    requests = SimpleNamespace(mamba_pool=pool, **changes) if states else SimpleNamespace()
    return SimpleNamespace(page_size=PAGE, sliding_window_size=7, req_to_token_pool=requests)


@pytest.mark.parametrize(
    ("kvcache", "states", "expected"),
    [
        (MHATokenToKVPool(), False, [("kv", PAGE, 0)]),
        (MLATokenToKVPool(), False, [("kv", PAGE, 0)]),
        (SWAKVPool(), False, [("kv", PAGE, 0), ("swa", PAGE, 2)]),
        (HybridLinearKVPool(MHATokenToKVPool()), True, [("kv", PAGE, 0), ("mamba", 1, 1)]),
        (HybridLinearKVPool(MLATokenToKVPool()), True, [("kv", PAGE, 0), ("mamba", 1, 1)]),
        (SWAKVPool(), True, [("kv", PAGE, 0), ("swa", PAGE, 2), ("mamba", 1, 1)]),
    ],
)
def test_each_component_has_a_pool_and_pages_of_it_come_back(
    kvcache: Any, states: bool, expected: list[tuple[str, int, int]]
) -> None:
    pools = pools_of(kvcache, params(states=states))
    assert [(pool.name, pool.page_slots, pool.window_blocks) for pool in pools] == expected
    check_components(pools, [{"kv": "FULL", "swa": "SWA", "mamba": "MAMBA"}[name] for name, _, _ in expected])
    for pool in pools:
        rows = torch.zeros(4, pool.page_bytes, dtype=torch.uint8)
        pool.gather([1, 3], rows, [0, 2])
        assert not torch.equal(rows[0], rows[2])
        kept = rows.clone()
        pool.scatter(rows, [2], [1])
        pool.gather([1], rows, [1])
        assert torch.equal(rows[1], kept[2])


def test_only_what_is_the_same_on_all_ranks_is_stored_once() -> None:
    assert is_replicated(MLATokenToKVPool())
    assert not is_replicated(MHATokenToKVPool())
    assert not is_replicated(HybridLinearKVPool(MLATokenToKVPool())), "its states are each rank's own"


@pytest.mark.parametrize(
    ("kvcache", "given", "told"),
    [
        (MHATokenToKVPool(layout="hnd"), {}, "layout 'hnd'"),
        (MHATokenToKVPool(quantized=True), {}, "scales of its own"),
        (UnifiedMHATokenToKVPool(), {}, "of the kind UnifiedMHATokenToKVPool are not supported"),
        (MHATokenToKVPool(), {"states": True, "replay": torch.zeros(1)}, "have replayssm_d"),
        (MHATokenToKVPool(), {"states": True, "siblings": (MLATokenToKVPool(),)}, "have MLATokenToKVPool"),
        (MHATokenToKVPool(), {"states": True, "mamba_ckpt_pool": SimpleNamespace()}, "with mamba_ckpt_pool"),
        (
            MHATokenToKVPool(),
            {"states": True, "short_conv_pool": SimpleNamespace(enabled=True)},
            "with short_conv_pool",
        ),
    ],
)
def test_what_cannot_be_restored_is_refused_by_name(kvcache: Any, given: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedPool, match=told):
        pools_of(kvcache, params(**given))


def test_a_tree_with_a_component_that_has_no_pool_is_refused() -> None:
    pools = pools_of(MHATokenToKVPool(), params())
    check_components(pools, ["FULL"])
    for components in (["FULL", "SWA"], ["FULL", "OTHER"], []):
        with pytest.raises(UnsupportedPool, match="differ in"):
            check_components(pools, components)
