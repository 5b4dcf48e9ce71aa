"""Subscribers that have asked for a replay, and what they are still to get."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from kvtierd.events.ring import EventStream, KeptBatch

END = (-1).to_bytes(8, "big", signed=True)
"""The number of the message that ends a replay."""
OUTGOING_BYTES_MAX = 64 << 20
"""An asker for whom more is waiting is forgotten, and so does not get the end."""
STUCK_S = 30.0
"""So is one that has taken nothing for so long."""


@dataclass(slots=True, eq=False)
class Asker:
    """One subscriber and its latest request."""

    client: bytes
    names_topics: bool
    """The topic is told with each batch."""
    took_s: float
    """When it last took something, or had nothing to take."""
    waits: set[EventStream] = field(default_factory=set)
    """Streams of which everything will be shown to it, which has not begun."""
    shown: set[EventStream] = field(default_factory=set)
    """Streams of which everything is being shown to it."""
    outgoing: deque[KeptBatch | None] = field(default_factory=deque)
    """None is the end."""
    outgoing_bytes: int = 0

    def add(self, batch: KeptBatch) -> None:
        self.outgoing.append(batch)
        self.outgoing_bytes += len(batch.payload)

    def end(self) -> None:
        """Adds the end, unless something is still to be shown."""
        if not self.waits and not self.shown:
            self.outgoing.append(None)

    def frames(self, batch: KeptBatch | None) -> list[bytes]:
        head = [self.client, b""]
        if batch is None:
            return [*head, *([b""] if self.names_topics else []), END, b""]
        topic = [batch.stream.topic] if self.names_topics else []
        return [*head, *topic, batch.number.to_bytes(8, "big"), batch.payload]


class Askers:
    """All of them. They get what the socket takes, and nobody waits for them."""

    def __init__(self, send: Callable[[list[bytes]], None], clock: Callable[[], float] = time.monotonic):
        """`send(frames)` raises zmq.Again if a client's queue is full, another ZMQError if it has gone."""
        self._send = send
        self._clock = clock
        self._of: dict[bytes, Asker] = {}
        self.forgotten = 0
        """Askers that did not get all, because they had gone or were too slow."""

    def __len__(self) -> int:
        return len(self._of)

    @property
    def blocked(self) -> bool:
        """Whether one of them could not be sent what is there."""
        return any(asker.outgoing for asker in self._of.values())

    def new(self, client: bytes, *, names_topics: bool) -> Asker:
        """A client asks. If it has asked before, that is over."""
        asker = self._of[client] = Asker(client, names_topics, self._clock())
        return asker

    def show(self, batch: KeptBatch) -> None:
        """A batch is for those to whom its stream is being shown: it tells of what is there, or was published
        meanwhile."""
        for asker in self._of.values():
            if batch.stream in asker.shown:
                asker.add(batch)

    def begins(self, stream: EventStream, first: KeptBatch) -> None:
        """Everything of a stream will be shown; `first` says that nothing from before counts."""
        for asker in self._of.values():
            if stream in asker.waits:
                asker.waits.remove(stream)
                asker.shown.add(stream)
                asker.add(first)

    def ends(self, stream: EventStream) -> None:
        """Everything of a stream has been shown."""
        for asker in self._of.values():
            if stream in asker.shown:
                asker.shown.remove(stream)
                asker.end()

    def again(self, stream: EventStream) -> bool:
        """A stream begins anew, so what was shown of it does not count. Returns whether somebody waits for
        it."""
        for asker in self._of.values():
            if stream in asker.shown:
                asker.shown.remove(stream)
                asker.waits.add(stream)
        return any(stream in asker.waits for asker in self._of.values())

    def send(self) -> None:
        """Sends what the socket takes."""
        now_s = self._clock()
        for asker in list(self._of.values()):
            if not asker.outgoing:
                asker.took_s = now_s
            try:
                while asker.outgoing:
                    self._send(asker.frames(asker.outgoing[0]))
                    batch = asker.outgoing.popleft()
                    asker.took_s = now_s
                    if batch is None:
                        del self._of[asker.client]
                    else:
                        asker.outgoing_bytes -= len(batch.payload)
            except zmq.Again:
                slow = now_s - asker.took_s > STUCK_S
                if slow or asker.outgoing_bytes > OUTGOING_BYTES_MAX:
                    self._forget(asker)
            except zmq.ZMQError:  # it has gone
                self._forget(asker)

    def _forget(self, asker: Asker) -> None:
        del self._of[asker.client]
        self.forgotten += 1
