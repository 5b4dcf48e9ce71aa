"""The pools that an engine's cache consists of: what one page of each has, and how it is copied to and from
one row of bytes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kvtier import GroupKind

DESCRIPTION_BYTES_MAX = 900


class UnsupportedPool(Exception):
    """This kind of cache cannot be stored. The message names it, and says what can be done."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One buffer's share of a page."""

    label: str
    pages: torch.Tensor
    """The buffer as bytes, shape (pages, rows of a page, bytes of a row)."""
    first: int
    """Where its bytes begin in a row of bytes that holds a page."""

    @property
    def end(self) -> int:
        return self.first + int(self.pages.shape[1] * self.pages.shape[2])


class PagePool:
    """The pages of one component of the cache."""

    def __init__(
        self,
        name: str,
        buffers: Sequence[tuple[str, torch.Tensor]],
        page_slots: int,
        *,
        block_tokens: int = 0,
        kind: GroupKind = GroupKind.FULL_ATTENTION,
        window_tokens: int = 0,
    ) -> None:
        """Raises UnsupportedPool.

        name: what SGLang calls the pool, "kv" for example.
        buffers: names, and tensors with one row for each slot. A page is `page_slots` rows of all of them.
        block_tokens: how many tokens have one hash; 0: as many as a page has slots.
        kind, window_tokens: which pages of a prefix are needed.
        """
        self.name = name
        self.page_slots = page_slots
        self.block_tokens = block_tokens or page_slots
        self.kind, self.window_tokens = kind, window_tokens
        self._parts: list[_Part] = []
        end = 0
        lines = []
        for label, buffer in buffers:
            pages = _as_pages(label, buffer, page_slots)
            part = _Part(label, pages, end)
            end = part.end
            self._parts.append(part)
            dtype = str(buffer.dtype).removeprefix("torch.")
            lines.append(f"{label} {dtype} {list(buffer.shape[1:])}")
        if not self._parts:
            raise UnsupportedPool("the cache has no buffers")
        self.page_bytes = end
        """Bytes of one page."""
        self.device = self._parts[0].pages.device
        self.num_pages = min(part.pages.shape[0] for part in self._parts)
        self.description = _described(name, page_slots, lines)
        """What a page holds; pages are interchangeable exactly if their descriptions are equal."""

    @property
    def window_blocks(self) -> int:
        """How many of a prefix's last pages are needed; 0 means all of them."""
        if self.kind is GroupKind.MAMBA:
            return 1
        return -(-self.window_tokens // self.block_tokens)

    def pages_of(self, slots: torch.Tensor) -> list[int]:
        """Returns the pages that these slots are. Raises ValueError unless they are whole pages."""
        flat = slots.detach().to(device="cpu", dtype=torch.int64).flatten()
        if flat.numel() % self.page_slots:
            raise ValueError(f"{flat.numel()} slots are not whole pages of {self.page_slots}")
        by_page = flat.view(-1, self.page_slots)
        starts = by_page[:, 0]
        wanted = starts[:, None] + torch.arange(self.page_slots)
        if bool((starts % self.page_slots).any()) or not torch.equal(by_page, wanted):
            raise ValueError("the slots of a page are not aligned, or not contiguous")
        numbers: list[int] = (starts // self.page_slots).tolist()
        if numbers and not (min(numbers) >= 0 and max(numbers) < self.num_pages):
            raise ValueError(f"a page is not below {self.num_pages}: {min(numbers)} to {max(numbers)}")
        return numbers

    def gather(self, pages: Sequence[int], rows: torch.Tensor, numbers: Sequence[int]) -> None:
        """Copies pages of the cache into these rows, which are on the host."""
        source, target = torch.tensor(pages, device=self.device), torch.tensor(numbers)
        for part in self._parts:
            found = part.pages.index_select(0, source).view(len(pages), -1)
            if self.device.type != "cpu":
                found = self._on_host(len(pages), found.shape[1]).copy_(found)
            rows[:, part.first : part.end].index_copy_(0, target, found)

    def scatter(self, rows: torch.Tensor, numbers: Sequence[int], pages: Sequence[int]) -> None:
        """Copies these rows, which are on the host, into pages of the cache. On a GPU, work that is enqueued
        later finds them there."""
        source, target = torch.tensor(numbers), torch.tensor(pages, device=self.device)
        found = self._on_host(len(pages), self.page_bytes)
        torch.index_select(rows, 0, source, out=found)
        found = found.to(self.device, non_blocking=True)
        for part in self._parts:
            shape = (len(pages), *part.pages.shape[1:])
            part.pages.index_copy_(0, target, found[:, part.first : part.end].reshape(shape))

    def _on_host(self, pages: int, page_bytes: int) -> torch.Tensor:
        """Memory for pages on their way, which a GPU reaches at the full speed of its link."""
        pinned = self.device.type == "cuda"
        return torch.empty(pages, page_bytes, dtype=torch.uint8, pin_memory=pinned)


def pools_of(kvcache: Any, params: Any) -> list[PagePool]:
    """Returns the pools of an engine's cache, that of full attention first.

    kvcache: SGLang's KV cache.
    params: its CacheInitParams.

    Raises UnsupportedPool for a kind that is not known.
    """
    page, name = params.page_size, type(kvcache).__name__
    whole = kvcache.full_kv_pool if name in ("SWAKVPool", "HybridLinearKVPool") else kvcache
    pools = [PagePool("kv", _attention(whole), page)]
    if name == "SWAKVPool":
        window = params.sliding_window_size
        buffers = _attention(kvcache.swa_kv_pool)
        pools.append(PagePool("swa", buffers, page, kind=GroupKind.SLIDING_WINDOW, window_tokens=window))
    if getattr(params.req_to_token_pool, "mamba_pool", None) is not None:
        pools.append(PagePool("mamba", _states(params), 1, block_tokens=page, kind=GroupKind.MAMBA))
    return pools


def check_components(pools: Sequence[PagePool], components: Iterable[str]) -> None:
    """Raises UnsupportedPool unless these are the pools of all components of the tree, by the names of those:
    what is not restored would be read all the same."""
    missing = {_POOL_OF.get(name, name) for name in components} ^ {pool.name for pool in pools}
    if missing:
        raise UnsupportedPool(f"the radix tree and the cache differ in {', '.join(sorted(missing))}")


_POOL_OF = {"FULL": "kv", "SWA": "swa", "MAMBA": "mamba"}


def _attention(pool: Any) -> list[tuple[str, torch.Tensor]]:
    """The buffers of a plain attention pool."""
    name = type(pool).__name__
    if name == "MHATokenToKVPool":
        if pool.kv_cache_layout != "nhd":
            raise UnsupportedPool(
                f"the KV cache has the layout {pool.kv_cache_layout!r}: only 'nhd' is supported"
            )
        if pool.is_quantized_kv_cache:
            raise UnsupportedPool("the KV cache has scales of its own: use kv_cache_dtype auto or fp8")
        keys = [(f"k{layer}", buffer) for layer, buffer in enumerate(pool.k_buffer)]
        values = [(f"v{layer}", buffer) for layer, buffer in enumerate(pool.v_buffer)]
        return [*keys, *values]
    if name == "MLATokenToKVPool":
        if pool.kv_scale_buffer is not None:
            raise UnsupportedPool("the KV cache has scales of its own")
        return [(f"kv{layer}", each) for layer, each in enumerate(pool.kv_buffer)]
    raise UnsupportedPool(
        f"KV caches of the kind {name} are not supported: plain attention (MHATokenToKVPool), latent "
        "attention (MLATokenToKVPool), sliding windows (SWAKVPool) and recurrent layers "
        "(HybridLinearKVPool) are"
    )


def _states(params: Any) -> list[tuple[str, torch.Tensor]]:
    """The buffers of recurrent layers, with one row for each state."""
    requests = params.req_to_token_pool
    others = [
        name
        for name in ("mamba_ckpt_pool", "short_conv_pool", "ngram_pool")
        if (pool := getattr(requests, name, None)) is not None and getattr(pool, "enabled", True)
    ]
    if others:
        raise UnsupportedPool(f"recurrent layers with {', '.join(others)} are not supported")
    cache = requests.mamba_pool.mamba_cache
    others = [
        field.name
        for field in dataclasses.fields(cache)
        if field.name not in ("temporal", "conv") and getattr(cache, field.name) is not None
    ]
    others += [type(state).__name__ for state in requests.mamba_pool._slot_siblings]
    if others:  # a state that is restored without them is another state
        raise UnsupportedPool(f"recurrent layers whose states have {', '.join(others)} are not supported")
    return [
        (f"{name}{layer}", state[layer])
        for name, state in (
            ("temporal", cache.temporal),
            *((f"conv{index}.", each) for index, each in enumerate(cache.conv)),
        )
        if state.numel()
        for layer in range(requests.mamba_pool.num_mamba_layers)
    ]


def is_replicated(kvcache: Any) -> bool:
    """Whether every rank of a tensor-parallel group holds the same bytes."""
    return type(kvcache).__name__ == "MLATokenToKVPool"


def _as_pages(label: str, buffer: torch.Tensor, page_slots: int) -> torch.Tensor:
    if buffer.dim() < 2 or buffer.shape[0] < page_slots:
        raise UnsupportedPool(f"{label} has shape {tuple(buffer.shape)}: there is no page in it")
    if not buffer[0].is_contiguous():
        raise UnsupportedPool(f"{label}, strides {tuple(buffer.stride())}, does not keep a slot contiguous")
    item = buffer.element_size()
    row_bytes, stride = buffer[0].numel() * item, buffer.stride(0) * item
    storage = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())
    return storage.as_strided(
        (buffer.shape[0] // page_slots, page_slots, row_bytes),
        (page_slots * stride, stride, 1),
        buffer.storage_offset() * item,
    )


def _described(name: str, page_slots: int, lines: Sequence[str]) -> str:
    text = "; ".join(lines)
    if len(text.encode()) > DESCRIPTION_BYTES_MAX:
        text = f"{lines[0]}; … {lines[-1]}; sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    return f"{name}: {page_slots} slots of {len(lines)} parts: {text}"
