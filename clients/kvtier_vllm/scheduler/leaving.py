"""What the daemon is told of a request's blocks when it is over: that they are in use, that they are to be
held for a time, or that they may go first."""

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
"""Nothing is told of a request whose stores have not ended so long after itself."""


@dataclass(slots=True, eq=False)
class _Over:
    """A request that is over, and has stores that are not."""

    stores: StoreState
    keeping: Keeping
    hashes: Sequence[bytes]
    """What it has used, in units of vLLM's block hashes."""
    until_s: float


class Leaving:
    """Last words of requests. Called from the scheduler's thread; nothing here waits.

    Only blocks that can be read already are held or let go first, so where either is wished the words wait
    for the request's stores.
    """

    def __init__(
        self, groups: Groups, longest: GroupShape, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`longest`: the group that knows how long a prefix is."""
        self._groups = groups
        self._longest = longest
        self._clock = clock
        self._waiting: deque[_Over] = deque()

    def __len__(self) -> int:
        """Requests whose stores are waited for."""
        return len(self._waiting)

    def over(self, client: Client, tracked: TrackedRequest) -> None:
        """The request is over; what the daemon is to know of it, it learns now or in a later step."""
        control, stores = tracked.control, tracked.stores
        blocks = stores.next_block[self._longest.group]
        if not control.store:
            if not control.keeping.hold_s:
                return
            # It has made none: what it began with was there before.
            blocks = tracked.expected_tokens // self._longest.block_tokens
        hashes = tracked.hashes[: blocks * self._longest.hash_stride]
        over = _Over(stores, control.keeping, hashes, self._clock() + PATIENCE_S)
        if stores.under_way and (over.keeping.hold_s or over.keeping.cool):
            self._waiting.append(over)
        else:
            self._tell(client, over)

    def tell(self, client: Client | None) -> None:
        """Once per step: what had to wait and need not any more. Without a daemon it is forgotten."""
        for _ in range(len(self._waiting)):
            over = self._waiting.popleft()
            if client is None or self._clock() > over.until_s:
                continue
            if over.stores.under_way:
                self._waiting.append(over)
            else:
                self._tell(client, over)

    def clear(self) -> None:
        """Another daemon, or other blocks: nothing is to be told any more."""
        self._waiting.clear()

    def _tell(self, client: Client, over: _Over) -> None:
        """Stores of one prefix in several steps leave its head older than its tail, and a prefix that hits in
        the engine's own cache is not heard of at all: say that the whole of it is in use."""
        made, hashes, hold_s = over.stores.made, over.hashes, over.keeping.hold_s
        if made is not None and (first := made.first(self._longest.group)) is not None:
            hashes = hashes[: first * self._longest.hash_stride]
        if hashes:
            client.touch(hashes, self._groups.queries, hold_s=hold_s, lazily=not hold_s)
        for group, blocks in () if made is None else made.in_order():
            client.cool(blocks, group=group)
