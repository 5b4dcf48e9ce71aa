"""Mooncake Store: the contract of stores with a real master and a real client that gives memory, what may
happen to both, and two hosts that share blocks by it."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from kvtierd.tiers.store import contract
from kvtierd.tiers.store.drivers import load_driver
from kvtierd.tiers.store.guarded import GuardedStore
from kvtierd.tiers.store.objects import ObjectStore, OpenStore, StoreError, StoreTrouble

from tests.integration.stores.conftest import Connect
from tests.integration.stores.steps import HASHES, is_served_beside_it, loads, misses_in_time
from tests.support import mooncake
from tests.support.daemon import until
from tests.support.hosts import NewHost, below, wait_until_put
from tests.support.mooncake import Mooncake

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
Result = TypeVar("Result")
MIB = 1 << 20
DEADLINE_S = 3.0
PATIENT_S = 30.0
"""Where nothing ends, on a machine that may be busy."""
SLACK_S = 10.0
"""For what takes no time on an idle machine, and what a thread does after its call's deadline."""
LEASE_S = 1.0
"""The default of tests/support/mooncake.py."""


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    if why := mooncake.why_not():
        pytest.skip(why)


@pytest.fixture(scope="module")
def shared(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    """A cluster for tests that harm nothing."""
    running = Mooncake(tmp_path_factory.mktemp("mooncake"))
    yield running
    running.stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Mooncake]:
    """One of the test's own, because it ends parts of it."""
    running = Mooncake(tmp_path)
    yield running
    running.stop()


def driver() -> OpenStore:
    """The driver, which nothing imports where Mooncake is not installed."""
    return load_driver("mooncake://host")


def open_store(url: str, options: dict[str, str], deadline_s: float) -> ObjectStore:
    return driver()(url, options, deadline_s)


