"""kvtierctl's calls of Admin. Each says who calls: it carries the token of a side connection, by which the
daemon knows this process's user."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError
from kvtier.v1 import admin_pb2_grpc, side_pb2

from kvtierd.config.daemon import side_socket_of
from kvtierd.rpc.contract import PROTOCOL_VERSIONS, TOKEN_METADATA

ANSWER_S = 2.0
ANSWER_BYTES_MAX = 65_536


@contextmanager
def admin_at(path: Path, options: Sequence[tuple[str, Any]] = ()) -> Iterator[admin_pb2_grpc.AdminStub]:
    """Gives the calls of the daemon at this gRPC socket. `options` are gRPC's for the channel."""
    with grpc.insecure_channel(f"unix:{path.absolute()}", options) as channel:
        caller = _Caller(side_socket_of(path.absolute()))
        try:
            yield admin_pb2_grpc.AdminStub(grpc.intercept_channel(channel, caller))
        finally:
            caller.close()


class _Details(NamedTuple):
    """One call, as gRPC's interceptors describe it."""

    method: str
    timeout: float | None
    metadata: list[tuple[str, str | bytes]]
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _Caller(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds a token to each call. The daemon closes a side connection that goes on to say nothing, so each
    call has one of its own, which stays open until the next."""

    def __init__(self, side_socket: Path) -> None:
        self._path = side_socket
        self._side: socket.socket | None = None

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(self._named(details), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(self._named(details), request)

    def _named(self, details: Any) -> _Details:
        metadata = list(details.metadata or ())
        if token := self._token():
            metadata.append((TOKEN_METADATA, token))
        return _Details(
            details.method,
            details.timeout,
            metadata,
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )

    def _token(self) -> bytes:
        """A token; empty if there is none, because then the call itself will say what is wrong."""
        self.close()
        self._side = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._side.settimeout(ANSWER_S)
        request = side_pb2.SideRequest(id=1, open=side_pb2.SideOpen(protocol_versions=PROTOCOL_VERSIONS))
        try:
            self._side.connect(str(self._path))
            self._side.send(request.SerializeToString())
            answer = side_pb2.SideResponse.FromString(self._side.recv(ANSWER_BYTES_MAX))
        except (OSError, DecodeError):
            return b""
        return answer.opened.token

    def close(self) -> None:
        """Closes the side connection of the latest call."""
        if self._side is not None:
            self._side.close()
            self._side = None
