"""Descriptors that are held back for workers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


class DescriptorReserve:
    """Holds descriptors that mean nothing, so that clients cannot take them, and lets go of them while a
    worker is started. What an ended worker had goes back into it."""

    def __init__(self, count: int) -> None:
        """Holds `count` descriptors, or as many as there are."""
        self._count = count
        self._held: list[int] = []
        self.fill()

    def fill(self) -> None:
        """Takes what is missing, as far as there are descriptors."""
        try:
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            pass  # more are freed when a worker ends

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The descriptors are free inside. Do not wait there, because anybody may take them."""
        self.close()
        try:
            yield
        finally:
            self.fill()

    def close(self) -> None:
        """Frees them."""
        while self._held:
            os.close(self._held.pop())
