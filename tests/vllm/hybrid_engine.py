"""A mini engine whose layers are of several kinds, in groups that lie over each other in one memory.

Every step checks what each kind relies on: full attention all tokens before it, a window its last ones, a
chunk those of its own, a recurrent layer the state after the token before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.vllm.mini_engine import (
    HEAD_SIZE,
    HEADS,
    PAGE_BYTES,
    TOKENS,
    Digests,
    MiniEngine,
    WrongKV,
    _digests,
    engine_config,
)

LAYERS = 2
"""Of each group."""


@dataclass(frozen=True)
class Kind:
    """One group of layers."""

    block_tokens: int = TOKENS
    window_tokens: int = 0
    chunk_tokens: int = 0
    state: str = ""
    """mamba_cache_mode."""
    float16: bool = False

    def spec(self) -> Any:
        """vLLM's. A block has the same bytes in every group."""
        import torch
        from vllm.v1 import kv_cache_interface as interface

        if self.state:
            return interface.MambaSpec(
                block_size=self.block_tokens,
                shapes=((64,), (4, 16)),
                dtypes=(torch.bfloat16, torch.float32),
                page_size_padded=PAGE_BYTES,
                mamba_cache_mode=self.state,
            )
        options: dict[str, Any] = {
            "block_size": self.block_tokens,
            "num_kv_heads": HEADS * TOKENS // self.block_tokens,
            "head_size": HEAD_SIZE,
            "dtype": torch.float16 if self.float16 else torch.bfloat16,
        }
        if self.window_tokens:
            return interface.SlidingWindowSpec(**options, sliding_window=self.window_tokens)
        if self.chunk_tokens:
            return interface.ChunkedLocalAttentionSpec(**options, attention_chunk_size=self.chunk_tokens)
        return interface.FullAttentionSpec(**options)

    def seen_from(self, position: int) -> int:
        """The first token that the one at `position` looks at, but for states."""
        if self.window_tokens:
            return max(0, position - self.window_tokens + 1)
        return position // self.chunk_tokens * self.chunk_tokens if self.chunk_tokens else 0


FULL = Kind()
WINDOW = Kind(window_tokens=40)
STATE = Kind(state="align")


def kv_cache_config(kinds: Sequence[Kind], blocks: int) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    tensors, groups = [], []
    for number, kind in enumerate(kinds):
        names = [f"model.layers.{number * LAYERS + layer}.attn" for layer in range(LAYERS)]
        tensors.append(
            KVCacheTensor(
                size=blocks * LAYERS * PAGE_BYTES,
                layers=names,
                layer_stride=PAGE_BYTES * blocks,
                block_stride=PAGE_BYTES,
            )
        )
        groups.append(KVCacheGroupSpec(names, kind.spec()))
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


class HybridEngine(MiniEngine):
    """See the module."""

    def __init__(
        self,
        model: Path,
        kv_transfer_config: dict[str, Any] | None,
        kinds: Sequence[Kind],
        blocks: int,
        **changes: Any,
    ) -> None:
        config = engine_config(model, kv_transfer_config, **changes)
        if any(kind.state for kind in kinds):
            config.cache_config.mamba_cache_mode = next(kind.state for kind in kinds if kind.state)
        self.kinds = tuple(kinds)
        super().__init__(config, blocks, kv_cache_config(kinds, blocks))
        names = list(self.layers)
        self._of_group = [
            [self.layers[name] for name in names[number * LAYERS : (number + 1) * LAYERS]]
            for number in range(len(kinds))
        ]

    def _block_sizes(self, kv_cache_config: Any, config: Any) -> tuple[int, int]:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        scheduled, hashed = resolve_kv_cache_block_sizes(kv_cache_config, config)
        return scheduled, hashed

    def _forward(self, output: Any, requests: dict[str, Any]) -> dict[str, list[int]]:
        for copy in output.kv_cache_block_copies or ():
            for pages in self.pages:
                pages[copy.dst_block_id] = pages[copy.src_block_id]
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            request = requests[name]
            start = request.num_computed_tokens - count
            digests = _digests(request.all_token_ids)
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            for number, (kind, table) in enumerate(zip(self.kinds, tables, strict=True)):
                step = _Step(f"{name}, group {number}", kind, table, self._of_group[number], digests)
                step.check(start)
                step.write(start, start + count)
            self.cached.setdefault(name, start)
            done = start + count >= request.num_tokens
            sampled[name] = [int(digests[-1] % np.uint64(1000))] if done else []
        return sampled


@dataclass
class _Step:
    """One request in one group."""

    name: str
    kind: Kind
    table: Sequence[int]
    layers: Sequence[Any]
    digests: Digests

    def check(self, start: int) -> None:
        """That what comes before token `start` is there, as far as the next token needs it."""
        if self.kind.state:
            if start:
                self._check_state(self.table[(start - 1) // self.kind.block_tokens], start)
            return
        positions = np.arange(self.kind.seen_from(start), start)
        blocks, offsets = self._at(positions)
        for layer, pages in enumerate(self.layers):
            wanted = (self.digests[positions] + np.uint64(layer))[:, None, None]
            good = (pages[blocks, :, offsets, :] == wanted) & (blocks != 0)[:, None, None]
            if not good.all():
                position = int(positions[np.flatnonzero(~good.all(axis=(1, 2)))[0]])
                block = self.table[position // self.kind.block_tokens]
                raise WrongKV(f"{self.name}: token {position} of {start} in block {block}")

    def write(self, start: int, end: int) -> None:
        """Tokens from `start` on have been computed."""
        if self.kind.state:
            self._write_states(start, end)
            return
        positions = np.arange(start, end)
        blocks, offsets = self._at(positions)
        assert blocks.all(), f"{self.name}: nowhere to compute to"
        for layer, pages in enumerate(self.layers):
            pages[blocks, :, offsets, :] = (self.digests[positions] + np.uint64(layer))[:, None, None]

    def _at(self, positions: Any) -> tuple[Any, Any]:
        table = np.array(self.table, np.int64)
        return table[positions // self.kind.block_tokens], positions % self.kind.block_tokens

    def _check_state(self, block: int, tokens: int) -> None:
        for layer, pages in enumerate(self.layers):
            if not block or not (pages[block] == self.digests[tokens - 1] + np.uint64(layer)).all():
                raise WrongKV(f"{self.name}: the state after {tokens} tokens is not in block {block}")

    def _write_states(self, start: int, end: int) -> None:
        tokens = self.kind.block_tokens
        for slot in range(start // tokens, -(-end // tokens)):
            block = self.table[slot]
            reached = min((slot + 1) * tokens, end)
            if self.kind.state == "align" and reached < end:
                continue  # it keeps the last one only
            assert block, f"{self.name}: nowhere to keep the state after {reached} tokens"
            for layer, pages in enumerate(self.layers):
                pages[block] = self.digests[reached - 1] + np.uint64(layer)
