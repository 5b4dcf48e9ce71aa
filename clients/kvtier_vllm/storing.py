"""Which blocks of running requests to store, and what became of those that were submitted."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier import Client, Doorbell, PartRef, StoreResult, Transfer, TransferState

from kvtier_vllm.meta import STORE_DOORBELL, StoreOrder

KNOWN_MAX = 65_536
"""Hashes remembered as stored, some 10 MB."""
KNOWN_S = 60.0
"""After it a block that is still in use is submitted again: the daemon may have evicted it, and learns that
it is wanted."""
TRANSFERS_MAX = 256
"""Stores in flight. Beyond it blocks wait, and go with later ones of their request."""
BLOCKS_MAX = 2_048
"""Of one store, far below what the daemon takes."""
PAUSE_S = 0.5
"""Without stores, after one was refused."""
FAILURES_MAX = 3
"""Of one request; then it is left alone."""


class KnownBlocks:
    """Hashes that the daemon held not long ago. Advisory: it spares submissions."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, block_hash: bytes) -> bool:
        return self._until_s.get(block_hash, 0.0) > self._clock()

    def add(self, hashes: Sequence[bytes]) -> None:
        """They are there now."""
        until_s = self._clock() + KNOWN_S
        for block_hash in hashes:
            self._until_s[block_hash] = until_s
            self._until_s.move_to_end(block_hash)
        while len(self._until_s) > KNOWN_MAX:
            self._until_s.popitem(last=False)

    def clear(self) -> None:
        """Nothing is known any more."""
        self._until_s.clear()


@dataclass(slots=True, eq=False)
class StoreState:
    """One request, as far as its stores go."""

    next_block: int = 0
    """Blocks below it were submitted, or need not be."""
    failures: int = 0
    open: dict[int, PartRef] = field(default_factory=dict)
    """By ticket: parts that may still read the request's blocks, as far as the scheduler knows."""


@dataclass(slots=True, eq=False)
class _Store:
    transfer: Transfer
    request: StoreState
    hashes: list[bytes]
    indexes: list[int]
    """Block of the request for each hash."""


@dataclass(slots=True)
class StoreCounters:
    """Since the engine started."""

    blocks: int = 0
    transfers: int = 0
    refused: int = 0


class Storer:
    """Submits stores, one per request and step at most, and keeps account of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.known = KnownBlocks(clock)
        self.counters = StoreCounters()
        self._clock = clock
        self._stores: dict[int, _Store] = {}
        self._paused_until_s = 0.0

    @property
    def has_room(self) -> bool:
        """Whether `submit` is worth calling now."""
        return len(self._stores) < TRANSFERS_MAX and self._clock() >= self._paused_until_s

    def submit(
        self,
        client: Client,
        name: str,
        request: StoreState,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        step: int,
    ) -> StoreOrder | None:
        """Submits what is new among the first `len(block_ids)` blocks of a request. They are full, and
        computed when the store doorbell says `step`. None if there is nothing for the workers to follow."""
        if request.failures > FAILURES_MAX:
            request.next_block = len(block_ids)
            return None
        first, end = request.next_block, min(len(block_ids), request.next_block + BLOCKS_MAX)
        indexes = [index for index in range(first, end) if hashes[index] not in self.known]
        request.next_block = end
        if not indexes:
            return None
        sources = tuple(block_ids[index] for index in indexes)
        transfer = client.store(
            [hashes[index] for index in indexes], sources, doorbell=Doorbell(STORE_DOORBELL, step)
        )
        self.counters.transfers += 1
        store = _Store(transfer, request, [hashes[index] for index in indexes], indexes)
        part = transfer.part
        if part is None:  # refused at once
            self._failed(store, 0)
            return None
        self._stores[part.ticket] = store
        request.open[part.ticket] = part
        return StoreOrder(name, part, sources)

    def poll(self) -> list[PartRef]:
        """Takes in what the daemon reported. Returns the parts of stores that ended otherwise than well: a
        worker that has not seen them start would wait for them in vain."""
        failed: list[PartRef] = []
        for ticket, store in list(self._stores.items()):
            outcome = store.transfer.outcome
            if outcome.state is TransferState.ACTIVE:
                continue
            del self._stores[ticket]
            if outcome.fenced:
                store.request.open.pop(ticket, None)
            if not outcome.done and store.transfer.part is not None:
                failed.append(store.transfer.part)
            self._account(store)
        return failed

    def forget_open(self, request: StoreState) -> list[PartRef]:
        """The request loses its blocks: returns the parts that may still read them. What becomes of those
        stores is no longer held against it, and it starts over."""
        parts = list(request.open.values())
        request.open.clear()
        request.next_block = 0
        for part in parts:
            store = self._stores.get(part.ticket)
            if store is not None:
                store.request = StoreState()
        return parts

    def start_over(self) -> None:
        """Another daemon, or the same after a restart: nothing is known of what it holds."""
        self.known.clear()
        self._paused_until_s = 0.0

    def _account(self, store: _Store) -> None:
        outcome, results = store.transfer.outcome, store.transfer.results
        if results is None or len(results) != len(store.hashes):
            self._failed(store, 0)
            return
        good: list[bytes] = []
        first_bad: int | None = None
        for position, (block_hash, result) in enumerate(zip(store.hashes, results, strict=True)):
            succeeded = position < len(outcome.succeeded) and outcome.succeeded[position] == 1
            if succeeded or result is StoreResult.EXISTS:
                good.append(block_hash)
            elif result is not StoreResult.PENDING and first_bad is None:
                first_bad = position
        self.known.add(good)
        self.counters.blocks += len(good)
        if first_bad is not None:
            self._failed(store, first_bad)

    def _failed(self, store: _Store, position: int) -> None:
        """What was not stored is tried again with its request's next blocks: without it they are of no
        use."""
        self.counters.refused += 1
        store.request.failures += 1
        store.request.next_block = min(store.request.next_block, store.indexes[position])
        self._paused_until_s = self._clock() + PAUSE_S
