"""Makes room in a store without losing a block: removes packs whose blocks newer packs have as well, and
joins small packs into larger ones.

Both follow one rule: a pack may go when each of its blocks is in a pack with a later name, whose bytes were
read and fit. The rule needs nothing but the packs, so there is no list that has to be kept true. Whoever
joins packs makes the larger one first; if it is killed then, the next run finds that the small ones may go.
Two collectors at once do the same work twice, and as both go by the order of names, the last pack that has a
block is removed by neither.

Hosts may know a pack that goes. So a note is left in its place that names the packs which have its blocks;
hosts look at it when the pack is missing (`Shelf.moved`). It is made before the pack goes.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvtierd.tiers.store import packs
from kvtierd.tiers.store.coder import Coder
from kvtierd.tiers.store.names import MOVED_TO_MAX, is_pack, made_s, pack_of_note
from kvtierd.tiers.store.objects import ObjectStore, StoreError, StoreTrouble
from kvtierd.tiers.store.packed import (
    LISTED_AT_ONCE,
    READS_AT_ONCE,
    SKEW_S,
    Block,
    PackNews,
    Shard,
    Shelf,
    Wanted,
)

PACK_BYTES: Final = 16 << 20
"""Packs are joined up to so many bytes of blocks, not compressed: they are all in memory then."""
SMALL_BYTES: Final = 4 << 20
"""Packs whose blocks have less are joined."""
JOINED_MIN: Final = 4
"""Fewer packs are not joined: each run would write the same blocks again to save a few objects."""
NOTES_KEPT_S: Final = 30 * 86_400.0
"""A note is removed when it is so old, by the store's clock and ours. Most hosts that knew its pack have
looked at it by then, or forgotten the pack; for the others its blocks are misses, which they store again."""

_Place = tuple[str, int]
"""The name of a pack, and the first record of a block in it."""


@dataclass(slots=True)
class Collected:
    """What a run has found and done. Without `dry_run`, what was found was done as well."""

    namespaces: int = 0
    packs: int = 0
    pack_bytes: int = 0
    superseded_packs: int = 0
    """Packs that went because newer ones have all of their blocks."""
    joined_packs: int = 0
    """Small packs that went into larger ones."""
    larger_packs: int = 0
    """What they went into."""
    removed_bytes: int = 0
    notes_removed: int = 0
    unreadable_packs: int = 0
    """What is no pack, or has something that this version cannot read. It stays as it is."""
    doubted_blocks: int = 0
    """Blocks whose bytes did not fit where they were to be the only copy. The packs in question stay."""
    failures: list[str] = field(default_factory=list)
    """What the store did not do. A later run does it."""


@dataclass(slots=True, eq=False)
class _Found:
    """A pack, and its whole blocks."""

    name: str
    size_bytes: int
    news: PackNews

    @property
    def made_s(self) -> float:
        return made_s(self.name)

    @property
    def data_bytes(self) -> int:
        """Of its blocks, not compressed, as its head says. A small object may say that it becomes a huge
        one."""
        return int(self.news.pack.records["data_bytes"].sum())


class Collector:
    """One run over everything in a store. Safe beside hosts that use it, and beside other collectors."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        older_s: float,
        dry_run: bool = False,
        coder: Coder | None = None,
        clock: Callable[[], float] = time.time,
        progress: Callable[[Collected], None] = lambda collected: None,
    ) -> None:
        """Leaves packs alone that are younger than `older_s`, which should be longer than the clocks of hosts
        may differ (10 minutes). `coder` says how larger packs are compressed. `progress` is called after each
        group of a namespace."""
        self._store = store
        self._older_s = max(older_s, SKEW_S)
        self._dry_run = dry_run
        self._coder = coder
        self._clock = clock
        self._progress = progress
        self.collected = Collected()

    async def run(self) -> Collected:
        """Goes through all namespaces. Raises StoreError if the store cannot be listed; what fails in one
        group is noted, and the next one follows."""
        namespaces = set()
        async for folder, packs_there, notes in self._folders():
            namespace, group = folder
            namespaces.add(namespace)
            try:
                await self._collect(namespace, group, packs_there, notes)
            except StoreError as error:
                self.collected.failures.append(str(error))
            self.collected.namespaces = len(namespaces)
            self._progress(self.collected)
        return self.collected

    # --- what there is ---

    async def _folders(self) -> AsyncIterator[tuple[tuple[bytes, int], dict[str, int], dict[str, float]]]:
        """Each group's packs with their sizes, and its notes with when they were made, in the order of their
        names."""
        folder: tuple[bytes, int] | None = None
        found: dict[str, int] = {}
        notes: dict[str, float] = {}
        prefix = f"{packs.VERSION}/"
        after = ""
        while True:
            listed = await self._store.list(prefix, after, LISTED_AT_ONCE)
            for each in listed:
                *parents, name = each.name.removeprefix(prefix).split("/")
                here = _folder_of(parents)
                if here != folder:
                    if folder is not None:
                        yield folder, found, notes
                    folder, found, notes = here, {}, {}
                if here is None:
                    continue
                if is_pack(name):
                    found[name] = each.size_bytes
                elif pack_of_note(name):
                    notes[name] = each.modified_s
            if len(listed) < LISTED_AT_ONCE:
                break
            after = listed[-1].name
        if folder is not None:
            yield folder, found, notes

    async def _read_heads(self, shelf: Shelf, sizes: dict[str, int]) -> list[_Found]:
        names = list(sizes)
        found = []
        for first in range(0, len(names), READS_AT_ONCE):
            some = names[first : first + READS_AT_ONCE]
            heads = await asyncio.gather(*(shelf.blocks_of(name) for name in some))
            for name, news in zip(some, heads, strict=True):
                if news is None or not _is_all_known(news):
                    self.collected.unreadable_packs += 1
                else:
                    found.append(_Found(name, sizes[name], news))
        return found

    # --- one group of one namespace ---

    async def _collect(
        self, namespace: bytes, group: int, sizes: dict[str, int], notes: dict[str, float]
    ) -> None:
        shelf = Shelf(self._store, "", namespace, group, "0" * 8, self._clock, self._coder)
        found = await self._read_heads(shelf, sizes)
        self.collected.packs += len(sizes)
        self.collected.pack_bytes += sum(sizes.values())
        newer: dict[bytes, _Place] = {}
        """Each block, and the newest pack that has it, but for those that were compared and did not fit."""
        kept: list[_Found] = []
        for pack in sorted(found, key=lambda pack: pack.name, reverse=True):
            if await self._goes(shelf, pack, newer):
                continue
            kept.append(pack)
            for block, record in _blocks(pack.news):
                newer.setdefault(block, (pack.name, record))
        for some in _to_be_joined(reversed(kept), self._is_settled):
            await self._join(shelf, some, newer)
        await self._remove_notes(shelf, notes)

    def _is_settled(self, pack: _Found) -> bool:
        return pack.made_s < self._clock() - self._older_s

    async def _goes(self, shelf: Shelf, pack: _Found, newer: dict[bytes, _Place]) -> bool:
        """Removes a pack if each of its blocks is in a newer one."""
        if not self._is_settled(pack):
            return False
        blocks = [block for block, _ in _blocks(pack.news)]
        if not all(block in newer for block in blocks):
            return False
        holders = _by_holder((newer[block][0], block) for block in blocks)
        if len(holders) > MOVED_TO_MAX or not await self._all_sound(shelf, blocks, newer):
            return False
        if await self._remove(shelf, pack, holders):
            self.collected.superseded_packs += 1
        return True

    async def _all_sound(self, shelf: Shelf, blocks: Sequence[bytes], newer: dict[bytes, _Place]) -> bool:
        """Whether newer packs really have these blocks, every byte of them compared. What they do not have is
        forgotten, so that the pack that has it is the one that counts."""
        by_pack: dict[str, dict[int, bytes]] = {}
        for block in blocks:
            name, record = newer[block]
            by_pack.setdefault(name, {})[record] = block
        sound = True
        for name, wanted in by_pack.items():
            for record in await self._unsound(shelf, name, wanted):
                del newer[wanted[record]]
                self.collected.doubted_blocks += 1
                sound = False
        return sound

    async def _unsound(self, shelf: Shelf, name: str, wanted: Iterable[int]) -> set[int]:
        """Which of these first records of a pack have other bytes than its head promises."""
        records = set(wanted)
        try:
            news = await shelf.blocks_of(name)
            if news is None:
                return records
            rows = np.flatnonzero(np.isin(news.records, list(records)))
            some = PackNews(name, news.hashes[rows], news.records[rows], news.pack)
            return records - set(some.records[await shelf.sound(some)].tolist())
        except StoreError as error:
            if error.trouble is StoreTrouble.MISSING:
                return records
            raise

    async def _join(self, shelf: Shelf, some: Sequence[_Found], newer: dict[bytes, _Place]) -> None:
        """Makes one pack of what is in several, and removes them."""
        read = [await self._blocks_to_join(shelf, pack, newer) for pack in some]
        sources = [pack for pack, blocks in zip(some, read, strict=True) if blocks is not None]
        blocks = [block for found in read for block in found or ()]
        if len(sources) < JOINED_MIN or not blocks:
            return
        self.collected.larger_packs += 1
        name = ""
        if not self._dry_run:
            name = (await shelf.put(blocks)).name
        gone = {pack.name for pack in sources}
        for pack in sources:
            places = ((newer[block][0], block) for block, _ in _blocks(pack.news))
            holders = _by_holder((name if holder in gone else holder, block) for holder, block in places)
            if len(holders) <= MOVED_TO_MAX and await self._remove(shelf, pack, holders):
                self.collected.joined_packs += 1

    async def _blocks_to_join(
        self, shelf: Shelf, pack: _Found, newer: dict[bytes, _Place]
    ) -> list[Block] | None:
        """The blocks of a pack that no newer one really has; None if one of them does not fit, or the pack
        has gone by now."""
        every = list(_blocks(pack.news))
        await self._all_sound(shelf, [block for block, _ in every if newer[block][0] != pack.name], newer)
        for block, record in every:
            newer.setdefault(block, (pack.name, record))
        mine = [(block, record) for block, record in every if newer[block][0] == pack.name]
        records = pack.news.pack.records
        wanted, promised = [], []
        for block, first in mine:
            shards = records[first : first + int(records[first]["world"])]
            into = [memoryview(bytearray(size)) for size in shards["data_bytes"].tolist()]
            wanted.append(Wanted(block[: packs.HASH_BYTES], first, into))
            promised.append(shards["checksum"].tolist())
        try:
            found = await shelf.get(pack.name, wanted)
        except StoreError as error:
            if error.trouble is StoreTrouble.MISSING:
                return None
            raise
        wrong = sum(
            got is None or got.sums != expected for got, expected in zip(found, promised, strict=True)
        )
        if wrong:
            self.collected.doubted_blocks += wrong
            return None
        return [
            Block(
                one.hash, [Shard(data, checksum) for data, checksum in zip(one.into, of_block, strict=True)]
            )
            for one, of_block in zip(wanted, promised, strict=True)
        ]

    async def _remove(self, shelf: Shelf, pack: _Found, moved_to: Mapping[str, Sequence[bytes]]) -> bool:
        """Leaves a note, and removes the pack. Returns whether it went."""
        if not self._dry_run:
            try:
                await shelf.leave_note(pack.name, moved_to)
                await shelf.delete(pack.name)
            except StoreError as error:
                self.collected.failures.append(str(error))
                return False
        self.collected.removed_bytes += pack.size_bytes
        return True

    async def _remove_notes(self, shelf: Shelf, notes: Mapping[str, float]) -> None:
        """Removes notes that are so old that no host looks for their packs any more."""
        for name, made in notes.items():
            if made < self._clock() - NOTES_KEPT_S:
                if not self._dry_run:
                    await shelf.delete(name)
                self.collected.notes_removed += 1


