"""Blocks in packs, in any store of objects."""

import asyncio
import itertools
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtierd.tiers.store import packs
from kvtierd.tiers.store.coder import Coder, Stored
from kvtierd.tiers.store.coding import readable
from kvtierd.tiers.store.names import (
    BEGIN_BYTES,
    NOTE_BYTES_MAX,
    is_pack,
    made_s,
    note_name,
    note_of,
    read_note,
)
from kvtierd.tiers.store.objects import ObjectStore, StoreError, StoreTrouble
from kvtierd.tiers.store.packs import Pack, PackError

SKEW_S: Final = 600.0
"""By how much the clocks of hosts may differ."""
FIRST_READ_BYTES: Final = 64 << 10
"""Of a pack, at first: the heads of most packs are shorter."""
HEADS_KEPT: Final = 256
LISTED_AT_ONCE: Final = 1_000
READS_AT_ONCE: Final = 16
NAME_TRIES: Final = 3
DOUBT_S: Final = 1.0
"""After so long, a pack whose bytes did not fit is looked at again; after twice as long each further time."""
DOUBT_MAX_S: Final = 3_600.0
COMPARED_AT_ONCE_BYTES: Final = 8 << 20
DOUBTED_AT_ONCE: Final = 8
"""So many of them are looked at together with what is new."""
DOUBTED_MAX: Final = 1_024
"""Of so many packs it is remembered that they were doubted: the oldest is forgotten for another one."""
FOLLOWED_MAX: Final = 4
"""So many notes are followed one after the other: what a pack went into may have gone as well."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What one shard of a block has."""

    data: memoryview
    checksum: int
    """As the host's record has it: it was computed when the block was stored."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block that is to be written: its shards in the order of their ranks."""

    hash: bytes
    shards: Sequence[Shard]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block that is to be read."""

    hash: bytes
    record: int
    """Which record of the pack its first shard is."""
    into: Sequence[memoryview]
    """One buffer for each shard, as long as its data is."""


@dataclass(frozen=True, slots=True)
class Got:
    """A block that was read."""

    sums: list[int]
    """The xxh3_64 of what each of its buffers has now, which whoever reads it compares."""
    stored_bytes: int
    """How many bytes the store gave for it."""


@dataclass(frozen=True, slots=True)
class PackNews:
    """A pack that was found, with blocks whose shards are all in it, and can be read here."""

    name: str
    hashes: npt.NDArray[np.uint8]
    """Shape (n, 32)."""
    records: npt.NDArray[np.uint32]
    """For each block its first record."""
    pack: Pack
    """What the pack's head says."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Where a block is whose pack has gone."""

    name: str
    record: int
    checksums: tuple[int, ...]
    """Of its shards, as the pack's head says. Another host may have computed the block, with other bytes."""


@dataclass(slots=True)
class _Doubt:
    """Bytes of a pack did not fit. It may be what is stored, or something on the way that passes."""

    wait_s: float
    """How long it is waited until the pack is looked at again."""
    again_s: float
    """When that is, by the monotonic clock; infinite if it has been since."""


