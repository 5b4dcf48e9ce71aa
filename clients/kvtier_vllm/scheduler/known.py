"""Remembers which blocks the daemon holds, and how often each was seen, so that they need not be stored."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtier_vllm.scheduler.retaining import PLAIN, Kept

KNOWN_MAX = 65_536
"""The most hashes that are remembered as stored, of all groups together: about 10 MB."""
KNOWN_S = 60.0
"""After this time a block that is still in use is submitted again: the daemon may have evicted it, or learns
that it is used."""
KNOWN_TTL_PART = 0.25
"""The share of a block's time to live after which it is submitted again, so that its time begins anew."""


class KnownBlocks:
    """Hashes that the daemon held not long ago, and how they are kept. They only spare submissions."""

    def __init__(self, clock: Callable[[], float], most: int = KNOWN_MAX) -> None:
        self._clock = clock
        self._most = most
        self._until_s: OrderedDict[bytes, float] = OrderedDict()
        self._lesser: dict[bytes, Kept] = {}
        """Those of them that are not kept as long as there is room."""

    def covers(self, block_hash: bytes, kept: Kept = PLAIN) -> bool:
        """Returns whether storing the block, to be kept like this, would change nothing."""
        until_s = self._until_s.get(block_hash)
        if until_s is None or until_s <= self._clock():
            return False
        return block_hash not in self._lesser or self._lesser[block_hash] >= kept

    def add(self, hashes: Sequence[bytes], kept: Kept = PLAIN) -> None:
        """Remembers that the daemon has these blocks now, kept like this."""
        until_s = self._clock() + min(KNOWN_S, kept.ttl_s * KNOWN_TTL_PART)
        plain = kept is PLAIN or kept == PLAIN
        if self._until_s.keys().isdisjoint(hashes):
            self._until_s.update(dict.fromkeys(hashes, until_s))
        else:
            for block_hash in hashes:
                self._put(block_hash, until_s)
        if not plain:
            self._lesser.update(dict.fromkeys(hashes, kept))
        elif self._lesser:
            for block_hash in hashes:
                self._lesser.pop(block_hash, None)
        self._bound()

    def seen(self, hashes: Sequence[bytes]) -> None:
        """Remembers that the daemon has these blocks now. Blocks that are known here already stay as they
        are: another engine may have given them a time, which ends unless they are submitted again."""
        until_s = self._clock() + KNOWN_S
        for block_hash in hashes:
            if block_hash not in self._until_s:
                self._put(block_hash, until_s)
        self._bound()

    def forget(self, block_hash: bytes) -> None:
        """Forgets a block that the daemon does not have any more."""
        self._until_s.pop(block_hash, None)
        self._lesser.pop(block_hash, None)

    def clear(self) -> None:
        """Forgets all blocks."""
        self._until_s.clear()
        self._lesser.clear()

    def _put(self, block_hash: bytes, until_s: float) -> None:
        if block_hash in self._until_s:
            self._until_s.move_to_end(block_hash)
        self._until_s[block_hash] = until_s

    def _bound(self) -> None:
        while len(self._until_s) > self._most:
            block_hash, _ = self._until_s.popitem(last=False)
            self._lesser.pop(block_hash, None)


class Sightings:
    """How many requests have had a block, of the blocks that were seen lately."""

    def __init__(self, enough: int, most: int = KNOWN_MAX) -> None:
        self._enough = enough
        self._most = most
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def add(self, hashes: Sequence[bytes]) -> None:
        """Counts one more request that has these blocks."""
        for block_hash in hashes:
            self._counts[block_hash] = min(self._counts.pop(block_hash, 0) + 1, self._enough)
        while len(self._counts) > self._most:
            self._counts.popitem(last=False)

    def enough(self, block_hash: bytes) -> bool:
        """Returns whether the block was seen often enough to be stored."""
        return self._counts.get(block_hash, 0) >= self._enough
