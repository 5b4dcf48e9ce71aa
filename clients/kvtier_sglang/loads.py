"""Loads, which are over when `load` returns: SGLang ends a request with an error if one fails later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier import Client, Lease, Transfer

from kvtier_sglang.lookups import HeldLookups
from kvtier_sglang.staging import Staging, StagingPool

AT_ONCE = 2
"""Copies of one load that are under way: one is copied on from the staging memory while the next lands."""
POLL_S = 0.005
"""How long a load waits for room or for other loads before it asks again."""


@dataclass(slots=True)
class _Chunk:
    transfer: Transfer
    numbers: list[int]
    """Pages of the staging memory that it lands in."""
    first: int
    """The first of the load's pages."""


class Loads:
    """Loads of one engine process."""

    def __init__(self, staging: Staging, lookups: HeldLookups, clock: Callable[[], float]) -> None:
        self._staging, self._lookups = staging, lookups
        self._clock = clock
        self._unfenced: list[tuple[Transfer, StagingPool, list[int]]] = []
        """Copies that were given up while they ran, and where they may still land."""

    def load(
        self,
        client: Client,
        request: str,
        hashes: list[bytes],
        pages: Sequence[Sequence[int]],
        deadline_s: float,
    ) -> bool:
        """Loads a prefix. `pages`: for each pool those that it goes to, of a window the last ones.

        Returns whether all of it is in the engine's cache; if not, some of it may be, and nothing more will
        come. Waits until `deadline_s` of the clock at most."""
        self.reap()
        done = 0
        while done < len(hashes):
            found = self._lookups.take(client, request, hashes[done:])
            if found is None:
                return False
            try:
                for group, own in enumerate(pages):
                    lease = found.lease_of(group)
                    if lease is None:
                        return False
                    count = min(lease.blocks, len(own) - done) if len(pages) == 1 else len(own)
                    if count > lease.blocks:
                        return False  # less than what the tree was told
                    skipped = 0 if len(pages) == 1 else lease.blocks - count
                    if not self._load_leased(
                        client, group, lease, skipped, own[done : done + count], deadline_s
                    ):
                        return False
                done += found.hits
            finally:
                found.release()
        return True

    def reap(self) -> None:
        """Takes back staging memory in which nothing can land any more."""
        left = []
        for transfer, pool, numbers in self._unfenced:
            if transfer.fenced:
                pool.give_back(numbers)
            else:
                left.append((transfer, pool, numbers))
        self._unfenced = left

    def _load_leased(
        self, client: Client, group: int, lease: Lease, skipped: int, pages: Sequence[int], deadline_s: float
    ) -> bool:
        """Loads blocks of a lease, but for the `skipped` first ones."""
        staging = self._staging.pools[group]
        begun, under_way = 0, deque[_Chunk]()
        size = max(1, min(client.transfer_blocks_max or len(pages), staging.pages // 2 // AT_ONCE))
        try:
            while begun < len(pages) or under_way:
                while begun < len(pages) and len(under_way) < AT_ONCE:
                    numbers = staging.take(min(size, len(pages) - begun))
                    if not numbers:
                        break
                    transfer = client.load(
                        lease, numbers, group=group, first=skipped + begun, keep_lease=True
                    )
                    under_way.append(_Chunk(transfer, numbers, begun))
                    begun += len(numbers)
                left_s = deadline_s - self._clock()
                if not under_way:  # copies that hang have all of the staging memory
                    self.reap()
                    if left_s <= 0:
                        return False
                    time.sleep(min(POLL_S, left_s))
                    continue
                chunk = under_way[0]
                if not chunk.transfer.wait(max(0.0, left_s)).done:
                    return False
                under_way.popleft()
                end = chunk.first + len(chunk.numbers)
                staging.pool.scatter(staging.rows, chunk.numbers, pages[chunk.first : end])
                staging.give_back(chunk.numbers)
            return True
        finally:
            for chunk in under_way:
                chunk.transfer.revoke()
                self._unfenced.append((chunk.transfer, staging, chunk.numbers))
            self.reap()
