"""A worker's status page: what it is busy with, so that the front can see it without asking.

For each lane it has the time at which it entered the native call that it is in, 0 outside of one; the
heartbeat, the time at which the main thread last came round; how many bytes of the pool are registered with
the GPU's driver, and since when more of it is being registered. For each thread of a disk's worker it has the
time at which it began to wait for the disk, or at which the disk last did anything that it waits for, 0 when
it does not wait. The last word is how many bytes of the pool lie on another memory node than the GPU. Times
are in monotonic nanoseconds.
"""

import mmap
import os
import time
from enum import IntEnum

from kvtier_kernels import SharedWords

from kvtierd.workers.supervisor.kinds import IO_THREADS_MAX as IO_THREADS_MAX

PAGE_BYTES = 4096

HEARTBEAT_PERIOD_S = 1.0
"""A worker's main thread comes round at least this often. Nothing else wakes an idle worker."""


class StatusWord(IntEnum):
    """Indexes of the words in the page."""

    LOAD_LANE = 0
    STORE_LANE = 1
    HEARTBEAT = 2
    REGISTERED_BYTES = 3
    """Bytes of the pool that are registered with the driver of the worker's GPU."""
    REGISTERING = 4
    IO_0 = 5
    IO_1 = 6
    IO_2 = 7
    IO_3 = 8
    IO_4 = 9
    IO_5 = 10
    IO_6 = 11
    IO_7 = 12
    REMOTE_BYTES = 13
    """Bytes of the pool that seem to lie on another memory node than the worker's GPU."""


_CULPRITS = {
    StatusWord.LOAD_LANE: "its load lane has been inside one copy call",
    StatusWord.STORE_LANE: "its store lane has been inside one copy call",
    StatusWord.HEARTBEAT: "its main thread has not come round",
    # A worker that registers holds up those of the other GPUs.
    StatusWord.REGISTERING: "it has been registering the pool with the driver",
} | {
    io: "the disk has not answered one of its threads"
    for io in StatusWord
    if StatusWord.IO_0 <= io <= StatusWord.IO_7
}


def io_word(thread: int) -> StatusWord:
    """The word of one thread, 0 to IO_THREADS_MAX - 1, of a disk's worker."""
    return StatusWord(StatusWord.IO_0 + thread)


def create_status_fd() -> int:
    """A memfd for one status page, all zero. The caller closes it."""
    fd = os.memfd_create("kvtierd-worker-status", os.MFD_CLOEXEC)
    os.ftruncate(fd, PAGE_BYTES)
    return fd


class StatusPage:
    """One end's mapping of a status page. It is unmapped with the object."""

    def __init__(self, fd: int) -> None:
        """Maps the page. The descriptor stays the caller's."""
        self.words = SharedWords(mmap.mmap(fd, PAGE_BYTES), len(StatusWord))

    def enter(self, word: StatusWord) -> None:
        """A lane enters a native call, or the main thread comes round."""
        self.words.store(word, time.monotonic_ns())

    def leave(self, word: StatusWord) -> None:
        self.words.store(word, 0)

    def read(self) -> tuple[int, ...]:
        """The words' values, in the order of StatusWord."""
        return tuple(self.words.load(word) for word in StatusWord)


class StallDetector:
    """Decides from successive readings whether a worker is stuck.

    A lane may be inside one call for `deadline_s`, and the main thread may sleep for one heartbeat more. Only
    time that the caller saw pass counts, so after the machine or the front was stopped for an hour, nobody is
    accused.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadlines_s = [deadline_s] * len(StatusWord)
        self._deadlines_s[StatusWord.HEARTBEAT] += HEARTBEAT_PERIOD_S
        self._last = (0,) * len(StatusWord)
        self._unchanged_s = [0.0] * len(StatusWord)
        self.stuck: StatusWord | None = None
        """What is stuck, as of the last reading."""

    def observe(self, values: tuple[int, ...], elapsed_s: float) -> str | None:
        """Takes a reading made `elapsed_s` after the one before. Returns what is stuck, as a sentence, or
        None."""
        for word in _CULPRITS:
            if values[word] == 0 or values[word] != self._last[word]:
                self._unchanged_s[word] = 0.0
            else:
                self._unchanged_s[word] += elapsed_s
        self._last = values
        self.stuck = None
        for word in _CULPRITS:
            if self._unchanged_s[word] >= self._deadlines_s[word]:
                self.stuck = word
                return f"{_CULPRITS[word]} for {self._unchanged_s[word]:.1f} s"
        return None
