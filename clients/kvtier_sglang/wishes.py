"""What KV hints say about pages that have not been stored yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier import Retention

PAGES_MAX = 65_536
"""For how many pages at most is remembered what is wished when they are stored. Older ones are forgotten."""


class Wishes:
    """What is wished for pages that have not been stored yet."""

    def __init__(self) -> None:
        self._holds: dict[bytes, float] = {}
        self._cold: dict[bytes, None] = {}

    def hold(self, hashes: Sequence[bytes], seconds: float) -> None:
        """Has these pages held for so long when they have been stored, or longer if that is wished too."""
        for each in hashes:
            _remember(self._holds, each, max(seconds, self._holds.get(each, 0.0)))

    def cool(self, hashes: Sequence[bytes]) -> None:
        """Has these pages evicted first once they have been stored."""
        for each in hashes:
            _remember(self._cold, each, None)

    def run(self, hashes: Sequence[bytes]) -> tuple[int, Retention | None]:
        """Returns how many of the first pages are stored in one way, at least one, and what that is."""
        if not self._holds:
            return len(hashes), None
        seconds = self._holds.get(hashes[0], 0.0)
        count = next(
            (index for index, each in enumerate(hashes) if self._holds.get(each, 0.0) != seconds), len(hashes)
        )
        return count, Retention(hold_s=seconds) if seconds else None

    def stored(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Forgets pages that have been stored, and returns those of them that are to be evicted first."""
        if not self._holds and not self._cold:
            return []
        cold = [each for each in hashes if each in self._cold]
        for each in hashes:
            self._holds.pop(each, None)
            self._cold.pop(each, None)
        return cold


def _remember(pages: dict[bytes, Any], page: bytes, value: Any) -> None:
    pages.pop(page, None)
    if len(pages) >= PAGES_MAX:
        del pages[next(iter(pages))]
    pages[page] = value
