"""Blocks in packs, in any store of objects."""

import asyncio
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from kvtier_kernels import xxh3_64

from kvtierd.tiers.store import packs
from kvtierd.tiers.store.objects import Listed, ObjectStore, StoreError, StoreTrouble
from kvtierd.tiers.store.packs import Pack, PackError

SKEW_S: Final = 600.0
"""By how much the clocks of hosts may differ."""
FIRST_READ_BYTES: Final = 64 << 10
"""Of a pack, at first: the heads of most packs are shorter."""
HEADS_KEPT: Final = 256
LISTED_AT_ONCE: Final = 1_000
READS_AT_ONCE: Final = 16
NAME_TRIES: Final = 3
_NAME: Final = re.compile(r"([0-9]{20})-[0-9a-f]{8}-[0-9a-f]{8}\.pack")


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
class PackNews:
    """A pack that was found, with blocks whose shards are all in it."""

    name: str
    hashes: npt.NDArray[np.uint8]
    """Shape (n, 32)."""
    records: npt.NDArray[np.uint32]
    """For each block its first record."""
    pack: Pack
    """What the pack's head says."""


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
    ) -> None:
        """`prefix` is where in the store kvtier's objects are, empty or with a slash at its end; `host` names
        this one with 8 hexadecimal digits."""
        self._store = store
        self._prefix = f"{prefix}{packs.VERSION}/{namespace.hex()}/{group}/"
        self._namespace, self._group, self._host = namespace, group, host
        self._clock = clock
        self._known: dict[str, float] = {}
        """Names that news were told of, or that are no packs, and when their hosts have made them."""
        self._newest_s = 0.0
        self._continue_after = ""
        """The name behind which the next listing goes on, if the last one did not come to the end."""
        self._heads: OrderedDict[str, Pack] = OrderedDict()

    # --- out ---

    async def put(self, blocks: Sequence[Block]) -> PackNews:
        """Writes one pack of these blocks, in the order of their prompts. Raises StoreError."""
        records = np.zeros(sum(len(block.shards) for block in blocks), packs.RECORD)
        data: list[memoryview] = []
        firsts = []
        for block in blocks:
            firsts.append(len(data))
            for rank, shard in enumerate(block.shards):
                record = records[len(data)]
                record["hash"] = np.frombuffer(block.hash, np.uint8)
                record["shard"], record["world"] = rank, len(block.shards)
                record["stored_bytes"] = record["data_bytes"] = len(shard.data)
                record["checksum"] = shard.checksum
                data.append(shard.data)
        placed = packs.laid_out(records)
        parts = list(packs.parts_of(self._namespace, self._group, placed, data))
        for _ in range(NAME_TRIES):
            name = f"{int(self._clock() * 1e6):020}-{self._host}-{secrets.token_hex(4)}.pack"
            if await self._store.put(self._prefix + name, parts):
                hashes = np.ascontiguousarray(placed["hash"][firsts])
                self._known[name] = _made_s(name)
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

    async def news(self, limit: int) -> list[PackNews]:
        """Packs that this has not told of yet, oldest first, at most `limit`; `behind` says whether there are
        more. What is no pack, or has gone meanwhile, is left out. Raises StoreError."""
        after = self._continue_after or f"{max(0, int((self._newest_s - SKEW_S) * 1e6)):020}"
        found: list[Listed] = []
        at_end = False
        while len(found) < limit and not at_end:
            listed = await self._store.list(self._prefix, self._prefix + after, LISTED_AT_ONCE)
            found += [each for each in listed if self._is_new(each)]
            at_end = len(listed) < LISTED_AT_ONCE
            if listed:
                after = listed[-1].name.removeprefix(self._prefix)
        more = len(found) > limit or not at_end
        found = found[:limit]
        told: list[PackNews] = []
        for first in range(0, len(found), READS_AT_ONCE):
            some = found[first : first + READS_AT_ONCE]
            try:
                heads = await asyncio.gather(*(self._head_or_none(each) for each in some))
            except StoreError:
                if not first:
                    raise
                # What was read before counts as known, so it has to be told; the next call goes on here.
                found, more = found[:first], True
                break
            for each, pack in zip(some, heads, strict=True):
                name = each.name.removeprefix(self._prefix)
                made_s = _made_s(name)
                self._known[name] = made_s
                self._newest_s = max(self._newest_s, min(made_s, self._clock() + SKEW_S))
                if pack is not None:
                    told.append(_whole_blocks(name, pack))
        # Whoever has more to tell of goes on from there, and does not list ten minutes again each time.
        self._continue_after = found[-1].name.removeprefix(self._prefix) if more else ""
        if not more:
            # Everything is known now. What this host has put counts as well; else it would list all of it
            # each time for as long as nobody else puts anything.
            self._newest_s = max(self._newest_s, min(max(self._known.values(), default=0.0), self._clock()))
        self._forget_old()
        return told

    def _is_new(self, listed: Listed) -> bool:
        name = listed.name.removeprefix(self._prefix)
        return _NAME.fullmatch(name) is not None and name not in self._known

    def _forget_old(self) -> None:
        """What is older than where a listing begins is not listed again."""
        oldest_s = self._newest_s - SKEW_S
        for name in [name for name, made_s in self._known.items() if made_s < oldest_s]:
            del self._known[name]

    async def _head_or_none(self, listed: Listed) -> Pack | None:
        try:
            return await self._head(listed.name.removeprefix(self._prefix))
        except PackError:
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

    async def get(self, name: str, wanted: Sequence[Wanted]) -> list[list[int] | None]:
        """Reads blocks of one pack. Returns for each the xxh3_64 of what its buffers have now, which the
        caller compares, or None if the pack does not say that it has this block. Raises StoreError, and then
        nobody knows what the buffers have; MISSING if the pack has gone."""
        try:
            pack = await self._head(name)
        except PackError:
            return [None] * len(wanted)
        fits = [self._fits(pack, one) for one in wanted]
        ranges: list[tuple[int, memoryview]] = []
        for one, right in zip(wanted, fits, strict=True):
            if right:
                ranges += [
                    (int(pack.records[one.record + rank]["offset"]), buffer)
                    for rank, buffer in enumerate(one.into)
                ]
        if ranges:
            await self._store.read_into(self._prefix + name, ranges)
        return [
            [xxh3_64(buffer) for buffer in one.into] if right else None
            for one, right in zip(wanted, fits, strict=True)
        ]

    @staticmethod
    def _fits(pack: Pack, one: Wanted) -> bool:
        """Whether a pack's records are those of this block, with as many bytes as its buffers have."""
        records = pack.records[one.record : one.record + len(one.into)]
        return len(records) == len(one.into) and all(
            record["hash"].tobytes() == one.hash
            and (int(record["shard"]), int(record["world"])) == (rank, len(one.into))
            and int(record["coding"]) == packs.RAW
            and int(record["stored_bytes"]) == int(record["data_bytes"]) == len(buffer)
            for rank, (record, buffer) in enumerate(zip(records, one.into, strict=True))
        )


def _made_s(name: str) -> float:
    """When a pack was made, by its host's clock."""
    return int(name[:20]) / 1e6


def _whole_blocks(name: str, pack: Pack) -> PackNews:
    """The blocks of a pack of which all shards are there, one after the other."""
    records = pack.records
    firsts = np.flatnonzero(records["shard"] == 0)
    world = records["world"][firsts].astype(np.int64)
    whole = []
    for first, count in zip(firsts.tolist(), world.tolist(), strict=True):
        some = records[first : first + count]
        alike = len(some) == count and bool((some["hash"] == some["hash"][0]).all())
        whole.append(alike and bool((some["shard"] == np.arange(count)).all()))
    chosen = firsts[np.array(whole, np.bool_)] if len(firsts) else firsts
    hashes = np.ascontiguousarray(records["hash"][chosen])
    return PackNews(name, hashes, chosen.astype(np.uint32), pack)
