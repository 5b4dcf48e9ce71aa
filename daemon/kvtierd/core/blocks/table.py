"""What the core needs of a block table. In production the table is native (`kvtier_kernels.BlockTable`);
tests also have a plain-Python oracle. Every call works on a batch, checks all of it first, and changes
nothing if it raises."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtierd.core.ids import Entries, Hashes, Slots

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]


class BlockState(IntEnum):
    """Where a block is in its life in one tier; 0 if it is not there."""

    ABSENT = 0
    WRITING = 1
    READY = 2
    EVICTING = 3


class BlockFlag(IntEnum):
    VERIFY = 1
    """The block's checksum is checked before it is loaded."""
    RECOVERED = 2
    """The block was found in the pool at the start, and no load has found it sound since."""
    CLEAN = 4
    """A disk has the block."""
    QUEUED = 8
    """The block is being written to a disk."""
    STORE_CLEAN = 256
    """The store has the block."""
    STORE_QUEUED = 512
    """The block is being put into the store."""
    REUSED = 16
    """The block was found or loaded after it was stored."""
    HOST_ONLY = 64
    """The block is not to be written to a disk, nor put into the store."""
    SPARED = 128
    """The block's disk is not to have it: it has more use for what it has, or was written enough."""
    STORE_SPARED = 1024
    """The store is not to have it, for the same reasons."""
    LATE = 32
    """On the host, WRITING: the disk takes too long to read the block. On a disk, READY: the block could not
    be read lately. In both cases lookups are told that it is not there."""


class IndexPage(Protocol):
    """A set of block hashes that clients read by themselves. Tables fill it, each page with the blocks of one
    space."""

    def complete(self) -> None:
        """From now on clients rely on it that a hash that is missing is not there."""
        ...

    def incomplete(self) -> None:
        """From now on clients ask about every hash."""
        ...


class HoldCounts(Protocol):
    """How many holders each entry of a table has."""

    def add(self, entries: Entries) -> int:
        """Counts one more holder for each occurrence of an entry. Returns how many entries had none
        before."""
        ...

    def remove(self, entries: Entries) -> int:
        """Undoes an `add` of the same entries. Returns how many entries have none now."""
        ...

    def of(self, entries: Entries) -> U32:
        """How many holders each entry has."""
        ...


class PoolShadow(Protocol):
    """What a pool would hit if it had half or twice its size, and as it is, from a sample of its blocks."""

    def begin(self, capacity_bytes: float, skipped_bytes: float) -> None:
        """Begins anew for a pool of so many bytes. Nothing is counted until blocks of `skipped_bytes` were
        asked for."""
        ...

    def resize(self, capacity_bytes: float) -> None:
        """The pool has so many bytes from now on. What was counted is forgotten."""
        ...

    def asked(self, space: int, hashes: Hashes, block_bytes: int, hits: int) -> None:
        """A prompt of these blocks, from its first on, was asked for, of which the pool had the first `hits`.
        Comes after the table's `asked`."""
        ...

    def stored(self, space: int, hashes: Hashes, block_bytes: int) -> None:
        """Blocks of one prompt, which follow each other in it, are about to be stored. Comes before
        `insert`."""
        ...

    def spared(self, blocks: int, block_bytes: int) -> None:
        """So many blocks were not asked for, because clients knew that the pool did not have them."""
        ...

    def fade(self, kept: float) -> None:
        """From now on, what was counted before weighs only so much of what it did."""
        ...

    def stats(self) -> dict[str, float]:
        """Blocks: `asked`, of which the pool has `hit` so many and other sizes would have missed
        `missed_half`, `missed_now` and `missed_twice`; `sampled`, how many were in the sample, which has a
        `share` of all; `blocks` that it follows for one size, and its `bytes`."""
        ...


