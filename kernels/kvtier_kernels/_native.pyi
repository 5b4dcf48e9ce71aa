"""The native core of kvtier. Use it through `kvtier_kernels`."""

from collections.abc import Sequence
from typing import Any, Self

import numpy
import numpy.typing
from typing_extensions import Buffer


class IndexPage:
    """
    A set of block hashes in shared memory, which clients read while a BlockTable writes it (`BlockTable.publish`).
    It is advisory: a few hashes may be left out.
    """

    def __init__(self, buffer: Buffer | numpy.typing.NDArray[Any], boot_nonce: int, seed: int) -> None:
        """
        Makes an empty page in a writable buffer of zeros that is as long as `bytes_for` says. `seed` keys the hash
        function. Raises ValueError for a buffer of another size, or one that is not aligned to cache lines.
        """

    @staticmethod
    def bytes_for(blocks: int) -> int:
        """Bytes of a page with room for so many hashes."""

    def complete(self) -> None:
        """
        From now on clients rely on it that a hash that is missing is not there.
        """

    def incomplete(self) -> None:
        """From now on clients ask about every hash."""

    @property
    def left_out(self) -> int:
        """How many hashes found no place."""

class IndexReader:
    """A client's view of an index page, for use in any thread."""

    def __init__(self, buffer: Buffer | numpy.typing.NDArray[Any], hash_bytes: int) -> None:
        """
        `hash_bytes` is the length of one block hash, 1 to 32. Raises ValueError if the buffer is not an index page.
        """

    @property
    def complete(self) -> bool:
        """If False, a hash that is missing may be there all the same."""

    @property
    def boot_nonce(self) -> int:
        """The boot nonce of the daemon that writes the page."""

    def run(self, hashes: Sequence[bytes], first: int, end: int) -> int:
        """
        How many of `hashes[first:end]` are there, up to the first that is not. Raises ValueError for a hash of another
        length.
        """

    def any(self, hashes: Sequence[bytes]) -> bool:
        """
        Whether at least one of them is there. Raises ValueError for a hash of another length, unless one that is there
        comes before.
        """

class HoldCounts:
    """
    How many holders each entry of a BlockTable has; made by `BlockTable.hold_counts`. It has one
    writer. An entry out of range raises ValueError, and then nothing has changed.
    """

    def add(self, entries: numpy.typing.NDArray[numpy.uint32]) -> int:
        """
        Counts one more holder for each occurrence of an entry. Returns how many entries had none before.
        """

    def remove(self, entries: numpy.typing.NDArray[numpy.uint32]) -> int:
        """
        Undoes an `add` of the same entries. Returns how many entries have none now. Raises ValueError for an entry that
        nobody holds, and then nothing has changed.
        """

    def of(self, entries: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint32]:
        """How many holders each entry has."""

class PoolShadow:
    """
    What a pool would hit if it had half or twice its size, and as it is, under the policy by which its block table
    goes; made by `BlockTable.shadow`. It follows a sample of the blocks, which gets smaller where blocks are more
    than it can follow. `hashes` have shape (n, 32). It has one writer, the table's.
    """

    def begin(self, capacity_bytes: float, skipped_bytes: float) -> None:
        """
        Begins anew for a pool of so many bytes. What is asked for is not counted until blocks of `skipped_bytes` were:
        so long the pool may have blocks that this has not seen.
        """

    def resize(self, capacity_bytes: float) -> None:
        """The pool has so many bytes from now on. What was counted is forgotten."""

    def asked(self, space: int, hashes: numpy.typing.NDArray[numpy.uint8], block_bytes: int, hits: int) -> None:
        """
        A prompt of these blocks, each of which takes `block_bytes` of the pool, was asked for, from its first block on, and
        the pool had the first `hits`. Comes after `BlockTable.asked` of the same prompt.
        """

    def stored(self, space: int, hashes: numpy.typing.NDArray[numpy.uint8], block_bytes: int) -> None:
        """
        Blocks of one prompt, which follow each other in it, are about to be stored. Comes before `BlockTable.insert`.
        """

    def spared(self, blocks: int, block_bytes: int) -> None:
        """
        So many blocks were asked for without a message, because clients knew that the pool did not have them.
        """

    def fade(self, kept: float) -> None:
        """
        From now on, what was counted before weighs only so much of what it did.
        """

    def stats(self) -> dict[str, float]:
        """
        How many blocks were `asked` for, how many of them the pool has `hit`, and what half of it, the pool as it is, and
        twice of it would have missed by the sample: `missed_half`, `missed_now`, `missed_twice`. Of those asked for,
        `sampled` were in the sample, to which the `share` of all blocks belongs now. It follows so many `blocks` for one
        size at most, and takes `bytes`.
        """

NO_ENTRY: int = 4294967295

NO_SLOT: int = 0

