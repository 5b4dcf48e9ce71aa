"""Moves blocks between the pool and a store's packs, in the order that makes it safe.

All of it happens on one event loop. Between two `await`s nothing else of the worker runs; the front and the
engines go on, so what a record says is compared again after each of them.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PoolRecords

from kvtierd.core.actions import DiskJobKind
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.tiers.store.coding import readable
from kvtierd.tiers.store.objects import StoreError, StoreTrouble
from kvtierd.tiers.store.packed import FOLLOWED_MAX, Block, PackNews, Shard, Shelf, Wanted
from kvtierd.workers.disk.jobs import U64, Rows, SlotJob
from kvtierd.workers.disk.moving import Bytes, pair
from kvtierd.workers.store import records
from kvtierd.workers.store.locations import U32, KnownPack, Locations
from kvtierd.workers.store.shelves import Shelves

PACK_BYTES = 16 << 20
"""No pack is larger, unless a single block is."""
Records = npt.NDArray[np.void]
Place = Callable[[int, int], memoryview]
"""Where so many bytes of a row go."""


@dataclass(slots=True, eq=False)
class _Target:
    """Blocks of one pack that are to be read: their rows, shard after shard."""

    rows: list[Rows]
    wanted: list[Wanted]


@dataclass(frozen=True, slots=True, eq=False)
class _Outgoing:
    """A copy of a block that is to be put, and the rows of its job that it is."""

    job: SlotJob
    rows: Rows
    space: tuple[bytes, int]
    """Its namespace and group."""
    block: Block

    @property
    def block_bytes(self) -> int:
        return sum(len(shard.data) for shard in self.block.shards)


class StoreMover:
    def __init__(
        self, pool: Bytes, host: PoolRecords, image: PoolRecords, locations: Locations, shelves: Shelves
    ) -> None:
        """`image` has the records of the store's slots, which have no bytes of their own."""
        self._pool = pool.data
        self._host = host
        self._image = image
        self._locations = locations
        self._shelves = shelves

    async def read(self, job: SlotJob) -> None:
        """Does all of a READ or CHECK. Raises nothing that a store may cause."""
        rows = np.arange(len(job))
        if job.kind is DiskJobKind.READ:
            await self._read(job, rows)
        else:
            await self._check(job, rows)
        job.done = len(job)

    def adopt(self, job: SlotJob, found: PackNews, shelf: Shelf) -> None:
        """Has the slots of an ADOPT stand for blocks of a pack. What its head says is believed only where it
        is what the slot's record says; the bytes are compared when they are read."""
        slots, generations = job.disk_slots, job.disk_generations
        sound = self._image.check_writing(slots, generations) == 1
        sound &= job.positions < len(found.records)
        rows = np.flatnonzero(sound)
        mine = records.read(self._image, slots[rows])
        where = found.records[job.positions[rows]] + mine["shard"]
        theirs = found.pack.records[np.minimum(where, len(found.pack.records) - 1)]
        same = (where < len(found.pack.records)) & (mine["hash"] == theirs["hash"]).all(axis=1)
        for name in ("shard", "world", "data_bytes"):
            same &= mine[name] == theirs[name]
        same &= readable(theirs)
        rows, where, theirs = rows[same], where[same], theirs[same]
        job.fail(np.setdiff1d(np.arange(len(job)), rows))
        job.done = len(job)
        if len(rows):
            sums = np.ascontiguousarray(theirs["checksum"]).astype(np.uint64)
            self._image.set_data_checksums(slots[rows], generations[rows], sums)
            self._locations.set(slots[rows], KnownPack(shelf, found.name), where.astype(np.uint32))
            self._image.commit(slots[rows], job.clocks[rows])

    # --- out ---

    def bytes_of(self, job: SlotJob) -> int:
        """How many bytes a WRITE puts."""
        return int(self._image.data_bytes(job.disk_slots).sum())

    async def write(self, jobs: Sequence[SlotJob]) -> None:
        """Does all of some WRITEs: blocks of one space go into packs together. Raises nothing that a store
        may cause."""
        by_space: dict[tuple[bytes, int], list[_Outgoing]] = {}
        for job in jobs:
            for outgoing in self._prepared(job):
                by_space.setdefault(outgoing.space, []).append(outgoing)
        for space, blocks in by_space.items():
            for some in _in_packs(blocks):
                await self._put(self._shelves.of(*space), some)
        for job in jobs:
            job.done = len(job)

    def _prepared(self, job: SlotJob) -> list["_Outgoing"]:
        """Copies the blocks of a job that are still on the host."""
        rows = np.arange(len(job))
        rows = self._keep(job, rows, self._image.match(*pair(job, rows, self._host)))
        copies = self._copied(job, rows)
        # If the host's block is still there, its bytes are what was copied, because a slot's generation
        # changes before its bytes do. Its checksum goes into the pack, and is compared by whoever reads it.
        kept = self._keep(job, rows, self._image.adopt(*pair(job, rows, self._host)))
        copies = [copies[place] for place in np.flatnonzero(np.isin(rows, kept)).tolist()]
        found = records.read(self._image, job.disk_slots[kept])
        blocks = list(_whole_blocks(found))
        in_blocks = np.concatenate([np.empty(0, np.int64), *(kept[first:end] for first, end in blocks)])
        job.fail(np.setdiff1d(kept, in_blocks))
        return [
            _Outgoing(
                job,
                kept[first:end],
                (found["namespace"][first].tobytes(), int(found["group"][first])),
                Block(
                    found["hash"][first].tobytes(),
                    [Shard(copies[at], int(found["checksum"][at])) for at in range(first, end)],
                ),
            )
            for first, end in blocks
        ]

    async def _put(self, shelf: Shelf, some: Sequence["_Outgoing"]) -> None:
        """Makes one pack of these blocks."""
        began_ns = time.monotonic_ns()
        trouble: StoreError | None = None
        try:
            put = await shelf.put([outgoing.block for outgoing in some])
        except StoreError as error:
            trouble = error
        took_ns = time.monotonic_ns() - began_ns
        for job in {id(outgoing.job): outgoing.job for outgoing in some}.values():
            places = [place for place, outgoing in enumerate(some) if outgoing.job is job]
            rows = np.concatenate([some[place].rows for place in places])
            job.busy_ns += took_ns
            if trouble is not None:
                job.fail(rows, str(trouble), refused=trouble.trouble is not StoreTrouble.LATE)
                continue
            where = np.concatenate(
                [put.records[place] + np.arange(len(some[place].rows)) for place in places]
            ).astype(np.uint32)
            slots = job.disk_slots[rows]
            self._locations.set(slots, KnownPack(shelf, put.name), where)
            self._image.commit(slots, job.clocks[rows])
            moved_bytes = sum(some[place].block_bytes for place in places)
            job.moved_bytes += moved_bytes
            job.saved_bytes += moved_bytes - int(put.pack.records["stored_bytes"][where].sum())

    def _copied(self, job: SlotJob, rows: Rows) -> list[memoryview]:
        """The bytes of the host's slots, one for each row."""
        sizes = self._image.data_bytes(job.disk_slots[rows]).tolist()
        whole = memoryview(bytearray(sum(sizes)))
        copies, at = [], 0
        for slot, size in zip(job.host_slots[rows].tolist(), sizes, strict=True):
            begin = slot * PAGE_BYTES
            copies.append(whole[at : at + size])
            copies[-1][:] = self._pool[begin : begin + size]
            at += size
        return copies

    # --- in ---

    async def _read(self, job: SlotJob, rows: Rows) -> None:
        matching = self._host.match(*pair(job, rows, self._image)) == 1
        job.fail(rows[~matching])
        rows = rows[matching]

        def place(row: int, size: int) -> memoryview:
            begin = int(job.host_slots[row]) * PAGE_BYTES
            return self._pool[begin : begin + size]

        read, sums = await self._get(job, rows, place)
        verdicts = self._host.accept(*pair(job, read, self._image), sums)
        job.corrupt.append(read[verdicts == 2])
        self._doubt(job.disk_slots[read[verdicts == 2]])
        job.fail(read[verdicts == 0])

    async def _check(self, job: SlotJob, rows: Rows) -> None:
        expected, good = self._image.data_sums(job.disk_slots[rows], job.disk_generations[rows])
        job.fail(rows[good == 0])
        rows, expected = rows[good == 1], expected[good == 1]
        read, sums = await self._get(job, rows, lambda row, size: memoryview(bytearray(size)))
        wrong = read[sums != expected[np.searchsorted(rows, read)]]
        # It is corrupt only if the slot still is what it was.
        still = self._image.check(job.disk_slots[wrong], job.disk_generations[wrong]) == 1
        job.corrupt.append(wrong[still])
        self._doubt(job.disk_slots[wrong[still]])
        job.fail(wrong[~still])

    def _doubt(self, slots: U32) -> None:
        """What was read for these slots did not fit. The front forgets them; their packs are told of again,
        because something on the way may have changed the bytes."""
        for number in np.unique(self._locations.of(slots)[0]).tolist():
            pack = self._locations.pack(number)
            if pack is not None:
                pack.shelf.doubt(pack.name)

    async def _get(self, job: SlotJob, rows: Rows, place: Place) -> tuple[Rows, U64]:
        """Reads the blocks of READY slots. Returns the rows of which there are bytes, and their sums; the
        others have failed, or are gone."""
        found = records.read(self._image, job.disk_slots[rows])
        numbers, where = self._locations.of(job.disk_slots[rows])
        targets: dict[int, _Target] = {}
        whole = list(_whole_blocks(found))
        for first, end in whole:
            number = int(numbers[first])
            alike = (numbers[first:end] == number).all()
            follow = (where[first:end] == where[first] + np.arange(end - first)).all()
            if not (alike and follow):
                job.gone.append(rows[first:end])
                continue
            into = [place(int(rows[at]), int(found["data_bytes"][at])) for at in range(first, end)]
            target = targets.setdefault(number, _Target([], []))
            target.rows.append(rows[first:end])
            target.wanted.append(Wanted(found["hash"][first].tobytes(), int(where[first]), into))
        in_blocks = np.concatenate([np.empty(0, np.int64), *(rows[first:end] for first, end in whole)])
        job.fail(np.setdiff1d(rows, in_blocks))
        with _timed(job):
            parts = await asyncio.gather(
                *(self._get_of_pack(job, number, target) for number, target in targets.items())
            )
        read = np.concatenate([np.empty(0, np.int64), *(part[0] for part in parts)])
        sums = np.concatenate([np.empty(0, np.uint64), *(part[1] for part in parts)])
        order = np.argsort(read)
        return read[order], sums[order]

    async def _get_of_pack(
        self, job: SlotJob, number: int, target: _Target, follow: int = FOLLOWED_MAX
    ) -> tuple[Rows, U64]:
        """Reads blocks of one pack. If it has gone, notes are followed, `follow` of them."""
        rows = np.concatenate(target.rows)
        nothing = np.empty(0, np.int64), np.empty(0, np.uint64)
        pack = self._locations.pack(number)
        if pack is None:
            job.gone.append(rows)
            return nothing
        try:
            found = await pack.shelf.get(pack.name, target.wanted)
        except StoreError as error:
            if error.trouble is not StoreTrouble.MISSING:
                job.fail(rows, str(error))
                return nothing
            if not follow:
                job.gone.append(rows)
                return nothing
            return await self._get_moved(job, pack, target, follow - 1)
        read = [each for each, got in zip(target.rows, found, strict=True) if got is not None]
        job.gone += [each for each, got in zip(target.rows, found, strict=True) if got is None]
        if not read:
            return nothing
        sums = np.array([each for got in found if got is not None for each in got.sums], np.uint64)
        for one, got in zip(target.wanted, found, strict=True):
            if got is not None:
                moved_bytes = sum(map(len, one.into))
                job.moved_bytes += moved_bytes
                job.saved_bytes += moved_bytes - got.stored_bytes
        return np.concatenate(read), sums

    async def _get_moved(
        self, job: SlotJob, gone: KnownPack, target: _Target, follow: int
    ) -> tuple[Rows, U64]:
        """Reads blocks whose pack has gone from where a collector has put them, and remembers that."""
        try:
            places = await gone.shelf.moved(gone.name, target.wanted)
        except StoreError as error:
            job.fail(np.concatenate(target.rows), str(error))
            return np.empty(0, np.int64), np.empty(0, np.uint64)
        by_name: dict[str, _Target] = {}
        for rows, one, place in zip(target.rows, target.wanted, places, strict=True):
            slots, generations = job.disk_slots[rows], job.disk_generations[rows]
            # No other task runs from here until the location is set.
            is_same = (
                place is not None
                and bool((self._image.check(slots, generations) == 1).all())
                and records.read(self._image, slots)["checksum"].tolist() == list(place.checksums)
            )
            if place is None or not is_same:
                job.gone.append(rows)
                continue
            where = (place.record + np.arange(len(rows))).astype(np.uint32)
            self._locations.set(slots, KnownPack(gone.shelf, place.name), where)
            moved = by_name.setdefault(place.name, _Target([], []))
            moved.rows.append(rows)
            moved.wanted.append(Wanted(one.hash, place.record, one.into))
        numbers = {
            name: int(self._locations.of(job.disk_slots[moved.rows[0]])[0][0])
            for name, moved in by_name.items()
        }
        parts = [
            await self._get_of_pack(job, numbers[name], moved, follow) for name, moved in by_name.items()
        ]
        return (
            np.concatenate([np.empty(0, np.int64), *(part[0] for part in parts)]),
            np.concatenate([np.empty(0, np.uint64), *(part[1] for part in parts)]),
        )

    @staticmethod
    def _keep(job: SlotJob, rows: Rows, verdicts: npt.NDArray[np.uint8]) -> Rows:
        """The rows that may go on. The blocks of the others are gone from the host, so they fail."""
        job.fail(rows[verdicts != 1])
        kept: Rows = rows[verdicts == 1]
        return kept


def _whole_blocks(found: Records) -> Iterator[tuple[int, int]]:
    """Each run of records, from and to, that are all shards of one block, in the order of their ranks."""
    first = 0
    while first < len(found):
        world = int(found["world"][first])
        some = found[first : first + world]
        if (
            world
            and len(some) == world
            and (some["hash"] == some["hash"][0]).all()
            and (some["shard"] == np.arange(world)).all()
        ):
            yield first, first + world
            first += world
        else:
            first += 1


def _in_packs(blocks: Sequence[_Outgoing]) -> Iterator[list[_Outgoing]]:
    """Cuts blocks into packs of at most PACK_BYTES, or one block if that is larger."""
    some: list[_Outgoing] = []
    size = 0
    for outgoing in blocks:
        if some and size + outgoing.block_bytes > PACK_BYTES:
            yield some
            some, size = [], 0
        some.append(outgoing)
        size += outgoing.block_bytes
    if some:
        yield some


@contextmanager
def _timed(job: SlotJob) -> Iterator[None]:
    began_ns = time.monotonic_ns()
    try:
        yield
    finally:
        job.busy_ns += time.monotonic_ns() - began_ns
