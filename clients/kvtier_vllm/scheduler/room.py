"""Limits how many requests wait for their loads at once, so that those that have their blocks can go on.

A request whose blocks are being loaded holds them from then on: vLLM never takes them back, and continues
such requests strictly in their order. What the first of them needs for its next tokens must be there when
nothing else runs. vLLM ensures that by counting what each still needs, except in groups that give blocks back
as a request proceeds (sliding windows, chunks). There it counts too few, and requests can come to hold what
each of the others waits for. Then the engine never schedules anything again (seen in vLLM 0.32).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtier_vllm.groups import Groups, GroupShape
from kvtier_vllm.scheduler.holding import BlockPool


def blocks_of(tokens: int, shape: GroupShape) -> int:
    """Returns how many blocks so many tokens need, counted from the first."""
    return -(-tokens // shape.block_tokens)


class LoadRoom:
    """The requests that wait for their loads, or have been loaded and have not run since."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._needed = any(shape.window_blocks for shape in groups.shapes)
        self._pool: BlockPool | None = None
        self._waiting: dict[str, int] = {}
        """The most blocks that each will take to go on."""
        self._next_in: str | None = None
        """A request for which there was no room. No other load begins before its own: smaller ones, one after
        the other, would keep it out for ever."""

    def watch(self, pool: BlockPool) -> None:
        """Takes the engine's block pool. Until it is known, one request waits at a time."""
        self._pool = pool

    def has(self, request: Any, end_tokens: int) -> bool:
        """Returns whether a load up to `end_tokens` may begin now. If not, it may later."""
        if not self._needed:
            return True
        if self._next_in not in (None, request.request_id):
            return False
        fits = not self._waiting or self._fits(request, end_tokens)
        if not fits:
            self._next_in = request.request_id
        return fits

    def take(self, request: Any, end_tokens: int) -> None:
        """Notes that the load begins."""
        if self._needed:
            self._waiting[request.request_id] = self._next(request, end_tokens)
            if request.request_id == self._next_in:
                self._next_in = None

    def give_back(self, requests: Iterable[str]) -> None:
        """Notes that these requests run, or are over. Safe to call twice."""
        if self._waiting or self._next_in is not None:
            for request_id in requests:
                self._waiting.pop(request_id, None)
                if request_id == self._next_in:
                    self._next_in = None

    def _fits(self, request: Any, end_tokens: int) -> bool:
        if self._pool is None:
            return False
        wanted = self._held(request, end_tokens) + self._next(request, end_tokens)
        return self._pool.get_num_free_blocks() >= wanted + sum(self._waiting.values())

    def _held(self, request: Any, end_tokens: int) -> int:
        """Returns how many blocks the request has at the end of the load. Those that the engine already has
        count as well, because they may be among the free ones."""
        return sum(
            min(blocks_of(end_tokens, shape), shape.window_blocks + 1)
            if shape.window_blocks
            else blocks_of(end_tokens, shape)
            for shape in self._groups.shapes
        )

    def _next(self, request: Any, end_tokens: int) -> int:
        """Returns how many blocks the rest of the request needs, and one more per group for
        sampled tokens."""
        return sum(
            blocks_of(request.num_tokens, shape) - end_tokens // shape.block_tokens + 1
            for shape in self._groups.shapes
        )