PINS_MAX: int = 1048575

CAPACITY_MAX: int = 1073741824

class BlockTable:
    """
    Metadata of all blocks of one tier, keyed by (space, 32-byte hash). States: 1 WRITING, 2 READY, 3 EVICTING; 0 is
    absent. An entry is the index of a block's metadata, valid until the block is removed; every method that takes
    entries refuses ones that are not live.

    It has one writer: a call while another runs raises RuntimeError. Every batch is checked before anything changes;
    a ValueError names argument, index and value, and leaves the table as it was. All memory is reserved when the
    table is made, and provided by the kernel when it is first used.
    """

    def __init__(self, capacity: int, pool_pages: int, seed: int | None = None, ranks: bool = False, history_blocks: int = 0) -> None:
        """
        Makes a table for `capacity` blocks (1 to 2^30) in a pool of `pool_pages` pages (2 to 2^32). `seed` keys the
        index's hash function and has no visible effect. It is random by default, so that clients cannot choose
        colliding hashes. With `ranks`, victims are those that are least likely to come back soon, by what is learnt
        from asked(), and not the least recent; at least `history_blocks` that are gone are remembered for it.
        """

    @property
    def ranks(self) -> bool:
        """Whether victims are ranked by their chance of reuse."""

    def rank(self, history_blocks: int) -> None:
        """
        Begins to rank, with nothing learnt: blocks that are there count as asked for once, the least recent first.
        """

    def stop_ranking(self) -> None:
        """From now on the least recent goes first. What was learnt is forgotten."""

    def learnt(self) -> bytes:
        """
        What was learnt of reuse, for restore_learnt(); empty if the table does not rank.
        """

    def restore_learnt(self, saved: bytes) -> bool:
        """
        Goes on with what another table has learnt. Returns False, and changes nothing, if this version cannot use it.
        """

    def rank_below(self, above: BlockTable) -> None:
        """
        Begins to rank by what the table `above` learns, which ranks. Blocks that are there
        already count as asked for once, the least recent first.
        """

    def asked(self, space: int, domain: int, hashes: numpy.typing.NDArray[numpy.uint8], below: Sequence[BlockTable] = ()) -> None:
        """
        A prompt of these blocks, from its first on, is asked for; what the tables `below` have of it counts as asked
        for there. `hashes` has shape (n, 32). Changes nothing unless the table ranks.
        """

    def asked_each(self, entries: numpy.typing.NDArray[numpy.uint32], below: Sequence[BlockTable] = ()) -> None:
        """
        Each of these blocks is asked for by itself, here and in the tables `below`. Changes nothing unless the table
        ranks.
        """

    def same_as(self, entries: numpy.typing.NDArray[numpy.uint32], above: BlockTable, of: numpy.typing.NDArray[numpy.uint32]) -> None:
        """
        WRITING entries are the same blocks as those entries of the table `above`: what is known of their reuse, and
        what they follow, is taken over. Changes nothing unless both tables rank.
        """

    def chained(self, entries: numpy.typing.NDArray[numpy.uint32]) -> None:
        """
        Says that these blocks follow each other in a prompt. Of those with `ranks`, none goes before its followers.
        """

    def admitted_of(self, domain: int, above: BlockTable, entries: numpy.typing.NDArray[numpy.uint32], free: int) -> int:
        """The same as admitted() for entries of the table `above`."""

    def admitted(self, domain: int, entries: numpy.typing.NDArray[numpy.uint32], free: int) -> int:
        """
        How many of these new blocks, in their order, are worth their room, if there is room for `free` of them: with
        `ranks` those that rank higher than what would have to go. Otherwise all.
        """

    def lookup(self, space: int, hashes: numpy.typing.NDArray[numpy.uint8]) -> tuple[numpy.typing.NDArray[numpy.uint32], numpy.typing.NDArray[numpy.uint8]]:
        """
        Entry and state of each key; NO_ENTRY and 0 where there is none. `hashes` has shape (n, 32).
        """

    def lookup_prefix(self, space: int, hashes: numpy.typing.NDArray[numpy.uint8]) -> tuple[numpy.typing.NDArray[numpy.uint32], int]:
        """
        Entries of the leading run of READY blocks, and the state of the block that ended it (0: absent, or all
        are READY).
        """

    def insert(self, space: int, domain: int, hashes: numpy.typing.NDArray[numpy.uint8], flags: int = 0) -> tuple[numpy.typing.NDArray[numpy.uint32], numpy.typing.NDArray[numpy.uint8]]:
        """
        Creates the absent keys as WRITING, unpinned, without slots. Returns each key's entry and 1 where it was
        created, 0 where it existed or came earlier in the batch, 2 where the table was full (entry NO_ENTRY).
        """

    def attach_slots(self, entries: numpy.typing.NDArray[numpy.uint32], slots: numpy.typing.NDArray[numpy.uint32]) -> None:
        """
        Gives WRITING entries their slots, page numbers of shape (n, world) in shard order. The entries must have none
        yet, and the slots no owner.
        """

    def slots(self, entries: numpy.typing.NDArray[numpy.uint32], world: int) -> numpy.typing.NDArray[numpy.uint32]:
        """
        Slots of the entries, uint32 of shape (n, world); a row of NO_SLOT for an entry without slots. Raises
        ValueError for an entry with another number of slots.
        """

    def owners(self, slots: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint32]:
        """Entry that owns each slot; NO_ENTRY for a free one."""

    def commit(self, entries: numpy.typing.NDArray[numpy.uint32]) -> None:
        """
        Makes WRITING entries READY. Unpinned ones become the most recent of their domains, the last of the batch most
        of all.
        """

    def begin_evict(self, entries: numpy.typing.NDArray[numpy.uint32]) -> None:
        """Makes READY, unpinned entries EVICTING."""

    def condemn(self, entries: numpy.typing.NDArray[numpy.uint32]) -> None:
        """
        Makes READY entries, pinned or not, EVICTING: they are not found READY any more, and whoever drops the last pin
        removes them.
        """

    def remove(self, entries: numpy.typing.NDArray[numpy.uint32]) -> None:
        """
        Forgets unpinned WRITING or EVICTING entries and frees their slots. The entries' generations go up.
        """

    def pin(self, entries: numpy.typing.NDArray[numpy.uint32]) -> None:
        """
        Adds a pin for each time an entry is named, up to PINS_MAX. Pinned blocks are never victims.
        """

    def unpin(self, entries: numpy.typing.NDArray[numpy.uint32]) -> None:
        """
        Drops a pin for each time an entry is named. A READY block that loses its last pin becomes the most recent
        of its domain, in the order of the batch.
        """

    def touch(self, entries: numpy.typing.NDArray[numpy.uint32]) -> None:
        """
        Makes READY, unpinned blocks the most recent, in this order. Other entries stay as they are.
        """

    def cool(self, entries: numpy.typing.NDArray[numpy.uint32]) -> None:
        """
        Makes READY, unpinned blocks the least recent of their domains, in this order, so that the last of the batch is
        the next to be evicted. Other entries stay as they are.
        """

    def victims(self, domain: int, n: int) -> numpy.typing.NDArray[numpy.uint32]:
        """
        Up to n READY, unpinned blocks of a domain, least recent first. Changes nothing.
        """

    def coldest(self, domain: int, n: int, without_flags: int, horizon: int) -> numpy.typing.NDArray[numpy.uint32]:
        """
        Of the `horizon` least recent victims of a domain, up to n that have none of these flags, least recent first.
        Changes nothing.
        """

    def evictable(self, domain: int) -> int:
        """How many blocks of a domain are READY and unpinned."""

    def states(self, entries: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint8]:
        """State of each entry."""

    def pins(self, entries: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint32]:
        """Number of pins of each entry."""

    def flags(self, entries: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint16]:
        """Flags of each entry."""

    def set_flags(self, entries: numpy.typing.NDArray[numpy.uint32], flags: int) -> None:
        """Sets these bits of each entry's flags."""

    def clear_flags(self, entries: numpy.typing.NDArray[numpy.uint32], flags: int) -> None:
        """Clears these bits of each entry's flags."""

    def hashes(self, entries: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint8]:
        """Hash of each entry, shape (n, 32)."""

    def spaces(self, entries: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint32]:
        """Space of each entry."""

    def domains(self, entries: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint16]:
        """Eviction domain of each entry."""

    def generations(self, entries: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint32]:
        """
        How many blocks have lived in each entry before this one (modulo 2^32).
        """

    def publish(self, space: int, page: IndexPage) -> None:
        """
        From now on the page has the hash of every block that is created in a space, until the block is removed. Several
        tables may share a page. Raises ValueError if the space has a page in this table.
        """

    def publish_more(self, space: int, n: int) -> bool:
        """
        Looks at up to n more of the entries that the table had when the page was published, and adds those of the space.
        True once all are in the page.
        """

    def withdraw(self, space: int) -> None:
        """Stops changing a space's page."""

    def hold_counts(self) -> HoldCounts:
        """
        New counts of holders for this table's entries, all zero. Their memory is used only as entries are held.
        """

    def shadow(self, blocks: int) -> PoolShadow:
        """
        What half and twice of a pool would hit that holds this table's blocks, from a sample of at most so many blocks.
        It has the same writer as the table.
        """

    def count(self, space: int) -> int:
        """Number of blocks of a space, in whatever state."""

    def entries_of(self, space: int) -> numpy.typing.NDArray[numpy.uint32]:
        """
        All entries of a space in ascending order. Reads the whole table, so it is not for the path of a request.
        """

    def ready_among(self, space: int, first: int, n: int) -> tuple[numpy.typing.NDArray[numpy.uint32], int]:
        """
        READY entries of a space among the n entries from `first` on, in ascending order; and where to go on, which is
        the capacity if no entry from there on was ever used.
        """

    def stats(self) -> dict[str, Any]:
        """
        The numbers `writing`, `ready`, `evicting`, `capacity` and `bytes` (of a full table, with slot records as far as
        they were used), and `domains`, the number of blocks of each domain that has any.
        """

    def dump(self) -> dict[str, numpy.typing.NDArray[Any]]:
        """
        All live entries as arrays: entries, spaces, hashes, states, flags, pins, domains, generations, slot_counts,
        and slots one after the other. For tests and validators.
        """

    def check(self) -> None:
        """
        Compares every structure of the table with every other. Raises AssertionError, which says what does not fit. Slow.
        """

