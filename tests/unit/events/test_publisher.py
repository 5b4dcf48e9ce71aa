"""The publisher with real sockets, and a core that a test plays: subscribers that do not read, a thread that
cannot keep up, topics, and the forms of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from kvtierd.core.actions import BlockNews, NewsKind
from kvtierd.core.blocks.namespaces import NamespaceAbout
from kvtierd.core.ids import DiskId, NamespaceDigest
from kvtierd.core.stimuli import GroupGeometry, ShowBlocks, Stimulus, TellAgain
from kvtierd.events.encoding import HASHES_PER_BATCH
from kvtierd.events.options import EventOptions
from kvtierd.events.publisher import EventPublisher

from tests.support.events import EventPlace, Known, Message, event_place, replay
from tests.support.process import DEADLINE_S

NAMESPACE = NamespaceDigest(bytes(range(16)))
OTHER = NamespaceDigest(bytes(16))
ABOUT = NamespaceAbout("tenant", "model", b"", 32, 1, (), (GroupGeometry(2, 16, 64, ((4096, "kv"),)),))


def hashes(first: int, count: int) -> np.ndarray:
    rows = np.zeros((count, 32), np.uint8)
    rows[:, 28:] = np.arange(first, first + count, dtype=">u4").view(np.uint8).reshape(count, 4)
    rows[:, 0] = 7
    return rows


def cleared(namespace: NamespaceDigest = NAMESPACE, about: NamespaceAbout = ABOUT) -> BlockNews:
    return BlockNews(NewsKind.CLEARED, namespace, hashes(0, 0), about=about)


def stored(first: int, count: int, disk: DiskId | None = None) -> BlockNews:
    return BlockNews(NewsKind.STORED, NAMESPACE, hashes(first, count), disk=disk)


class Stage:
    """A publisher, and what it says to the core."""

    def __init__(self, place: EventPlace, **changed: Any) -> None:
        self.place = place
        self.said: list[Stimulus] = []
        self.on_stimulus: Callable[[Stimulus], None] = lambda _: None
        queued_max = changed.pop("queued_max", 1 << 22)
        options: dict[str, Any] = {
            "endpoint": place.endpoint,
            "replay_endpoint": place.replay_endpoint,
            "topic": "kv@{host}@{model}",
            "host": "here",
            "replay_batches": 10_000,
            "replay_bytes": 64 << 20,
            "subscriber_queue": 10_000,
            "heartbeat_s": 600.0,
            "whole_hashes": False,
            "positional": False,
            "store": None,
        }
        self.publisher = EventPublisher(
            EventOptions(**options | changed), self.post, asyncio.get_running_loop(), queued_max=queued_max
        )

    def post(self, stimulus: Stimulus) -> None:
        self.said.append(stimulus)
        self.on_stimulus(stimulus)

    def tell(self, *news: BlockNews) -> None:
        self.publisher.tell(news)

    async def replayed(self, number: int = 0) -> list[Message]:
        return await asyncio.to_thread(replay, self.place, number)

    async def published(self, batches: int) -> None:
        await until(lambda: self.publisher.status().batches >= batches, f"{batches} batches")


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline_s, f"still not: {what}"
        await asyncio.sleep(0.01)


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Stage]]:
    with event_place() as place:
        stages: list[Stage] = []

        def make_one(**changed: Any) -> Stage:
            stages.append(Stage(place, **changed))
            return stages[-1]

        yield make_one
        for stage in stages:
            await asyncio.to_thread(stage.publisher.close)


class TestForms:
    async def told(self, stage: Stage, *news: BlockNews) -> list[Any]:
        """The events that come of news."""
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(stage.place.endpoint)
            events: list[Any] = []

            def come() -> bool:
                while socket.poll(0):
                    topic, _, payload = socket.recv_multipart()
                    assert topic == b"kv@here@model"
                    events.extend(msgspec.msgpack.decode(payload)[1])
                return len(events) > len(news)

            # Until it is connected, nothing reaches it.
            await until(lambda: self._connected(stage, socket), "the subscriber is connected")
            stage.tell(*news)
            stage.tell(cleared())
            await until(come, "all of it has come")
        return events[:-1]

    def _connected(self, stage: Stage, socket: Any) -> bool:
        stage.tell(cleared())
        if not socket.poll(20):
            return False
        while socket.poll(100):
            socket.recv_multipart()
        return True

    async def test_maps_and_numbers(self, make: Callable[..., Stage]) -> None:
        stage = make()
        [on_host, on_disk, gone] = await self.told(
            stage,
            stored(5, 2),
            stored(5, 1, DiskId(0)),
            BlockNews(NewsKind.REMOVED, NAMESPACE, hashes(6, 1)),
        )
        assert on_host["block_hashes"] == [5, 6], "the last 64 bits"
        assert on_host["kv_cache_spec_kind"] == "sliding_window"
        assert on_host["kv_cache_spec_sliding_window"] == 64
        assert (on_disk["medium"], on_disk["locality"]) == ("STORAGE", "LOCAL")
        assert gone == {
            "type": "BlockRemoved",
            "block_hashes": [6],
            "medium": "CPU",
            "group_idx": 0,
            "locality": "LOCAL",
            "ownership": "kvtier",
        }

    async def test_arrays_and_bytes(self, make: Callable[..., Stage]) -> None:
        stage = make(positional=True, whole_hashes=True, store=DiskId(1))
        [on_disk] = await self.told(stage, stored(4, 1, DiskId(0)))
        assert (on_disk[6], on_disk[12]) == ("STORAGE", "LOCAL")
        told = await self.told(stage, stored(5, 1, DiskId(1)))
        assert told == [
            [
                "BlockStored",
                [hashes(5, 1).tobytes()],
                None,
                [],
                16,
                None,
                "EXTERNAL",
                None,
                None,
                0,
                "sliding_window",
                64,
                "REMOTE",
                "kvtier",
            ]
        ]

    async def test_many_blocks_are_several_batches(self, make: Callable[..., Stage]) -> None:
        stage = make()
        told = await self.told(stage, stored(0, 2 * HASHES_PER_BATCH + 1))
        assert [len(each["block_hashes"]) for each in told] == [HASHES_PER_BATCH, HASHES_PER_BATCH, 1]
        numbers = [number for each in told for number in each["block_hashes"]]
        assert numbers == list(range(2 * HASHES_PER_BATCH + 1))


async def test_two_namespaces_of_one_topic(
    make: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    stage = make()
    stage.tell(cleared(), cleared(OTHER))
    stage.tell(stored(0, 3), BlockNews(NewsKind.STORED, OTHER, hashes(10, 5)))
    await until(lambda: stage.publisher.status().stored_blocks >= 3, "one is published")
    await asyncio.to_thread(stage.publisher.close)
    assert stage.publisher.status().stored_blocks == 3
    assert "write {namespace} into events.topic" in caplog.text


async def test_who_does_not_read_loses_batches_and_slows_nobody(make: Callable[..., Stage]) -> None:
    stage = make(subscriber_queue=1)
    with zmq.Context() as context, context.socket(zmq.SUB) as stuck:
        stuck.setsockopt(zmq.RCVHWM, 1)
        stuck.setsockopt(zmq.SUBSCRIBE, b"")
        stuck.connect(stage.place.endpoint)
        stage.tell(cleared())

        def connected() -> bool:
            stage.tell(cleared())
            return bool(stuck.poll(20))

        await until(connected, "the subscriber is connected")
        before = stage.publisher.status().batches
        for number in range(500):  # 18 MB
            stage.tell(stored(number * HASHES_PER_BATCH, HASHES_PER_BATCH))
        await stage.published(before + 500)
        numbers = []
        while stuck.poll(100):
            numbers.append(int.from_bytes(stuck.recv_multipart()[1], "big"))
    assert len(numbers) < 500
    assert numbers == sorted(set(numbers))
    known = Known()
    for message in await stage.replayed(numbers[0]):
        known.apply(message)
    assert len(known.has("CPU")) == 500 * HASHES_PER_BATCH, "a replay has all of it"


async def test_a_replay_larger_than_the_sockets_queue_comes_whole(make: Callable[..., Stage]) -> None:
    stage = make()
    stage.tell(cleared())
    for number in range(5_000):
        stage.tell(stored(number, 1))
    await stage.published(5_001)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(stage.place.endpoint)

        def told() -> bool:
            stage.tell(stored(10_000, 1), BlockNews(NewsKind.REMOVED, NAMESPACE, hashes(10_000, 1)))
            return bool(socket.poll(20))

        await until(told, "the subscriber is connected")
        number = int.from_bytes(socket.recv_multipart()[1], "big")
    messages = await stage.replayed(number - 5_000)
    assert [each.number for each in messages[:5_001]] == list(range(number - 5_000, number + 1))


class TestShowing:
    """The core shows everything to those who come late, while other things are published."""

    async def test_what_is_published_meanwhile_comes_in_its_place(self, make: Callable[..., Stage]) -> None:
        stage = make()
        stage.tell(cleared(), stored(0, 4))
        await stage.published(2)

        def show(stimulus: Stimulus) -> None:
            assert stimulus == ShowBlocks(NAMESPACE)
            stage.tell(BlockNews(NewsKind.SHOWING, NAMESPACE, hashes(0, 0)))
            stage.tell(BlockNews(NewsKind.SHOWN, NAMESPACE, hashes(0, 2)))
            stage.tell(BlockNews(NewsKind.REMOVED, NAMESPACE, hashes(1, 1)), stored(9, 1))
            stage.tell(BlockNews(NewsKind.SHOWN, NAMESPACE, hashes(2, 2)))
            stage.tell(BlockNews(NewsKind.SHOWN_ALL, NAMESPACE, hashes(0, 0)))

        stage.on_stimulus = show
        known = Known(strict=False)
        numbers = []
        for message in await stage.replayed():
            known.apply(message)
            numbers.append(message.number)
        assert known.has("CPU") == {0, 2, 3, 9}
        assert numbers == sorted(numbers)
        assert numbers[-1] == numbers[0] + 1, "one batch was published"

    async def test_a_stream_that_begins_anew_is_shown_anew(self, make: Callable[..., Stage]) -> None:
        stage = make()
        stage.tell(cleared(), stored(0, 4))
        await stage.published(2)

        def show(stimulus: Stimulus) -> None:
            stage.tell(BlockNews(NewsKind.SHOWING, NAMESPACE, hashes(0, 0)))
            stage.tell(BlockNews(NewsKind.SHOWN, NAMESPACE, hashes(0, 2)))
            if len(stage.said) == 1:
                stage.tell(cleared(), stored(20, 2))
            else:
                stage.tell(BlockNews(NewsKind.SHOWN, NAMESPACE, hashes(20, 2)))
                stage.tell(BlockNews(NewsKind.SHOWN_ALL, NAMESPACE, hashes(0, 0)))

        stage.on_stimulus = show
        known = Known(strict=False)
        for message in await stage.replayed():
            known.apply(message)
        assert known.has("CPU") == {0, 1, 20, 21}
        assert stage.said == [ShowBlocks(NAMESPACE)] * 2


async def test_a_thread_that_is_too_far_behind_has_everything_told_anew(make: Callable[..., Stage]) -> None:
    """What does not fit into the queue is dropped, and so is what comes until the thread has caught up."""
    stage = make(queued_max=1_000)
    stage.tell(cleared())
    for number in range(200):
        stage.tell(stored(number * 900, 900))
    assert stage.publisher.status().resets > 0
    await until(lambda: TellAgain() in stage.said, "the core is asked to tell everything anew")
    before = stage.publisher.status().stored_blocks
    assert before < 200 * 900
    stage.tell(cleared(), stored(0, 10))
    await until(lambda: stage.publisher.status().stored_blocks == before + 10, "it goes on")


async def test_an_address_of_another_host_cannot_be_bound(make: Callable[..., Stage]) -> None:
    with pytest.raises(zmq.ZMQError):
        make(endpoint="tcp://203.0.113.1:5557")
