"""Making room in a store: what is removed is somewhere else, whatever ends the collector, and whoever else
collects at the same time."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvtier_kernels import xxh3_64
from kvtierd.tiers.store import collector, packs
from kvtierd.tiers.store.coder import Coder
from kvtierd.tiers.store.coding import Compression
from kvtierd.tiers.store.collector import JOINED_MIN, NOTES_KEPT_S, Collected, Collector
from kvtierd.tiers.store.objects import ObjectStore, StoreError, StoreTrouble
from kvtierd.tiers.store.packed import FOLLOWED_MAX, Block, PackNews, Shard, Shelf, Wanted

from tests.support.memory_store import InMemory, Objects

NAMESPACE = bytes(range(16))
SIZES = (700, 512)
"""Of the shards of a block."""
HOUR_S = 3_600.0


class Clock:
    now_s = 1_800_000_000.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


class KilledError(BaseException):
    """The collector's process ends here."""


class DiesAt(InMemory):
    """Ends the process before or after its n-th change of the store."""

    def __init__(self, objects: Objects, changes_left: float, *, after: bool) -> None:
        super().__init__(objects)
        self._left, self._after = changes_left, after

    async def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        return bool(await self._change(lambda: super(DiesAt, self).put(name, parts)))

    async def delete(self, name: str) -> None:
        await self._change(lambda: super(DiesAt, self).delete(name))

    async def _change(self, change: Callable[[], Any]) -> Any:
        self._left -= 1
        if self._left < 0 and not self._after:
            raise KilledError
        done = await change()
        if self._left < 0:
            raise KilledError
        return done


def hash_of(number: int) -> bytes:
    return number.to_bytes(8, "big") * 4


def block(number: int, version: int = 0) -> Block:
    """With another version, another host has computed it, with other bytes."""
    dice = np.random.default_rng((number, version))
    shards = [dice.bytes(size) for size in SIZES]
    return Block(hash_of(number), [Shard(memoryview(data), xxh3_64(data)) for data in shards])


def shelf(store: ObjectStore, clock: Clock, host: str = "0000000a") -> Shelf:
    return Shelf(store, "", NAMESPACE, 0, host, clock)