def xxh3_64(data: Buffer | numpy.typing.NDArray[Any]) -> int:
    """
    The 64-bit XXH3 checksum of a C-contiguous buffer's bytes. Raises ValueError for anything else.
    """

def xxh3_64_rows(rows: numpy.typing.NDArray[numpy.uint8]) -> numpy.typing.NDArray[numpy.uint64]:
    """
    The checksum of each row of a uint8 array of shape (n, bytes), as uint64 of shape (n,).
    """

PAGE_BYTES: int = 4096

def copy_variants() -> list[str]:
    """
    The variants of copies that this machine can run, fastest first: avx512, avx2, sse2, memcpy.
    """

class CopyPlan:
    """
    Where the fragments of an engine's blocks lie in its mapping, and the copies between them and slots of the pool.
    Fragment p of block b is at base_offsets[p] + b * block_strides[p], fragment_bytes[p] long; a slot holds a block's
    fragments one after the other. Slots are page numbers: slot s begins at byte s * PAGE_BYTES of the pool.

    All numbers of a call are checked before a byte is copied: a ValueError names argument, index and value, and
    nothing was written. Copies release the GIL and are safe from several threads as long as their targets do not
    overlap. When a call returns, its stores come before any later store of this thread. The mapping stays exported
    while this object lives: drop it before closing an mmap.
    """

    def __init__(self, mapping: Buffer | numpy.typing.NDArray[Any], base_offsets: numpy.typing.NDArray[numpy.uint64], block_strides: numpy.typing.NDArray[numpy.uint64], fragment_bytes: numpy.typing.NDArray[numpy.uint64], num_blocks: int, variant: str | None = None) -> None:
        """
        `mapping` is a writable buffer; the three arrays are uint64 of shape (planes,). `variant` is one of
        copy_variants(), the first by default. Raises ValueError unless every fragment of blocks 0 to num_blocks - 1 lies
        inside the mapping and no plane's blocks overlap each other.
        """

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block in a slot: the sum of its fragments."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine."""

    @property
    def planes(self) -> int:
        """Fragments per block."""

    def gather(self, block_ids: numpy.typing.NDArray[numpy.uint32], pool: Buffer | numpy.typing.NDArray[Any], slots: numpy.typing.NDArray[numpy.uint32], checksums: numpy.typing.NDArray[numpy.uint64] | None = None) -> None:
        """
        Copies blocks to slots, uint32 of shape (n,) each. Slots must not overlap. `checksums`, uint64 of shape (n,),
        receives xxh3_64 of each slot's bytes, which takes half as long again, but less than reading them later.
        """

    def scatter(self, block_ids: numpy.typing.NDArray[numpy.uint32], pool: Buffer | numpy.typing.NDArray[Any], slots: numpy.typing.NDArray[numpy.uint32]) -> None:
        """
        Copies slots to blocks. A block may come only once, and a slot several times.
        """

    def first_hole(self, block_ids: numpy.typing.NDArray[numpy.uint32], fd: int) -> int | None:
        """
        The offset of the first page of the blocks for which the file `fd`, whose beginning is the mapping, has no data;
        None if it has data everywhere. A page that was reserved and never written has none. Any file that is not a
        plain memfd is taken to have none. Moves the file offset of `fd`.
        """

    def checksums(self, pool: Buffer | numpy.typing.NDArray[Any], slots: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint64]:
        """xxh3_64 of each slot's bytes, uint64 of shape (n,)."""

