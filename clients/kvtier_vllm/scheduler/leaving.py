"""Tells the daemon about a request's blocks when it is over: that they are in use, that they are to be held
for a time, or that they may be evicted first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier import Client

from kvtier_vllm.groups import Groups, GroupShape
from kvtier_vllm.scheduler.retaining import Keeping
from kvtier_vllm.scheduler.storing import StoreState
from kvtier_vllm.scheduler.tracking import TrackedRequest

PATIENCE_S = 30.0
"""If a request's stores have not ended so long after the request, nothing is told about it."""


@dataclass(slots=True, eq=False)
class _Over:
    """A request that is over, and has stores that are not."""

    stores: StoreState
    keeping: Keeping
    hashes: Sequence[bytes]
    """The hashes of what it has used, in vLLM's block hashes."""
    until_s: float


class Leaving:
    """What is told about requests that are over. Called from the scheduler's thread; nothing here waits.

    Only blocks that can be read already can be held or made the first to be evicted. If either is wished,
    telling waits for the request's stores.
    """

    def __init__(
        self, groups: Groups, longest: GroupShape, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`longest` is the group that knows how long a prefix is."""
        self._groups = groups
        self._longest = longest
        self._clock = clock
        self._waiting: deque[_Over] = deque()

    def __len__(self) -> int:
        """Returns the number of requests whose stores are waited for."""
        return len(self._waiting)

    def over(self, client: Client, tracked: TrackedRequest) -> None:
        """Tells the daemon about a request that is over, now or in a later step."""
        control, stores = tracked.control, tracked.stores
        blocks = stores.next_block[self._longest.group]
        if not control.store:
            if not control.keeping.holds:
                return
            # It has made no blocks; those that it began with were there before.
            blocks = tracked.expected_tokens // self._longest.block_tokens
        hashes = tracked.hashes[: blocks * self._longest.hash_stride]
        over = _Over(stores, control.keeping, hashes, self._clock() + PATIENCE_S)
        if stores.under_way and (over.keeping.holds or over.stores.made is not None):
            self._waiting.append(over)
        else:
            self._tell(client, over)

    def tell(self, client: Client | None) -> None:
        """Tells what need not wait any more. Called once per step. Without a daemon it is dropped."""
        for _ in range(len(self._waiting)):
            over = self._waiting.popleft()
            if client is None or self._clock() > over.until_s:
                continue
            if over.stores.under_way:
                self._waiting.append(over)
            else:
                self._tell(client, over)

    def clear(self) -> None:
        """Drops all that waits, because there is another daemon, or the blocks are others."""
        self._waiting.clear()

    def _tell(self, client: Client, over: _Over) -> None:
        """Tells the daemon that the whole prefix is in use: storing it in several steps leaves its head older
        than its tail, and of a prefix that hits in the engine's own cache the daemon does not hear at all."""
        made, hashes, longest = over.stores.made, over.hashes, self._longest
        if made is not None and (first := made.first(longest.group)) is not None:
            hashes = hashes[: first * longest.hash_stride]
        held_to = 0
        for hold in over.keeping.holds if hashes else ():
            end = None if hold.end_tokens is None else -(-hold.end_tokens // longest.block_tokens)
            held = hashes if end is None else hashes[: end * longest.hash_stride]
            client.touch(held, self._groups.queries, hold_s=hold.seconds)
            held_to = max(held_to, len(held))
        if held_to < len(hashes):
            client.touch(hashes, self._groups.queries, lazily=True)
        for group, blocks in () if made is None else made.in_order():
            client.cool(blocks, group=group)
