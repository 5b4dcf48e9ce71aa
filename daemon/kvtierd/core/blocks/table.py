"""What the core needs of a block table. In production it is native (`kvtier_kernels.BlockTable`); in tests
also a plain-Python oracle. Every call works on a batch, validates everything first, and changes nothing if it
raises."""

from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtierd.core.ids import Entries, Hashes, Slots

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]


class BlockState(IntEnum):
    """Residency of a block in a tier; 0 is "not there"."""

    ABSENT = 0
    WRITING = 1
    READY = 2
    EVICTING = 3


class BlockFlag(IntEnum):
    VERIFY = 1
    """Its checksum is checked before it is loaded."""
    RECOVERED = 2
    """Found in the pool at the start, and not seen to fit its checksum since."""
    CLEAN = 4
    """A disk has it."""
    QUEUED = 8
    """It is being written to a disk."""
    REUSED = 16
    """It was found or loaded since it was stored."""
    HOST_ONLY = 64
    """It is not to be written to a disk."""
    LATE = 32
    """On the host, WRITING: the disk takes too long to read it. On a disk, READY: it could not be read
    lately. Whoever asks is told that it is not there."""


class IndexPage(Protocol):
    """A set of block hashes that clients read by themselves; tables fill it, each page with blocks of one
    space."""

    def complete(self) -> None:
        """From now on clients believe that what is missing is not there."""
        ...


class HoldCounts(Protocol):
    """How many hold each entry of a table."""

    def add(self, entries: Entries) -> int:
        """One holder more for each occurrence of an entry. Returns how many entries had none before."""
        ...

    def remove(self, entries: Entries) -> int:
        """Undoes an `add` of the same entries. Returns how many entries have none now."""
        ...

    def of(self, entries: Entries) -> U32:
        """How many hold each entry."""
        ...


class BlockTable(Protocol):
    """Metadata of all blocks of one tier, in arrays; one writer."""

    def lookup(self, space: int, hashes: Hashes) -> tuple[Entries, U8]:
        """Entry and state of each key; NO_ENTRY and 0 where there is none."""
        ...

    def lookup_prefix(self, space: int, hashes: Hashes) -> tuple[Entries, int]:
        """Entries of the leading run of READY blocks, and the state of the block that ended it (0: absent or
        end)."""
        ...

    def insert(self, space: int, domain: int, hashes: Hashes, flags: int = 0) -> tuple[Entries, U8]:
        """Create the absent keys as WRITING, unpinned and without slots.

        Returns the entry of each key and 1 where it was created, 0 where it existed (or came earlier in the
        batch), 2 where the table was full (entry NO_ENTRY).
        """
        ...

    def attach_slots(self, entries: Entries, slots: Slots) -> None:
        """Give WRITING entries their slots, shape (n, world): one slot per shard, in rank order."""
        ...

    def slots(self, entries: Entries, world: int) -> Slots:
        """Slots of entries, shape (n, world)."""
        ...

    def owners(self, slots: Slots) -> Entries:
        """Entry that owns each slot; NO_ENTRY for a free one."""
        ...

    def commit(self, entries: Entries) -> None:
        """WRITING to READY; becomes the most recent of its domain, the last of the batch most of all."""
        ...

    def begin_evict(self, entries: Entries) -> None:
        """READY and unpinned to EVICTING."""
        ...

    def condemn(self, entries: Entries) -> None:
        """READY, pinned or not, to EVICTING: found no longer again; whoever drops the last pin removes it."""
        ...

    def remove(self, entries: Entries) -> None:
        """Forget WRITING or EVICTING, unpinned entries; their slots have no owner any more."""
        ...

    def pin(self, entries: Entries) -> None:
        """One pin more on each; an entry may come several times. Pinned blocks are no victims."""
        ...

    def unpin(self, entries: Entries) -> None:
        """One pin less on each; READY blocks that lose their last one become the most recent, in this
        order."""
        ...

    def touch(self, entries: Entries) -> None:
        """READY unpinned blocks become the most recent, in this order; others are left alone."""
        ...

    def cool(self, entries: Entries) -> None:
        """READY unpinned blocks become the least recent, in this order: the last one goes first; others are
        left alone."""
        ...

    def victims(self, domain: int, n: int) -> Entries:
        """Up to n unpinned READY blocks, least recent first. Changes nothing."""
        ...

    def coldest(self, domain: int, n: int, without_flags: int, horizon: int) -> Entries:
        """Of the `horizon` victims that are least recent, the up to n least recent ones that have none of
        these flags. Changes nothing."""
        ...

    def states(self, entries: Entries) -> U8: ...

    def pins(self, entries: Entries) -> U32: ...

    def flags(self, entries: Entries) -> U8: ...

    def set_flags(self, entries: Entries, flags: int) -> None: ...

    def clear_flags(self, entries: Entries, flags: int) -> None: ...

    def hashes(self, entries: Entries) -> Hashes: ...

    def spaces(self, entries: Entries) -> U32: ...

    def domains(self, entries: Entries) -> npt.NDArray[np.uint16]: ...

    def generations(self, entries: Entries) -> U32: ...

    def publish(self, space: int, page: Any) -> None:
        """From now on the page, an IndexPage of the table's own kind, has the hash of every block that is
        made in the space, until the block is removed."""
        ...

    def publish_more(self, space: int, n: int) -> bool:
        """Adds those blocks of the space that are among the next n entries the table had already. True once
        all are in the page."""
        ...

    def withdraw(self, space: int) -> None:
        """Lets go of a space's page, and leaves it as it is."""
        ...

    def hold_counts(self) -> HoldCounts:
        """Of the table's own kind, all zero."""
        ...

    def count(self, space: int) -> int: ...

    def entries_of(self, space: int) -> Entries: ...

    def stats(self) -> dict[str, Any]:
        """`writing`, `ready`, `evicting`, `capacity`, `bytes`, and `domains` (blocks per domain)."""
        ...

    def dump(self) -> dict[str, npt.NDArray[Any]]:
        """All live entries, ascending: `entries`, `spaces`, `hashes`, `states`, `flags`, `pins`, `domains`,
        `generations`, `slot_counts`, and `slots`, those of all entries one after another. For tests."""
        ...

    def check(self) -> None:
        """Validate the table's own consistency; AssertionError if it is broken. For tests."""
        ...
