"""Stores: pages go to the staging memory while the engine keeps them, and from there to the daemon."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier import Chain, Client, StoreResult, Transfer, TransferState

from kvtier_sglang.staging import Staging, StagingPool
from kvtier_sglang.wishes import Wishes

QUEUED_PAGES_MAX = 65_536
"""At most so many pages wait for room; a node beyond that is rolled back, and may be offered again."""
Part = tuple[int, list[bytes], Sequence[int]]
"""What a node has in one pool: the pool's number, hashes, and the pages that have the blocks."""
STAGED_FRACTION = 1 / 2
"""The part of the staging memory that stores may have: the rest is for loads, which somebody waits for."""
STORE_TIMEOUT_S = 10.0
"""After this time a store is given up, because the engine cannot evict what it has of the node."""


@dataclass(slots=True, eq=False)
class _Copy:
    """A transfer from the staging memory."""

    transfer: Transfer
    staging: StagingPool
    numbers: list[int]
    """The pages of the staging memory that it reads."""
    group: int
    hashes: list[bytes]


@dataclass(slots=True, eq=False)
class _Store:
    """One node of the radix tree."""

    parts: deque[Part]
    """What has not been copied to the staging memory."""
    since_s: float
    pages: int
    """How many it has in all pools."""
    ready: Callable[[], bool] = lambda: True
    """Whether its pages have been computed."""
    previous: bytes = b""
    """The hash before what is left of the first part, if some of that has been copied."""
    copies: list[_Copy] = field(default_factory=list)
    failed: bool = False

    @property
    def over(self) -> bool:
        return self.failed or not (self.parts or self.copies)


class Stores:
    """Stores of one engine process, which end in the order in which they began.

    Whatever happens, each node that is offered has one result. Ranks take results in step, so a rank that
    took a node while another did not would from then on compare results of different nodes.
    """

    def __init__(self, staging: Staging, clock: Callable[[], float], wishes: Wishes | None = None) -> None:
        self._staging, self._clock = staging, clock
        self._wishes = wishes or Wishes()
        self._queue: deque[_Store] = deque()
        self._queued_pages = 0
        self._staged = dict.fromkeys(staging.pools, 0)
        self._unfenced: list[_Copy] = []
        self._results: deque[bool] = deque()
        self.begun = 0
        """How many nodes there have been."""

    def add(
        self, client: Client | None, parts: Sequence[Part], ready: Callable[[], bool] = lambda: True
    ) -> None:
        """Stores a node, whose pages must not change until its result is there. It fails at once without a
        daemon, or if too many wait.

        ready: whether its pages have been computed, which nobody waits for.
        """
        pages = sum(len(hashes) for _, hashes, _ in parts)
        if client is None or client.ready_epoch is None or self._queued_pages + pages > QUEUED_PAGES_MAX:
            self.refuse()
            return
        known = all(
            client.known_run(hashes, group=group, counted=False) == len(hashes) for group, hashes, _ in parts
        )
        # What somebody has stored already is not copied, but its result has its turn.
        self._append(_Store(deque() if known else deque(parts), self._clock(), pages, ready))
        self.go_on(client)

    def skip(self) -> None:
        """Takes note of a node that another rank stores for this one."""
        self._append(_Store(deque(), self._clock(), 0))
        self._end_leading()

    def refuse(self) -> None:
        """Takes note of a node that cannot be stored."""
        self._append(_Store(deque(), self._clock(), 0, failed=True))
        self._end_leading()

    @property
    def completed(self) -> int:
        """How many results are there."""
        return len(self._results)

    def take_result(self) -> bool:
        """Takes the oldest result: whether the node is stored."""
        return self._results.popleft()

    def go_on(self, client: Client | None) -> None:
        """Copies what there is room for, and takes note of what has ended."""
        self._reap()
        for store in self._queue:
            store.copies = [each for each in store.copies if not self._is_over(client, store, each)]
            late = self._clock() - store.since_s > STORE_TIMEOUT_S
            if client is None or client.ready_epoch is None or late:
                if not store.over:
                    self._give_up(store)
            elif not store.failed and store.ready():
                self._stage(client, store)
        self._end_leading()

    def fail_all(self) -> None:
        """Gives up everything that has not ended. The results say so."""
        for store in self._queue:
            if not store.over:
                self._give_up(store)
        self._end_leading()
        self._reap()

    def forget(self) -> None:
        """Gives up everything that has not ended, and forgets results that nobody has taken."""
        self.fail_all()
        self._results.clear()

    def _append(self, store: _Store) -> None:
        self._queue.append(store)
        self._queued_pages += store.pages
        self.begun += 1

    def _stage(self, client: Client, store: _Store) -> None:
        while store.parts:
            group, hashes, pages = store.parts[0]
            staging = self._staging.pools[group]
            alike, retention = self._wishes.run(hashes)
            room = max(1, int(staging.pages * STAGED_FRACTION)) - self._staged[staging]
            numbers = staging.take(max(0, min(room, alike, client.transfer_blocks_max or room)))
            if not numbers:
                return
            count = len(numbers)
            self._staged[staging] += count
            staging.pool.gather(pages[:count], staging.rows, numbers)
            chain = Chain(count, store.previous)
            transfer = client.store(
                hashes[:count], numbers, group=group, chains=(chain,), retention=retention
            )
            store.copies.append(_Copy(transfer, staging, numbers, group, hashes[:count]))
            if count < len(hashes):
                store.previous = hashes[count - 1]
                store.parts[0] = (group, hashes[count:], pages[count:])
            else:
                store.previous = b""
                store.parts.popleft()

    def _is_over(self, client: Client | None, store: _Store, copy: _Copy) -> bool:
        outcome = copy.transfer.outcome
        if outcome.state is TransferState.ACTIVE or not outcome.fenced:
            return False  # its copy may be over before the daemon says what became of it
        failed = not outcome.done or StoreResult.THROTTLED in (copy.transfer.results or ())
        store.failed |= failed
        self._give_back(copy)
        if client is not None and not failed and (cold := self._wishes.stored(copy.hashes)):
            client.cool(cold, group=copy.group)
        return True

    def _give_up(self, store: _Store) -> None:
        store.failed = True
        for copy in store.copies:
            copy.transfer.revoke()
        self._unfenced += store.copies
        store.copies = []

    def _reap(self) -> None:
        left = []
        for copy in self._unfenced:
            if copy.transfer.fenced:
                self._give_back(copy)
            else:
                left.append(copy)
        self._unfenced = left

    def _give_back(self, copy: _Copy) -> None:
        self._staged[copy.staging] -= len(copy.numbers)
        copy.staging.give_back(copy.numbers)

    def _end_leading(self) -> None:
        while self._queue and self._queue[0].over:
            store = self._queue.popleft()
            if store.failed:
                self._give_up(store)
            self._queued_pages -= store.pages
            self._results.append(not store.failed)
