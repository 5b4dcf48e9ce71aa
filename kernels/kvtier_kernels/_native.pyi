"""The native core of kvtier. Use it through `kvtier_kernels`."""

import numpy
import numpy.typing
from typing_extensions import Buffer


def xxh3_64(data: Buffer) -> int:
    """
    The 64-bit XXH3 checksum of a C-contiguous buffer's bytes. Raises ValueError for anything else.
    """

def xxh3_64_rows(rows: numpy.typing.NDArray[numpy.uint8]) -> numpy.typing.NDArray[numpy.uint64]:
    """
    The checksum of each row of a uint8 array of shape (n, bytes), as uint64 of shape (n,).
    """

PART_ARMED: int = 0

PART_STARTED: int = 1

PART_REVOKED: int = 2

PART_DONE: int = 3

PART_FAILED: int = 4

PART_SUPERSEDED: int = 5

TICKET_MAX: int = 72057594037927935

class SharedWords:
    """
    64-bit words at the start of a writable buffer, shared with other processes. The buffer stays exported while this
    object lives: drop it before closing an mmap. Safe from any number of threads. An index out of range raises
    ValueError.
    """

    def __init__(self, buffer: Buffer, count: int) -> None:
        """
        `count` words, at least one. Raises ValueError if the buffer is smaller, read-only or not 8-byte aligned.
        """

    @property
    def count(self) -> int:
        """Number of words."""

    def load(self, index: int) -> int:
        """The word's value (acquire)."""

    def load_many(self, indexes: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint64]:
        """
        The values of several words (each acquire), uint64 of the shape of `indexes` (n,).
        """

    def store(self, index: int, value: int) -> None:
        """Sets the word (release)."""

    def compare_exchange(self, index: int, expected: int, desired: int) -> bool:
        """
        Sets the word to `desired` if it is `expected`; True if it did (acquire and release).
        """

    def ring(self, index: int, value: int) -> None:
        """
        Raises a doorbell to `value` (release). One that is already there or further stays: doorbells never go back.
        """

    def try_start(self, index: int, ticket: int) -> bool:
        """
        Armed to STARTED. False, and nothing changed, if the part is started, revoked, over or superseded.
        """

    def try_revoke(self, index: int, ticket: int) -> bool:
        """
        Armed to REVOKED; True also if this part is revoked already. False, and nothing changed, if it is started,
        over or superseded. After True the part will never start.
        """

    def finish(self, index: int, ticket: int, state: int) -> None:
        """
        STARTED to PART_DONE or PART_FAILED (release). Raises RuntimeError, and changes nothing, if the word does not
        say STARTED for this ticket.
        """

    def part_state(self, index: int, ticket: int) -> int:
        """
        The part's state: one of the PART_ constants; PART_SUPERSEDED if the word belongs to a later ticket. Raises
        RuntimeError for a value that no part word can have.
        """
