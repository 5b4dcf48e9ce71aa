"""The thread that publishes: it makes batches of news, sends them to subscribers, and answers replays."""

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import zmq

from kvtierd.core.actions import BlockNews, NewsKind
from kvtierd.core.ids import NamespaceDigest
from kvtierd.events.askers import Askers
from kvtierd.events.encoding import BatchEncoder, EventForm
from kvtierd.events.options import EventOptions
from kvtierd.events.ring import EventStream, KeptBatch, ReplayRing
from kvtierd.logs import logger

ASKERS_MAX = 64
"""Replays at once. Requests beyond that are not answered."""
REPLAY_QUEUE = 1_000
"""Messages of a replay that may wait in the socket for one subscriber; the others wait in its `Asker`."""
RETRY_MS = 20
"""When a full queue is tried again."""
NUMBER_BYTES = 8
LINGER_MS = 500
"""How long the end waits for subscribers to take what they were sent."""
STOP_S = 5.0

log = logger(__name__)


class Behind:
    """Stands in the queue for news that did not fit into it."""


_Task = Sequence[BlockNews] | Behind | None


class EventServer:
    """The sockets and their thread. Others call `put` and `close`, and read the counters."""

    def __init__(
        self,
        options: EventOptions,
        ask: Callable[[NamespaceDigest], None],
        caught_up: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Binds the sockets. Raises zmq.ZMQError with the endpoint in its text if that is not possible.

        `ask` is called, on the thread, with a namespace of which everything is to be shown; `caught_up`, when
        it has got as far as a `Behind`.
        """
        self._options = options
        self._ask = ask
        self._caught_up = caught_up
        self._clock = clock
        self._encoder = BatchEncoder(EventForm(options.whole_hashes, options.positional, options.store))
        self._first_number = int(clock() * 1e6)
        self._streams: dict[NamespaceDigest, EventStream] = {}
        self._left_out: set[NamespaceDigest] = set()
        self._ring = ReplayRing(options.replay_batches, options.replay_bytes)
        self._tasks: deque[_Task] = deque()
        self._closed = False
        self._context = zmq.Context()
        try:
            self._publisher = self._socket(zmq.PUB, options.subscriber_queue)
            self._publisher.bind(options.endpoint)
            self._replay: zmq.Socket[bytes] | None = None
            if options.replay_endpoint:
                self._replay = self._socket(zmq.ROUTER, REPLAY_QUEUE)
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._replay.bind(options.replay_endpoint)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._askers = Askers(self._send_replay)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.counts: Counter[str] = Counter()
        """`batches` published, `stored` and `removed` blocks in them, `replays` asked for, requests that were
        `refused`, and streams of which everything was to be `shown`."""
        self.taken = 0
        """Hashes that have been taken from the queue."""
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def _socket(self, kind: int, queue: int) -> "zmq.Socket[bytes]":
        found = self._context.socket(kind)
        found.setsockopt(zmq.LINGER, 0)
        found.setsockopt(zmq.SNDHWM, queue)
        found.setsockopt(zmq.IPV6, 1)
        return found

    # --- for others ---

    def put(self, task: _Task) -> None:
        """Hands in news, or what stands for news that are lost. None ends the thread."""
        if not self._closed:
            self._tasks.append(task)
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Publishes what was handed in, and that nothing can be loaded any more. Then closes the sockets."""
        if self._closed:
            return
        self.put(None)
        self._closed = True
        self._thread.join(STOP_S)
        if not self._thread.is_alive():
            os.close(self._wake)

    @property
    def alive(self) -> bool:
        """Whether it still publishes. If not, the log says why."""
        return self._thread.is_alive()

    @property
    def streams(self) -> int:
        return len(self._streams)

    @property
    def kept_batches(self) -> int:
        return len(self._ring)

    @property
    def kept_bytes(self) -> int:
        return self._ring.kept_bytes

    @property
    def forgotten(self) -> int:
        """Replays that did not come to an end, because the subscriber had gone or was too slow."""
        return self._askers.forgotten

    # --- the thread ---

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(RETRY_MS if self._askers.blocked else self._beat()))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    if not self._work():
                        return
                if self._replay is not None and self._replay in ready:
                    for request in self._requests(self._replay):
                        self._answer(request)
                self._askers.send()
        except Exception as error:
            log.critical("no KV events are published any more", error=repr(error), exc_info=error)
        finally:
            self._context.destroy(linger=LINGER_MS)

    def _beat(self) -> int:
        """Publishes an empty batch on each stream that has been silent for long. Returns the milliseconds
        until the next time."""
        now_s, pause_s = time.monotonic(), self._options.heartbeat_s
        due_s = now_s + pause_s
        for stream in self._streams.values():
            if stream.published_s + pause_s <= now_s:
                self._publish(stream, self._encoder.empty(self._clock()))
            due_s = min(due_s, stream.published_s + pause_s)
        return max(1, int(1000 * (due_s - now_s)))

    def _work(self) -> bool:
        """Does what is in the queue. Returns False if that was the last of all."""
        while self._tasks:
            task = self._tasks.popleft()
            if task is None:
                for stream in self._streams.values():
                    self._publish(stream, self._encoder.cleared(self._clock()))
                return False
            if isinstance(task, Behind):
                self._caught_up()
                continue
            for namespace, news in groupby(task, lambda each: each.namespace):
                self._tell(namespace, list(news))
            self.taken += sum(len(each.hashes) for each in task)
            self._askers.send()
        return True

    def _tell(self, namespace: NamespaceDigest, news: list[BlockNews]) -> None:
        """News of one namespace, in their order."""
        for kind, those in groupby(news, lambda each: _phase(each.kind)):
            self._tell_of(kind, namespace, list(those))

    def _tell_of(self, kind: NewsKind, namespace: NamespaceDigest, news: list[BlockNews]) -> None:
        if kind is NewsKind.CLEARED:
            self._begin(news[-1])
            return
        stream = self._streams.get(namespace)
        if stream is None:
            return
        match kind:
            case NewsKind.STORED:
                for payload in self._encoder.batches(news, stream.about, self._clock()):
                    self._publish(stream, payload)
                for each in news:
                    self.counts[each.kind.value] += len(each.hashes)
            case NewsKind.SHOWING:
                self._askers.begins(stream, self._now(stream, self._encoder.cleared(self._clock())))
            case NewsKind.SHOWN:
                for payload in self._encoder.batches(news, stream.about, self._clock()):
                    self._askers.show(self._now(stream, payload))
            case NewsKind.SHOWN_ALL:
                self._askers.ends(stream)

    def _begin(self, news: BlockNews) -> None:
        """A stream begins, or begins anew."""
        namespace, about = news.namespace, news.about
        assert about is not None
        stream = self._streams.get(namespace)
        if stream is None:
            topic = self._options.topic_of(namespace, about)
            if any(each.topic == topic for each in self._streams.values()):
                if namespace not in self._left_out:
                    self._left_out.add(namespace)
                    log.warning(
                        "two namespaces have the same topic, so the second one is not published: write "
                        "{namespace} into events.topic",
                        topic=topic.decode(),
                        namespace=namespace.hex(),
                    )
                return
            first = self._first_number
            stream = EventStream(topic, namespace, about, following=first, kept_from=first)
            self._streams[namespace] = stream
        self._publish(stream, self._encoder.cleared(self._clock()))
        if self._askers.again(stream):
            self._ask(namespace)

    def _publish(self, stream: EventStream, payload: bytes) -> None:
        batch = self._ring.append(stream, payload)
        # A PUB socket does not wait: it drops what a subscriber has no room for.
        self._publisher.send_multipart((stream.topic, batch.number.to_bytes(NUMBER_BYTES, "big"), payload))
        stream.published_s = time.monotonic()
        self._askers.show(batch)
        self.counts["batches"] += 1

    @staticmethod
    def _now(stream: EventStream, payload: bytes) -> KeptBatch:
        """A batch for those who have asked. It has the number of the last one that was published, because it
        tells how things are after that."""
        return KeptBatch(stream, stream.following - 1, payload)

    # --- replays ---

    def _requests(self, replay: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
        while True:
            try:
                yield replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _send_replay(self, frames: list[bytes]) -> None:
        assert self._replay is not None
        self._replay.send_multipart(frames, zmq.NOBLOCK)

    def _answer(self, request: list[bytes]) -> None:
        """Answers [client, empty, number], as vLLM does, or [client, empty, number, beginning of topics]."""
        client, *rest = request
        well_formed = len(rest) in (2, 3) and rest[0] == b"" and len(rest[1]) == NUMBER_BYTES
        if not well_formed or len(self._askers) >= ASKERS_MAX:
            self.counts["refused"] += 1
            return
        self.counts["replays"] += 1
        number = int.from_bytes(rest[1], "big")
        streams = list(self._streams.values())
        if len(rest) == 3:
            streams = [stream for stream in streams if stream.topic.startswith(rest[2])]
        elif len(streams) > 1:
            streams = []  # batches could not be told apart
        asker = self._askers.new(client, names_topics=len(rest) == 3)
        for stream in streams:
            if stream.kept_from <= number <= stream.following:
                for batch in self._ring.since(stream, number):
                    asker.add(batch)
            else:
                asker.waits.add(stream)
                self.counts["shown"] += 1
                self._ask(stream.namespace)
        asker.end()


def _phase(kind: NewsKind) -> NewsKind:
    """STORED for what goes into the same batches."""
    return NewsKind.STORED if kind is NewsKind.REMOVED else kind