class DevicePlan:
    """
    Where the fragments of an engine's blocks lie in device memory, and what to copy between them and slots of the pool.
    Fragment p of block b is at bases[p] + b * block_strides[p], fragment_bytes[p] long; a slot holds a block's fragments
    one after the other. Slots are page numbers: slot s begins at byte s * PAGE_BYTES of the pool.

    It computes addresses and reads no memory. It is immutable and safe from several threads; large batches are planned
    without the GIL. All numbers of a call are checked first: a ValueError names argument, index and value.
    """

    def __init__(self, bases: numpy.typing.NDArray[numpy.uint64], block_strides: numpy.typing.NDArray[numpy.uint64], fragment_bytes: numpy.typing.NDArray[numpy.uint64], num_blocks: int, ranges: numpy.typing.NDArray[numpy.uint32] | None = None) -> None:
        """
        `bases` are device addresses; the three arrays are uint64 of shape (planes,). `ranges`, uint32 of shape (planes,),
        says in which range of device memory each plane lies: a copy never touches two ranges, however close they are.
        Without it all planes lie in one. The caller has to know that the memory exists. Raises ValueError for a base of 0,
        if an address overflows, or if a plane's blocks overlap each other.
        """

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block in a slot: the sum of its fragments."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine."""

    @property
    def planes(self) -> int:
        """Fragments per block."""

    def describe(self, block_ids: numpy.typing.NDArray[numpy.uint32], pool_address: int, pool_bytes: int, slots: numpy.typing.NDArray[numpy.uint32], to_device: bool = False, borders: numpy.typing.NDArray[numpy.uint64] | None = None) -> tuple[numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint64]]:
        """
        The copies between blocks and slots, uint32 of shape (n,) each: device addresses, host addresses and bytes, uint64
        of shape (m,). Bytes that are contiguous on both sides become one copy, whatever the order of the blocks. The order
        of the copies is not that of the blocks.

        With `to_device`, the device is written: no block may come twice, but a slot may. Without it, no slot may come
        twice, but a block may. Slots must not overlap in part. `borders`, uint64 of shape (k,), are offsets of the pool in
        rising order that no copy may cross, such as the ends of memory registrations. One inside a slot raises ValueError.
        """

    def describe_rows(self, block_ids: numpy.typing.NDArray[numpy.uint32], pool_address: int, pool_bytes: int, slots: numpy.typing.NDArray[numpy.uint32], to_device: bool = False, borders: numpy.typing.NDArray[numpy.uint64] | None = None) -> tuple[numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint64]]:
        """
        The same bytes as two-dimensional copies: device and host addresses, width in bytes, rows, and the distance of two
        rows on the device and on the host, uint64 of shape (m,) each. Fragments at constant distances become one copy,
        either over the planes of a block or over the blocks of a plane, whichever gives fewer copies, and never more than
        describe() gives. A single row is a plain copy, with its width for pitches. Pitches are at most 2^31 - 1, which is
        what drivers accept.
        """