def _folder_of(parents: Sequence[str]) -> tuple[bytes, int] | None:
    """The namespace and group whose packs are in a folder; None if it is none of ours."""
    try:
        namespace, group = parents
        digest = bytes.fromhex(namespace)
        return (digest, int(group)) if len(digest) == packs.DIGEST_BYTES else None
    except ValueError:
        return None


def _is_all_known(news: PackNews) -> bool:
    """Whether everything in a pack is a whole block that can be read here."""
    records = news.pack.records
    return int(records["world"][news.records].astype(np.int64).sum()) == len(records)


def _by_holder(places: Iterable[tuple[str, bytes]]) -> dict[str, list[bytes]]:
    """The blocks that each pack has."""
    found: dict[str, list[bytes]] = {}
    for name, block in places:
        found.setdefault(name, []).append(block)
    return found


def _blocks(news: PackNews) -> Iterable[tuple[bytes, int]]:
    """Each block of a pack, as its hash and the lengths of its shards, and its first record."""
    records = news.pack.records
    world = records["world"][news.records].astype(np.int64).tolist()
    lengths = np.ascontiguousarray(records["data_bytes"])
    for first, count in zip(news.records.tolist(), world, strict=True):
        yield records[first]["hash"].tobytes() + lengths[first : first + count].tobytes(), first


def _to_be_joined(kept: Iterable[_Found], is_settled: Callable[[_Found], bool]) -> Iterable[list[_Found]]:
    """Runs of small packs, the oldest first, each of which makes one pack."""
    some: list[_Found] = []
    size = records = 0
    for pack in kept:
        if pack.data_bytes >= SMALL_BYTES or not is_settled(pack):
            continue
        count = len(pack.news.pack.records)
        if some and (size + pack.data_bytes > PACK_BYTES or records + count > packs.RECORDS_MAX):
            yield some
            some, size, records = [], 0, 0
        some.append(pack)
        size += pack.data_bytes
        records += count
    yield some
