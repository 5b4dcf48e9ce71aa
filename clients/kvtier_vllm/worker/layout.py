"""Finds out where an engine's KV blocks lie: from vLLM's tensors to planes that a copy worker can follow.

It understands KV cache groups (see `groups`) whose layers are tensors `[blocks, ...]`, with every block dense
inside its layer, and refuses everything else by name. That covers vLLM 0.29 to 0.33 in the layouts with
per-layer pages and with contiguous blocks across layers. Groups may overlap in memory, layers of one group
may not.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier import KvtierError, Plane

from kvtier_vllm.groups import GroupShape, UnsupportedLayout, shape_of
from kvtier_vllm.worker.kv_memory import KVMemory

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GroupLayout:
    """One KV cache group."""

    shape: GroupShape
    num_blocks: int
    planes: dict[str, Plane]
    """The plane of each layer. A description says layer, geometry and dtype."""


def describe(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any, memory: KVMemory, spread: int = 1
) -> tuple[GroupLayout, ...]:
    """Returns the layout of the registered KV caches, group by group.

    `kv_caches` and `kv_cache_config` (a KVCacheConfig) are what the connector's worker was given. `memory` is
    what the caches were allocated from. `spread` is over how many ranks the tokens of each block are (see
    `groups.context_ranks`). Raises NotShareable or UnsupportedLayout with the reason.
    """
    found = enumerate(kv_cache_config.kv_cache_groups)
    groups = [(shape_of(index, group, spread), group) for index, group in found]
    memory.check(kv_caches)
    return tuple(
        GroupLayout(
            shape=shape,
            num_blocks=kv_cache_config.num_blocks,
            planes=_planes_of(group, kv_caches, kv_cache_config.num_blocks, memory),
        )
        for shape, group in groups
    )


def _planes_of(
    group: Any, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, memory: KVMemory
) -> dict[str, Plane]:
    planes: dict[str, Plane] = {}
    seen: set[int] = set()
    for name in group.layer_names:
        if name not in kv_caches:
            raise UnsupportedLayout(f"layer {name} is in the KV cache group but was not registered")
        plane = _plane_of(name, kv_caches[name], num_blocks, memory, _content(group.kv_cache_spec, name))
        # Layers that reuse another layer's cache are registered under both names, and stored once.
        if plane.base_offset not in seen:
            seen.add(plane.base_offset)
            planes[name] = plane
    _refuse_overlap(planes, num_blocks)
    return planes


def _content(spec: Any, layer: str) -> str:
    """Returns what the shape of a layer's tensor does not say, because that of a recurrent layer is bytes."""
    spec = getattr(spec, "kv_cache_specs", {}).get(layer, spec)
    shapes = getattr(spec, "shapes", None)
    if shapes is None:
        return ""
    dtypes = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
    kind = getattr(spec.mamba_type, "name", spec.mamba_type)
    return f" {kind} states " + " ".join(
        f"{dtype}{list(shape)}" for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def _plane_of(name: str, tensor: torch.Tensor, num_blocks: int, memory: KVMemory, content: str) -> Plane:
    if not hasattr(tensor, "stride"):
        raise UnsupportedLayout(f"{name} is registered as a {type(tensor).__name__}, not as one tensor")
    # Imported on first use, because the API server imports the connector's module too.
    from kvtier.torch import plane_of

    try:
        plane = plane_of(name, tensor, num_blocks, memory.offset_of(name, tensor), content)
    except KvtierError as error:
        raise UnsupportedLayout(str(error)) from error
    end = plane.base_offset + (num_blocks - 1) * plane.block_stride_bytes + plane.fragment_bytes
    if end > memory.size_bytes:
        raise UnsupportedLayout(f"{name} ends {end - memory.size_bytes} bytes beyond the connector's memory")
    return plane


def _refuse_overlap(planes: Mapping[str, Plane], num_blocks: int) -> None:
    """Raises UnsupportedLayout if planes overlap: a byte of two would be stored and restored twice."""
    for block in (0, num_blocks - 1):
        spans = sorted(
            (plane.base_offset + block * plane.block_stride_bytes, plane.fragment_bytes, layer)
            for layer, plane in planes.items()
        )
        for (start, size, layer), (following, _, other) in itertools.pairwise(spans):
            if start + size > following:
                raise UnsupportedLayout(f"layers {layer} and {other} share bytes of one block")