def copy_loop(function_address: int, dst: numpy.typing.NDArray[numpy.uint64], src: numpy.typing.NDArray[numpy.uint64], sizes: numpy.typing.NDArray[numpy.uint64], stream: int) -> tuple[int, int]:
    """
    Calls `CUresult f(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream)`, which lies at that address
    (cuMemcpyAsync), once for each element of the arrays, uint64 of shape (n,), in order and without the GIL. Returns
    (0, n), or (code, i) for the first call i that did not return 0; the copies before it are submitted. Addresses and
    sizes are the caller's responsibility. Raises ValueError, with nothing called, for arrays of different lengths.
    """

def copy_rows_loop(function_address: int, device: numpy.typing.NDArray[numpy.uint64], host: numpy.typing.NDArray[numpy.uint64], width: numpy.typing.NDArray[numpy.uint64], rows: numpy.typing.NDArray[numpy.uint64], device_pitch: numpy.typing.NDArray[numpy.uint64], host_pitch: numpy.typing.NDArray[numpy.uint64], to_device: bool, stream: int) -> tuple[int, int]:
    """
    As copy_loop, with cuMemcpy2DAsync_v2 and the arrays that DevicePlan.describe_rows() returns, from host to device
    memory or back.
    """

class EventLog:
    """
    What engines look up and store, until it is taken: events, and of each block hash eight bytes, which are
    mixed from all 32 with a `secret` of 32 random bytes. It has one writer, and takes no more than about
    twice `bytes_max` of memory.
    """

    def __init__(self, bytes_max: int, secret: bytes) -> None: ...

    def add(self, kind: int, time_us: int, place: int, hits: int, part: int, hashes: numpy.typing.NDArray[numpy.uint8], behind: numpy.typing.NDArray[numpy.uint8] | None = None) -> bool:
        """
        Adds an event of these `hashes`, shape (n, 32), which come behind those of `behind`, if that is given. Returns
        whether there was room for it.
        """

    @property
    def size_bytes(self) -> int:
        """What the events take that are there."""

    @staticmethod
    def bytes_of(hashes: int) -> int:
        """What an event of so many hashes takes."""

    def take(self, bytes_max: int) -> tuple[bytes, bytes]:
        """
        Takes the first events: as many as have `bytes_max` bytes with their hashes, but one at least. Returns six numbers
        of eight bytes for each (kind, time, place, number of hashes, hits, part), and eight bytes for each hash.
        """

