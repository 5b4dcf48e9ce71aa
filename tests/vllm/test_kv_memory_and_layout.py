"""The engine's KV cache lies in shareable memory, and the planes say where: on vLLM's own allocator."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from dataclasses import replace
from typing import Any

import pytest
from kvtier_vllm.kv_memory import NotShareable, SharedKVMemory
from kvtier_vllm.layout import UnsupportedLayout, describe

pytestmark = pytest.mark.vllm

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


@pytest.mark.parametrize(
    ("layout", "across_layers"), [("LBHNC", False), ("LBNHC", False), ("BLHNC", True), ("BLNHC", True)]
)
def test_planes_lead_to_every_block_of_every_layer(
    memory: SharedKVMemory, layout: str, across_layers: bool
) -> None:
    kv_cache_config = config(across_layers)
    caches = allocate(kv_cache_config, layout, memory)
    found = describe(caches, kv_cache_config, memory)
    assert (found.num_blocks, found.block_tokens, found.block_bytes) == (BLOCKS, TOKENS, LAYERS * PAGE_BYTES)
    # Written through torch, read through a mapping of the descriptor alone, as the daemon has it.
    for number, plane in enumerate(found.planes):
        for block in range(BLOCKS):
            caches[plane.layer][block] = number * BLOCKS + block + 1
    with mmap.mmap(memory.fileno(), memory.size_bytes) as elsewhere:
        import torch

        for number, plane in enumerate(found.planes):
            for block in range(BLOCKS):
                start = plane.base_offset + block * plane.block_stride_bytes
                fragment = bytearray(elsewhere[start : start + plane.fragment_bytes])
                values = torch.frombuffer(fragment, dtype=torch.bfloat16)
                assert values.unique().tolist() == [number * BLOCKS + block + 1]


def test_what_another_process_writes_is_what_the_engine_reads(memory: SharedKVMemory) -> None:
    kv_cache_config = config(across_layers=False)
    caches = allocate(kv_cache_config, "LBHNC", memory)
    plane = describe(caches, kv_cache_config, memory).planes[1]
    offset = plane.base_offset + 3 * plane.block_stride_bytes
    os.pwrite(memory.fileno(), b"\x3f\x3f" * (plane.fragment_bytes // 2), offset)
    cache = caches[plane.layer]
    assert cache[3].unique().numel() == 1
    assert cache[3].flatten()[0] != 0
    assert not cache[2].any()
    assert not cache[4].any()


def test_memory_is_zero_sealed_and_whole_pages() -> None:
    memory = SharedKVMemory(5000)
    assert memory.size_bytes == 8192
    assert os.pread(memory.fileno(), 8192, 0) == bytes(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fileno(), 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fileno(), 16384)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    memory.close()
    memory.close()


def test_only_the_kv_allocation_is_answered(memory: SharedKVMemory) -> None:
    import torch

    wanted = BLOCKS * LAYERS * PAGE_BYTES
    with memory.allocation_context():
        others = [
            torch.zeros(wanted, dtype=torch.uint8),
            torch.zeros(wanted + 1, dtype=torch.int8),
            torch.zeros(wanted, dtype=torch.int8, pin_memory=False),
            torch.ones(wanted, dtype=torch.int8),
        ]
        first = torch.zeros((wanted,), dtype=torch.int8, device=torch.device("cpu"))
        second = torch.zeros(wanted, dtype=torch.int8)
    assert memory.offset_of("first", first) == 0
    for other in [*others, second]:
        with pytest.raises(NotShareable, match="outside"):
            memory.offset_of("other", other)


def test_a_cache_allocated_elsewhere_is_reported_not_shared(memory: SharedKVMemory) -> None:
    kv_cache_config = config(across_layers=False)
    caches = allocate(kv_cache_config, "LBHNC")
    with pytest.raises(NotShareable, match="did not allocate its KV cache through"):
        describe(caches, kv_cache_config, memory)


def test_one_layer_outside_the_memory_is_enough_to_refuse(memory: SharedKVMemory) -> None:
    kv_cache_config = config(across_layers=False)
    caches = allocate(kv_cache_config, "LBHNC", memory)
    name = next(reversed(caches))
    caches[name] = caches[name].clone()
    with pytest.raises(NotShareable, match=r"layers\.2.*outside"):
        describe(caches, kv_cache_config, memory)


def test_layers_that_reuse_a_cache_are_stored_once(memory: SharedKVMemory) -> None:
    kv_cache_config = config(across_layers=False)
    caches = allocate(kv_cache_config, "LBHNC", memory)
    names = kv_cache_config.kv_cache_groups[0].layer_names
    caches["model.layers.9.self_attn.attn"] = caches[names[0]]
    names.append("model.layers.9.self_attn.attn")
    assert [plane.layer for plane in describe(caches, kv_cache_config, memory).planes] == names[:LAYERS]


def test_kernel_blocks_smaller_than_a_block_make_whole_blocks(memory: SharedKVMemory) -> None:
    kv_cache_config = config(across_layers=False)
    caches = allocate(kv_cache_config, "LBHNC", memory)
    halves = {
        name: cache.view(BLOCKS * 2, HEADS, TOKENS // 2, 2 * HEAD_SIZE) for name, cache in caches.items()
    }
    found = describe(halves, kv_cache_config, memory)
    assert [plane.fragment_bytes for plane in found.planes] == [PAGE_BYTES] * LAYERS
    assert [plane.block_stride_bytes for plane in found.planes] == [PAGE_BYTES] * LAYERS
    assert found.planes[0].description != describe(caches, kv_cache_config, memory).planes[0].description


def test_blocks_torn_apart_inside_a_layer_are_refused(memory: SharedKVMemory) -> None:
    kv_cache_config = config(across_layers=False)
    caches = allocate(kv_cache_config, "LBHNC", memory)
    torn = {
        name: cache.as_strided(cache.shape, (1024, BLOCKS * 1024, 64, 1)) for name, cache in caches.items()
    }
    with pytest.raises(UnsupportedLayout, match="contiguous"):
        describe(torn, kv_cache_config, memory)


def test_overlapping_layers_are_refused(memory: SharedKVMemory) -> None:
    kv_cache_config = config(across_layers=False)
    caches = allocate(kv_cache_config, "LBHNC", memory)
    first, second = kv_cache_config.kv_cache_groups[0].layer_names[:2]
    shape, strides = caches[first].shape, caches[first].stride()
    caches[second] = caches[first].as_strided(shape, strides, storage_offset=64)
    with pytest.raises(UnsupportedLayout, match="share bytes"):
        describe(caches, kv_cache_config, memory)


def test_a_first_dimension_that_is_not_blocks_is_refused(memory: SharedKVMemory) -> None:
    kv_cache_config = config(across_layers=False)
    caches = allocate(kv_cache_config, "LBHNC", memory)
    swapped = {name: cache.transpose(0, 1) for name, cache in caches.items()}
    with pytest.raises(UnsupportedLayout, match="first dimension"):
        describe(swapped, kv_cache_config, memory)


def test_other_kinds_of_cache_are_refused_by_name(memory: SharedKVMemory) -> None:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    window = SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16, sliding_window=64
    )
    caches = allocate(config(across_layers=False), "LBHNC", memory)
    with pytest.raises(UnsupportedLayout, match="SlidingWindowSpec"):
        describe(caches, config(across_layers=False, groups=[window]), memory)
    with pytest.raises(UnsupportedLayout, match="2 KV cache groups"):
        describe(caches, config(across_layers=False, groups=[spec(), window]), memory)
    with pytest.raises(UnsupportedLayout, match="later tokens"):
        describe(caches, config(across_layers=False, groups=[spec(non_causal=True)]), memory)


def test_blocks_that_are_zeroed_before_anybody_hears_of_it_are_refused(memory: SharedKVMemory) -> None:
    import torch
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    names = config(False).kv_cache_groups[0].layer_names
    specs = dict.fromkeys(names, spec()) | {names[1]: spec(dtype=torch.float16)}
    mixed = config(False, [UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs)])
    assert mixed.needs_kv_cache_zeroing
    caches = allocate(config(False), "LBHNC", memory)
    with pytest.raises(UnsupportedLayout, match="one KV cache dtype for all layers"):
        describe(caches, mixed, memory)


def test_layers_of_different_geometry_have_different_descriptions() -> None:
    def description(layout: str, across_layers: bool) -> str:
        memory = SharedKVMemory(BLOCKS * LAYERS * PAGE_BYTES)
        kv_cache_config = config(across_layers)
        caches = allocate(kv_cache_config, layout, memory)
        memory.close()
        return describe(caches, kv_cache_config, memory).planes[0].description

    assert description("LBHNC", False) != description("LBNHC", False)
    # Where blocks lie may differ; the bytes of one do not.
    assert description("LBHNC", False) == description("BLHNC", True)
