"""Doorbell words that the streams of a GPU write: what was asked of the streams, and what has landed.

A stream that was asked to write to a page does so whenever it gets there, even if the page is no longer in
use. So such pages stay mapped until the process ends. What lands on a page that was replaced is carried over
to the page in use: a little late, but never before the stream got there.
"""

from collections.abc import Sequence

import numpy as np
from kvtier_kernels import SharedWords

from kvtier.memory import SharedBuffer

WORD_BYTES = 8


class StreamPage:
    """The doorbell words at the start of a page, writable by a GPU."""

    def __init__(self, buffer: SharedBuffer, doorbells: int, device_address: int) -> None:
        """`buffer` stays mapped until the process ends, even if it is closed."""
        self._words = SharedWords(buffer.array, doorbells)
        self._indexes = np.arange(doorbells, dtype=np.uint32)
        self._asked = np.zeros(doorbells, np.uint64)
        self._device_address = device_address

    def ask(self, doorbell: int, value: int) -> int:
        """Notes that a stream is about to be asked to write `value`. Returns the word's address on
        the GPU."""
        self._asked[doorbell] = max(value, int(self._asked[doorbell]))
        return self._device_address + doorbell * WORD_BYTES

    def values(self) -> list[int]:
        """Returns the words' values now."""
        values: list[int] = self._words.load_many(self._indexes).tolist()
        return values

    def expects_more(self, reached: Sequence[int]) -> bool:
        """Whether a stream was asked to write a value here that is higher than the one in `reached`."""
        return bool((self._asked > np.array(reached, np.uint64)).any())


class StreamWords:
    """The pages of one rank that streams write, or were asked to write."""

    def __init__(self, doorbells: int) -> None:
        self._current: StreamPage | None = None
        self._past: list[StreamPage] = []  # a stream may still write to these
        self._asked = [0] * doorbells

    def use(self, page: StreamPage | None) -> None:
        """From now on streams write to this page, or to none."""
        if self._current is not None:
            self._past.append(self._current)
        self._current = page

    @property
    def writable(self) -> bool:
        """Whether streams have a page to write to."""
        return self._current is not None

    def asked(self, doorbell: int) -> int:
        """Returns the highest value of this doorbell that a stream was ever asked to write."""
        return self._asked[doorbell]

    def ask(self, doorbell: int, value: int) -> int | None:
        """Notes that a stream is about to be asked to write `value`. Returns the word's address on the GPU,
        or None without a page."""
        self._asked[doorbell] = max(value, self._asked[doorbell])
        return None if self._current is None else self._current.ask(doorbell, value)

    def landed(self) -> list[int]:
        """Returns the highest value of each doorbell that has landed on any page; empty without pages."""
        pages = [*self._past, *([] if self._current is None else [self._current])]
        return [max(values) for values in zip(*(page.values() for page in pages), strict=True)]

    def forget(self, reached: Sequence[int]) -> None:
        """Forgets the replaced pages on which nothing higher than `reached` can still land."""
        self._past = [page for page in self._past if page.expects_more(reached)]

    @property
    def behind(self) -> bool:
        """Whether something may still land on a page that was replaced, to be carried over."""
        return bool(self._past)

    def clear(self) -> None:
        """Forgets all pages, which stay mapped."""
        self._current = None
        self._past.clear()
