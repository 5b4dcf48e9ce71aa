"""How a client attaches and registers, as steps. The session's thread performs each and sends back its
result.

Each generator runs under the session's lock between two steps, and without it while a step is performed. The
error of a step that fails is thrown into the generator, which may handle it; otherwise it ends the session.
It is a KvtierError if something was refused, and a ConnectionLostError if the daemon is gone or late.
"""

import os
import random
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.errors import ConnectionLostError, KvtierError, NotExportableError, Reason
from kvtier.memory import Export, StreamDoorbells, fd_of, on_device
from kvtier.session.index import GROUPS_MAX
from kvtier.session.pending import HelloRecord
from kvtier.session.state import ProtocolState
from kvtier.spec import PROTOCOL_VERSION, AttachSpec
from kvtier.v1 import side_pb2
from kvtier.words import WORD_BYTES, WordsPage

OPEN_TIMEOUT_S = 2.0
HELLO_TIMEOUT_S = 5.0
REGISTER_TIMEOUT_S = 75.0
"""A copy worker needs a while to map a large cache. One for a GPU may have to be started first, for which the
daemon allows a minute."""
UNREGISTER_TIMEOUT_S = 75.0
"""Longer than the minute after which the daemon gives up."""
REGISTER_BYTES_MAX = 190 * 1024
"""The largest request; the daemon takes packets of 192 KiB."""
BACKOFF_FIRST_S, BACKOFF_MOST_S = 0.05, 2.0
REGISTER_RETRY_S = 0.1
"""A copy worker that was lost is back within about a second."""
STALE_TRIES = 100
"""About ten seconds in all, far more than a worker needs to close what a dead engine has left."""
UNABLE_RETRY_S = 2.0
"""After this time somebody may have changed what made registration impossible."""
_BUSY = (Reason.WORKER_UNAVAILABLE, Reason.QUEUE_FULL)
_UNABLE = (Reason.DEVICE_UNKNOWN, Reason.DEVICE_UNAVAILABLE, Reason.DEVICE_OUT_OF_MEMORY)


@dataclass(frozen=True, slots=True)
class SideCall:
    """One exchange on the side socket. Performing it returns a SideReply, or raises the refusal."""

    request: side_pb2.SideRequest
    fds: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SideReply:
    """The reply to a SideCall. Whoever gets it owns its descriptors."""

    response: side_pb2.SideResponse
    fds: Sequence[int]


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Opens the gRPC stream, lets the session's messages flow, and waits for the record's event."""

    record: HelloRecord
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """A call that may take a while, such as the driver's. Performing it returns its result."""

    call: Callable[[], Any]


Step = SideCall | OpenStream | Work
Steps = Generator[Step, Any, None]


class NotRegisteredError(Exception):
    """The memory is not registered, but the session goes on: try again after `retry_s` seconds or later."""

    def __init__(self, error: KvtierError, retry_s: float) -> None:
        super().__init__(str(error))
        self.retry_s = retry_s
        self.lasting = retry_s >= UNABLE_RETRY_S
        """Whether somebody has to change something before it can succeed."""


def _take(reply: SideReply | None, body: str, fds: int = 0) -> SideReply:
    """Returns the reply if it is what was asked for; otherwise closes its descriptors and raises."""
    assert reply is not None
    if reply.response.WhichOneof("body") == body and len(reply.fds) == fds:
        return reply
    for fd in reply.fds:
        os.close(fd)
    found = reply.response.WhichOneof("body")
    raise ConnectionLostError(
        f"the daemon answered {found} with {len(reply.fds)} descriptors, expected {body}"
    )


def attach(session: ProtocolState) -> Steps:
    """Connects the side socket, then the stream. Afterwards the session has an epoch."""
    request = side_pb2.SideRequest(open=side_pb2.SideOpen(protocol_versions=[PROTOCOL_VERSION]))
    reply = _take((yield SideCall(request, (), OPEN_TIMEOUT_S)), "opened")
    opened = reply.response.opened
    record = session.say_hello(opened.token, opened.daemon_pid)
    yield OpenStream(record, HELLO_TIMEOUT_S)
    if record.error is not None:
        raise record.error
    if not record.welcomed:
        raise ConnectionLostError(session.ended or "the daemon did not answer our Hello in time")


