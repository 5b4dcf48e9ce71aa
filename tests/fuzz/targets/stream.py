"""Streams of one or two engines: any requests, in any order, while copies end in any way and time passes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import grpc.aio
from kvtier.v1 import cache_pb2, types_pb2
from kvtierd.cache import CPU, MappedGroup
from kvtierd.core.ids import SessionId
from kvtierd.core.stimuli import PartOutcome, Tick
from kvtierd.rpc.calls import Calls
from kvtierd.rpc.connections import Connection
from kvtierd.rpc.guard import decoder
from kvtierd.rpc.stream import AttachStream, StreamSettings

from tests.fuzz.front import LIMITS, Front, run_stepped
from tests.fuzz.messages import edited
from tests.fuzz.source import Source
from tests.fuzz.target import Target
from tests.fuzz.targets.hello import REFUSAL_BYTES_MAX, hello

STEPS_MAX = 48
FRAGMENT_BYTES = 100_000
BLOCKS, WORDS, KEYS = 32, 8, 24
SETTINGS = StreamSettings(5.0, 64, cache_pb2.Limits(), "0", 1 << 20)
DECODE = decoder(cache_pb2.AttachRequest, 1 << 20)
REQUESTS = (
    *("store", "lookup", "load", "release", "cancel", "wait"),
    *("touch", "prefetch", "heartbeat", "store", "lookup", "load"),
)


class _Call:
    """As much of a gRPC call as the stream uses: the client is the input."""

    def __init__(self, front: Front, connection: Connection, source: Source, leases: list[int]) -> None:
        """`leases`: those of all engines, which each may try to use."""
        self._front = front
        self._connection = connection
        self._source = source
        self._steps = 0
        self._ids = 0
        self._tickets = 0
        self._leases = leases
        self.has_ended = False

    async def read(self) -> Any:
        source = self._source
        self._steps += 1
        if self._steps == 1:
            return self._hello()
        self._front.check()
        if self._steps == 2 and self._connection.epoch is not None:
            await self._register()
        while self._steps < STEPS_MAX and not source.is_empty and self._connection.ended is None:
            self._steps += 1
            kind = source.below(16)
            if kind == 0:
                return DECODE(source.take(source.number()))
            if kind == 1:
                batch = cache_pb2.RequestBatch(requests=[self._request() for _ in range(source.below(6))])
                return cache_pb2.AttachRequest(id=int(source.one_in(16)), batch=batch)
            if kind <= 4:
                self._end_a_copy()
            elif kind == 5:
                self._front.now_s += source.choice((0.1, 1.0, 5.0, 11.0, 200.0))
                self._front.cache.handle(Tick())
            else:
                return self._request()
            self._front.check()
        return grpc.aio.EOF

    async def write(self, message: cache_pb2.AttachResponse) -> None:
        for each in message.batch.responses if message.HasField("batch") else [message]:
            if each.HasField("lookup"):
                self._leases += [each.lookup.lease_id] * bool(each.lookup.lease_id)
                self._leases += [answer.lease_id for answer in each.lookup.answers if answer.lease_id]
            if each.HasField("error"):
                assert each.error.message
                assert each.error.reason in types_pb2.Reason.values()
                assert each.error.reason != types_pb2.REASON_INTERNAL, each.error
                assert each.ByteSize() <= REFUSAL_BYTES_MAX
            self.has_ended |= each.HasField("goodbye")

    # --- what the client does ---

    def _hello(self) -> cache_pb2.AttachRequest:
        message = hello()
        message.token = self._connection.token
        message.instance = f"engine {self._connection.id}"
        for group in message.groups:
            del group.planes[1:]
            group.planes[0].fragment_bytes = FRAGMENT_BYTES
        if self._source.flag():
            del message.groups[1:]
        if self._source.one_in(4):
            del message.features[:]
        if self._source.one_in(16):
            edited(message, self._source)
        return cache_pb2.AttachRequest(id=1, hello=message)

    async def _register(self) -> None:
        """The rank's words and memory. An edited Hello may hold no rank, and then registers nothing."""
        if not self._connection.groups:
            return
        session = SessionId(self._connection.id)
        _, pidfd = await self._front.cache.mappings.register_words(session, CPU, -1, 2, WORDS)

        os.close(pidfd)
        groups = [
            MappedGroup(group=index, num_blocks=BLOCKS, fragment_bytes=[size for size, _ in shape.planes])
            for index, shape in enumerate(self._connection.groups)
        ]
        await self._front.cache.mappings.register_memory(session, None, 1 << 20, groups)

    def _end_a_copy(self) -> None:
        workers = self._front.workers
        if not workers.posted:
            return
        part = self._source.choice(sorted(workers.posted))
        outcomes = (PartOutcome.DONE, PartOutcome.DONE, PartOutcome.FAILED, PartOutcome.REVOKED)
        outcome = self._source.choice((*outcomes, PartOutcome.GATE_DEADLINE))
        failed = [self._source.number()] if outcome is PartOutcome.FAILED and self._source.flag() else []
        workers.finish(part, outcome, failed)

    def _hashes(self, most: int = 6) -> bytes:
        first, count = self._source.below(KEYS), self._source.below(most)
        return b"".join(bytes([key + 1]) * 32 for key in range(first, first + count))

    def _signals(self) -> cache_pb2.Signals:
        self._tickets += 1
        word = self._tickets % WORDS
        if self._source.one_in(4):
            return cache_pb2.Signals(ticket=self._tickets, part_word=word, gate=types_pb2.GATE_DOORBELL)
        return cache_pb2.Signals(ticket=self._tickets, part_word=word, gate=types_pb2.GATE_NONE)

    def _request(self) -> cache_pb2.AttachRequest:
        self._ids += 1
        request = cache_pb2.AttachRequest(id=self._ids)
        kind = self._source.choice(REQUESTS)
        make: dict[str, Callable[[Any], None]] = {
            "store": self._store,
            "load": self._load,
            "lookup": self._queries,
            "touch": self._queries,
            "prefetch": self._queries,
        }
        message = getattr(request, kind)
        message.SetInParent()
        if kind in make:
            make[kind](message)
        elif kind == "release":
            message.lease_ids.extend(self._leases[-2:])
        elif kind in ("cancel", "wait"):
            message.tickets.append(max(0, self._tickets - self._source.below(4)))
        if kind == "wait":
            message.timeout_ms = self._source.choice((0, 10, 60_000))
        if self._source.one_in(3):
            edited(request, self._source)
        return request

    def _store(self, message: cache_pb2.StoreRequest) -> None:
        message.signals.CopyFrom(self._signals())
        message.group = self._source.below(2)
        message.hashes = self._hashes()
        first = self._source.below(BLOCKS - 6)
        message.block_ids.extend(range(first, first + len(message.hashes) // 32))
        message.lazily = self._source.flag()

    def _load(self, message: cache_pb2.LoadRequest) -> None:
        message.signals.CopyFrom(self._signals())
        message.group = self._source.below(2)
        message.lease_id = self._leases[-1 - self._source.below(len(self._leases))] if self._leases else 1
        message.first = self._source.below(2)
        message.block_ids.extend(range(self._source.below(4) + 1))
        message.keep_lease = self._source.flag()

    def _queries(self, message: Any) -> None:
        groups = self._source.below(3)
        modes = (cache_pb2.LOOKUP_MODE_PREFIX, cache_pb2.LOOKUP_MODE_EXACT, cache_pb2.LOOKUP_MODE_SUFFIX)
        for group in range(groups) or [self._source.below(2)]:
            mode = self._source.choice(modes[: 3 if groups < 2 else 1])
            window = self._source.below(3) + 1 if mode == cache_pb2.LOOKUP_MODE_SUFFIX else 0
            message.queries.add(group=group, mode=mode, hashes=self._hashes(), window_blocks=window)
        if isinstance(message, cache_pb2.LookupRequest):
            message.lease = self._source.flag()


def run(data: bytes) -> None:
    source = Source(data)

    async def main() -> None:
        front, leases = Front(), list[int]()
        calls = Calls(front.cache, LIMITS, lambda: front.now_s)
        streams = []
        for _ in range(2 if source.one_in(4) else 1):
            call: Any = _Call(front, front.connections.open(front.peer()), source, leases)
            streams.append(
                AttachStream(
                    front.connections, calls, front.cache.handle, SETTINGS, lambda body, took_s: None, call
                )
            )
        await asyncio.gather(*(stream.run() for stream in streams))
        front.check_empty()

    run_stepped(main)


TARGET = Target(
    run,
    (
        *(
            f"kvtierd.rpc.{name}"
            for name in ("stream", "calls", "queries", "replies", "batches", "heartbeats")
        ),
        *(f"kvtierd.core.transfers.{name}" for name in ("transfers", "leases", "lookups", "fencing")),
    ),
    bytes_max=600,
)
