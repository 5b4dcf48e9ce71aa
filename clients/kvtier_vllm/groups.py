"""The KV cache groups of an engine: what a lookup needs of each, and how its blocks come and go.

Layers of one group share a block table. A model that mixes full attention, sliding windows and recurrent
layers has several groups, whose blocks lie over each other in one memory: a block id is of one group at a
time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvtier import GroupKind, GroupQuery

from kvtier_vllm.worker.kv_memory import NotShareable

# First release in which a load of several groups can fail without ending the engine.
HYBRID_VLLM = (0, 30)


class UnsupportedLayout(NotShareable):
    """The KV cache has a shape that this version does not understand."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One group."""

    group: int
    """vLLM's number of it, and the daemon's."""
    block_tokens: int
    """Those of all ranks together, where a block is spread over several."""
    kind: GroupKind = GroupKind.FULL_ATTENTION
    window_tokens: int = 0
    window_blocks: int = 0
    """A prefix needs its last so many blocks; 0: all of them."""
    hash_stride: int = 1
    """Of the request's block hashes: a block's is the last of so many."""
    handed_off: bool = False
    """vLLM says which block holds which state; its block table does not."""


@dataclass(frozen=True)
class Groups:
    """All groups of an engine."""

    shapes: tuple[GroupShape, ...]
    hash_tokens: int
    """Tokens of one of the request's block hashes."""
    zeroed: bool = False
    """vLLM zeroes blocks before it says that it has taken them from a request."""
    looks_ahead: bool = False
    """The end of a block's KV depends on the token behind it, too: only the block behind it proves it."""

    @classmethod
    def one(cls, block_tokens: int) -> Groups:
        """Full attention in all layers."""
        return cls((GroupShape(0, block_tokens),), block_tokens)

    @cached_property
    def plain(self) -> bool:
        """One group, of which a prefix needs all."""
        return len(self.shapes) == 1 and not self.shapes[0].window_blocks

    @cached_property
    def unit_tokens(self) -> int:
        """What is matched and loaded has a multiple of so many tokens."""
        return math.lcm(*(shape.block_tokens for shape in self.shapes))

    @cached_property
    def unit_hashes(self) -> int:
        """Hashes of one unit."""
        return self.unit_tokens // self.hash_tokens

    @cached_property
    def queries(self) -> tuple[GroupQuery, ...]:
        """A lookup's, one for each group."""
        return tuple(GroupQuery(shape.group, shape.window_blocks, shape.hash_stride) for shape in self.shapes)


def groups_of(kv_cache_config: Any, vllm_config: Any) -> Groups:
    """The groups of a KVCacheConfig. Raises UnsupportedLayout for what is not understood, by name."""
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
    """Whether a draft model is fed each token's hidden state together with the token behind it, so that its
    KV at the end of a block is not decided by the block's tokens alone (EAGLE, MTP)."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return speculative is not None and bool(speculative.use_eagle())


def context_ranks(kv_cache_config: Any, vllm_config: Any) -> int:
    """Over how many ranks the tokens of every block are spread (decode context parallelism): a block has so
    many times the tokens of vLLM's spec, and each rank's page holds its own of them. 1: it is off. Raises
    UnsupportedLayout where it is on, and not certain for every block."""
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
    """The groups of which every rank holds the same bytes: latents of MLA, where nothing but the heads is
    split. Ranks of a pipeline hold different layers, those of a context different tokens (with fewer of them
    than ranks some hold the same, which is stored by each)."""
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
    """Of the layers of a group, each kind at least once."""
    return list(getattr(group.kv_cache_spec, "kv_cache_specs", {}).values()) or [group.kv_cache_spec]


def _refuse_states_elsewhere(cache_config: Any) -> None:
    for name in ("use_replayssm", "use_kda_recoverssm"):
        if getattr(cache_config, name, False):
            raise UnsupportedLayout(f"{name} keeps part of a recurrent state outside its block: turn it off")


def shape_of(index: int, group: Any, spread: int = 1) -> GroupShape:
    """Of one KVCacheGroupSpec, as if hashes were of its own blocks, each of them `spread` over so many ranks
    (see `context_ranks`). Raises UnsupportedLayout."""
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

    # Exact types: subclasses keep other state in a block (hidden states, ring buffers, sinks).
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
        # It needs what its chunk has so far. To ask for a whole chunk's blocks costs a hit now and then.
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