class Shelf:
    """The packs of one group of one namespace. Safe for several tasks of one loop."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        namespace: bytes,
        group: int,
        host: str,
        clock: Callable[[], float] = time.time,
        coder: Coder | None = None,
    ) -> None:
        """`prefix` is where in the store kvtier's objects are, empty or with a slash at its end; `host` names
        this one with 8 hexadecimal digits. Without a `coder`, blocks are put as they are."""
        self._store = store
        self._prefix = f"{prefix}{packs.VERSION}/{namespace.hex()}/{group}/"
        self._namespace, self._group, self._host = namespace, group, host
        self._clock = clock
        self._coder = coder or Coder()
        self._known: dict[str, float] = {}
        """Names that news were told of, or that are no packs, and when their hosts have made them."""
        self._newest_s = 0.0
        self._continue_after = ""
        """The name behind which the next listing goes on, if the last one did not come to the end."""
        self._heads: OrderedDict[str, Pack] = OrderedDict()
        self._doubted: OrderedDict[str, _Doubt] = OrderedDict()

    # --- out ---

    async def put(self, blocks: Sequence[Block]) -> PackNews:
        """Writes one pack of these blocks, in the order of their prompts. Raises StoreError."""
        records = np.zeros(sum(len(block.shards) for block in blocks), packs.RECORD)
        coded = await self._coder.encode([shard.data for block in blocks for shard in block.shards])
        data: list[memoryview] = []
        firsts = []
        for block in blocks:
            firsts.append(len(data))
            for rank, shard in enumerate(block.shards):
                record, stored = records[len(data)], coded[len(data)]
                record["hash"] = np.frombuffer(block.hash, np.uint8)
                record["shard"], record["world"] = rank, len(block.shards)
                record["coding"], record["stored_bytes"] = stored.coding, len(stored.data)
                record["data_bytes"], record["checksum"] = len(shard.data), shard.checksum
                data.append(memoryview(stored.data))
        placed = packs.laid_out(records)
        parts = list(packs.parts_of(self._namespace, self._group, placed, data))
        for _ in range(NAME_TRIES):
            name = f"{int(self._clock() * 1e6):020}-{self._host}-{secrets.token_hex(4)}.pack"
            if await self._store.put(self._prefix + name, parts):
                hashes = np.ascontiguousarray(placed["hash"][firsts])
                self._known[name] = made_s(name)
                pack = Pack(self._namespace, self._group, packs.length_of(bytes(parts[0])), placed)
                self._keep(name, pack)
                return PackNews(name, hashes, np.array(firsts, np.uint32), pack)
        raise StoreError(StoreTrouble.OTHER, f"{self._prefix}: every name that was tried is taken")

    # --- what there is ---

    def start_over(self) -> None:
        """Has the next `news` tell of everything there is."""
        self._known.clear()
        self._newest_s = 0.0
        self._continue_after = ""

    @property
    def behind(self) -> bool:
        """Whether the last `news` left packs to the next one."""
        return bool(self._continue_after)

    def doubt(self, name: str) -> None:
        """Bytes of a pack did not fit. It may be what is stored, or something on the way that passes: `news`
        tells of the pack again when all bytes of a block fit, and looks ever more rarely."""
        self._heads.pop(name, None)
        before = self._doubted.pop(name, None)
        wait_s = DOUBT_S
        if before is not None:
            looked_since = before.again_s == math.inf
            wait_s = min(2 * before.wait_s, DOUBT_MAX_S) if looked_since else before.wait_s
        self._doubted[name] = _Doubt(wait_s, time.monotonic() + wait_s)
        if len(self._doubted) > DOUBTED_MAX:
            self._doubted.popitem(last=False)

    async def news(self, limit: int) -> list[PackNews]:
        """Packs that this has not told of yet, oldest first, at most `limit`, and after them some that were
        doubted, with those of their blocks that are sound; `behind` says whether there are more new ones.
        What is no pack, or has gone meanwhile, is left out. Raises StoreError, but not after it has found
        something, because nobody would tell of that again."""
        names, more = await self._new_names(limit)
        told: list[PackNews] = []
        looked = 0
        try:
            while looked < len(names):
                some = names[looked : looked + READS_AT_ONCE]
                told += await self._told(some)
                looked += len(some)
            for name in self._due():
                told += await self._told_again(name)
        except StoreError:
            if not told:
                raise
        if more or looked < len(names):
            # Whoever has more to tell of goes on from there, and does not list ten minutes again each time.
            self._continue_after = names[looked - 1]
        else:
            # Everything is known now. What this host has put counts as well; else it would list all of it
            # each time for as long as nobody else puts anything.
            self._continue_after = ""
            self._newest_s = max(self._newest_s, min(max(self._known.values(), default=0.0), self._clock()))
        self._forget_old()
        return told

    async def _told(self, names: Sequence[str]) -> list[PackNews]:
        heads = await asyncio.gather(*(self._head_or_none(name) for name in names))
        told = []
        for name, pack in zip(names, heads, strict=True):
            self._known[name] = made = made_s(name)
            if pack is not None:
                self._newest_s = max(self._newest_s, min(made, self._clock() + SKEW_S))
                told.append(_whole_blocks(name, pack))
        return told

    async def _told_again(self, name: str) -> list[PackNews]:
        """What is sound of a pack that was doubted, every byte of it compared."""
        doubt = self._doubted[name]
        doubt.again_s = math.inf
        try:
            pack = await self._head_or_none(name)
            if pack is None:
                return []
            news = _whole_blocks(name, pack)
            if not len(news.records):
                return []
            sound = await self.sound(news)
        except StoreError as error:
            if error.trouble is StoreTrouble.MISSING:
                return []
            doubt.again_s = time.monotonic() + doubt.wait_s
            raise
        if len(sound) < len(news.records):
            self.doubt(name)
        if len(sound) == 0:
            return []
        return [PackNews(name, np.ascontiguousarray(news.hashes[sound]), news.records[sound], pack)]

    async def sound(self, news: PackNews) -> npt.NDArray[np.intp]:
        """Which of these blocks of a pack have the bytes that its head promises. Raises StoreError."""
        world = news.pack.records["world"][news.records].astype(np.int64)
        starts = news.records.astype(np.int64)
        own = np.repeat(starts - np.cumsum(world) + world, world) + np.arange(world.sum())
        records = news.pack.records[own]
        right = np.zeros(len(records), np.bool_)
        known = np.flatnonzero(readable(records))
        # By what the bytes become: a few that are stored may become very many.
        ends = np.cumsum(records["data_bytes"][known].astype(np.int64))
        cuts = np.flatnonzero(np.diff(ends // COMPARED_AT_ONCE_BYTES)) + 1
        for rows in np.split(known, cuts):
            some = records[rows]
            places = zip(some["offset"].tolist(), some["stored_bytes"].tolist(), strict=True)
            found = await self._store.read_ranges(self._prefix + news.name, list(places))
            stored = [Stored(int(coding), data) for coding, data in zip(some["coding"], found, strict=True)]
            sums = await self._coder.sums(stored, some["data_bytes"].tolist())
            right[rows] = np.array(sums, np.uint64) == some["checksum"]
        ends_of = np.cumsum(world)
        of_block = zip((ends_of - world).tolist(), ends_of.tolist(), strict=True)
        return np.flatnonzero([right[first:end].all() for first, end in of_block])

    def _due(self) -> list[str]:
        """Names of packs that were doubted, and are looked at again now."""
        now_s = time.monotonic()
        due = (name for name, doubt in self._doubted.items() if doubt.again_s <= now_s)
        return list(itertools.islice(due, DOUBTED_AT_ONCE))

    async def _new_names(self, limit: int) -> tuple[list[str], bool]:
        """Names that have not been looked at, in their order, and whether there may be more of them."""
        after = self._continue_after or f"{max(0, int((self._newest_s - SKEW_S) * 1e6)):020}"
        found: list[str] = []
        at_end = False
        while len(found) < limit and not at_end:
            listed = await self._store.list(self._prefix, self._prefix + after, LISTED_AT_ONCE)
            names = [each.name.removeprefix(self._prefix) for each in listed]
            found += [name for name in names if is_pack(name) and name not in self._known]
            at_end = len(listed) < LISTED_AT_ONCE
            after = names[-1] if names else after
        return found[:limit], len(found) > limit or not at_end

    def _forget_old(self) -> None:
        """What is older than where a listing begins is not listed again."""
        oldest_s = self._newest_s - SKEW_S
        for name in [name for name, made in self._known.items() if made < oldest_s]:
            del self._known[name]

    async def _head_or_none(self, name: str) -> Pack | None:
        try:
            return await self._head(name)
        except PackError:
            self.doubt(name)
            return None
        except StoreError as error:
            if error.trouble is StoreTrouble.MISSING:
                return None
            raise

    async def _head(self, name: str) -> Pack:
        """The head of a pack. Raises PackError and StoreError."""
        pack = self._heads.get(name)
        if pack is None:
            path = self._prefix + name
            piece = await self._store.read(path, 0, FIRST_READ_BYTES)
            begin = piece.data
            length = packs.needed_bytes(begin)
            if length > len(begin):
                begin += (await self._store.read(path, len(begin), length - len(begin))).data
            pack = packs.read_head(begin[:length], self._namespace, self._group, piece.object_bytes)
            self._keep(name, pack)
        else:
            self._heads.move_to_end(name)
        return pack

    def _keep(self, name: str, pack: Pack) -> None:
        """Keeps a head, so that blocks of the pack are read by one call; the one that was used least recently
        goes for it."""
        self._heads[name] = pack
        if len(self._heads) > HEADS_KEPT:
            self._heads.popitem(last=False)

    # --- in ---

    async def get(self, name: str, wanted: Sequence[Wanted]) -> list[Got | None]:
        """Reads blocks of one pack. Returns for each what was read, which the caller compares, or None if the
        pack does not say that it has this block, in a coding that is known here. Raises StoreError, and then
        nobody knows what the buffers have; MISSING if the pack has gone."""
        try:
            pack = await self._head(name)
        except PackError:
            self.doubt(name)
            return [None] * len(wanted)
        fits = [self._fits(pack, one) for one in wanted]
        fitting = [one for one, right in zip(wanted, fits, strict=True) if right]
        if not fitting:
            return [None] * len(wanted)
        rows = np.concatenate([one.record + np.arange(len(one.into)) for one in fitting])
        records = pack.records[rows]
        places = zip(records["offset"].tolist(), records["stored_bytes"].tolist(), strict=True)
        try:
            found = await self._store.read_ranges(self._prefix + name, list(places))
        except StoreError as error:
            if error.trouble is StoreTrouble.MISSING:
                self._heads.pop(name, None)  # else `moved` would take it for a place where blocks are
            raise
        stored = [Stored(int(coding), data) for coding, data in zip(records["coding"], found, strict=True)]
        buffers = [buffer for one in fitting for buffer in one.into]
        sums = iter(await self._coder.decode(stored, buffers))
        lengths = iter(records["stored_bytes"].tolist())
        return [
            Got([next(sums) for _ in one.into], sum(next(lengths) for _ in one.into)) if right else None
            for one, right in zip(wanted, fits, strict=True)
        ]

    async def moved(self, name: str, wanted: Sequence[Wanted]) -> list[Moved | None]:
        """Where blocks of a pack are that has gone, by the notes of collectors; None for those that no note
        leads to. Raises StoreError."""
        places: dict[bytes, Moved] = {}
        looked: set[str] = set()
        gone = {name: {one.hash for one in wanted}}
        for _ in range(FOLLOWED_MAX):
            looked.update(gone)
            holders: dict[str, set[bytes]] = {}
            for each, missing in gone.items():
                for holder, begins in (await self._note(each)).items():
                    there = {block for block in missing if block[:BEGIN_BYTES] in begins}
                    if there and holder not in looked:
                        holders.setdefault(holder, set()).update(there)
            gone = {}
            for holder, missing in holders.items():
                try:
                    pack = await self._head(holder)
                except PackError:
                    self.doubt(holder)
                    continue
                except StoreError as error:
                    if error.trouble is not StoreTrouble.MISSING:
                        raise
                    gone[holder] = missing
                    continue
                places.update(_moved_to(holder, pack, missing))
            if not gone:
                break
        return [places.get(one.hash) for one in wanted]

    async def _note(self, name: str) -> dict[str, set[bytes]]:
        """Which packs have what a pack had that has gone, and how the hashes of the blocks begin."""
        try:
            note = await self._store.read(self._prefix + note_name(name), 0, NOTE_BYTES_MAX)
        except StoreError as error:
            if error.trouble is StoreTrouble.MISSING:
                return {}
            raise
        return read_note(note.data)

    # --- for collectors ---

    async def blocks_of(self, name: str) -> PackNews | None:
        """The blocks of a pack of which all shards are there; None if it is no pack, or has gone. Raises
        StoreError."""
        pack = await self._head_or_none(name)
        return None if pack is None else _whole_blocks(name, pack)

    async def leave_note(self, name: str, moved_to: Mapping[str, Iterable[bytes]]) -> None:
        """Notes which packs have which blocks of this one. A note that is there stays: the packs that it
        names had everything, and if one of them has gone, there is a note for it in turn. Raises
        StoreError."""
        path, note = self._prefix + note_name(name), memoryview(note_of(moved_to))
        if not await self._store.put(path, [note]) and not await self._note(name):
            raise StoreError(StoreTrouble.OTHER, f"{path}: this is no note that kvtier has made: remove it")

    async def delete(self, name: str) -> None:
        """Removes a pack or a note. Raises StoreError."""
        self._heads.pop(name, None)
        await self._store.delete(self._prefix + name)

    @staticmethod
    def _fits(pack: Pack, one: Wanted) -> bool:
        """Whether a pack's records are those of this block, with as many bytes as its buffers have, and can
        be read here."""
        records = pack.records[one.record : one.record + len(one.into)]
        return (
            len(records) == len(one.into)
            and bool(readable(records).all())
            and all(
                record["hash"].tobytes() == one.hash
                and (int(record["shard"]), int(record["world"])) == (rank, len(one.into))
                and int(record["data_bytes"]) == len(buffer)
                for rank, (record, buffer) in enumerate(zip(records, one.into, strict=True))
            )
        )


def _whole_blocks(name: str, pack: Pack) -> PackNews:
    """The blocks of a pack of which all shards are there, one after the other, and can be read here."""
    records, known = pack.records, readable(pack.records)
    firsts = np.flatnonzero(records["shard"] == 0)
    world = records["world"][firsts].astype(np.int64)
    whole = []
    for first, count in zip(firsts.tolist(), world.tolist(), strict=True):
        some = records[first : first + count]
        alike = len(some) == count and bool((some["hash"] == some["hash"][0]).all())
        alike = alike and bool(known[first : first + count].all())
        whole.append(alike and bool((some["shard"] == np.arange(count)).all()))
    chosen = firsts[np.array(whole, np.bool_)] if len(firsts) else firsts
    hashes = np.ascontiguousarray(records["hash"][chosen])
    return PackNews(name, hashes, chosen.astype(np.uint32), pack)


def _moved_to(name: str, pack: Pack, wanted: set[bytes]) -> Iterator[tuple[bytes, Moved]]:
    """Which of these blocks a pack has, and where."""
    for first in _whole_blocks(name, pack).records.tolist():
        block = pack.records[first]["hash"].tobytes()
        if block in wanted:
            shards = pack.records[first : first + int(pack.records[first]["world"])]
            yield block, Moved(name, first, tuple(shards["checksum"].tolist()))
