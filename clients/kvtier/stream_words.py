"""Doorbell words that the streams of a GPU write: what was asked of them, and what has landed.

A stream that was asked to write to a page writes there whenever it gets there, whatever has become of the
page. So such pages stay mapped for good, and what lands on one that has been replaced is carried over to the
page in use: a little late, but never before the stream was there.
"""

from collections.abc import Sequence

import numpy as np
from kvtier_kernels import SharedWords

from kvtier.memory import SharedBuffer

WORD_BYTES = 8


class StreamPage:
    """The doorbell words at the start of a page, writable by a GPU."""

    def __init__(self, buffer: SharedBuffer, doorbells: int, device_address: int) -> None:
        """`buffer` is mapped for good; it may be closed."""
        self._words = SharedWords(buffer.array, doorbells)
        self._indexes = np.arange(doorbells, dtype=np.uint32)
        self._asked = np.zeros(doorbells, np.uint64)
        self._device_address = device_address

    def ask(self, doorbell: int, value: int) -> int:
        """A stream is about to be asked for this. Returns the word's address on the GPU."""
        self._asked[doorbell] = max(value, int(self._asked[doorbell]))
        return self._device_address + doorbell * WORD_BYTES

    def values(self) -> list[int]:
        """What the words say."""
        values: list[int] = self._words.load_many(self._indexes).tolist()
        return values

    def expects_more(self, reached: Sequence[int]) -> bool:
        """Whether something was asked of it that is beyond these values."""
        return bool((self._asked > np.array(reached, np.uint64)).any())


class StreamWords:
    """The pages of one rank that streams write, or were asked to write."""

    def __init__(self, doorbells: int) -> None:
        self._current: StreamPage | None = None
        self._past: list[StreamPage] = []  # where something may still land
        self._asked = [0] * doorbells

    def use(self, page: StreamPage | None) -> None:
        """From now on streams write here; None: nowhere."""
        if self._current is not None:
            self._past.append(self._current)
        self._current = page

    @property
    def writable(self) -> bool:
        """Whether there is a page to write."""
        return self._current is not None

    def asked(self, doorbell: int) -> int:
        """The highest value that a stream was ever asked for."""
        return self._asked[doorbell]

    def ask(self, doorbell: int, value: int) -> int | None:
        """A stream is about to be asked for this. Returns the word's address on the GPU; None without a
        page."""
        self._asked[doorbell] = max(value, self._asked[doorbell])
        return None if self._current is None else self._current.ask(doorbell, value)

    def landed(self) -> list[int]:
        """The highest value of each doorbell that has landed anywhere; empty without pages."""
        pages = [*self._past, *([] if self._current is None else [self._current])]
        return [max(values) for values in zip(*(page.values() for page in pages), strict=True)]

    def forget(self, reached: Sequence[int]) -> None:
        """Forgets the pages of the past that can bring nothing beyond these values."""
        self._past = [page for page in self._past if page.expects_more(reached)]

    @property
    def behind(self) -> bool:
        """Whether something may still land on a page of the past."""
        return bool(self._past)

    def clear(self) -> None:
        """Forgets all pages, which stay mapped."""
        self._current = None
        self._past.clear()
