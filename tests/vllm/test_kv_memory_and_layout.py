"""The engine's KV cache lies in shareable memory, and the planes say where: on vLLM's own allocator."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import kvtier.memory
import pytest
from kvtier import Group, GroupKind, Plane
from kvtier_vllm.groups import UnsupportedLayout, groups_of
from kvtier_vllm.worker.kv_memory import NotShareable, SharedKVMemory
from kvtier_vllm.worker.layout import GroupLayout, describe
from kvtier_vllm.worker.sharing_choice import covering

from tests.vllm.kv_memory import BLOCKS, HEAD_SIZE, HEADS, LAYERS, PAGE_BYTES, TOKENS, allocate, config, spec
from tests.vllm.kv_memory import memory as memory

pytestmark = pytest.mark.vllm


def first_of(layout: GroupLayout) -> Plane:
    return next(iter(layout.planes.values()))


@pytest.mark.parametrize(
    ("layout", "across_layers"), [("LBHNC", False), ("LBNHC", False), ("BLHNC", True), ("BLNHC", True)]
)
def test_planes_lead_to_every_block_of_every_layer(
    memory: SharedKVMemory, layout: str, across_layers: bool
) -> None:
    kv_cache_config = config(across_layers)
    caches = allocate(kv_cache_config, layout, memory)
    [found] = describe(caches, kv_cache_config, memory)
    block_bytes = sum(plane.fragment_bytes for plane in found.planes.values())
    assert (found.num_blocks, found.shape.block_tokens, block_bytes) == (BLOCKS, TOKENS, LAYERS * PAGE_BYTES)
    # Written through torch, read through a mapping of the descriptor alone, as the daemon has it.
    for number, layer in enumerate(found.planes):
        for block in range(BLOCKS):
            caches[layer][block] = number * BLOCKS + block + 1
    with mmap.mmap(memory.fileno(), memory.size_bytes) as elsewhere:
        import torch

        for number, plane in enumerate(found.planes.values()):
            for block in range(BLOCKS):
                start = plane.base_offset + block * plane.block_stride_bytes
                fragment = bytearray(elsewhere[start : start + plane.fragment_bytes])
                values = torch.frombuffer(fragment, dtype=torch.bfloat16)
                assert values.unique().tolist() == [number * BLOCKS + block + 1]


def test_what_another_process_writes_is_what_the_engine_reads(memory: SharedKVMemory) -> None:
    kv_cache_config = config(across_layers=False)
    caches = allocate(kv_cache_config, "LBHNC", memory)
    layer, plane = list(describe(caches, kv_cache_config, memory)[0].planes.items())[1]
    offset = plane.base_offset + 3 * plane.block_stride_bytes
    os.pwrite(memory.fileno(), b"\x3f\x3f" * (plane.fragment_bytes // 2), offset)
    cache = caches[layer]
    assert cache[3].unique().numel() == 1
    assert cache[3].flatten()[0] != 0
    assert not cache[2].any()
    assert not cache[4].any()


def test_memory_is_zero_allocated_sealed_and_whole_pages() -> None:
    memory = SharedKVMemory(5000)
    assert memory.size_bytes == 8192
    assert os.fstat(memory.fileno()).st_blocks * 512 == 8192, "the engine pays for it, and not the daemon"
    assert os.pread(memory.fileno(), 8192, 0) == bytes(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fileno(), 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fileno(), 16384)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    memory.close()
    memory.close()


def test_memory_that_is_not_there_is_told_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtier.memory, "MADV_POPULATE_WRITE", -1)  # the system refuses
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotShareable, match=r"size_bytes=8192: no memory for so many bytes.*share less"):
        SharedKVMemory(5000)
    assert len(os.listdir("/proc/self/fd")) == before


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
    assert list(describe(caches, kv_cache_config, memory)[0].planes) == names[:LAYERS]


def test_kernel_blocks_smaller_than_a_block_make_whole_blocks(memory: SharedKVMemory) -> None:
    kv_cache_config = config(across_layers=False)
    caches = allocate(kv_cache_config, "LBHNC", memory)
    halves = {
        name: cache.view(BLOCKS * 2, HEADS, TOKENS // 2, 2 * HEAD_SIZE) for name, cache in caches.items()
    }
    [found] = describe(halves, kv_cache_config, memory)
    assert [plane.fragment_bytes for plane in found.planes.values()] == [PAGE_BYTES] * LAYERS
    assert [plane.block_stride_bytes for plane in found.planes.values()] == [PAGE_BYTES] * LAYERS
    [whole] = describe(caches, kv_cache_config, memory)
    assert first_of(found).description != first_of(whole).description


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


def window_spec(**changes: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    options = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": HEAD_SIZE, "sliding_window": 64}
    return SlidingWindowSpec(**options | {"dtype": torch.bfloat16} | changes)


def state_spec(**changes: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    options: dict[str, Any] = {
        "block_size": TOKENS,
        "shapes": ((64,), (8, 16)),
        "dtypes": (torch.bfloat16, torch.float32),
        "page_size_padded": PAGE_BYTES,
        "mamba_cache_mode": "align",
    }
    return MambaSpec(**options | changes)


def test_groups_may_lie_over_each_other(memory: SharedKVMemory) -> None:
    import torch

    both = config(across_layers=False, groups=[spec(), window_spec()])
    caches = allocate(config(across_layers=False), "LBHNC", memory)
    full, window = describe(caches, both, memory)
    assert (full.shape.kind, full.shape.window_blocks) == (GroupKind.FULL_ATTENTION, 0)
    assert (window.shape.kind, window.shape.window_tokens) == (GroupKind.SLIDING_WINDOW, 64)
    assert window.shape.window_blocks == 4
    for one, other in zip(full.planes.values(), window.planes.values(), strict=True):
        assert (one.base_offset, one.description) == (other.base_offset, other.description)
    states = config(across_layers=False, groups=[spec(), state_spec()])
    pages = {name: cache.view(torch.int8).view(BLOCKS, -1) for name, cache in caches.items()}
    content = {name: page[:, : 128 + 512] for name, page in pages.items()}
    _, state = describe(content, states, memory)
    assert sum(plane.fragment_bytes for plane in state.planes.values()) == LAYERS * (128 + 512)
    assert {plane.block_stride_bytes for plane in state.planes.values()} == {PAGE_BYTES}
    assert "MAMBA2 states bfloat16[64] float32[8, 16]" in first_of(state).description
    other = config(across_layers=False, groups=[spec(), state_spec(shapes=((64,), (16, 8)))])
    assert first_of(describe(content, other, memory)[1]).description != first_of(state).description


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: spec(non_causal=True), "later tokens"),
        (lambda: spec(tokens_per_state=4), "packs several tokens"),
        (lambda: window_spec(sliding_window=1), "window of 1 tokens"),
        (lambda: window_spec(extra_retained_tokens=3), "draft models"),
        (lambda: state_spec(mamba_cache_mode="none"), "mamba_cache_mode='none'"),
        (lambda: state_spec(num_speculative_blocks=1), "speculative decoding"),
    ],
)
def test_other_kinds_of_cache_are_refused_by_name(
    memory: SharedKVMemory, other: Callable[[], Any], named: str
) -> None:
    caches = allocate(config(across_layers=False), "LBHNC", memory)
    with pytest.raises(UnsupportedLayout, match=named):
        describe(caches, config(across_layers=False, groups=[spec(), other()]), memory)


def test_subclasses_and_groups_that_lie_elsewhere_are_refused_by_name(memory: SharedKVMemory) -> None:
    import torch
    from vllm.v1.kv_cache_interface import RSWASpec

    caches = allocate(config(across_layers=False), "LBHNC", memory)
    reference = RSWASpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16, rswa_window=64
    )
    with pytest.raises(UnsupportedLayout, match="RSWASpec"):
        describe(caches, config(across_layers=False, groups=[reference]), memory)
    elsewhere = config(across_layers=False)
    elsewhere.kv_cache_groups[0].host_resident = True
    with pytest.raises(UnsupportedLayout, match="host memory"):
        describe(caches, elsewhere, memory)


@pytest.mark.parametrize("groups", [[spec, window_spec], [window_spec]], ids=["several groups", "a window"])
def test_a_draft_that_looks_ahead_is_refused_beside_windows(groups: list[Any]) -> None:
    fed = SimpleNamespace(speculative_config=SimpleNamespace(use_eagle=lambda: True))
    found = config(across_layers=False, groups=[one() for one in groups])
    with pytest.raises(UnsupportedLayout, match="fed hidden states"):
        groups_of(found, fed)
    alone = config(across_layers=False)
    alone.kv_cache_groups[0].is_eagle_group = True
    assert groups_of(alone, fed).looks_ahead
    assert not groups_of(alone, SimpleNamespace(speculative_config=None)).looks_ahead


def test_states_that_lie_elsewhere_in_part_are_refused() -> None:
    states = config(across_layers=False, groups=[spec(), state_spec()])
    engine = SimpleNamespace(cache_config=SimpleNamespace(use_replayssm=True))
    with pytest.raises(UnsupportedLayout, match="use_replayssm"):
        groups_of(states, engine)


def test_a_mirror_has_all_bytes_that_a_block_has_in_some_group() -> None:
    def group(*planes: tuple[int, int, int]) -> Group:
        return Group(
            block_tokens=16,
            num_blocks=4,
            planes=tuple(
                Plane(fragment_bytes=size, base_offset=base, block_stride_bytes=stride)
                for size, base, stride in planes
            ),
        )

    found = covering([group((64, 0, 128), (64, 512, 128)), group((96, 0, 128)), group((64, 40, 128))])
    assert [(plane.fragment_bytes, plane.base_offset) for plane in found.planes] == [(104, 0), (64, 512)]
    with pytest.raises(NotShareable, match="equally far apart"):
        covering([group((64, 0, 128)), group((64, 0, 256))])


def test_layers_of_different_geometry_have_different_descriptions() -> None:
    def description(layout: str, across_layers: bool) -> str:
        memory = SharedKVMemory(BLOCKS * LAYERS * PAGE_BYTES)
        kv_cache_config = config(across_layers)
        caches = allocate(kv_cache_config, layout, memory)
        memory.close()
        return first_of(describe(caches, kv_cache_config, memory)[0]).description

    assert description("LBHNC", False) != description("LBNHC", False)
    # Where blocks lie may differ; the bytes of one do not.
    assert description("LBHNC", False) == description("BLHNC", True)