class PoolRecords:
    """
    Slot records of a pool file (format 1, or 2 for a slab that holds ciphertext): the only code that changes a slot's state.

    `pool` is the whole file, mapped writable, uint8. Slots are page numbers, uint32 of shape (n,). Every batch is
    checked before anything changes: ValueError names the slot, what was expected and what was found. Whatever the
    pool's bytes say, nothing outside it is touched. The interpreter's lock is released in every call.
    """

    def __init__(self, pool: numpy.typing.NDArray[numpy.uint8], crash_after: int = 0) -> None:
        """
        Raises ValueError if the header is not one of format 1 or 2 or does not fit the size of `pool`. With `crash_after`
        n > 0 the process kills itself (SIGKILL) right after its nth persisted step: for tests.
        """

    def open(self, slots: numpy.typing.NDArray[numpy.uint32], writer: int, boot_nonce: int, transfer: int, namespace: bytes, group: int, shard: int, world: int, hashes: numpy.typing.NDArray[numpy.uint8], data_bytes: int) -> numpy.typing.NDArray[numpy.uint64]:
        """
        Makes FREE slots WRITING, with a new generation, for one shard of the blocks with these hashes, shape (n, 32).
        `namespace` is the 16-byte digest of theirs. Returns the generations, uint64 (n,).
        """

    def set_data_checksums(self, slots: numpy.typing.NDArray[numpy.uint32], generations: numpy.typing.NDArray[numpy.uint64], sums: numpy.typing.NDArray[numpy.uint64]) -> None:
        """
        Records the xxh3_64 of the data of slots that are WRITING with these generations.
        """

    def claim(self, slots: numpy.typing.NDArray[numpy.uint32], generations: numpy.typing.NDArray[numpy.uint64], salt: int) -> numpy.typing.NDArray[numpy.uint8]:
        """
        For a slab of format 2. Notes in records that are WRITING with these generations, and that nobody has claimed,
        with which `salt`, 1 to 2^48 - 1, their data will be encrypted. 1 where that was done, else 0; uint8 (n,). So no
        generation of a slot is encrypted twice.
        """

    def set_tags(self, slots: numpy.typing.NDArray[numpy.uint32], generations: numpy.typing.NDArray[numpy.uint64], sums: numpy.typing.NDArray[numpy.uint64], tags: numpy.typing.NDArray[numpy.uint8]) -> None:
        """
        For a slab of format 2. As `set_data_checksums`, with sums that are masked, and with the tags of the ciphertext,
        uint8 (n, 16).
        """

    def copies(self, slots: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint64]:
        """The records of slots, in whatever state, word by word, uint64 (n, 16)."""

    def commit(self, slots: numpy.typing.NDArray[numpy.uint32], clocks: numpy.typing.NDArray[numpy.uint64]) -> None:
        """Makes WRITING slots READY, each with its recency."""

    def free(self, slots: numpy.typing.NDArray[numpy.uint32]) -> None:
        """Makes slots in any state FREE, with a new generation."""

    def generations(self, slots: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint64]:
        """The present generation of each slot, uint64 (n,)."""

    def check(self, slots: numpy.typing.NDArray[numpy.uint32], generations: numpy.typing.NDArray[numpy.uint64], data_bytes: int | None = None) -> numpy.typing.NDArray[numpy.uint8]:
        """
        1 where a slot is READY with this generation, its record can be believed and, if `data_bytes` is given, it holds
        so many, else 0; uint8 (n,). A page that is not a slot gives 0 as well. After a copy, 1 says that the copied bytes
        were the slot's.
        """

    def check_writing(self, slots: numpy.typing.NDArray[numpy.uint32], generations: numpy.typing.NDArray[numpy.uint64], data_bytes: int | None = None) -> numpy.typing.NDArray[numpy.uint8]:
        """
        1 where a slot is WRITING with this generation and, if `data_bytes` is given, for so many, else 0; uint8 (n,).
        A page that is not a slot gives 0 as well.
        """

    def verify_data(self, slots: numpy.typing.NDArray[numpy.uint32], generations: numpy.typing.NDArray[numpy.uint64]) -> numpy.typing.NDArray[numpy.uint8]:
        """
        As `check`, and the data checksum must match the slot's data bytes, which are all read.
        """

    def match(self, slots: numpy.typing.NDArray[numpy.uint32], generations: numpy.typing.NDArray[numpy.uint64], source: PoolRecords, source_slots: numpy.typing.NDArray[numpy.uint32], source_generations: numpy.typing.NDArray[numpy.uint64]) -> numpy.typing.NDArray[numpy.uint8]:
        """
        1 where a slot is WRITING with its generation, the slot of `source` is READY with its own, the record there can be
        believed, and both are the same shard of the same block: namespace, group, shard, world size, hash and data bytes
        are equal. Else 0; uint8 (n,). A page that is not a slot gives 0 as well. `source` may be any pool. Its slots are
        uint32 and their generations uint64, of shape (n,).
        """

    def adopt(self, slots: numpy.typing.NDArray[numpy.uint32], generations: numpy.typing.NDArray[numpy.uint64], source: PoolRecords, source_slots: numpy.typing.NDArray[numpy.uint32], source_generations: numpy.typing.NDArray[numpy.uint64]) -> numpy.typing.NDArray[numpy.uint8]:
        """
        As `match`; where it is 1, this slot takes over the source's data checksum. After a copy of the source's data, 1
        says that the copied bytes are those of the checksum, or have rotted since.
        """

    def accept(self, slots: numpy.typing.NDArray[numpy.uint32], generations: numpy.typing.NDArray[numpy.uint64], source: PoolRecords, source_slots: numpy.typing.NDArray[numpy.uint32], source_generations: numpy.typing.NDArray[numpy.uint64], sums: numpy.typing.NDArray[numpy.uint64]) -> numpy.typing.NDArray[numpy.uint8]:
        """
        For use after the source's data were read into these slots. As `match`, but 1 only if `sums`, xxh3_64 of the data
        bytes that are in each slot now, uint64 (n,), is the source's data checksum, which this slot then takes over. 2 if
        the records match, but the data do not.
        """

    def data_bytes(self, slots: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint64]:
        """
        How many data bytes each slot's record says that it has, in whatever state, uint64 (n,); 0 if it was never opened.
        Raises ValueError if they are more than the slot's.
        """

    def data_sums(self, slots: numpy.typing.NDArray[numpy.uint32], generations: numpy.typing.NDArray[numpy.uint64]) -> tuple[numpy.typing.NDArray[numpy.uint64], numpy.typing.NDArray[numpy.uint8]]:
        """
        The data checksum of each slot, uint64 (n,), and what `check` returns, uint8 (n,). Where that is 0, so is the sum.
        """

    def record_pages(self, slots: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint64]:
        """
        File offsets of the pages that hold the slots' records, each once, in rising order; uint64 (m,).
        """

    def table_range(self, extent: int) -> tuple[int, int]:
        """
        (file offset, bytes) of the slot table of an extent in use, both multiples of PAGE_BYTES; its header page lies
        before it. Raises ValueError if the extent is not in use.
        """

    def format_extent(self, extent: int, slot_bytes: int) -> None:
        """
        Divides an extent into FREE slots of this size; generations in it go on rising. Raises ValueError if one of its
        slots is not FREE, or if no slot of this size fits.
        """

    def extent_info(self, extent: int) -> tuple[int, int, int, int] | None:
        """
        (slot bytes, stride, slots, file offset of the first slot) of an extent in use, else None.
        """

    def scan(self) -> dict[str, numpy.typing.NDArray[Any]]:
        """
        Every extent in use and every slot that is not FREE, as a dict of arrays with one row each. `intact`: READY, and
        the record can be believed. `space_keys`: a checksum of namespace, group and world size; `block_keys`: of these and
        the hash; `copy_keys`: of these and the store id. `broken_extents`: extents whose headers cannot be believed.
        """

    def start_boot(self, boot_nonce: int) -> int:
        """
        Writes the nonce of this boot into the header and counts the boot. Returns the count.
        """

    @property
    def encrypted(self) -> bool:
        """Whether it has format 2."""

    @property
    def boots(self) -> int:
        """Boots since the pool was made."""

    @property
    def extents(self) -> int:
        """Number of extents."""

    @property
    def populated(self) -> int:
        """
        How many extents, from the first on, have memory. The others count as not in use, and are never touched.
        """

    def set_populated(self, extents: int) -> None:
        """
        Notes that the first `extents` extents have memory. Raises ValueError for fewer than before.
        """

    @property
    def extent_bytes(self) -> int:
        """Bytes per extent."""

    @property
    def persisted_steps(self) -> int:
        """
        Steps that this object has persisted so far: each store of a word, checksum, clock or header, or group of fields.
        """