class Reader:
    """A host that has found what there was, and looks for nothing more."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.places: dict[int, tuple[PackNews, int]] = {}

    async def look(self) -> Reader:
        while news := await self._shelf.news(1_000):
            for found in news:
                for place, name in enumerate(found.hashes):
                    self.places.setdefault(int.from_bytes(name[:8].tobytes(), "big"), (found, place))
        return self

    async def read(self, number: int) -> bytes | None:
        """A block as the host would load it: with the bytes that the pack's head promised when it was found.
        None if it is a miss."""
        found, place = self.places[number]
        first = int(found.records[place])
        shards = found.pack.records[first : first + len(SIZES)]
        name, promised = found.name, tuple(shards["checksum"].tolist())
        for _ in range(FOLLOWED_MAX):
            one = Wanted(hash_of(number), first, [memoryview(bytearray(size)) for size in SIZES])
            try:
                [got] = await self._shelf.get(name, [one])
            except StoreError as error:
                if error.trouble is not StoreTrouble.MISSING:
                    raise
                [moved] = await self._shelf.moved(name, [one])
                if moved is None or moved.checksums != promised:
                    return None
                name, first = moved.name, moved.record
            else:
                assert got is not None
                return b"".join(one.into) if tuple(got.sums) == promised else None
        return None


def right(number: int, versions: Iterable[int] = (0,)) -> set[bytes]:
    return {b"".join(shard.data for shard in block(number, version).shards) for version in versions}


async def collected(store: ObjectStore, clock: Clock, **options: Any) -> Collected:
    return await Collector(store, older_s=HOUR_S, clock=clock, **options).run()


async def has_everything(objects: Objects, clock: Clock, numbers: Iterable[int], *readers: Reader) -> None:
    """A host that starts now finds all of these blocks, and hosts that knew them still read them."""
    fresh = await Reader(shelf(InMemory(objects), clock, "000000ff")).look()
    for number in numbers:
        for reader in (fresh, *readers):
            assert await reader.read(number) in right(number), number


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def objects() -> Objects:
    return {}


def packs_in(objects: Objects) -> list[str]:
    return sorted(name for name in objects if name.endswith(".pack"))


def test_packs_go_whose_blocks_newer_packs_have(objects: Objects, clock: Clock) -> None:
    async def task() -> None:
        store = InMemory(objects)
        await shelf(store, clock).put([block(1), block(2)])
        await shelf(store, clock, "0000000b").put([block(2), block(3)])
        knew = await Reader(shelf(store, clock, "0000000c")).look()
        await shelf(store, clock, "0000000d").put([block(number) for number in (1, 2, 4)])
        clock.now_s += 2 * HOUR_S
        before = dict(objects)
        told = await collected(store, clock, dry_run=True)
        assert (told.packs, told.superseded_packs, objects) == (3, 1, before)
        told = await collected(store, clock)
        assert (told.superseded_packs, told.joined_packs, told.failures) == (1, 0, [])
        assert packs_in(objects) == packs_in(before)[1:], "the second has a block that nobody else has"
        await has_everything(objects, clock, [1, 2, 3, 4])
        for number in (1, 2, 3):
            assert await knew.read(number) in right(number)
        assert (await collected(store, clock)).superseded_packs == 0

    asyncio.run(task())


def test_young_packs_stay(objects: Objects, clock: Clock) -> None:
    async def task() -> None:
        store = InMemory(objects)
        for _ in range(8):
            await shelf(store, clock).put([block(1)])
        clock.now_s += HOUR_S / 2
        await collected(store, clock)
        assert len(packs_in(objects)) == 8

    asyncio.run(task())


def test_small_packs_are_joined_and_large_ones_are_not(
    objects: Objects, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "SMALL_BYTES", 10_000)
    monkeypatch.setattr(collector, "PACK_BYTES", 15_000)

    async def task() -> None:
        store = InMemory(objects)
        for number in range(8):
            await shelf(store, clock).put([block(10 * number + each) for each in range(3)])
        await shelf(store, clock).put([block(100 + each) for each in range(10)])
        knew = await Reader(shelf(store, clock, "0000000c")).look()
        clock.now_s += 2 * HOUR_S
        told = await collected(store, clock)
        assert (told.joined_packs, told.larger_packs) == (8, 2)
        assert len(packs_in(objects)) == 3
        every = [10 * number + each for number in range(8) for each in range(3)]
        await has_everything(objects, clock, [*every, *range(100, 110)], knew)
        clock.now_s += 2 * HOUR_S
        told = await collected(store, clock)
        assert (told.joined_packs, told.superseded_packs) == (0, 0), "what was joined is not joined again"

    asyncio.run(task())


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_collector_that_dies_at_any_step_loses_nothing(clock: Clock, after: bool) -> None:
    async def world() -> tuple[Objects, Reader]:
        objects: Objects = {}
        store = InMemory(objects)
        for number in range(5):
            await shelf(store, clock).put([block(number), block(number + 1)])
        await shelf(store, clock, "0000000b").put([block(0), block(1)])
        knew = await Reader(shelf(store, clock, "0000000c")).look()
        clock.now_s += 2 * HOUR_S
        return objects, knew

    async def task() -> int:
        for changes in range(100):
            objects, knew = await world()
            try:
                await collected(DiesAt(objects, changes, after=after), clock)
            except KilledError:
                await has_everything(objects, clock, range(6), knew)
                clock.now_s += 2 * HOUR_S
                await collected(InMemory(objects), clock)
                await has_everything(objects, clock, range(6), knew)
                continue
            return changes
        raise AssertionError("it never came to its end")

    assert asyncio.run(task()) > 8, "it makes that many changes at least"


def test_a_copy_whose_bytes_do_not_fit_is_no_reason_to_remove_another(objects: Objects, clock: Clock) -> None:
    async def task() -> None:
        store = InMemory(objects)
        await shelf(store, clock).put([block(1), block(2)])
        newer = await shelf(store, clock).put([block(1), block(2)])
        path = next(name for name in objects if name.endswith(newer.name))
        changed = bytearray(objects[path])
        changed[int(newer.pack.records[2]["offset"])] ^= 1
        objects[path] = bytes(changed)
        clock.now_s += 2 * HOUR_S
        told = await collected(store, clock)
        assert (told.superseded_packs, told.doubted_blocks) == (0, 1)
        assert len(packs_in(objects)) == 2
        fresh = await Reader(shelf(store, clock)).look()
        assert await fresh.read(2) in right(2), "the older one is found first, and has it"

    asyncio.run(task())


def test_what_another_host_computed_with_other_bytes_is_a_miss_for_whoever_knew_the_first(
    objects: Objects, clock: Clock
) -> None:
    async def task() -> None:
        store = InMemory(objects)
        await shelf(store, clock).put([block(1, version=0)])
        knew = await Reader(shelf(store, clock, "0000000c")).look()
        await shelf(store, clock).put([block(1, version=1)])
        clock.now_s += 2 * HOUR_S
        assert (await collected(store, clock)).superseded_packs == 1
        assert await knew.read(1) is None
        fresh = await Reader(shelf(store, clock)).look()
        assert await fresh.read(1) in right(1, [1])

    asyncio.run(task())


def test_what_is_compressed_is_joined_and_compressed_again(objects: Objects, clock: Clock) -> None:
    pytest.importorskip("zstandard")

    def alike(number: int) -> Block:
        shards = [bytes([number]) * (20 * size) for size in SIZES]
        return Block(hash_of(number), [Shard(memoryview(data), xxh3_64(data)) for data in shards])

    async def task() -> None:
        store, coder = InMemory(objects), Coder(Compression.ZSTD)
        for number in range(JOINED_MIN):
            await Shelf(store, "", NAMESPACE, 0, "0000000a", clock, coder).put([alike(number)])
        clock.now_s += 2 * HOUR_S
        for joined_by in (coder, None):
            told = await collected(InMemory(copy := dict(objects)), clock, coder=joined_by)
            assert (told.joined_packs, told.doubted_blocks) == (JOINED_MIN, 0)
            [path] = packs_in(copy)
            reader = shelf(InMemory(copy), clock)
            news = await reader.blocks_of(path.rpartition("/")[2])
            assert news is not None
            records = news.pack.records
            assert (records["stored_bytes"].sum() < records["data_bytes"].sum() / 2) == (joined_by is coder)
            assert len(await reader.sound(news)) == JOINED_MIN

    asyncio.run(task())


def test_small_packs_that_say_they_become_huge_are_not_joined(objects: Objects, clock: Clock) -> None:
    """To decode them would take more memory than there is."""
    pytest.importorskip("zstandard")

    async def task() -> None:
        store, coder = InMemory(objects), Coder(Compression.ZSTD)
        for number in range(JOINED_MIN):
            data = memoryview(bytes([number]) * 20_000)
            puts = Shelf(store, "", NAMESPACE, 0, "0000000a", clock, coder)
            put = await puts.put([Block(hash_of(number), [Shard(data, xxh3_64(data))])])
            records = put.pack.records.copy()
            records["data_bytes"] = 1 << 30
            head = packs.head_of(NAMESPACE, 0, records)
            path = next(name for name in objects if name.endswith(put.name))
            objects[path] = head + objects[path][len(head) :]
        clock.now_s += 2 * HOUR_S
        before = dict(objects)
        told = await collected(store, clock)
        assert (told.joined_packs, told.doubted_blocks, told.unreadable_packs) == (0, 0, 0)
        assert objects == before

    asyncio.run(task())


def test_notes_go_when_nobody_looks_for_their_packs_any_more(objects: Objects, clock: Clock) -> None:
    async def task() -> None:
        store = InMemory(objects)
        await shelf(store, clock).put([block(1)])
        await shelf(store, clock).put([block(1)])
        clock.now_s += 2 * HOUR_S
        await collected(store, clock)
        assert [name for name in objects if name.endswith(".moved")]
        clock.now_s = 2e9  # when the store says that everything was made
        assert (await collected(store, clock)).notes_removed == 0
        clock.now_s += NOTES_KEPT_S
        assert (await collected(store, clock)).notes_removed == 1
        assert [name.rpartition(".")[2] for name in objects] == ["pack"]

    asyncio.run(task())


def test_what_is_no_pack_is_left_alone(objects: Objects, clock: Clock) -> None:
    async def task() -> None:
        store = InMemory(objects)
        await shelf(store, clock).put([block(1)])
        [name] = objects
        folder = name.rpartition("/")[0]
        objects[f"{folder}/00000000000000000001-0000000a-0000000a.pack"] = b"something else"
        objects[f"{folder}/README"] = objects["1/else"] = objects["1/not/ours/at/all"] = b"whatever"
        objects[f"{folder}/00000000000000000001-0000000a-0000000a.moved"] = b"\xff{["
        before = set(objects)
        clock.now_s += 2 * HOUR_S
        told = await collected(store, clock)
        assert (told.namespaces, told.unreadable_packs, told.failures) == (1, 1, [])
        assert set(objects) == before
        reader = await Reader(shelf(store, clock)).look()
        assert await reader.read(1) in right(1)

    asyncio.run(task())


def test_a_pack_with_anything_that_cannot_be_read_here_stays(objects: Objects, clock: Clock) -> None:
    """A newer version may have put it, or a host with another library."""

    async def task() -> None:
        store = InMemory(objects)
        older = shelf(store, clock)
        await older.put([block(1), block(2)])
        [path] = objects
        pack = await older.blocks_of(path.rpartition("/")[2])
        assert pack is not None
        records = pack.pack.records.copy()
        records["shard"][3] = 0  # no shard 1 of the second block
        head = packs.head_of(NAMESPACE, 0, records)
        objects[path] = head + objects[path][len(head) :]
        for _ in range(JOINED_MIN):
            await shelf(store, clock).put([block(1), block(2)])
        clock.now_s += 2 * HOUR_S
        told = await collected(store, clock)
        assert (told.unreadable_packs, told.superseded_packs) == (1, JOINED_MIN - 1)
        assert path in objects

    asyncio.run(task())


@pytest.mark.parametrize("seed", range(30))
def test_whatever_there_is_and_however_many_collect_nothing_sound_is_lost(seed: int) -> None:
    dice = random.Random(seed)
    clock, objects = Clock(), Objects()

    async def task() -> None:
        store = InMemory(objects)
        numbers = range(dice.randrange(3, 30))
        readers = []
        for number in range(dice.randrange(2, 14)):
            some = sorted(dice.sample(numbers, dice.randrange(1, min(6, len(numbers)) + 1)))
            await shelf(store, clock, f"{number % 3:08x}").put([block(each) for each in some])
            clock.now_s += dice.choice([0.0, 10.0, HOUR_S])
            if dice.random() < 0.3:
                readers.append(await Reader(shelf(store, clock, "0000000c")).look())
        clock.now_s += HOUR_S + 1
        for name in dice.sample(packs_in(objects), dice.choice([0, 0, 1, len(packs_in(objects)) // 2])):
            data = bytearray(objects[name])
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            objects[name] = bytes(data)
        fresh = await Reader(shelf(store, clock, "0000000d")).look()
        sound = {number for number in fresh.places if await fresh.read(number) in right(number)}
        known = [
            {number for number in reader.places if await reader.read(number) is not None}
            for reader in readers
        ]

        for _ in range(dice.randrange(1, 4)):
            collectors = [
                collected(DiesAt(objects, dice.choice([0, 1, 2, 5, 99]), after=dice.random() < 0.5), clock)
                for _ in range(dice.randrange(1, 4))
            ]
            for ended in await asyncio.gather(*map(outcome, collectors)):
                assert ended is None or isinstance(ended, KilledError), ended
            clock.now_s += dice.choice([1.0, HOUR_S, 2 * HOUR_S])

        again = Reader(shelf(store, clock, "0000000e"))
        await again.look()
        for number in sound:
            assert number in again.places, number
        for reader, numbers_known in zip(readers, known, strict=True):
            for number in numbers_known:
                assert await reader.read(number) in right(number), number
        for number in set(again.places) & sound:
            found = await again.read(number)
            assert found is None or found in right(number)

    asyncio.run(task())


async def outcome(run: Any) -> BaseException | None:
    try:
        await run
    except KilledError as error:
        return error
    return None


def collect(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtierd.cli", "collect", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_people_are_told_what_was_done_and_what_was_not(tmp_path: Path) -> None:
    ended = collect(f"--store-url={tmp_path.as_uri()}", "--dry-run")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "0 packs would be removed, because newer packs have their blocks\n" in ended.stdout
    ended = collect()
    assert (ended.returncode, ended.stdout) == (78, "")
    assert "store.url = '': name the store, for example s3://BUCKET/FOLDER" in ended.stderr
    nowhere = ["--store-url=s3://bucket/folder", "--store-deadline-s=1"]
    options = "endpoint=http://127.0.0.1:9,region=x,access_key_id=a,secret_access_key=b"
    ended = collect(*nowhere, f"--store-options={options}", "--json")
    assert ended.returncode == 75, "a later run does it"
    [failure] = json.loads(ended.stdout)["failures"]
    assert failure.startswith("1/: no answer")
