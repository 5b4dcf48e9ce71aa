"""A subscriber of KV events that knows vLLM's wire, and minds whether it is told everything once."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from tests.support.daemon import until
from tests.support.leaks import SOCKET_PREFIX
from tests.support.process import DEADLINE_S

END = (-1).to_bytes(8, "big", signed=True)
CPU, STORAGE = "CPU", "STORAGE"


@dataclass
class Message:
    """One batch as it came."""

    topic: bytes
    number: int
    payload: bytes

    @property
    def events(self) -> list[dict[str, Any]]:
        _, events, rank = msgspec.msgpack.decode(self.payload)
        assert rank is None
        return list(events)


@dataclass
class Known:
    """What a stream has told."""

    strict: bool = True
    """Whether each block may be told only once as stored, and once as removed."""
    number: int = -1
    clears: int = 0
    blocks: dict[str, Counter[int | bytes]] = field(default_factory=dict)

    def apply(self, message: Message) -> None:
        self.number = message.number
        for event in message.events:
            if event["type"] == "AllBlocksCleared":
                self.clears += 1
                self.blocks.clear()
                continue
            told = self.blocks.setdefault(event["medium"], Counter())
            for block_hash in event["block_hashes"]:
                if event["type"] == "BlockStored":
                    told[block_hash] += 1
                    assert told[block_hash] == 1 or not self.strict, "told twice"
                else:
                    assert told[block_hash] == 1 or not self.strict, "removed, and never told as stored"
                    del told[block_hash]

    def has(self, medium: str) -> set[int | bytes]:
        return set(self.blocks.get(medium, ()))


def as_int(block_hash: bytes) -> int:
    """A hash as vLLM writes it by default."""
    return int.from_bytes(block_hash[-8:], "big")


def as_ints(hashes: list[bytes]) -> set[int]:
    return {as_int(each) for each in hashes}


class EventPlace:
    """Where a daemon publishes, and the settings for it."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/events"
        self.replay_endpoint = f"ipc://{folder}/replay"

    @property
    def settings(self) -> dict[str, str]:
        return {
            "events__endpoint": self.endpoint,
            "events__replay_endpoint": self.replay_endpoint,
            "events__tenants": "*",
            "events__heartbeat_s": "0.3",
        }


@contextmanager
def event_place() -> Iterator[EventPlace]:
    with tempfile.TemporaryDirectory(prefix=SOCKET_PREFIX, dir="/tmp") as folder:
        yield EventPlace(Path(folder))


class Subscriber:
    """Applies what it gets, and asks for what it misses."""

    def __init__(self, place: EventPlace, topic: bytes = b"") -> None:
        self._place = place
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        self._socket.connect(place.endpoint)
        self.streams: dict[bytes, Known] = {}
        self.messages: list[Message] = []
        """All that were applied."""
        self.gaps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def leave(self) -> None:
        """Gives up its connection, as if that were broken."""
        self._socket.disconnect(self._place.endpoint)

    def come_back(self) -> None:
        self._socket.connect(self._place.endpoint)

    def received(self, timeout_ms: int = 0) -> Iterator[Message]:
        """What has come, as it is."""
        while self._socket.poll(timeout_ms):
            topic, number, payload = self._socket.recv_multipart()
            yield Message(topic, int.from_bytes(number, "big"), payload)

    def take(self, timeout_ms: int = 20) -> None:
        """Applies what has come. A number that is not the next one is a gap, and what is missing is asked
        for."""
        for message in self.received(timeout_ms):
            known = self.streams.get(message.topic)
            if known is not None and message.number <= known.number:
                continue  # a replay told it
            if known is None and message.events == [{"type": "AllBlocksCleared"}]:
                known = self.streams[message.topic] = Known(number=message.number - 1)
            if known is None or message.number != known.number + 1:
                self.gaps += known is not None
                self.catch_up(message.topic)
            else:
                known.apply(message)
                self.messages.append(message)

    def catch_up(self, topic: bytes = b"") -> None:
        """Asks for what it does not have of streams whose topics begin so."""
        known = self.streams.get(topic)
        for message in replay(self._place, 0 if known is None else known.number + 1, topic):
            stream = self.streams.setdefault(message.topic, Known(strict=False))
            stream.strict = False  # everything is shown beside what is published
            stream.apply(message)
            self.messages.append(message)

    @property
    def only(self) -> Known:
        """The one stream there is."""
        [known] = self.streams.values()
        return known

    def until_has(self, medium: str, blocks: set[int] | set[bytes]) -> None:
        """Returns when a medium of the only stream has exactly these blocks."""

        def there() -> bool:
            self.take()
            return bool(self.streams) and self.only.has(medium) == blocks

        until(there, f"{len(blocks)} blocks in {medium}")


def replay(place: EventPlace, number: int, topic: bytes | None = b"") -> list[Message]:
    """The whole answer to a request. `topic` None: without topics, as vLLM's subscribers ask."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(place.replay_endpoint)
        socket.send_multipart([b"", number.to_bytes(8, "big"), *([] if topic is None else [topic])])
        messages: list[Message] = []
        while socket.poll(int(DEADLINE_S * 1000)):
            empty, *rest = socket.recv_multipart()
            assert empty == b""
            told, [number_told, payload] = rest[:-2], rest[-2:]
            if number_told == END:
                assert payload == b""
                return messages
            messages.append(Message(told[0] if told else b"", int.from_bytes(number_told, "big"), payload))
    raise AssertionError("the replay has no end")
