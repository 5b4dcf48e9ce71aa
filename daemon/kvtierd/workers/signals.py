"""Signals that reach a whole process group, or all processes of a service. They are meant for the front,
which then tells its workers."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

FOR_THE_FRONT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_back() -> Iterator[None]:
    """Keeps these signals from a worker that is started in this context until it ignores them itself; a
    Ctrl-C would otherwise end its imports with a traceback. They reach this process a moment later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_FRONT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Ignores these signals. A worker calls it at its start."""
    for number in FOR_THE_FRONT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_FRONT)
