"""Why blocks are gone: a bounded memory of the latest ones, in arrays that are written a batch at a time."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kvtierd.core.blocks.table import U32
from kvtierd.core.errors import Reason
from kvtierd.core.ids import HASH_BYTES_MAX, Hashes, SpaceId


class Fate(IntEnum):
    """How a block came to be absent."""

    EVICTED = 1
    STORE_ENDED = 2
    """Its store failed or was called off, so it was never readable."""
    REFUSED = 3
    """There was no room to store it."""
    CORRUPT = 4
    CLEARED = 5
    """An operator dropped it."""
    EXPIRED = 6
    """Its time was over."""
    UNWANTED = 7
    """It was not worth its room, or what comes before it was not there."""


@dataclass(frozen=True, slots=True)
class RememberedFate:
    """What last became of a block."""

    fate: Fate
    reason: Reason | None
    """Why its store ended; None for other fates."""
    at: int
    """When, in the unit of `History.remember`."""


class History:
    """The fates of the latest blocks that have gone."""

    def __init__(self, capacity: int) -> None:
        """`capacity` is the number of blocks to remember, at least one."""
        self.capacity = capacity
        self.total = 0
        """Blocks ever remembered."""
        self._hashes = np.zeros((capacity, HASH_BYTES_MAX), np.uint8)
        self._spaces = np.zeros(capacity, np.uint32)
        self._notes = np.zeros(capacity, np.uint64)
        """Time, fate and reason in one word."""
        self._next = 0

    def __len__(self) -> int:
        return min(self.total, self.capacity)

    def remember(
        self, spaces: U32 | SpaceId, hashes: Hashes, fate: Fate, now: int, reason: Reason | None = None
    ) -> None:
        """Remembers a batch, and forgets the oldest blocks to make room. `spaces` is that of each block, or
        one for all. `now` may be in any unit, but always in the same."""
        n = len(hashes)
        note = now << 16 | fate << 8 | (reason or 0)
        if n > self.capacity - self._next:
            self._wrap(spaces, hashes, note)
        else:
            first, last = self._next, self._next + n
            self._hashes[first:last] = hashes
            self._spaces[first:last] = spaces
            self._notes[first:last] = note
            self._next = last
        self.total += n

    def _wrap(self, spaces: U32 | SpaceId, hashes: Hashes, note: int) -> None:
        kept = hashes[-self.capacity :]
        places = (self._next + np.arange(len(kept))) % self.capacity
        self._hashes[places] = kept
        self._spaces[places] = spaces if isinstance(spaces, int) else spaces[-self.capacity :]
        self._notes[places] = note
        self._next = int(places[-1]) + 1

    def fates(self, key: Hashes) -> dict[SpaceId, RememberedFate]:
        """What last became of the blocks of one hash, by space; `key` has shape (1, 32). It reads everything,
        so it is for people's questions and not for requests."""
        words = self._hashes.view(np.uint64)
        wanted = key.view(np.uint64)[0]
        found = np.flatnonzero(words[: len(self), 0] == wanted[0])
        found = found[(words[found] == wanted).all(axis=1)]
        oldest_first = found[np.argsort((found - self._next) % self.capacity)]
        latest = dict(
            zip(self._spaces[oldest_first].tolist(), self._notes[oldest_first].tolist(), strict=True)
        )
        return {SpaceId(space): _remembered(note) for space, note in latest.items()}

    def oldest_at(self) -> int | None:
        """When the oldest block that is remembered went; None if nothing was ever forgotten."""
        if self.total <= self.capacity:
            return None
        return int(self._notes[self._next % self.capacity]) >> 16


def _remembered(note: int) -> RememberedFate:
    reason = note & 0xFF
    return RememberedFate(Fate(note >> 8 & 0xFF), Reason(reason) if reason else None, note >> 16)
