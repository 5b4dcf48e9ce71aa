"""SIGINT and SIGTERM, from the first line of a command on: they never end in a traceback, nor leave anything
half done.

A command that has made nothing is ended at once. One that has is only told, and checks between two steps,
because an exception from a signal handler could come anywhere, even where nobody can clean up or where it is
swallowed. This module is imported before everything else, so it imports almost nothing.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STATUS_BASE = 128
"""Added to a signal's number for the exit status, as shells do: 130 after SIGINT, 143 after SIGTERM."""

_last_words = ""
_status: int | None = None
_to_terminal = ""


def leave_at_once(last_words: str, *numbers: signal.Signals) -> None:
    """From now on these signals end the process, with one line on stderr (in which `{signal}` becomes the
    signal's name) and the conventional status. Nothing is cleaned up."""
    instead(last_words)
    for number in numbers:
        signal.signal(number, _leave)


def instead(last_words: str, status: int | None = None, to_terminal: str = "") -> None:
    """Sets what a signal that ends the process does from now on.

    It writes `to_terminal` to standard output and the line `last_words` to standard error, each unless it is
    empty, and ends the process with `status`; None is the conventional status.
    """
    global _last_words, _status, _to_terminal
    _last_words, _status, _to_terminal = last_words, status, to_terminal


def _leave(number: int, _: FrameType | None) -> None:
    line = _last_words.replace("{signal}", signal.Signals(number).name)
    for descriptor, text in ((1, _to_terminal), (2, f"{line}\n" if line else "")):
        if text:
            with suppress(OSError):
                os.write(descriptor, text.encode())
    os._exit(STATUS_BASE + number if _status is None else _status)


class StoppedEarly(Exception):
    """A signal came before the work was done."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = STATUS_BASE + number


class Noted:
    """Notes signals instead of acting on them. The program checks now and then whether one has come."""

    def __init__(self, *numbers: signal.Signals, patience: int | None = None) -> None:
        """Takes these signals over for good. With `patience`, so many are noted, and one more ends the
        process."""
        self._number = 0
        self._count = 0
        self._patience = patience
        self._tell: Callable[[int], object] | None = None
        for number in numbers:
            signal.signal(number, self._note)

    @property
    def noted(self) -> bool:
        """Whether there was a signal."""
        return bool(self._number)

    def check(self) -> None:
        """Raises StoppedEarly if there was a signal."""
        if self._number:
            raise StoppedEarly(self._number)

    @contextmanager
    def told(self, tell: Callable[[int], object]) -> Iterator[None]:
        """In this context, `tell(number)` is called with every signal, from the signal's handler."""
        self._tell = tell
        try:
            yield
        finally:
            self._tell = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._number = self._number or number
        self._count += 1
        if self._patience is not None and self._count > self._patience:
            _leave(number, frame)
        if self._tell is not None:
            self._tell(number)
