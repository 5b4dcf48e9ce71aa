"""The session stream: requests are answered in the order in which they arrive, and events are sent in
between."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc.aio
from kvtier.v1 import cache_pb2

from kvtierd.cache import WAITS_PER_EPOCH_MAX, Event
from kvtierd.core.actions import Attached, SessionEnded, TransferEnded
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Epoch
from kvtierd.core.stimuli import RenewSession
from kvtierd.rpc.batches import BATCHES, REQUESTS_MAX, in_batches
from kvtierd.rpc.calls import Calls
from kvtierd.rpc.connections import Connection, Connections
from kvtierd.rpc.errors import to_error
from kvtierd.rpc.guard import Undecodable
from kvtierd.rpc.heartbeats import renew_of
from kvtierd.rpc.hello import greeting_of
from kvtierd.rpc.queries import Caller
from kvtierd.rpc.replies import instance_event, transfer_event

GOODBYE_DEADLINE_S = 1.0
"""Time for the last messages to be sent; a client that does not read misses them."""
UNHURRIED = frozenset({"store", "touch", "release", "cancel"})
"""Requests whose reply only says that they were accepted. It is sent with the next message, which for a store
is usually the event that says it has ended."""
ANSWER_OPTIONAL = frozenset({"touch", "release", "cancel"})
"""Requests that may have no id. Then nobody is told whether they were accepted or refused."""
REPLY_DELAY_S = 0.05
"""How long such a reply waits for a message that it can be sent with."""
EVENT_DELAY_S = 0.01
"""How long the event of a transfer waits that nobody waits for."""
REPLIES_MAX = 64
"""How many such replies may wait. When there are more, the client's next message is read only after they are
sent."""

Context = grpc.aio.ServicerContext[cache_pb2.AttachRequest, cache_pb2.AttachResponse]


@dataclass(frozen=True, slots=True)
class StreamSettings:
    hello_deadline_s: float
    outgoing_max: int
    """Events that may wait for the client to read them."""
    limits: cache_pb2.Limits
    daemon_version: str
    pool_bytes: int


class AttachStream:
    """One Attach call."""

    def __init__(
        self,
        connections: Connections,
        calls: Calls,
        renew: Callable[[RenewSession], object],
        settings: StreamSettings,
        observe: Callable[[str, float], None],
        context: Context,
    ) -> None:
        self._connections = connections
        self._calls = calls
        self._renew = renew
        self._settings = settings
        self._observe = observe
        self._context = context
        self._connection: Connection | None = None
        self._boot_nonce = connections.boot_nonce
        self._queue: deque[cache_pb2.AttachResponse] = deque()
        self._writing = asyncio.Lock()
        self._replying = 0
        self._batches = False
        """Whether the client sends and takes several messages in one."""
        self._unhurried: list[cache_pb2.AttachResponse] = []
        self._lazy: set[int] = set()
        """Tickets of transfers whose end nobody waits for."""
        self._timer: asyncio.Handle | None = None
        """Sends messages that wait for others without them."""
        self._timer_s = 0.0
        """When it does. Kept here, because a handle may not know: uvloop's call_at gives one without a time
        if the time has come already."""
        self._closed = False
        self._more = asyncio.Event()
        self._finished: Refusal | None = None
        self._ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serves the stream until it ends, and ends the session with it."""
        reader = asyncio.create_task(self._read())
        writer = asyncio.create_task(self._write())
        try:
            await asyncio.wait({reader, writer, self._ending}, return_when=asyncio.FIRST_COMPLETED)
            if self._finished is not None:
                await asyncio.wait({writer}, timeout=GOODBYE_DEADLINE_S)
        finally:
            self._end(Refusal(Reason.EPOCH_ENDED, "its stream has ended"))
            self._closed = True
            tasks = {reader, writer, *self._waits}
            try:
                # gRPC ends no call while one of its messages is being sent. If the client does not read, that
                # lasts until its connection ends, which pings bring about. The session is over before that.
                async with self._writing:
                    pass
            finally:
                for task in tasks:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            # Anything but the end of the connection is a bug, which gRPC logs.
            if isinstance(result, Exception) and not isinstance(result, grpc.aio.BaseError):
                raise result

    # --- outgoing ---

    def _push(self, message: cache_pb2.AttachResponse, *, lazily: bool = False) -> None:
        """Queues an event, because events cannot wait. A client that lets too many pile up is dropped. With
        `lazily`, the event may be sent a little later, together with others."""
        if self._finished is not None:
            return
        if len(self._queue) >= self._settings.outgoing_max:
            self._queue.clear()
            self._end(
                Refusal(
                    Reason.QUEUE_FULL,
                    f"it does not read: {self._settings.outgoing_max} messages wait (server.outgoing_max)",
                )
            )
            return
        self._queue.append(message)
        if not lazily:
            self._more.set()
        else:
            self._write_within(EVENT_DELAY_S)

    def _write_within(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        at_s = loop.time() + delay_s
        if self._timer is not None:
            if self._timer_s <= at_s:
                return
            self._timer.cancel()
        self._timer, self._timer_s = loop.call_at(at_s, self._time_is_over), at_s

    def _time_is_over(self) -> None:
        self._timer = None
        self._more.set()

    async def _send(self, messages: Iterable[cache_pb2.AttachResponse]) -> None:
        """Sends replies, and returns when they are sent, so that nothing is read from a client that does not
        read."""
        self._replying += 1
        try:
            async with self._writing:
                for message in self._joined(messages):
                    if not self._closed:
                        await self._context.write(message)
        finally:
            self._replying -= 1
            if self._finished is not None:
                self._more.set()

    async def _write(self) -> None:
        """Sends what is queued. Returns after Goodbye."""
        while True:
            await self._more.wait()
            self._more.clear()
            async with self._writing:
                while self._queue or self._unhurried:
                    events = list(self._queue)
                    self._queue.clear()
                    for message in self._joined(events):
                        await self._context.write(message)
                if self._finished is not None and not self._replying:
                    self._closed = True
                    goodbye = cache_pb2.Goodbye(why=to_error(self._finished))
                    await self._context.write(cache_pb2.AttachResponse(goodbye=goodbye))
                    return

    def _joined(self, messages: Iterable[cache_pb2.AttachResponse]) -> Iterable[cache_pb2.AttachResponse]:
        """The messages to send now. For a client that takes batches, they include the replies that waited,
        and are joined into few messages."""
        if not self._batches:
            return messages
        replies, self._unhurried = self._unhurried, []
        if self._timer is not None and not self._queue:
            self._timer.cancel()
            self._timer = None
        return in_batches((*replies, *messages))

    def _finish(self, why: Refusal) -> None:
        """Sends what waits, then Goodbye, and then ends the stream."""
        if self._finished is None:
            self._finished = why
            self._ending.set_result(None)
            self._more.set()

    def _end(self, why: Refusal) -> None:
        self._finish(why)
        if self._connection is not None:
            self._connections.end(self._connection, why)

    # --- incoming ---

    async def _read(self) -> None:
        try:
            request: Any  # the library's type leaves out the end of the stream
            async with asyncio.timeout(self._settings.hello_deadline_s):
                request = await self._context.read()
        except TimeoutError:
            deadline_s = self._settings.hello_deadline_s
            self._finish(Refusal(Reason.DEADLINE, f"no Hello within {deadline_s:g} s"))
            return
        while request is not grpc.aio.EOF:
            if isinstance(request, Undecodable):
                self._end(request.refusal)
                return
            if self._connection is None:
                if not await self._hello(request):
                    return
            else:
                self._connections.heard(self._connection)
                await self._answer(self._connection, request)
            request = await self._context.read()

    async def _hello(self, request: cache_pb2.AttachRequest) -> bool:
        """Attaches the session. False if it was refused and the stream is to end."""
        try:
            if request.WhichOneof("body") != "hello":
                raise Refusal(Reason.NOT_ATTACHED, "the first message of a stream is a Hello", field="body")
            connection = self._connections.by_token(request.hello.token)
            greeting = greeting_of(request.hello, connection.id, connection.peer)
            attached = self._connections.attach(connection, greeting, self._event)
        except Refusal as refusal:
            self._push(cache_pb2.AttachResponse(id=request.id, error=to_error(refusal)))
            self._finish(refusal)
            return False
        self._connection = connection
        connection.on_end.append(self._finish)
        await self._send([self._welcome(request, greeting.protocol_version, greeting.features, attached)])
        self._batches = BATCHES in greeting.features
        return True

    def _welcome(
        self,
        request: cache_pb2.AttachRequest,
        version: int,
        features: tuple[str, ...],
        attached: Attached,
    ) -> cache_pb2.AttachResponse:
        welcome = cache_pb2.Welcome(
            protocol_version=version,
            features=features,
            epoch=attached.epoch,
            boot_nonce=self._boot_nonce,
            daemon_version=self._settings.daemon_version,
            limits=self._settings.limits,
            layout_fingerprint=attached.fingerprint.hex() if attached.fingerprint else "",
            instance=instance_event(attached.instance),
            pool_bytes=self._settings.pool_bytes,
        )
        return cache_pb2.AttachResponse(id=request.id, welcome=welcome)

    async def _answer(self, connection: Connection, request: cache_pb2.AttachRequest) -> None:
        requests = [request]
        if self._batches and request.WhichOneof("body") == "batch":
            requests = list(request.batch.requests)
            self._give_back(connection, request)
            if request.id or len(requests) > REQUESTS_MAX:
                field, value = ("id", request.id) if request.id else ("batch.requests", len(requests))
                message = f"a batch has no id of its own, and at most {REQUESTS_MAX} requests"
                error = to_error(Refusal(Reason.MALFORMED, message, field=field, value=value))
                await self._send([cache_pb2.AttachResponse(id=request.id, error=error)])
                return
        hurried = []
        for each in requests:
            await self._connections.pace.wait(connection.peer.tenant)
            reply = self._reply(connection, each)
            if reply is None:
                continue
            if self._batches and each.WhichOneof("body") in UNHURRIED and not reply.HasField("error"):
                self._unhurried.append(reply)
            else:
                hurried.append(reply)
        if hurried or len(self._unhurried) >= REPLIES_MAX:
            await self._send(hurried)
        elif self._unhurried:
            self._write_within(REPLY_DELAY_S)

    def _reply(
        self, connection: Connection, request: cache_pb2.AttachRequest
    ) -> cache_pb2.AttachResponse | None:
        started_s, used_s = time.perf_counter(), time.thread_time()
        self._give_back(connection, request)
        body = request.WhichOneof("body")
        if body is None and request.released_leases:
            return None
        try:
            response = self._respond(connection, body, request)
        except Refusal as refusal:
            response = cache_pb2.AttachResponse(id=request.id, error=to_error(refusal))
        took_s, used_s = time.perf_counter() - started_s, time.thread_time() - used_s
        self._connections.pace.spent(connection.peer.tenant, used_s)
        if body is not None and body != "wait":
            self._observe(body, took_s)
        return response if request.id or body not in ANSWER_OPTIONAL else None

    def _give_back(self, connection: Connection, request: cache_pb2.AttachRequest) -> None:
        """Takes the leases that a message gives back. Nobody waits for an answer to that."""
        if request.released_leases:
            with contextlib.suppress(Refusal):
                self._calls.give_back(request.released_leases, connection.caller(None))

    def _respond(
        self, connection: Connection, body: str | None, request: cache_pb2.AttachRequest
    ) -> cache_pb2.AttachResponse | None:
        """The answer, or None if there is none now. Raises Refusal."""
        if body == "heartbeat":
            renewal = renew_of(request.heartbeat, connection.id)
            self._connections.told_audits(connection, renewal.audits)
            self._renew(renewal)
            if not request.id:
                return None
            return cache_pb2.AttachResponse(id=request.id, heartbeat_ack=cache_pb2.HeartbeatAck())
        # A batch that gets here is inside another one, or its client has not said that it sends batches.
        if body is None or body == "batch":
            raise Refusal(Reason.MALFORMED, "this daemon does not know this request", field="body")
        if body == "hello":
            raise Refusal(Reason.SECOND_HELLO, "a session says Hello once: open another session")
        if not request.id and body not in ANSWER_OPTIONAL:
            raise Refusal(Reason.MALFORMED, "a request needs an id above zero", field="id", value=0)
        message = getattr(request, body)
        caller = self._caller(connection, message)
        if body == "wait":
            self._start_wait(request, caller)
            return None
        ticket = message.signals.ticket if body == "store" and message.lazily and self._batches else 0
        if ticket:
            self._lazy.add(ticket)
        try:
            field, call = self._calls.by_body[body]
            reply = call(message, caller)
        except Refusal:
            self._lazy.discard(ticket)
            raise
        return cache_pb2.AttachResponse(**{"id": request.id, field: reply})

    def _caller(self, connection: Connection, message: Any) -> Caller:
        if not message.HasField("session"):
            return connection.caller(None)
        ref = message.session
        if ref.token and ref.token != connection.token:
            raise Refusal(Reason.FOREIGN, "a stream carries its own session only", field="session.token")
        return connection.caller(Epoch(ref.epoch) if ref.epoch else None)

    def _start_wait(self, request: cache_pb2.AttachRequest, caller: Caller) -> None:
        if len(self._waits) >= WAITS_PER_EPOCH_MAX:
            raise Refusal(
                Reason.QUEUE_FULL,
                f"{WAITS_PER_EPOCH_MAX} waits at once are the most: name more tickets in one",
            )
        task = asyncio.create_task(self._wait(request, caller))
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)

    async def _wait(self, request: cache_pb2.AttachRequest, caller: Caller) -> None:
        try:
            response = cache_pb2.AttachResponse(
                id=request.id, wait=await self._calls.wait(request.wait, caller)
            )
        except Refusal as refusal:
            response = cache_pb2.AttachResponse(id=request.id, error=to_error(refusal))
        try:
            await self._send([response])
        except Exception:
            # A stream that failed once is of no use. Without this, the client would wait for its answer.
            self._end(Refusal(Reason.EPOCH_ENDED, "an answer could not be sent on its stream"))
            raise

    # --- events, which come inside the façade's `handle` ---

    def _event(self, event: Event) -> None:
        if isinstance(event, TransferEnded):
            transfer = transfer_event(self._boot_nonce, event)
            lazily = event.ticket in self._lazy
            self._lazy.discard(event.ticket)
            self._push(cache_pb2.AttachResponse(transfer=transfer), lazily=lazily)
        elif isinstance(event, SessionEnded):
            self._end(event.why)
        else:
            self._push(cache_pb2.AttachResponse(instance=instance_event(event)))