@pytest.mark.parametrize("check", contract.CHECKS, ids=contract.title)
def test_it_keeps_the_contract(
    check: contract.Check, shared: Mooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in mooncake.environment().items():
        monkeypatch.setenv(name, value)  # for the process that is killed
    contract.run(check, driver(), shared.url("contract"))


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("mooncake://", {}, "mooncake://MASTER:PORT/FOLDER"),
        ("mooncake:///folder", {}, "mooncake://MASTER:PORT/FOLDER"),
        ("mooncake://host:port/folder", {}, "mooncake://MASTER:PORT/FOLDER"),
        ("mooncake://user@host/folder", {}, "mooncake://MASTER:PORT/FOLDER"),
        ("mooncake://host/a folder", {}, "'a folder' may have"),
        ("mooncake://host", {"colour": "blue"}, "colour=blue is not known"),
        ("mooncake://host", {"protocol": "udp"}, "protocol=udp: write tcp or rdma"),
        ("mooncake://host", {"replicas": "0"}, "replicas=0: write"),
    ],
)
def test_what_cannot_be_used_is_told(url: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(StoreError) as raised:
        open_store(url, options, 1.0)
    assert said in str(raised.value)


def parts(*pieces: bytes) -> list[memoryview]:
    return [memoryview(each) for each in pieces]


async def trouble_of(call: Coroutine[Any, Any, object]) -> StoreTrouble:
    """Why a call fails, which it does in time."""
    began_s = time.monotonic()
    with pytest.raises(StoreError) as raised:
        await call
    assert time.monotonic() - began_s < DEADLINE_S + SLACK_S
    return raised.value.trouble


async def sooner_or_later(call: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """What a call returns, once it does not fail any more."""
    give_up_s = time.monotonic() + 60
    while True:
        try:
            return await call()
        except StoreError:
            if time.monotonic() > give_up_s:
                raise
            await asyncio.sleep(0.2)


def with_two_hosts(
    cluster: Mooncake,
    task: Callable[[ObjectStore, ObjectStore], Coroutine[Any, Any, None]],
    deadline_s: float = DEADLINE_S,
) -> None:
    """Runs a task on a store as two hosts have it. No call of it is stuck."""

    async def run() -> None:
        stuck: list[None] = []

        def is_stuck() -> None:
            stuck.append(None)

        one, two = (
            GuardedStore(open_store(cluster.url("test"), {}, deadline_s), 2 * deadline_s, is_stuck)
            for _ in range(2)
        )
        await task(one, two)
        assert not stuck

    asyncio.run(run())


async def is_shared(one: ObjectStore, two: ObjectStore, name: str) -> str:
    """What one host puts, the other one lists and reads, at the latest when they have found what was
    started anew. Returns its name, which has a number behind it."""
    data = os.urandom(MIB)
    names = (f"{name}.{tried}" for tried in itertools.count())

    async def put() -> str:
        # A put that was late may still be at it, so each try has a name of its own.
        tried = next(names)
        assert await one.put(tried, parts(data))
        return tried

    name = await sooner_or_later(put)
    assert name in [each.name for each in await sooner_or_later(lambda: two.list("a/"))]
    assert (await sooner_or_later(lambda: two.read(name, 0, MIB))).data == data
    [found] = await sooner_or_later(lambda: two.read_ranges(name, [(5, 100)]))
    assert bytes(found) == data[5:105]
    return name


def test_a_master_that_is_killed_is_late_and_a_new_one_is_used(cluster: Mooncake) -> None:
    async def task(one: ObjectStore, two: ObjectStore) -> None:
        first, *_ = [await is_shared(one, two, f"a/{number}") for number in range(3)]
        cluster.kill("mooncake_master")
        assert await trouble_of(two.read(first, 0, 8)) is StoreTrouble.LATE
        assert await trouble_of(two.read_ranges(first, [(0, 8)])) is StoreTrouble.LATE
        assert await trouble_of(one.put("a/late", parts(b"x"))) is StoreTrouble.LATE
        assert await trouble_of(two.list("a/")) is StoreTrouble.LATE
        cluster.start_master()
        cluster.wait_for_memory()
        # It has forgotten everything. A host that begins numbers its objects as it did before.
        assert await sooner_or_later(lambda: missing(two, first))
        [three] = [open_store(cluster.url("test"), {}, DEADLINE_S)]
        await is_shared(three, two, "a/new")
        await is_shared(one, three, "a/newer")
        await is_shared(two, one, "a/newest")

    with_two_hosts(cluster, task)


async def missing(store: ObjectStore, name: str) -> bool:
    """Whether an object has gone. Raises StoreError if nobody can tell."""
    try:
        await store.read_ranges(name, [(0, 8)])
    except StoreError as error:
        if error.trouble is StoreTrouble.MISSING:
            return True
        raise
    return False


def test_a_master_that_is_not_there_yet_is_late_and_found_later(cluster: Mooncake) -> None:
    async def task(one: ObjectStore, two: ObjectStore) -> None:
        cluster.kill("mooncake_master")
        assert await trouble_of(one.put("a/early", parts(b"x"))) is StoreTrouble.LATE
        cluster.start_master()
        await is_shared(one, two, "a/first")

    with_two_hosts(cluster, task)


def test_memory_that_does_not_answer_is_late_and_used_again(cluster: Mooncake) -> None:
    async def task(one: ObjectStore, two: ObjectStore) -> None:
        before = await is_shared(one, two, "a/before")
        cluster.stop_memory()
        try:
            assert await trouble_of(two.read_ranges(before, [(0, MIB)])) is StoreTrouble.LATE
            # The master counts the memory out as soon as its client has been silent for some seconds.
            trouble = await trouble_of(one.put("a/during", parts(bytes(MIB))))
            assert trouble in (StoreTrouble.LATE, StoreTrouble.FULL)
        finally:
            cluster.go_on_with_memory()
        await is_shared(one, two, "a/after")

    with_two_hosts(cluster, task)


def test_memory_that_is_killed_is_a_miss_and_other_memory_is_used(cluster: Mooncake) -> None:
    async def task(one: ObjectStore, two: ObjectStore) -> None:
        before = await is_shared(one, two, "a/before")
        cluster.kill("mooncake_client")
        assert await trouble_of(two.read_ranges(before, [(0, MIB)])) in (
            StoreTrouble.LATE,
            StoreTrouble.MISSING,
        )
        assert await trouble_of(one.put("a/during", parts(bytes(MIB)))) in (
            StoreTrouble.LATE,
            StoreTrouble.FULL,
        )
        await asyncio.to_thread(cluster.wait_until_memory_has_gone)
        assert await sooner_or_later(lambda: missing(two, before))
        cluster.start_memory()
        await is_shared(one, two, "a/after")

    with_two_hosts(cluster, task)


def test_what_is_evicted_is_missing_and_what_is_new_is_found(tmp_path: Path) -> None:
    cluster = Mooncake(tmp_path, memory_bytes=64 * MIB)

    async def task(one: ObjectStore, two: ObjectStore) -> None:
        names = [f"a/{number:04}" for number in range(20)]
        for name in names:
            assert await sooner_or_later(partial(one.put, name, parts(bytes(8 * MIB))))
        listed = [each.name for each in await two.list("a/")]
        assert listed == names, "entries outlive what they tell of"
        assert await missing(two, names[0])
        assert names[0] not in [each.name for each in await two.list("a/")], "what has gone is forgotten"
        assert not await missing(two, names[-1])

    try:
        with_two_hosts(cluster, task, PATIENT_S)
    finally:
        cluster.stop()


def test_entries_that_are_evicted_hide_nothing_that_comes_later(cluster: Mooncake) -> None:
    async def task(one: ObjectStore, two: ObjectStore) -> None:
        for number in range(5):
            await is_shared(one, two, f"a/{number}")
        assert cluster.remove("^test/index/[0-9]+/[0-4]$") == 5
        three = open_store(cluster.url("test"), {}, DEADLINE_S)
        await is_shared(three, two, "a/by a host that has not seen them".replace(" ", "-"))
        await is_shared(one, three, "a/by-one-that-has")
        await is_shared(two, one, "a/back")

    with_two_hosts(cluster, task, PATIENT_S)


def test_an_object_is_deleted_once_nobody_may_be_reading_it(shared: Mooncake) -> None:
    async def task(_: ObjectStore, __: ObjectStore) -> None:
        one, two = (cast(Any, open_store(shared.url("deleted"), {}, PATIENT_S)) for _ in range(2))
        name = await is_shared(one, two, f"a/{secrets.token_hex(4)}")
        assert await trouble_of(one.delete(name)) is StoreTrouble.LATE
        await asyncio.sleep(LEASE_S)
        await sooner_or_later(lambda: one.delete(name))
        assert await missing(two, name)
        assert name not in [each.name for each in await two.list("a/")]
        await one.delete(name)
        assert await two.put(name, parts(b"again"))
        assert name in [each.name for each in await one.list("a/")]

    with_two_hosts(shared, task)


class TestHosts:
    """Two daemons, and engines of theirs."""

    STORE_DEADLINE_S = 3.0

    def test_what_one_host_puts_another_loads_and_a_master_that_is_away_costs_misses(
        self,
        cluster: Mooncake,
        new_host: NewHost,
        connect_to: Connect,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for name, value in mooncake.environment().items():
            monkeypatch.setenv(name, value)
        settings = {
            "store__url": cluster.url("hosts"),
            "store__deadline_s": self.STORE_DEADLINE_S,
            "store__probe_after_s": "1",
        }
        one, two = new_host(**settings), new_host(**settings)
        one.daemon.may_complain = two.daemon.may_complain = True
        writer, reader = connect_to(one), connect_to(two)
        assert reader.lookup(HASHES).hits == 0
        assert writer.store(HASHES).done
        wait_until_put(one, len(HASHES))
        until(lambda: below(two).blocks == len(HASHES), "the other host knows of them")
        cluster.kill("mooncake_master")
        misses_in_time(reader, self.STORE_DEADLINE_S)
        is_served_beside_it(reader)
        cluster.start_master()
        cluster.wait_for_memory()
        # The new master has nothing. What the first host puts there from now on, the other one finds.
        three = new_host(**settings)
        assert connect_to(three).store(HASHES).done
        wait_until_put(three, len(HASHES))
        four = new_host(**settings)
        four.daemon.may_complain = three.daemon.may_complain = True
        loads(connect_to(four), HASHES)
        until(lambda: below(two).state == "live", "it is used again")
