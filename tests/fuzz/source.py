"""Turns the bytes of one input into choices, so that a small change of the bytes is a small change of what a
target does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")

BORDERS = (
    *(0, 1, 2, 3, 7, 8, 63, 64, 127, 128, 255, 256, 511, 512, 4095, 4096, 4097, 65535, 65536, 65537),
    *((1 << bits) + off for bits in (20, 21, 31, 32, 40, 52, 56, 63) for off in (-1, 0, 1)),
    (1 << 64) - 1,
    (1 << 64) - 4096,
)
"""Numbers at which checks and arithmetic change."""


class Source:
    """The choices of one input. When its bytes are used up, every choice is the first one, or 0."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_empty(self) -> bool:
        """Whether all bytes are used up."""
        return self._at >= len(self._data)

    def take(self, count: int) -> bytes:
        """The next bytes; fewer at the end."""
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def rest(self) -> bytes:
        """All bytes that are left."""
        return self.take(len(self._data))

    def number(self, bits: int = 8) -> int:
        """A number of so many bits, a multiple of 8."""
        return int.from_bytes(self.take(bits // 8), "little")

    def below(self, end: int) -> int:
        """0 to `end` - 1."""
        return self.number(8 if end <= 256 else 16 if end <= 65_536 else 64) % end

    def flag(self) -> bool:
        return bool(self.number() & 1)

    def one_in(self, count: int) -> bool:
        """True for one of `count` values, and not for 0."""
        return self.number() % count == count - 1

    def choice(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def hostile(self) -> int:
        """An unsigned number of 64 bits: small, near a border, or anything."""
        kind = self.below(4)
        if kind == 0:
            return self.number()
        if kind == 1:
            return self.choice(BORDERS)
        if kind == 2:
            return self.number(16) * 4096 % (1 << 64)
        return self.number(64)

    def text(self) -> str:
        """Text of any length, with what may not be in it now and then."""
        kind = self.below(6)
        if kind == 0:
            return ""
        if kind == 1:
            return self.take(self.below(32)).decode("latin-1")
        if kind == 2:
            return self.choice(("a", "é", "\U0001f600")) * (self.below(2048) + 1)
        if kind == 3:
            return self.choice(("\0", "\x1b[2J", "a\nb", "\u202e", "cpu", "GPU-", "MIG-1"))
        return f"name{self.below(8)}"
