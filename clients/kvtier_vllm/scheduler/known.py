"""Which blocks the daemon is known to hold, and how often each was seen: what need not be stored."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtier_vllm.scheduler.retaining import PLAIN, Kept

KNOWN_MAX = 65_536
"""Hashes remembered as stored, of all groups together: some 10 MB."""
KNOWN_S = 60.0
"""After it a block that is still in use is submitted again: the daemon may have evicted it, and learns that
it is wanted."""
KNOWN_TTL_PART = 0.25
"""Of a block that is dropped after a time, so much of it at most: then its time begins anew."""


class KnownBlocks:
    """Hashes that the daemon held not long ago, and what they were kept like. Advisory: it spares
    submissions."""

    def __init__(self, clock: Callable[[], float], most: int = KNOWN_MAX) -> None:
        self._clock = clock
        self._most = most
        self._until_s: OrderedDict[bytes, float] = OrderedDict()
        self._lesser: dict[bytes, Kept] = {}
        """Of them, those that are not kept as long as there is room."""

    def covers(self, block_hash: bytes, kept: Kept = PLAIN) -> bool:
        """Whether a store that has the block kept like this would change nothing."""
        if self._until_s.get(block_hash, 0.0) <= self._clock():
            return False
        return block_hash not in self._lesser or self._lesser[block_hash] >= kept

    def add(self, hashes: Sequence[bytes], kept: Kept = PLAIN) -> None:
        """They are there now, kept like this."""
        until_s = self._clock() + min(KNOWN_S, kept.ttl_s * KNOWN_TTL_PART)
        plain = kept == PLAIN
        for block_hash in hashes:
            self._put(block_hash, until_s)
            if plain:
                self._lesser.pop(block_hash, None)
            else:
                self._lesser[block_hash] = kept
        self._bound()

    def seen(self, hashes: Sequence[bytes]) -> None:
        """They are there now. That tells nothing of those that are known here already: another engine may
        have given them a time, which ends only if they are submitted again."""
        until_s = self._clock() + KNOWN_S
        for block_hash in hashes:
            if block_hash not in self._until_s:
                self._put(block_hash, until_s)
        self._bound()

    def forget(self, block_hash: bytes) -> None:
        """It is not there any more."""
        self._until_s.pop(block_hash, None)
        self._lesser.pop(block_hash, None)

    def clear(self) -> None:
        """Nothing is known any more."""
        self._until_s.clear()
        self._lesser.clear()

    def _put(self, block_hash: bytes, until_s: float) -> None:
        self._until_s[block_hash] = until_s
        self._until_s.move_to_end(block_hash)

    def _bound(self) -> None:
        while len(self._until_s) > self._most:
            block_hash, _ = self._until_s.popitem(last=False)
            self._lesser.pop(block_hash, None)


class Sightings:
    """How many requests have had a block, of those that were had lately."""

    def __init__(self, enough: int, most: int = KNOWN_MAX) -> None:
        self._enough = enough
        self._most = most
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def add(self, hashes: Sequence[bytes]) -> None:
        """One more request has them."""
        for block_hash in hashes:
            self._counts[block_hash] = min(self._counts.pop(block_hash, 0) + 1, self._enough)
        while len(self._counts) > self._most:
            self._counts.popitem(last=False)

    def enough(self, block_hash: bytes) -> bool:
        """Whether it is to be stored."""
        return self._counts.get(block_hash, 0) >= self._enough
