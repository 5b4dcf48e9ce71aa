"""Blocks in packs: what one host puts, another finds and reads, and believes nothing that does not fit."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvtier_kernels import xxh3_64
from kvtierd.tiers.store import packed, packs
from kvtierd.tiers.store.coder import Coder
from kvtierd.tiers.store.coding import CODINGS, Compression
from kvtierd.tiers.store.objects import Listed, ObjectStore, Piece, StoreError, StoreTrouble
from kvtierd.tiers.store.obstore_store import ObstoreStore
from kvtierd.tiers.store.packed import SKEW_S, Block, PackNews, Shard, Shelf, Wanted

NAMESPACE = bytes(range(16))
SIZES = (5_000, 4_096)
"""Of the shards of a block."""


class Clock:
    now_s = 1_800_000_000.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObstoreStore(tmp_path.joinpath("shared").as_uri(), {}, 30.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def shelf(
    store: ObjectStore, clock: Clock, host: str = "0000000a", group: int = 0, coder: Coder | None = None
) -> Shelf:
    return Shelf(store, "some/where/", NAMESPACE, group, host, clock, coder)


def blocks(*numbers: int) -> list[Block]:
    made = []
    for number in numbers:
        random = np.random.default_rng(number)
        shards = [random.bytes(size) for size in SIZES]
        made.append(Block(bytes([number]) * 32, [Shard(memoryview(data), xxh3_64(data)) for data in shards]))
    return made


def wanted(news: PackNews, number: int) -> Wanted:
    place = news.hashes[:, 0].tolist().index(number)
    buffers = [memoryview(bytearray(size)) for size in SIZES]
    return Wanted(bytes([number]) * 32, int(news.records[place]), buffers)


def right(one: Wanted, number: int) -> bool:
    [block] = blocks(number)
    return all(buffer == shard.data for buffer, shard in zip(one.into, block.shards, strict=True))


def sums(number: int) -> list[int]:
    """What a block's shards should give."""
    [block] = blocks(number)
    return [shard.checksum for shard in block.shards]


async def got(reader: Shelf, name: str, some: Sequence[Wanted]) -> list[list[int] | None]:
    """The sums of what a shelf reads."""
    return [None if each is None else each.sums for each in await reader.get(name, some)]


def numbers(news: Sequence[PackNews]) -> list[list[int]]:
    return [each.hashes[:, 0].tolist() for each in news]


def test_what_one_host_puts_another_finds_and_reads(store: ObjectStore, clock: Clock) -> None:
    async def task() -> None:
        one, other = shelf(store, clock), shelf(store, clock, "0000000b")
        put = await one.put(blocks(1, 2, 3))
        assert await one.news(100) == [], "it knows its own"
        [found] = await other.news(100)
        assert (found.name, found.hashes.tolist(), found.records.tolist()) == (
            put.name,
            put.hashes.tolist(),
            [0, 2, 4],
        )
        some = [wanted(found, number) for number in (3, 1)]
        assert await got(other, found.name, some) == [sums(3), sums(1)]
        assert right(some[0], 3)
        assert right(some[1], 1)
        assert await other.news(100) == []
        await one.put(blocks(4))
        await one.put(blocks(5))
        assert numbers(await other.news(1)) == [[4]]
        assert numbers(await other.news(100)) == [[5]]

    asyncio.run(task())


def test_other_groups_and_namespaces_have_other_packs(store: ObjectStore, clock: Clock) -> None:
    async def task() -> None:
        await shelf(store, clock).put(blocks(1))
        assert await shelf(store, clock, group=1).news(100) == []
        assert await Shelf(store, "some/where/", bytes(16), 0, "0000000b", clock).news(100) == []

    asyncio.run(task())


def test_a_host_whose_clock_is_behind_is_heard_all_the_same(store: ObjectStore, clock: Clock) -> None:
    async def task() -> None:
        late = Clock()
        late.now_s -= SKEW_S / 2
        one, behind, reader = (
            shelf(store, clock),
            shelf(store, late, "0000000b"),
            shelf(store, clock, "0000000c"),
        )
        await one.put(blocks(1))
        assert numbers(await reader.news(100)) == [[1]]
        await behind.put(blocks(2))
        assert numbers(await reader.news(100)) == [[2]]
        ahead = Clock()
        ahead.now_s += 100 * SKEW_S
        await shelf(store, ahead, "0000000d").put(blocks(3))
        assert numbers(await reader.news(100)) == [[3]]
        await one.put(blocks(4))
        assert numbers(await reader.news(100)) == [[4]], "one wrong clock does not hide the others"

    asyncio.run(task())


