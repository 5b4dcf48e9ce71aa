"""The side socket against a peer that answers late, wrongly, with too much, or not at all."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvtier import KvtierError, Reason
from kvtier.connection.address import Address
from kvtier.connection.side_socket import SideSocket, call_blocking
from kvtier.connection.steps import SideCall, SideReply
from kvtier.errors import ConnectionLostError
from kvtier.v1 import side_pb2, types_pb2

OPEN = SideCall(side_pb2.SideRequest(open=side_pb2.SideOpen(protocol_versions=[1])), (), timeout_s=20)
Answer = Callable[[socket.socket, side_pb2.SideRequest], None]


@pytest.fixture
def interrupt() -> Iterator[int]:
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


@pytest.fixture
def exchange(socket_dir: Path, interrupt: int) -> Iterator[Callable[..., SideReply]]:
    """One exchange with a peer that answers like this."""
    address = Address(socket_dir / "k.sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.fspath(address.side_socket))
    listener.listen()
    opened: list[socket.socket] = [listener]

    def run(answer: Answer, call: SideCall = OPEN) -> SideReply:
        side = SideSocket(address)
        peer, _ = listener.accept()
        opened.append(peer)

        def serve() -> None:
            request = side_pb2.SideRequest.FromString(peer.recv(65536))
            answer(peer, request)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return call_blocking(side, call, interrupt)
        finally:
            side.close()
            thread.join(20)

    yield run
    for one in opened:
        one.close()


def reply(request: side_pb2.SideRequest, **body: object) -> bytes:
    return side_pb2.SideResponse(id=request.id, **body).SerializeToString()  # type: ignore[arg-type]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_answer_comes_with_its_descriptors(exchange: Callable[..., SideReply]) -> None:
    def answer(peer: socket.socket, request: side_pb2.SideRequest) -> None:
        with open(os.devnull) as null:
            message = reply(request, words_registered=side_pb2.WordsRegistered(worker_pid=5))
            socket.send_fds(peer, [message], [null.fileno()])

    found = exchange(answer)
    assert found.response.words_registered.worker_pid == 5
    [fd] = found.fds
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_a_refusal_is_raised_and_its_descriptors_are_closed(exchange: Callable[..., SideReply]) -> None:
    before = descriptors()

    def answer(peer: socket.socket, request: side_pb2.SideRequest) -> None:
        error = types_pb2.Error(reason=types_pb2.REASON_MAPPING_NOT_SEALED, field="seals", message="seal it")
        with open(os.devnull) as null:
            socket.send_fds(peer, [reply(request, error=error)], [null.fileno()])
        peer.close()

    with pytest.raises(KvtierError) as raised:
        exchange(answer)
    assert (raised.value.reason, raised.value.field) == (Reason.MAPPING_NOT_SEALED, "seals")
    assert descriptors() == before


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda peer, request: peer.close(), "closed the side socket"),
        (lambda peer, request: peer.send(b"\xff" * 9), "something else"),
        (lambda peer, request: peer.send(b"\0" * 70_000), "cut short|something else"),
        (lambda peer, request: peer.send(side_pb2.SideResponse(id=99).SerializeToString()), "reply 99"),
    ],
)
def test_nonsense_ends_the_connection(exchange: Callable[..., SideReply], answer: Answer, says: str) -> None:
    with pytest.raises(ConnectionLostError, match=says):
        exchange(answer)


def test_silence_ends_at_the_deadline(exchange: Callable[..., SideReply]) -> None:
    with pytest.raises(ConnectionLostError, match="does not answer"):
        exchange(lambda peer, request: None, SideCall(OPEN.request, (), timeout_s=0.05))


def test_an_interrupt_ends_a_long_wait(exchange: Callable[..., SideReply], interrupt: int) -> None:
    with pytest.raises(ConnectionLostError, match="closing"):
        exchange(lambda peer, request: os.eventfd_write(interrupt, 1))


def test_nobody_listening_is_said_with_the_path(socket_dir: Path) -> None:
    before = descriptors()
    with pytest.raises(ConnectionLostError, match=r"no daemon listens at .*/k\.sock"):
        SideSocket(Address(socket_dir / "k.sock"))
    assert descriptors() == before
