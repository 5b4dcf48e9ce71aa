"""The side socket: a SOCK_SEQPACKET socket beside gRPC's, one message per packet, one exchange at a time.

It proves to the daemon who we are, carries descriptors, and lives as long as the session. `SideSocket` never
waits; `call_blocking` waits until it is ready.
"""

import array
import math
import os
import select
import socket
import time
from collections.abc import Callable

from kvtier.connection.address import Address
from kvtier.connection.reach import Reach, explain, look
from kvtier.connection.steps import SideCall, SideReply
from kvtier.connection.trust import require_daemon
from kvtier.errors import ConnectionLostError, KvtierError
from kvtier.v1 import side_pb2

PACKET_BYTES_MAX = 65_536
FDS_MAX = 4
FD_BYTES = array.array("i").itemsize


class SideSocket:
    """A connected, non-blocking side socket."""

    def __init__(self, address: Address) -> None:
        """Connects. Raises ConnectionLostError, which says why, if that fails, or if somebody listens whom we
        do not trust. If something is wrong with the gRPC socket, which users know, the error tells that."""
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        self._next_id = 1
        try:
            self._socket.connect(os.fspath(address.side_socket))
            require_daemon(self._socket, address.side_socket, address.daemon_user)
        except OSError as error:
            self._socket.close()
            raise ConnectionLostError(_why(address, error)) from None
        except ConnectionLostError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Returns the descriptor, or -1 once it is closed."""
        return self._socket.fileno()

    def prepare(self, call: SideCall) -> side_pb2.SideRequest:
        """Returns a copy of the request with an id of its own."""
        request = side_pb2.SideRequest()
        request.CopyFrom(call.request)
        request.id = self._next_id
        self._next_id += 1
        return request

    def try_send(self, request: side_pb2.SideRequest, fds: tuple[int, ...]) -> bool:
        """Sends the request. Returns False if the socket is not ready. Raises ConnectionLostError."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([request.SerializeToString()], ancillary)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise ConnectionLostError(f"the daemon closed the side socket: {error.strerror}") from None
        return True

    def try_receive(self, request_id: int) -> SideReply | None:
        """Returns the reply to this request, or None if there is none yet.

        Raises KvtierError for what the daemon refused, and ConnectionLostError for everything unexpected.
        """
        try:
            # Not socket.recv_fds: in Python 3.11 it drops the flags; the descriptors would survive exec.
            data, ancillary, flags, _ = self._socket.recvmsg(
                PACKET_BYTES_MAX, socket.CMSG_SPACE(FDS_MAX * FD_BYTES), socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise ConnectionLostError(f"the daemon closed the side socket: {error.strerror}") from None
        fds = _descriptors(ancillary)
        try:
            if not data:
                raise ConnectionLostError("the daemon closed the side socket")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ConnectionLostError("a reply on the side socket was cut short")
            try:
                response = side_pb2.SideResponse.FromString(data)
            except Exception:  # DecodeError's class differs between protobuf's implementations
                raise ConnectionLostError("the daemon sent something else than a SideResponse") from None
            if response.id != request_id:
                raise ConnectionLostError(f"reply {response.id} on the side socket, expected {request_id}")
            if response.WhichOneof("body") == "error":
                raise KvtierError.from_proto(response.error)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return SideReply(response, fds)

    def close(self) -> None:
        """Closes the socket, which ends the session. Safe to call twice."""
        self._socket.close()


def _why(address: Address, error: OSError) -> str:
    found = look(address.socket)
    if found.reach is not Reach.LISTENS:
        return found.text
    side = explain(address.side_socket, error)
    hint = (
        "; in a container, mount the sockets' folder, not the one file" if side.reach is Reach.MISSING else ""
    )
    return f"{side.text}, although its daemon listens at {address.socket}{hint}"


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % FD_BYTES])
    return fds.tolist()


def call_blocking(
    side: SideSocket, call: SideCall, interrupt: int, keep_alive: Callable[[], float] = lambda: math.inf
) -> SideReply:
    """Performs one exchange. Raises as `try_receive` does, and ConnectionLostError at its deadline and when
    `interrupt` is readable.

    While it waits it calls `keep_alive`, each time after as many seconds as the call before returned.
    """
    deadline_s = time.monotonic() + call.timeout_s
    request = side.prepare(call)
    while not side.try_send(request, call.fds):
        _wait(side, select.POLLOUT, interrupt, deadline_s, keep_alive)
    while (reply := side.try_receive(request.id)) is None:
        _wait(side, select.POLLIN, interrupt, deadline_s, keep_alive)
    return reply


def _wait(
    side: SideSocket, mask: int, interrupt: int, deadline_s: float, keep_alive: Callable[[], float]
) -> None:
    """Waits until the socket is ready, or `keep_alive` is to be called again."""
    poll = select.poll()
    poll.register(side, mask)
    poll.register(interrupt, select.POLLIN)
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise ConnectionLostError("the daemon does not answer on the side socket")
    ready = poll.poll(math.ceil(min(remaining_s, keep_alive()) * 1_000))
    if any(fd == interrupt for fd, _ in ready):
        raise ConnectionLostError("the client is closing")
