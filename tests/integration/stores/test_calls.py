"""How many requests the store tier sends, counted by the store: the constants of the capacity model."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from kvtier_kernels import xxh3_64
from kvtierd.config.disk import DISK_BYTES_MAX
from kvtierd.tiers.store import packed, packs
from kvtierd.tiers.store.coder import Coder
from kvtierd.tiers.store.objects import Listed, Piece, StoreError, StoreTrouble
from kvtierd.tiers.store.obstore_store import ObstoreStore
from kvtierd.tiers.store.packed import FIRST_READ_BYTES, SKEW_S, Block, Shard, Shelf, Wanted
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.store import looking
from kvtierd.workers.store.looking import Looking
from kvtierd.workers.store.loop import LINGER_S
from kvtierd.workers.store.moving import PACK_BYTES
from kvtierd.workers.store.records import RECORD
from kvtierd.workers.store.shelves import Shelves

from tests.integration.stores.conftest import Connect
from tests.support.counted_s3 import BUCKET, CountedS3
from tests.support.daemon import until
from tests.support.hosts import NewHost, below, wait_until_put
from tests.support.plain_client import BLOCK_BYTES, block_hashes
from tools.capacity import model
from tools.capacity.__main__ import STORE_SIZE_MAX

NAMESPACE = bytes(range(16))
DEADLINE_S = 30.0
MIB = 1 << 20


@pytest.fixture
def s3() -> Iterator[CountedS3]:
    with CountedS3() as server:
        yield server


class Clock:
    """Goes on by a second with each look at it."""

    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def opened(s3: CountedS3) -> ObstoreStore:
    return ObstoreStore(f"s3://{BUCKET}", s3.options(), DEADLINE_S)


def shelf(s3: CountedS3, host: str = "0000000a", clock: Clock | None = None) -> Shelf:
    return Shelf(opened(s3), "", NAMESPACE, 0, host, clock or Clock())


def block(number: int, size: int = 4_096, shards: int = 1) -> Block:
    data = memoryview(bytes([number % 256]) * size)
    return Block(number.to_bytes(32, "little"), [Shard(data, xxh3_64(data)) for _ in range(shards)])


def pack_of(blocks: Sequence[Block]) -> bytes:
    """The bytes of a pack."""
    records = np.zeros(sum(len(each.shards) for each in blocks), packs.RECORD)
    data: list[memoryview] = []
    for each in blocks:
        for rank, shard in enumerate(each.shards):
            record = records[len(data)]
            record["hash"] = np.frombuffer(each.hash, np.uint8)
            record["shard"], record["world"] = rank, len(each.shards)
            record["stored_bytes"] = record["data_bytes"] = len(shard.data)
            data.append(shard.data)
    return b"".join(packs.parts_of(NAMESPACE, 0, packs.laid_out(records), data))


def put_by_others(s3: CountedS3, made_s: Iterator[float], count: int) -> None:
    """So many packs of one block, as other hosts made them at these times."""
    data = pack_of([block(1)])
    for number, when_s in zip(range(count), made_s, strict=False):
        name = f"{int(when_s * 1e6):020}-0000000b-{number:08x}.pack"
        s3.objects[f"1/{NAMESPACE.hex()}/0/{name}"] = data


async def until_all_is_known(one: Shelf) -> int:
    """Looks until there is nothing new. Returns how many packs were told of."""
    found = 0
    while True:
        found += len(await one.news(looking.PACKS_AT_ONCE))
        if not one.behind:
            return found


def test_the_constants_of_the_model_are_those_of_the_code() -> None:
    assert model.PACK_BYTES == PACK_BYTES
    assert STORE_SIZE_MAX == DISK_BYTES_MAX
    assert model.LINGER_S == LINGER_S
    assert model.WINDOW_S == SKEW_S
    assert model.LISTED_AT_ONCE == packed.LISTED_AT_ONCE
    assert model.HEAD_READ_BYTES == FIRST_READ_BYTES
    assert model.HEADS_KEPT == packed.HEADS_KEPT
    assert model.TOLD_AT_ONCE == looking.PACKS_AT_ONCE
    assert model.HEADS_AT_ONCE == packed.READS_AT_ONCE
    assert packs.HEAD.itemsize == model.HEAD_BYTES
    assert packs.RECORD.itemsize == model.RECORD_BYTES
    assert model.ALIGNMENT == packs.ALIGNMENT
    assert RECORD.itemsize == model.SLOT_RECORD_BYTES


@pytest.mark.parametrize("count", [0, 700, 2_300])
def test_a_look_lists_all_names_of_ten_minutes_a_thousand_at_a_time(s3: CountedS3, count: int) -> None:
    """Also those that it knows."""
    clock = Clock()

    async def task() -> None:
        reader = shelf(s3, clock=clock)
        # A hundred packs an hour ago, which no later look lists again.
        put_by_others(s3, (clock.now_s - 3_600 + number for number in itertools.count()), 100)
        step_s = SKEW_S / 2 / max(1, count)
        put_by_others(s3, (clock.now_s - SKEW_S / 2 + number * step_s for number in itertools.count()), count)
        assert await until_all_is_known(reader) == 100 + count
        known, before = s3.requests["GET"], s3.requests.copy()
        assert known == 100 + count, "each head is one read"
        assert await reader.news(looking.PACKS_AT_ONCE) == []
        again = s3.since(before)
        # If nobody put anything lately, the hundred are the latest.
        assert again == {"LIST": model.lists_per_look(count or 100)}

    asyncio.run(task())


def test_coming_to_know_what_there_is_lists_it_once(s3: CountedS3) -> None:
    """All of it lies within ten minutes, so each listing from there on would have every name again."""
    count = 500
    clock = Clock()

    async def task() -> None:
        put_by_others(s3, (clock.now_s - SKEW_S / 2 + 0.1 * number for number in itertools.count()), count)
        assert await until_all_is_known(shelf(s3, clock=clock)) == count
        looks = -(-count // looking.PACKS_AT_ONCE)
        assert s3.requests == {"LIST": looks, "GET": count}
        assert s3.sent_bytes == count * len(pack_of([block(1)])), "no more than a pack has"

    asyncio.run(task())


def test_packs_that_were_read_before_an_error_are_told(s3: CountedS3) -> None:
    count = 40
    clock = Clock()

    async def task() -> None:
        put_by_others(s3, (clock.now_s - SKEW_S / 2 + number for number in itertools.count()), count)

        class Failing(ObstoreStore):
            reads = 0

            async def read(self, name: str, begin: int, size_bytes: int) -> Piece:
                self.reads += 1
                if self.reads == packed.READS_AT_ONCE + 4:
                    raise StoreError(StoreTrouble.LATE, "no answer")
                return await super().read(name, begin, size_bytes)

        store = Failing(f"s3://{BUCKET}", s3.options(), DEADLINE_S)
        reader = Shelf(store, "", NAMESPACE, 0, "0000000a", clock)
        assert len(await reader.news(64)) == packed.READS_AT_ONCE
        assert reader.behind
        assert len(await reader.news(64)) == count - packed.READS_AT_ONCE
        assert not reader.behind

    asyncio.run(task())


def test_what_only_this_host_has_put_is_not_listed_for_ever(s3: CountedS3) -> None:
    clock = Clock()

    async def task() -> None:
        alone = shelf(s3, clock=clock)
        for number in range(3):
            await alone.put([block(number)])
        assert await alone.news(64) == []
        # Its own packs of long ago: more than one listing has.
        put_by_others(s3, (clock.now_s - 7_200 + number for number in itertools.count()), 1_500)
        before = s3.requests.copy()
        assert await alone.news(64) == []
        assert s3.since(before) == {"LIST": 1}

    asyncio.run(task())


def test_where_others_put_packs_all_the_time_a_host_does_not_look_all_the_time(s3: CountedS3) -> None:
    """Each listing finds something new, and the next one begins after `look_every_s` all the same."""

    async def task() -> None:
        lists = asyncio.Semaphore(0)
        other = shelf(s3, "0000000b")

        class Busy(ObstoreStore):
            async def list(self, prefix: str, after: str = "", limit: int = 1_000) -> list[Listed]:
                await other.put([block(1)])
                found = await super().list(prefix, after, limit)
                lists.release()
                return found

        told: list[wire.PackFound] = []
        shelves = Shelves(Busy(f"s3://{BUCKET}", s3.options(), DEADLINE_S), "", "0000000a", Coder())
        looks = Looking(shelves, 3_600.0, told.append)
        sizes = np.array([4_096], "<u8").tobytes()
        looks.watch(wire.WatchSpace(space=1, namespace=NAMESPACE, group=0, sizes=sizes))
        running = asyncio.create_task(looks.run())
        await asyncio.wait_for(lists.acquire(), DEADLINE_S)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lists.acquire(), 1.0)
        running.cancel()
        assert len(told) == 1

    asyncio.run(task())


@pytest.mark.parametrize(("size", "shards"), [(5 * MIB, 1), (640 << 10, 8), (2 * MIB, 1), (256 << 10, 8)])
def test_reading_a_pack_costs_its_head_and_one_range(s3: CountedS3, size: int, shards: int) -> None:
    """A head is read once while it is one of the last that were used."""

    async def task() -> None:
        count = model.blocks_per_pack(size * shards)
        made = [block(number, size, shards) for number in range(count)]
        put = await shelf(s3).put(made)
        assert s3.requests == {"PUT": 1}
        [(_, whole)] = s3.objects.items()
        assert len(whole) == model.pack_bytes(size * shards, shards, count)
        reader = shelf(s3, "0000000b")
        some = [
            Wanted(each.hash, number * shards, [memoryview(bytearray(size)) for _ in range(shards)])
            for number, each in enumerate(made)
        ]
        for heads in (1, 0):
            before = s3.requests.copy()
            got = await reader.get(put.name, some)
            assert all(each is not None for each in got)
            assert s3.since(before) == {"GET": heads + model.RANGES_PER_READ}

    asyncio.run(task())


def test_two_daemons_send_what_the_model_says(s3: CountedS3, new_host: NewHost, connect_to: Connect) -> None:
    """The writer: one object for what came in a quarter of a second. The reader: the head of each, and from
    then on nothing but listings; then one range for what is loaded."""
    store = {
        "store__url": f"s3://{BUCKET}/fleet",
        "store__options": ",".join(f"{name}={value}" for name, value in s3.options().items()),
    }
    one, two = new_host(**store), new_host(**store)
    writer, reader = connect_to(one), connect_to(two)
    hashes = block_hashes("counted", range(24))
    for first, end in ((0, 12), (12, 24)):
        # What is put has waited for others for LINGER_S, so nothing comes any more into the first pack.
        assert writer.store(hashes[first:end]).done
        wait_until_put(one, end)
    assert s3.requests["PUT"] == 2
    sizes = sorted(map(len, s3.objects.values()))
    assert sizes == 2 * [model.pack_bytes(BLOCK_BYTES, 1, 12)]
    until(lambda: below(two).blocks == 24, "the other host knows of them")
    assert s3.requests["GET"] == 2, "one read for each head; whoever has put it needs none"
    looked = s3.requests["LIST"]
    until(lambda: s3.requests["LIST"] > looked + 20, "both go on looking")
    assert s3.requests["GET"] == 2
    until(lambda: reader.lookup(hashes).hits == 24, "they come up")
    assert reader.load(hashes) == 24
    assert s3.requests["GET"] == 2 + 2 * model.RANGES_PER_READ
    assert s3.requests == Counter(PUT=2, GET=4, LIST=s3.requests["LIST"])
