"""The KV cache groups of an engine: what a lookup needs of each, and how its blocks come and go.

Layers of one group share a block table. A model that mixes full attention, sliding windows and recurrent
layers has several groups. Their blocks share one memory, so a block id belongs to one group at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvtier import GroupKind, GroupQuery

from kvtier_vllm.worker.kv_memory import NotShareable

# The first release in which a load of several groups can fail without ending the engine.
HYBRID_VLLM = (0, 30)


class UnsupportedLayout(NotShareable):
    """The KV cache has a shape that this version does not understand."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The shape of one group."""

    group: int
    """The number of the group, in vLLM and in the daemon."""
    block_tokens: int
    """The tokens of one block; of all ranks together, if a block is spread over several."""
    kind: GroupKind = GroupKind.FULL_ATTENTION
    window_tokens: int = 0
    window_blocks: int = 0
    """How many of a prefix's last blocks are needed; 0 means all of them."""
    hash_stride: int = 1
    """How many of the request's block hashes make one block, whose hash is the last of them."""
    handed_off: bool = False
    """Whether vLLM says by other means than the block table which block holds which state."""


@dataclass(frozen=True)
class Groups:
    """All groups of an engine."""

    shapes: tuple[GroupShape, ...]
    hash_tokens: int
    """The tokens that one of the request's block hashes stands for."""
    zeroed: bool = False
    """Whether vLLM zeroes blocks before it says that it has taken them from a request."""
    looks_ahead: bool = False
    """Whether the end of a block's KV also depends on the token behind the block, so that only the next
    block's hash proves it."""

    @classmethod
    def one(cls, block_tokens: int) -> Groups:
        """Makes the groups of a model with full attention in all layers."""
        return cls((GroupShape(0, block_tokens),), block_tokens)

    @cached_property
    def plain(self) -> bool:
        """Whether there is one group, of which a prefix needs all blocks."""
        return len(self.shapes) == 1 and not self.shapes[0].window_blocks

    @cached_property
    def unit_tokens(self) -> int:
        """Matches and loads are multiples of this many tokens."""
        return math.lcm(*(shape.block_tokens for shape in self.shapes))

    @cached_property
    def unit_hashes(self) -> int:
        """The number of block hashes in one unit."""
        return self.unit_tokens // self.hash_tokens

    @cached_property
    def queries(self) -> tuple[GroupQuery, ...]:
        """The queries of a lookup, one for each group."""
        return tuple(GroupQuery(shape.group, shape.window_blocks, shape.hash_stride) for shape in self.shapes)