class BlockTable(Protocol):
    """Metadata of all blocks of one tier, in arrays. It has one writer."""

    def lookup(self, space: int, hashes: Hashes) -> tuple[Entries, U8]:
        """Entry and state of each key; NO_ENTRY and 0 where there is none."""
        ...

    def lookup_prefix(self, space: int, hashes: Hashes) -> tuple[Entries, int]:
        """Entries of the leading run of READY blocks, and the state of the block that ended it (0: it is
        absent, or all blocks are READY)."""
        ...

    def insert(self, space: int, domain: int, hashes: Hashes, flags: int = 0) -> tuple[Entries, U8]:
        """Creates the absent keys as WRITING, unpinned and without slots.

        Returns the entry of each key and 1 where it was created, 0 where it existed (or came earlier in the
        batch), 2 where the table was full (entry NO_ENTRY).
        """
        ...

    def attach_slots(self, entries: Entries, slots: Slots) -> None:
        """Gives WRITING entries their slots, shape (n, world): one slot per shard, in rank order."""
        ...

    def slots(self, entries: Entries, world: int) -> Slots:
        """Slots of entries, shape (n, world)."""
        ...

    def owners(self, slots: Slots) -> Entries:
        """Entry that owns each slot; NO_ENTRY for a free one."""
        ...

    def commit(self, entries: Entries) -> None:
        """Makes WRITING entries READY and the most recent of their domain, the last of the batch most of
        all."""
        ...

    def begin_evict(self, entries: Entries) -> None:
        """Makes READY, unpinned entries EVICTING."""
        ...

    def condemn(self, entries: Entries) -> None:
        """Makes READY entries, pinned or not, EVICTING: they are not found any more, and whoever drops the
        last pin removes them."""
        ...

    def remove(self, entries: Entries) -> None:
        """Forgets unpinned WRITING or EVICTING entries; their slots have no owner any more."""
        ...

    def pin(self, entries: Entries) -> None:
        """Adds a pin for each occurrence of an entry. Pinned blocks are never victims."""
        ...

    def unpin(self, entries: Entries) -> None:
        """Drops a pin for each occurrence of an entry. READY blocks that lose their last one become the most
        recent, in this order."""
        ...

    def touch(self, entries: Entries) -> None:
        """Makes READY, unpinned blocks the most recent, in this order; other entries stay as they are."""
        ...

    def cool(self, entries: Entries) -> None:
        """Makes READY, unpinned blocks the least recent, in this order, so that the last one is the next to
        be evicted; other entries stay as they are."""
        ...

    def victims(self, domain: int, n: int) -> Entries:
        """Up to n READY, unpinned blocks of a domain: the least recent first, or with `ranks` what is least
        likely to come back soon. Changes nothing."""
        ...

    @property
    def ranks(self) -> bool:
        """Whether victims are ranked by their chance of reuse. If not, the calls below change nothing."""
        ...

    def rank(self, history_blocks: int) -> None:
        """Begins to rank, with nothing learnt, and remembers at least so many blocks that are gone. Blocks
        that are there count as asked for once, the least recent first."""
        ...

    def stop_ranking(self) -> None:
        """From now on the least recent goes first. What was learnt is forgotten."""
        ...

    def learnt(self) -> bytes:
        """What was learnt of reuse, for `restore_learnt`; empty if the table does not rank."""
        ...

    def restore_learnt(self, saved: bytes) -> bool:
        """Goes on with what another table has learnt. False if this version cannot use it, and then nothing
        has changed."""
        ...

    def rank_below(self, above: Any) -> None:
        """Begins to rank by what the table above learns, which is of the same kind, and ranks."""
        ...

    def asked(self, space: int, domain: int, hashes: Hashes, below: Sequence[Any] = ()) -> None:
        """A prompt of these blocks, from its first on, is asked for; so is what tables below have of it."""
        ...

    def asked_each(self, entries: Entries, below: Sequence[Any] = ()) -> None:
        """Each of these blocks is asked for by itself, here and in tables below."""
        ...

    def same_as(self, entries: Entries, above: Any, of: Entries) -> None:
        """WRITING entries are the same blocks as those of the table above: what is known of their reuse, and
        what they follow, is taken over."""
        ...

    def chained(self, entries: Entries) -> None:
        """Says that these blocks follow each other in a prompt."""
        ...

    def admitted(self, domain: int, entries: Entries, free: int) -> int:
        """How many of these new blocks, in their order, are worth their room, if there is room for `free` of
        them."""
        ...

    def admitted_of(self, domain: int, above: Any, entries: Entries, free: int) -> int:
        """The same for entries of the table above."""
        ...

    def coldest(self, domain: int, n: int, without_flags: int, horizon: int) -> Entries:
        """Of the `horizon` least recent victims, up to n that have none of these flags, least recent first.
        Changes nothing."""
        ...

    def evictable(self, domain: int) -> int:
        """How many blocks of a domain are READY and unpinned."""
        ...

    def states(self, entries: Entries) -> U8: ...

    def pins(self, entries: Entries) -> U32: ...

    def flags(self, entries: Entries) -> U16: ...

    def set_flags(self, entries: Entries, flags: int) -> None: ...

    def clear_flags(self, entries: Entries, flags: int) -> None: ...

    def hashes(self, entries: Entries) -> Hashes: ...

    def spaces(self, entries: Entries) -> U32: ...

    def domains(self, entries: Entries) -> npt.NDArray[np.uint16]: ...

    def generations(self, entries: Entries) -> U32: ...

    def publish(self, space: int, page: Any) -> None:
        """From now on the page, an IndexPage of the table's own kind, has the hash of every block that is
        created in the space, until the block is removed."""
        ...

    def publish_more(self, space: int, n: int) -> bool:
        """Adds those blocks of the space that are among the next n entries that the table had before. True
        once all of these are in the page."""
        ...

    def withdraw(self, space: int) -> None:
        """Stops changing a space's page."""
        ...

    def hold_counts(self) -> HoldCounts:
        """New counts for this table's entries, all zero."""
        ...

    def shadow(self, blocks: int) -> PoolShadow:
        """A new shadow of a pool that holds this table's blocks, which follows at most so many for each
        size."""
        ...

    def count(self, space: int) -> int: ...

    def entries_of(self, space: int) -> Entries: ...

    def ready_among(self, space: int, first: int, n: int) -> tuple[Entries, int]:
        """READY entries of a space among the n entries from `first` on, in ascending order; and where to go
        on, which is the capacity if no entry from there on was ever used."""
        ...

    def stats(self) -> dict[str, Any]:
        """The numbers `writing`, `ready`, `evicting`, `capacity` and `bytes`, and `domains` (blocks per
        domain)."""
        ...

    def dump(self) -> dict[str, npt.NDArray[Any]]:
        """All live entries in ascending order: `entries`, `spaces`, `hashes`, `states`, `flags`, `pins`,
        `domains`, `generations`, `slot_counts`, and `slots`, which has those of all entries one after
        another. For tests."""
        ...

    def check(self) -> None:
        """Checks the table's own consistency. Raises AssertionError if it is broken. For tests."""
        ...