def register(session: ProtocolState, doorbells: StreamDoorbells | None) -> Steps:
    """Registers shared words, then memory. Afterwards the rank is registered, with a new page of words.

    `doorbells` lets streams of a GPU ring here, if they do. Raises NotRegisteredError if another try in the
    same session makes sense.
    """
    if not session.memory.wants_registration:
        return  # the memory was taken back meanwhile
    spec, memory = session.memory.begin()
    export: Export | None = None
    page: WordsPage | None = None
    words_registered = False
    try:
        if on_device(memory):  # first what only this process can refuse: then the daemon knows nothing yet
            export = yield Work(memory.export)
        page = session.memory.new_page()
        yield from _register_words(page, spec)
        words_registered = True
        if export is None:
            request, fds = spec.register_memory(), [fd_of(memory)]
        else:
            yield from _add_chunks(export)
            request, fds = spec.register_memory(export.ranges()), []
        registration = yield from _register_memory(session, page, request, fds)
        # last, because what is exposed stays mapped for good, and there may be many attempts
        if doorbells is not None:
            buffer, size_bytes = page.buffer, spec.doorbells * WORD_BYTES
            session.words.expose(buffer, (yield Work(lambda: doorbells.expose(buffer, size_bytes))))
        session.memory.registered(registration)
        session.counters.registrations += 1
    except KvtierError as error:
        session.memory.error = error
        worker_gone = page is not None and page.worker_is_dead  # its successor knows nothing of this session
        if error.reason in _BUSY or worker_gone:
            raise NotRegisteredError(error, REGISTER_RETRY_S) from error
        if not words_registered and (isinstance(error, NotExportableError) or error.reason in _UNABLE):
            raise NotRegisteredError(error, UNABLE_RETRY_S) from error
        raise
    finally:
        if export is not None:
            export.close()
        session.memory.end()


def _register_words(page: WordsPage, spec: AttachSpec) -> Steps:
    words = side_pb2.RegisterWords(doorbells=spec.doorbells, parts=spec.parts, device=spec.device)
    request = side_pb2.SideRequest(register_words=words)
    reply = _take(
        (yield SideCall(request, (page.buffer.fileno(),), REGISTER_TIMEOUT_S)), "words_registered", fds=1
    )
    page.adopt_worker(reply.fds[0])


def _add_chunks(export: Export) -> Steps:
    """Sends the chunks in packets: a large cache has more of them than a process may have descriptors."""
    while (packet := (yield Work(export.next_packet))) is not None:
        request = side_pb2.SideRequest(add_chunks=side_pb2.AddChunks(bytes=packet.sizes_bytes))
        _take((yield SideCall(request, packet.fds, REGISTER_TIMEOUT_S)), "chunks_added")


def _register_memory(
    session: ProtocolState, page: WordsPage, memory: side_pb2.RegisterMemory, fds: Sequence[int]
) -> Generator[Step, Any, int]:
    """Registers the memory. Returns the daemon's number of the registration."""
    request = side_pb2.SideRequest(register_memory=memory)
    if request.ByteSize() > REGISTER_BYTES_MAX:
        message = "too many ranges and planes for one request: share the allocation behind them as one range"
        raise KvtierError(
            Reason.MAPPING_INVALID, message, field="memory", value=f"{request.ByteSize()} bytes"
        )
    of_handles = bool(memory.ranges) and all(part.HasField("ipc") for part in memory.ranges)
    again = STALE_TRIES if of_handles else 0
    while True:
        try:
            reply = _take((yield SideCall(request, tuple(fds), REGISTER_TIMEOUT_S)), "memory_registered")
        except KvtierError as error:
            # A worker that lives may still have an older allocation open under the same handle, for a moment.
            stale = error.reason is Reason.WORKER_UNAVAILABLE and not page.worker_is_dead
            if not stale or not again or session.memory.spec.memory is None:
                raise
            again -= 1
            yield Work(lambda: time.sleep(REGISTER_RETRY_S))
        else:
            return reply.response.memory_registered.registration_id


def open_index(session: ProtocolState) -> Steps:
    """Opens the index pages of the instance's groups, if there are any. Without a page, the daemon
    is asked."""
    index = session.begin_index()
    if index is None:
        return  # the session has ended meanwhile
    try:
        while len(index) < GROUPS_MAX:
            request = side_pb2.SideRequest(open_index=side_pb2.OpenIndex(group=len(index)))
            reply = _take((yield SideCall(request, (), OPEN_TIMEOUT_S)), "index_opened", fds=1)
            index.add(reply.fds[0])
    except KvtierError as error:
        if error.reason is not Reason.UNKNOWN_GROUP:  # which comes after the last one
            session.last_error = str(error)


def unregister(session: ProtocolState) -> Steps:
    """Unregisters the memory. Afterwards no copy can touch it, and the daemon has unmapped it."""
    registration = session.memory.registration
    if registration is None:
        return  # the session has ended meanwhile
    body = side_pb2.UnregisterMemory(registration_id=registration)
    call = SideCall(side_pb2.SideRequest(unregister_memory=body), (), UNREGISTER_TIMEOUT_S)
    try:
        _take((yield call), "memory_unregistered")
    except KvtierError as error:
        if error.reason is not Reason.NOT_ATTACHED:
            raise
        # The worker that had it was lost. Its death, which the words page sees, is the fence.
    session.memory.unregistered()


class Backoff:
    """The pauses between attempts: 50 ms, doubling up to 2 s, with jitter so that clients spread out."""

    def __init__(self, uniform: Callable[[float, float], float] = random.uniform) -> None:
        self._uniform = uniform
        self._next_s = BACKOFF_FIRST_S

    def reset(self) -> None:
        """Starts again with the shortest pause, after an attempt that succeeded and lasted."""
        self._next_s = BACKOFF_FIRST_S

    def next_s(self) -> float:
        """Returns the seconds to wait now."""
        wait_s, self._next_s = self._next_s, min(self._next_s * 2, BACKOFF_MOST_S)
        return self._uniform(wait_s / 2, wait_s)
