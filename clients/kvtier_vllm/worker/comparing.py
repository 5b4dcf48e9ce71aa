"""Measures how far two blocks of an engine's KV cache are apart, which an audit asks of a worker.

The blocks stay where they are, and nothing waits: on a GPU the kernels are enqueued behind the step's own, on
the stream that the engine computes on, and the answer is fetched when it is there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier import Client, GroupKind

from kvtier_vllm.meta import AuditCompare, AuditResult, Orders
from kvtier_vllm.worker.layout import GroupLayout
from kvtier_vllm.worker.parts import TrackedPart
from kvtier_vllm.worker.sharing import Landing

if TYPE_CHECKING:
    import torch

PLANES_AT_ONCE = 8
"""How many planes are compared together, so that few kernels take little memory."""
ERROR_MAX = 1e6
"""The largest error that is reported, also in place of an infinite one."""
_FP8 = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""The dtype of a KV cache that vLLM keeps as plain bytes, by its `cache_dtype`."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between two blocks."""

    error: float
    """The error of the layer that differs most: the norm of the difference over the larger of both norms. 0
    for equal bytes, about 1.4 for blocks that have nothing to do with each other; at most ERROR_MAX."""
    layer: str


class Comparison:
    """A comparison that is under way."""

    def __init__(self, layers: Sequence[str], errors: torch.Tensor, ready: Callable[[], bool]) -> None:
        """`errors` has one value per layer, in host memory, complete once `ready` returns True."""
        self._layers = layers
        self._errors = errors
        self._ready = ready

    def poll(self) -> Difference | None:
        """Returns the result, or None before it is there."""
        if not self._ready():
            return None
        errors = [min(error, ERROR_MAX) if error >= 0 else ERROR_MAX for error in self._errors.tolist()]
        worst = max(range(len(errors)), key=errors.__getitem__)
        return Difference(errors[worst], self._layers[worst])