def groups_of(kv_cache_config: Any, vllm_config: Any) -> Groups:
    """Returns the groups of a KVCacheConfig. Raises UnsupportedLayout, naming what is not understood."""
    found = kv_cache_config.kv_cache_groups
    if not found:
        raise UnsupportedLayout("the engine has no KV cache")
    spread = context_ranks(kv_cache_config, vllm_config)
    shapes = [shape_of(index, group, spread) for index, group in enumerate(found)]
    if any(shape.kind is GroupKind.MAMBA for shape in shapes):
        _refuse_states_elsewhere(vllm_config.cache_config)
    zeroed = bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))
    looks_ahead = drafts_from_hidden_states(vllm_config)
    if looks_ahead and (len(shapes) > 1 or shapes[0].window_blocks):
        raise UnsupportedLayout(
            "a draft model that is fed hidden states is supported only where all layers have full attention"
        )
    if len(shapes) == 1:
        return Groups(tuple(shapes), shapes[0].block_tokens, zeroed, looks_ahead)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    for shape in shapes:
        if shape.block_tokens % hash_tokens:
            raise UnsupportedLayout(
                f"KV cache group {shape.group} has blocks of {shape.block_tokens} tokens, which are not made "
                f"of the {hash_tokens} tokens of a block hash"
            )
    return Groups(
        tuple(replace(shape, hash_stride=shape.block_tokens // hash_tokens) for shape in shapes),
        hash_tokens,
        zeroed,
    )


def drafts_from_hidden_states(vllm_config: Any) -> bool:
    """Returns whether a draft model is fed each token's hidden state together with the token behind it
    (EAGLE, MTP). Its KV at the end of a block then depends on more than the block's tokens."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return speculative is not None and bool(speculative.use_eagle())


def context_ranks(kv_cache_config: Any, vllm_config: Any) -> int:
    """Returns over how many ranks the tokens of every block are spread (decode context parallelism), or 1 if
    it is off. A block has this many times the tokens of vLLM's spec, and each rank's page holds its own part.

    Raises UnsupportedLayout if it is on, and is not certain to hold for every block.
    """
    ranks = _decode_context_parallel_size(vllm_config)
    if ranks == 1:
        return 1
    groups, what = kv_cache_config.kv_cache_groups, f"decode_context_parallel_size={ranks}"
    if len(groups) != 1:
        raise UnsupportedLayout(f"{what} with {len(groups)} KV cache groups: not supported")
    if drafts_from_hidden_states(vllm_config):
        raise UnsupportedLayout(f"{what} with a draft model that is fed hidden states: not supported")
    for spec in _specs_of(groups[0]):
        spread = getattr(spec, "dcp_sharded", None)
        if spread is None:
            raise UnsupportedLayout(
                f"{what}: this vLLM does not say of a KV cache whether its blocks are spread over the ranks; "
                "use vLLM 0.31 or later"
            )
        if not spread or not _is_full_attention(spec):
            raise UnsupportedLayout(f"{what} with a {type(spec).__name__} is not supported by this version")
    return ranks


def _decode_context_parallel_size(vllm_config: Any) -> int:
    return int(getattr(getattr(vllm_config, "parallel_config", None), "decode_context_parallel_size", 1))


def _is_full_attention(spec: Any) -> bool:
    from vllm.v1 import kv_cache_interface as interface

    return type(spec) in (interface.FullAttentionSpec, interface.MLAAttentionSpec)


def replicated_groups(kv_cache_config: Any, vllm_config: Any) -> frozenset[int]:
    """Returns the groups of which every rank holds the same bytes: latents of MLA, if only the heads are
    split. Ranks of a pipeline hold different layers, and those of a context different tokens. (If a context
    has fewer ranks than the engine, some ranks hold the same bytes, and each stores its own.)"""
    from vllm.v1 import kv_cache_interface as interface

    parallel = vllm_config.parallel_config
    if not 1 < parallel.world_size == parallel.tensor_parallel_size:
        return frozenset()
    if _decode_context_parallel_size(vllm_config) > 1:
        return frozenset()
    return frozenset(
        index
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        if all(type(spec) is interface.MLAAttentionSpec for spec in _specs_of(group))
    )


def _specs_of(group: Any) -> list[Any]:
    """Returns the specs of a group's layers, each kind at least once."""
    return list(getattr(group.kv_cache_spec, "kv_cache_specs", {}).values()) or [group.kv_cache_spec]


def _refuse_states_elsewhere(cache_config: Any) -> None:
    for name in ("use_replayssm", "use_kda_recoverssm"):
        if getattr(cache_config, name, False):
            raise UnsupportedLayout(f"{name} keeps part of a recurrent state outside its block: turn it off")


def shape_of(index: int, group: Any, spread: int = 1) -> GroupShape:
    """Returns the shape of one KVCacheGroupSpec, as if hashes were of its own blocks, each `spread` over so
    many ranks (see `context_ranks`). Raises UnsupportedLayout."""
    if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
        raise UnsupportedLayout(
            f"KV cache group {index} lies in host memory, or takes no part in transfers: not supported"
        )
    spec, specs = group.kv_cache_spec, _specs_of(group)
    shapes = {_shape_of_layer(index, one) for one in specs}
    if any(one.block_size != spec.block_size for one in specs):
        raise UnsupportedLayout("layers of one KV cache group have different block sizes")
    if len(shapes) != 1:
        raise UnsupportedLayout(f"the layers of KV cache group {index} need different parts of a prefix")
    shape = shapes.pop()
    return replace(shape, block_tokens=shape.block_tokens * spread)


def _shape_of_layer(index: int, spec: Any) -> GroupShape:
    from vllm.v1 import kv_cache_interface as interface

    # Only the exact types match: subclasses keep other state in a block (hidden states, ring buffers, sinks).
    kind = type(spec)
    if kind is interface.MambaSpec:
        return _state_of(index, spec)
    if kind not in (
        interface.FullAttentionSpec,
        interface.MLAAttentionSpec,
        interface.SlidingWindowSpec,
        interface.ChunkedLocalAttentionSpec,
    ):
        raise UnsupportedLayout(f"KV cache of type {kind.__name__} is not supported by this version")
    if getattr(spec, "non_causal", False) or getattr(spec, "tokens_per_state", 1) != 1:
        raise UnsupportedLayout("KV that depends on later tokens or packs several tokens is not supported")
    tokens = spec.block_size
    if kind is interface.SlidingWindowSpec:
        if getattr(spec, "extra_retained_tokens", 0):
            raise UnsupportedLayout("a sliding window that is kept longer for draft models is not supported")
        # The next token sees one token less of what is there.
        return _window(index, tokens, spec.sliding_window, spec.sliding_window - 1)
    if kind is interface.ChunkedLocalAttentionSpec:
        # It needs what its chunk has so far. Asking for a whole chunk's blocks costs a hit now and then.
        return _window(index, tokens, spec.attention_chunk_size, spec.attention_chunk_size)
    return GroupShape(index, tokens)


def _window(index: int, block_tokens: int, window_tokens: int, needed_tokens: int) -> GroupShape:
    if needed_tokens < 1:
        raise UnsupportedLayout(f"a window of {window_tokens} tokens is not supported")
    blocks = -(-needed_tokens // block_tokens)
    return GroupShape(index, block_tokens, GroupKind.SLIDING_WINDOW, window_tokens, blocks)


def _state_of(index: int, spec: Any) -> GroupShape:
    mode = spec.mamba_cache_mode
    if mode not in ("align", "all"):
        raise UnsupportedLayout(
            f"recurrent layers keep no states of prefixes (mamba_cache_mode={mode!r}); start the engine with "
            "--enable-prefix-caching, and --mamba-cache-mode align"
        )
    if spec.num_speculative_blocks:
        raise UnsupportedLayout("speculative decoding with recurrent layers is not supported")
    return GroupShape(index, spec.block_size, GroupKind.MAMBA, window_blocks=1, handed_off=mode == "align")