def format_pool(pool: numpy.typing.NDArray[numpy.uint8], extent_bytes: int, extents: int, config_digest: bytes, crash_after: int = 0, encrypted: bool = False, populated: int | None = None) -> None:
    """
    Writes the header of a new pool file, with its magic last and no extent in use; with `encrypted`, of a slab of format 2,
    which holds ciphertext. Only the first `populated` extents have memory; None for all. Raises ValueError, and changes
    nothing, if the extents do not fit.
    """

def populate(pool: numpy.typing.NDArray[numpy.uint8], offset: int, length: int) -> None:
    """
    Prefaults pages for writing, with the interpreter's lock released. Raises OSError: EFAULT when the file system is
    full, EINVAL when the kernel is older than 5.14.
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
    object lives, so drop it before closing an mmap. It is safe from any number of threads. An index out of range raises
    ValueError.
    """

    def __init__(self, buffer: Buffer | numpy.typing.NDArray[Any], count: int) -> None:
        """
        `count` is at least one. Raises ValueError if the buffer is too small, read-only or not 8-byte aligned.
        """

    @property
    def count(self) -> int:
        """Number of words."""

    def load(self, index: int) -> int:
        """The word's value (acquire)."""

    def load_many(self, indexes: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint64]:
        """
        The values of several words (acquire for each), uint64 of shape (n,) like `indexes`.
        """

    def store(self, index: int, value: int) -> None:
        """Sets the word (release)."""

    def compare_exchange(self, index: int, expected: int, desired: int) -> bool:
        """
        Sets the word to `desired` if it is `expected`, and returns whether it did (acquire and release).
        """

    def ring(self, index: int, value: int) -> None:
        """
        Raises a doorbell to `value` (release). One that is as high or higher stays: doorbells never go back.
        """

    def try_start(self, index: int, ticket: int) -> bool:
        """
        Moves a part from armed to STARTED. False, and nothing changed, if it is started, revoked, over or superseded.
        """

    def try_revoke(self, index: int, ticket: int) -> bool:
        """
        Moves a part from armed to REVOKED. True as well if it is revoked already; then it will never start. False, and
        nothing changed, if it is started, over or superseded.
        """

    def finish(self, index: int, ticket: int, state: int) -> None:
        """
        Moves a part from STARTED to PART_DONE or PART_FAILED (release). Raises RuntimeError, and changes nothing, if the
        word does not say STARTED for this ticket.
        """

    def part_state(self, index: int, ticket: int) -> int:
        """
        The part's state, one of the PART_ constants; PART_SUPERSEDED if the word belongs to a later ticket. Raises
        RuntimeError for a value that no part word can have.
        """