class Comparer:
    """Compares blocks of one worker. Called from the thread that runs the model."""

    def __init__(
        self, kv_caches: Mapping[str, torch.Tensor], layouts: Sequence[GroupLayout], cache_dtype: str
    ) -> None:
        """`kv_caches` are those that were registered, `cache_dtype` is that of vLLM's CacheConfig."""
        self._kv_caches = kv_caches
        self._layouts = layouts
        self._cache_dtype = cache_dtype

    def start(self, group: int, stored: int, computed: int) -> Comparison:
        """Compares two blocks of a group as they are when all that is enqueued by now has run. Raises
        ValueError for a group whose content is not understood, and what torch raises."""
        import torch

        layout = self._layouts[group]
        if layout.shape.kind is GroupKind.MAMBA:
            raise ValueError(f"group {group} keeps states")
        planes = [self._values(layer, layout.num_blocks) for layer in layout.planes]
        parts = []
        for begin in range(0, len(planes), PLANES_AT_ONCE):
            some = planes[begin : begin + PLANES_AT_ONCE]
            one = torch.stack([plane[stored].flatten().float() for plane in some])
            other = torch.stack([plane[computed].flatten().float() for plane in some])
            parts.append(_errors(one, other))
        errors = torch.cat(parts)
        layers = list(layout.planes)
        if errors.device.type == "cpu":
            return Comparison(layers, errors, lambda: True)
        on_host = torch.empty(errors.shape, dtype=errors.dtype, pin_memory=True)
        on_host.copy_(errors, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Comparison(layers, on_host, event.query)

    def _values(self, layer: str, num_blocks: int) -> torch.Tensor:
        """Returns one layer's values: a tensor whose first dimension is the blocks. Raises ValueError."""
        import torch

        tensor = self._kv_caches[layer]
        if tensor.dtype in (torch.uint8, torch.int8):
            name = _FP8.get(self._cache_dtype)
            if name is None:
                raise ValueError(f"{layer} keeps bytes, and cache_dtype is {self._cache_dtype!r}")
            tensor = tensor.view(getattr(torch, name))
        # Attention kernels may work on smaller blocks than the block table.
        split = tensor.shape[0] // num_blocks
        return tensor if split == 1 else tensor.unflatten(0, (num_blocks, split))


def _errors(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns the error of each row. Where both sides are NaN, they count as equal."""
    import torch

    equal = (one == other) | (one.isnan() & other.isnan())
    difference = torch.where(equal, 0.0, one - other).nan_to_num(nan=math.inf)
    norms = torch.maximum(_norm(one.nan_to_num()), _norm(other.nan_to_num()))
    return _norm(difference) / norms.clamp(min=torch.finfo(torch.float32).tiny)


def _norm(rows: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.linalg.vector_norm(rows, dim=1)


@dataclass(slots=True, eq=False)
class _Followed:
    ticket: int
    left: list[TrackedPart]
    """Parts that are not over."""
    failed: bool = False
    """Whether nobody waits for it any more, or the stored blocks have not come."""
    order: AuditCompare | None = None
    under_way: list[tuple[int, Comparison]] | None = None


class AuditFollower:
    """A worker's part in audits. It reports each that it is told of once, and never before its fence. Called
    from the thread that runs the model."""

    def __init__(
        self,
        landing: Callable[[TrackedPart, float], Landing],
        over: Callable[[TrackedPart], None],
        log: logging.Logger,
    ) -> None:
        """`landing` returns what has become of a part's bytes at a time; `over` is called after the
        last use."""
        self.comparer: Comparer | None = None
        """None until the engine has registered its KV cache."""
        self._landing = landing
        self._over = over
        self._log = log
        self._followed: dict[int, _Followed] = {}
        self._told = False

    def __len__(self) -> int:
        """Returns the number of audits that were not reported yet."""
        return len(self._followed)

    def adopt(self, orders: Orders, client: Client | None, now_s: float) -> list[TrackedPart]:
        """Takes what a step says about audits. Returns the parts that may start now."""
        parts: list[TrackedPart] = []
        for load in orders.audits:
            followed = _Followed(load.ticket, [])
            self._followed[load.ticket] = followed
            for ref, block in zip(load.parts, load.block_ids, strict=True):
                if ref is None:
                    followed.failed = True
                else:
                    followed.left.append(TrackedPart(client, ref, (block,), now_s))
            parts += followed.left
        for order in orders.compares:
            if order.ticket in self._followed:
                self._followed[order.ticket].order = order
        for ticket in orders.audits_dropped:
            if ticket in self._followed:
                self._followed[ticket].failed = True
        return parts

    def fail_all(self) -> None:
        """Has all audits fail."""
        for followed in self._followed.values():
            followed.failed = True

    def poll(self, now_s: float) -> list[AuditResult]:
        """Returns the results of the audits that have ended since the last call."""
        results = []
        for followed in list(self._followed.values()):
            result = self._poll(followed, now_s)
            if result is not None:
                del self._followed[followed.ticket]
                results.append(result)
        return results

    def _poll(self, followed: _Followed, now_s: float) -> AuditResult | None:
        for part in list(followed.left):
            if followed.failed:
                part.revoke()
            landing = self._landing(part, now_s)
            if landing is not Landing.PENDING:
                followed.left.remove(part)
                self._over(part)
                followed.failed |= landing is Landing.FAILED
        if followed.left:
            return None
        if not followed.failed and followed.order is not None and followed.under_way is None:
            self._start(followed, followed.order)
        if followed.failed:
            return AuditResult(followed.ticket)
        if followed.under_way is None:
            return None
        found = [(group, comparison.poll()) for group, comparison in followed.under_way]
        differences = tuple((group, one.error, one.layer) for group, one in found if one is not None)
        return AuditResult(followed.ticket, differences) if len(differences) == len(found) else None

    def _start(self, followed: _Followed, order: AuditCompare) -> None:
        try:
            if self.comparer is None:
                raise ValueError("the KV cache is not there")
            followed.under_way = [
                (group, self.comparer.start(group, stored, computed))
                for group, stored, computed in order.blocks
            ]
        except Exception as error:  # such as out of memory: the engine does without its audit
            followed.failed = True
            if not self._told:
                self._told = True
                self._log.warning("kvtier: blocks could not be compared for an audit: %s", error)