def test_more_packs_than_one_listing_has(
    store: ObjectStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "LISTED_AT_ONCE", 3)

    async def task() -> None:
        one, reader = shelf(store, clock), shelf(store, clock, "0000000b")
        for number in range(1, 11):
            await one.put(blocks(number))
        assert numbers(await reader.news(100)) == [[number] for number in range(1, 11)]

    asyncio.run(task())


def test_a_pack_that_was_changed_is_a_miss(store: ObjectStore, clock: Clock, tmp_path: Path) -> None:
    async def task() -> None:
        one = shelf(store, clock)
        put = await one.put(blocks(1, 2))
        [file] = tmp_path.joinpath("shared").rglob("*.pack")
        data = bytearray(file.read_bytes())
        data[packs.head_bytes(4) + 10] ^= 1
        file.write_bytes(data)
        some = [wanted(put, number) for number in (1, 2)]
        first, second = await got(shelf(store, clock, "0000000b"), put.name, some)
        assert first is not None
        assert first != sums(1), "whoever compares them sees it"
        assert second == sums(2)
        assert right(some[1], 2)
        data[100] ^= 1
        file.write_bytes(data)
        reader = shelf(store, clock, "0000000c")
        assert await got(reader, put.name, some) == [None, None]
        assert await reader.news(100) == []
        file.write_bytes(b"something else")
        assert await shelf(store, clock, "0000000d").news(100) == []

    asyncio.run(task())


class OnTheWay:
    """A store beyond a network: what is read may be changed, or fail."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.flips = False
        self.reads_left = math.inf
        """After so many reads of heads there is no answer."""
        self.invents: list[Listed] = []
        """Objects that are not there, but listed."""

    async def read(self, name: str, begin: int, size_bytes: int) -> Piece:
        if self.reads_left <= 0:
            raise StoreError(StoreTrouble.LATE, f"{name}: no answer in time")
        self.reads_left -= 1
        piece = await self._store.read(name, begin, size_bytes)
        data = bytearray(piece.data)
        data[200] ^= self.flips
        return Piece(bytes(data), piece.object_bytes)

    async def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytearray]:
        found = [bytearray(data) for data in await self._store.read_ranges(name, ranges)]
        found[0][0] ^= self.flips
        return found

    async def list(self, prefix: str, after: str = "", limit: int = 1_000) -> list[Listed]:
        return await self._store.list(prefix, after, limit) + self.invents

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def on_the_way(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> OnTheWay:
    monkeypatch.setattr(packed, "DOUBT_S", 0.0)
    return OnTheWay(store)


def test_a_head_that_was_changed_on_its_way_is_read_again(
    store: ObjectStore, on_the_way: OnTheWay, clock: Clock
) -> None:
    async def task() -> None:
        await shelf(store, clock).put(blocks(1, 2))
        reader = shelf(on_the_way, clock, "0000000b")
        on_the_way.flips = True
        assert await reader.news(100) == []
        assert await reader.news(100) == []
        on_the_way.flips = False
        assert numbers(await reader.news(100)) == [[1, 2]]
        assert await reader.news(100) == [], "once"

    asyncio.run(task())


def test_of_a_pack_that_was_doubted_the_sound_blocks_are_told_of_again(
    store: ObjectStore,
    on_the_way: OnTheWay,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is wrong where it is stored is never told of again."""
    monkeypatch.setattr(packed, "COMPARED_AT_ONCE_BYTES", 10_000)

    async def task() -> None:
        put = await shelf(store, clock).put(blocks(1, 2, 3))
        reader = shelf(on_the_way, clock, "0000000b")
        assert numbers(await reader.news(100)) == [[1, 2, 3]]
        on_the_way.flips = True
        reader.doubt(put.name)
        assert await reader.news(100) == [], "not even its head is right"
        on_the_way.flips = False
        assert numbers(await reader.news(100)) == [[1, 2, 3]]
        [file] = tmp_path.joinpath("shared").rglob("*.pack")
        data = bytearray(file.read_bytes())
        data[int(put.pack.records["offset"][3])] ^= 1
        file.write_bytes(data)
        reader.doubt(put.name)
        for _ in range(3):
            assert numbers(await reader.news(100)) == [[1, 3]], "it is looked at again, and found the same"
        file.unlink()
        for _ in range(3):
            assert await reader.news(100) == [], "nor is it an error that it has gone meanwhile"

    asyncio.run(task())