class SlabIo:
    """
    Reads and writes whole pages between memory and a file, many at once (Linux native AIO). A call returns when all of
    its operations have ended, whatever signals come, so no device touches the memory afterwards. The interpreter's
    lock is released meanwhile.

    It has one caller: a call while another runs raises RuntimeError. All rows are checked before anything is
    submitted: a ValueError names argument, index and value.
    """

    def __init__(self, fd: int, depth: int, progress: SharedWords | None = None, progress_index: int = 0) -> None:
        """
        Works on a duplicate of `fd`, with up to `depth` operations (1 to 2^20) in flight. A descriptor opened without
        O_DIRECT works as well, but one operation after the other. The word `progress_index` of `progress` receives the
        time of completions, in nanoseconds of CLOCK_MONOTONIC. Raises OSError, with EAGAIN if the machine's limit of
        asynchronous operations (fs.aio-max-nr) is used up.
        """

    def read(self, memory: numpy.typing.NDArray[numpy.uint8], memory_offsets: numpy.typing.NDArray[numpy.uint64], file_offsets: numpy.typing.NDArray[numpy.uint64], lengths: numpy.typing.NDArray[numpy.uint64], data_bytes: numpy.typing.NDArray[numpy.uint64]) -> tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.uint64]]:
        """
        Reads `lengths[i]` bytes at `file_offsets[i]` into `memory`, uint8 of any size, at `memory_offsets[i]`. These three
        are uint64 of shape (n,) and multiples of PAGE_BYTES, as is the address of `memory`. Rows must not overlap in
        memory. They are read in the order of the file, and neighbours in it together, up to 1 MiB.

        Returns 0 or an errno for each row, int32 of shape (n,), and xxh3_64 of the first `data_bytes[i]` bytes of each row,
        uint64 (n,), 0 where it has an error. A row's checksum is computed as soon as the row is there, while others are
        still being read. A row that is not there as a whole has EIO. When several rows fail together, each is tried alone.
        """

    def write(self, memory: numpy.typing.NDArray[numpy.uint8], memory_offsets: numpy.typing.NDArray[numpy.uint64], file_offsets: numpy.typing.NDArray[numpy.uint64], lengths: numpy.typing.NDArray[numpy.uint64]) -> numpy.typing.NDArray[numpy.int32]:
        """
        Writes from `memory` to the file, with arguments as for `read`. Rows must not overlap in the file. Returns 0 or an
        errno for each row. What is in the file at a row with an error is not known. Nothing is flushed.
        """

    def close(self) -> None:
        """
        Releases the context and the descriptor. Every later read or write raises ValueError.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...
