"""How a client gets attached and registered, as steps: the shells perform them, blocking or async, and send
back what came of it.

Each generator runs under the session's lock between two steps, and without it while a step is performed. A
step that fails is raised out of the shell, and ends the generator: KvtierError if the daemon refused,
ConnectionLostError if it is gone or late.
"""

import os
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from kvtier.errors import ConnectionLostError, KvtierError, Reason
from kvtier.session import HelloRecord, Session
from kvtier.spec import PROTOCOL_VERSION
from kvtier.v1 import side_pb2

OPEN_TIMEOUT_S = 2.0
HELLO_TIMEOUT_S = 5.0
REGISTER_TIMEOUT_S = 15.0
"""Mapping a large cache takes the copy worker a while."""
BACKOFF_FIRST_S, BACKOFF_MOST_S = 0.05, 2.0
REGISTER_RETRY_S = 0.1
"""A lost copy worker is back within about a second."""


@dataclass(frozen=True, slots=True)
class SideCall:
    """One exchange on the side socket. Performing it returns a SideReply, or raises the refusal."""

    request: side_pb2.SideRequest
    fds: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SideReply:
    """Descriptors belong to whoever gets this."""

    response: side_pb2.SideResponse
    fds: Sequence[int]


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open the gRPC stream and let the session's messages flow; then wait until this event is set."""

    record: HelloRecord
    timeout_s: float


Step = SideCall | OpenStream
Steps = Generator[Step, SideReply | None, None]


def _take(reply: SideReply | None, body: str, fds: int = 0) -> SideReply:
    """The reply, if it is what was asked for; otherwise its descriptors are closed."""
    assert reply is not None
    if reply.response.WhichOneof("body") == body and len(reply.fds) == fds:
        return reply
    for fd in reply.fds:
        os.close(fd)
    found = reply.response.WhichOneof("body")
    raise ConnectionLostError(
        f"the daemon answered {found} with {len(reply.fds)} descriptors, expected {body}"
    )


def attach(session: Session) -> Steps:
    """Side socket, then stream: afterwards the session has an epoch."""
    request = side_pb2.SideRequest(open=side_pb2.SideOpen(protocol_versions=[PROTOCOL_VERSION]))
    reply = _take((yield SideCall(request, (), OPEN_TIMEOUT_S)), "opened")
    opened = reply.response.opened
    record = session.say_hello(opened.token, opened.daemon_pid)
    yield OpenStream(record, HELLO_TIMEOUT_S)
    if record.error is not None:
        raise record.error
    if not record.welcomed:
        raise ConnectionLostError(session.ended or "the daemon did not answer our Hello in time")


def register(session: Session) -> Steps:
    """Shared words, then memory: afterwards the rank is registered, with a new page of words."""
    spec = session.spec
    page = session.new_page()
    words = side_pb2.RegisterWords(doorbells=spec.doorbells, parts=spec.parts)
    reply = _take(
        (yield SideCall(side_pb2.SideRequest(register_words=words), (page.fileno(),), REGISTER_TIMEOUT_S)),
        "words_registered",
        fds=1,
    )
    page.adopt_worker(reply.fds[0])
    assert spec.memory is not None
    memory = side_pb2.SideRequest(register_memory=spec.register_memory())
    _take((yield SideCall(memory, (spec.memory.fileno(),), REGISTER_TIMEOUT_S)), "memory_registered")
    session.registered()


def may_register_later(error: KvtierError) -> bool:
    """Whether a refused registration is worth another try in the same session."""
    return error.reason in (Reason.WORKER_UNAVAILABLE, Reason.QUEUE_FULL)


class Backoff:
    """How long to wait before the next attempt: 50 ms, doubling up to 2 s, with jitter so that clients spread
    out."""

    def __init__(self, uniform: Callable[[float, float], float] = random.uniform) -> None:
        self._uniform = uniform
        self._next_s = BACKOFF_FIRST_S

    def reset(self) -> None:
        """The last attempt was a success that lasted."""
        self._next_s = BACKOFF_FIRST_S

    def next_s(self) -> float:
        """Seconds to wait now."""
        wait_s, self._next_s = self._next_s, min(self._next_s * 2, BACKOFF_MOST_S)
        return self._uniform(wait_s / 2, wait_s)