def test_a_pack_without_a_sound_block_is_not_told_of_again(
    store: ObjectStore, on_the_way: OnTheWay, clock: Clock, tmp_path: Path
) -> None:
    async def task() -> None:
        put = await shelf(store, clock).put(blocks(1))
        reader = shelf(on_the_way, clock, "0000000b")
        assert numbers(await reader.news(100)) == [[1]]
        [file] = tmp_path.joinpath("shared").rglob("*.pack")
        data = bytearray(file.read_bytes())
        data[int(put.pack.records["offset"][1])] ^= 1
        file.write_bytes(data)
        reader.doubt(put.name)
        for _ in range(3):
            assert await reader.news(100) == []

    asyncio.run(task())


def test_a_pack_is_looked_at_ever_more_rarely(
    store: ObjectStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def task() -> None:
        put = await shelf(store, clock).put(blocks(1))
        reader, now_s = shelf(store, clock, "0000000b"), 0.0
        monkeypatch.setattr("kvtierd.tiers.store.packed.time.monotonic", lambda: now_s)
        await reader.news(100)
        for wait_s in (1, 2, 4, 8):
            reader.doubt(put.name)
            reader.doubt(put.name)
            now_s += wait_s - 0.5
            assert await reader.news(100) == []
            now_s += 1
            assert numbers(await reader.news(100)) == [[1]]

    asyncio.run(task())


def test_what_was_found_before_an_error_is_told_of(
    store: ObjectStore, on_the_way: OnTheWay, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "READS_AT_ONCE", 2)

    async def task() -> None:
        one, reader = shelf(store, clock), shelf(on_the_way, clock, "0000000b")
        for number in range(1, 6):
            await one.put(blocks(number))
        on_the_way.reads_left = 3
        assert numbers(await reader.news(100)) == [[1], [2]]
        with pytest.raises(StoreError):
            await reader.news(100)
        on_the_way.reads_left = math.inf
        assert numbers(await reader.news(100)) == [[3], [4], [5]]

    asyncio.run(task())


def test_a_name_of_nothing_hides_no_pack(store: ObjectStore, on_the_way: OnTheWay, clock: Clock) -> None:
    """A listing may be wrong as well."""

    async def task() -> None:
        one, reader = shelf(store, clock), shelf(on_the_way, clock, "0000000b")
        put = await one.put(blocks(1))
        folder = f"some/where/{packs.VERSION}/{NAMESPACE.hex()}/0/"
        ahead = f"{folder}{int((clock.now_s + 100 * SKEW_S) * 1e6):020}{put.name[20:]}"
        on_the_way.invents = [Listed(ahead, 1, 0.0)]
        assert numbers(await reader.news(100)) == [[1]]
        on_the_way.invents = []
        behind = Clock()
        behind.now_s -= SKEW_S / 2
        await shelf(store, behind, "0000000c").put(blocks(2))
        assert numbers(await reader.news(100)) == [[2]]

    asyncio.run(task())


def test_a_block_of_another_key_or_size_is_a_miss(store: ObjectStore, clock: Clock) -> None:
    async def task() -> None:
        one = shelf(store, clock)
        put = await one.put(blocks(1, 2))
        own = wanted(put, 1)
        other_key = Wanted(bytes([2]) * 32, own.record, own.into)
        shorter = Wanted(own.hash, own.record, [own.into[0][:-1], own.into[1]])
        one_rank = Wanted(own.hash, own.record, own.into[:1])
        beyond = Wanted(own.hash, 3, own.into)
        far = Wanted(own.hash, 1 << 40, own.into)
        some = [other_key, shorter, one_rank, beyond, far]
        assert await got(one, put.name, some) == [None] * len(some)

    asyncio.run(task())


def test_a_pack_that_has_gone_is_missing(store: ObjectStore, clock: Clock, tmp_path: Path) -> None:
    async def task() -> None:
        put = await shelf(store, clock).put(blocks(1))
        reader = shelf(store, clock, "0000000b")
        assert await got(reader, put.name, [wanted(put, 1)]) == [sums(1)]
        for file in tmp_path.joinpath("shared").rglob("*.pack"):
            file.unlink()
        with pytest.raises(StoreError) as raised:
            await got(reader, put.name, [wanted(put, 1)])
        assert raised.value.trouble is StoreTrouble.MISSING

    asyncio.run(task())


class TestCompression:
    """Packs of a host that compresses, and of hosts that do not."""

    SIZES = (50_002, 16_384)

    def coded_blocks(self, *numbers: int) -> list[Block]:
        """Blocks of bfloat16, but for those of odd numbers, of which nothing could be saved."""
        made = []
        for number in numbers:
            random = np.random.default_rng(number)
            shards = []
            for size in self.SIZES:
                floats = random.normal(size=size // 2).astype("<f4").view("<u4") >> np.uint32(16)
                shards.append(random.bytes(size) if number % 2 else floats.astype("<u2").tobytes())
            found = [Shard(memoryview(data), xxh3_64(data)) for data in shards]
            made.append(Block(bytes([number]) * 32, found))
        return made

    def wanted(self, news: PackNews, number: int) -> Wanted:
        place = news.hashes[:, 0].tolist().index(number)
        buffers = [memoryview(bytearray(size)) for size in self.SIZES]
        return Wanted(bytes([number]) * 32, int(news.records[place]), buffers)

    def sums(self, number: int) -> list[int]:
        [block] = self.coded_blocks(number)
        return [shard.checksum for shard in block.shards]

    async def put(self, store: ObjectStore, clock: Clock) -> PackNews:
        """Two blocks that are coded, and one between them that is not."""
        return await shelf(store, clock, coder=Coder(Compression.ZSTD)).put(self.coded_blocks(2, 1, 4))

    def damage(self, tmp_path: Path, put: PackNews, record: int, data: bytes, at: int = 0) -> None:
        """Writes over what a record names."""
        [file] = tmp_path.joinpath("shared").rglob("*.pack")
        with file.open("r+b") as opened:
            opened.seek(int(put.pack.records["offset"][record]) + at)
            opened.write(data)

    @pytest.mark.parametrize("reads", [Compression.OFF, Compression.ZSTD])
    def test_what_one_host_compresses_any_other_reads(
        self, store: ObjectStore, clock: Clock, reads: Compression
    ) -> None:
        async def task() -> None:
            put = await self.put(store, clock)
            records = put.pack.records
            assert records["coding"].tolist() == [CODINGS[1]] * 2 + [packs.RAW] * 2 + [CODINGS[1]] * 2
            assert records["data_bytes"].tolist() == list(self.SIZES) * 3
            other = shelf(store, clock, "0000000b", coder=Coder(reads))
            [found] = await other.news(100)
            assert numbers([found]) == [[2, 1, 4]]
            some = [self.wanted(found, number) for number in (4, 1, 2)]
            read = await other.get(found.name, some)
            assert [None if each is None else each.sums for each in read] == list(map(self.sums, (4, 1, 2)))
            for one, number in zip(some, (4, 1, 2), strict=True):
                [block] = self.coded_blocks(number)
                assert [bytes(buffer) for buffer in one.into] == [bytes(shard.data) for shard in block.shards]
            stored = [None if each is None else each.stored_bytes for each in read]
            assert stored == [int(records["stored_bytes"][at : at + 2].sum()) for at in (4, 2, 0)]
            assert stored[1] == sum(self.SIZES)

        asyncio.run(task())

    def test_a_pack_takes_less_room(self, store: ObjectStore, clock: Clock) -> None:
        async def task() -> None:
            some = self.coded_blocks(*range(2, 40, 2))
            plain = await shelf(store, clock).put(some)
            coded = await shelf(store, clock, coder=Coder(Compression.ZSTD)).put(some)
            assert coded.pack.pack_bytes < 0.85 * plain.pack.pack_bytes

        asyncio.run(task())

    @pytest.mark.parametrize("at", [0, 5, 20_000])
    @pytest.mark.parametrize("damage", [b"\xff" * 8, bytes(3_000), b"\x28\xb5\x2f\xfd" * 4])
    def test_what_was_damaged_is_no_other_blocks_trouble(
        self, store: ObjectStore, clock: Clock, tmp_path: Path, at: int, damage: bytes
    ) -> None:
        async def task() -> None:
            put = await self.put(store, clock)
            self.damage(tmp_path, put, 4, damage, at)
            some = [self.wanted(put, number) for number in (2, 1, 4)]
            first, second, third = await got(shelf(store, clock, "0000000b"), put.name, some)
            assert [first, second] == [self.sums(2), self.sums(1)]
            assert third is not None
            assert third[0] != self.sums(4)[0], "whoever compares them sees it"
            assert third[1] == self.sums(4)[1]

        asyncio.run(task())

    def test_of_a_pack_that_was_doubted_the_sound_blocks_are_told_of_again(
        self, store: ObjectStore, on_the_way: OnTheWay, clock: Clock, tmp_path: Path
    ) -> None:
        async def task() -> None:
            put = await self.put(store, clock)
            reader = shelf(on_the_way, clock, "0000000b")
            assert numbers(await reader.news(100)) == [[2, 1, 4]]
            reader.doubt(put.name)
            assert numbers(await reader.news(100)) == [[2, 1, 4]]
            self.damage(tmp_path, put, 5, b"\xff" * 8)
            reader.doubt(put.name)
            for _ in range(3):
                assert numbers(await reader.news(100)) == [[2, 1]]

        asyncio.run(task())

    def test_without_the_library_only_what_is_not_compressed_is_told_of(
        self, store: ObjectStore, on_the_way: OnTheWay, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def task() -> None:
            put = await self.put(store, clock)
            monkeypatch.setitem(sys.modules, "zstandard", None)
            reader = shelf(on_the_way, clock, "0000000b")
            assert numbers(await reader.news(100)) == [[1]]
            assert await reader.news(100) == [], "nothing is wrong with the pack"
            some = [self.wanted(put, number) for number in (2, 1)]
            assert await got(reader, put.name, some) == [None, self.sums(1)]
            reader.doubt(put.name)
            assert numbers(await reader.news(100)) == [[1]]
            monkeypatch.undo()
            coder = Coder(Compression.ZSTD)
            other = await shelf(store, clock, coder=coder).put(self.coded_blocks(2))
            monkeypatch.setattr(packed, "DOUBT_S", 0.0)
            monkeypatch.setitem(sys.modules, "zstandard", None)
            reader.doubt(other.name)
            assert numbers(await reader.news(100)) == [[]], "all of it is compressed"

        asyncio.run(task())

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("coding", CODINGS[-1] + 1),
            ("coding", packs.RAW),
            ("coding", (1 << 32) - 1),
            ("data_bytes", SIZES[0] + 1),
            ("data_bytes", (1 << 64) - 1),
            ("data_bytes", 1),
        ],
    )
    def test_a_record_that_does_not_fit_is_a_miss_even_if_the_heads_checksum_does(
        self, store: ObjectStore, clock: Clock, tmp_path: Path, field: str, value: int
    ) -> None:
        """Newer daemons may have other codings, and whoever may write into the store computes checksums."""

        async def task() -> None:
            put = await self.put(store, clock)
            wrong = put.pack.records.copy()
            wrong[field][0] = value
            [file] = tmp_path.joinpath("shared").rglob("*.pack")
            with file.open("r+b") as opened:
                opened.write(packs.head_of(NAMESPACE, 0, wrong))
            reader = shelf(store, clock, "0000000b")
            [found] = await reader.news(100)
            assert found.hashes[:, 0].tolist()[-2:] == [1, 4]
            some = [self.wanted(put, number) for number in (2, 1, 4)]
            assert await got(reader, put.name, some) == [None, self.sums(1), self.sums(4)]

        asyncio.run(task())
