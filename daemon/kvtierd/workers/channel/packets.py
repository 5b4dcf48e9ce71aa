"""Packets with file descriptors over a Unix SOCK_SEQPACKET socket, and both kinds of ends that it has: one on
an event loop, for the daemon's front, and a blocking one, for the threads of a worker.

One message is one packet. A packet is never empty, because an empty one looks like the end of the connection.
"""

import array
import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

PACKET_BYTES_MAX = 192 * 1024
"""The largest packet. The largest message is a part of 8,192 blocks: 17 bytes for each, 139,264 in all, and a
few fields. A socket with the kernel's default send buffer (212,992 bytes) takes packets of up to 212,960
bytes."""

FDS_MAX = 64
"""The most descriptors in one packet."""

SEND_BUFFER_BYTES = 4 * 1024 * 1024
"""The size that is asked for. The kernel grants at most net.core.wmem_max, and does not report that."""

_SEND_OVERHEAD_BYTES = 32
_FD_BYTES = array.array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(FDS_MAX * _FD_BYTES)

TRANSIENT_ERRNOS = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})
"""The kernel has no room for this packet just now; the same call may succeed a little later."""

PEER_CLOSED = "the peer closed the connection"
"""The reason of a channel whose peer closed it, or died."""

_PACKETS_PER_TURN = 64
"""Packets that are read before other callbacks of the loop get their turn, so that one busy peer does not
starve the others."""

_RETRY_S = 0.005
_RETRIES_MAX = 400


class PacketError(Exception):
    """What arrived is not one of our packets, so the connection cannot be used any longer."""


class ProtocolError(Exception):
    """The front sent a packet that no version of it sends. A worker ends instead of guessing what it
    means."""


class ChannelEndedError(Exception):
    """The peer is gone, so nothing that is sent can arrive."""


def packet_socketpair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, not inheritable, with room for the largest packet. The caller closes both."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        for end in ends:
            prepare(end)
    except BaseException:
        for end in ends:
            end.close()
        raise
    return ends


def prepare(sock: socket.socket) -> None:
    """Gives a socket room for many of the largest packets. Raises ValueError if it has not even room for
    one."""
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
        raise ValueError(f"a packet channel needs a Unix SOCK_SEQPACKET socket, not {sock!r}")
    if send_buffer_bytes(sock) < SEND_BUFFER_BYTES:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if send_buffer_bytes(sock) - _SEND_OVERHEAD_BYTES < PACKET_BYTES_MAX:
        raise ValueError(
            f"the send buffer of a Unix socket is {send_buffer_bytes(sock)} bytes, too small for a packet of "
            f"{PACKET_BYTES_MAX}: raise net.core.wmem_max to 212992 or more"
        )


def send_buffer_bytes(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def check_packet(packet: bytes, fds: Sequence[int]) -> None:
    """Raises ValueError unless these can be sent as one packet."""
    if not 0 < len(packet) <= PACKET_BYTES_MAX:
        raise ValueError(f"a packet holds 1 to {PACKET_BYTES_MAX} bytes, not {len(packet)}")
    if len(fds) > FDS_MAX:
        raise ValueError(f"a packet carries at most {FDS_MAX} descriptors, not {len(fds)}")


def send_packet(sock: socket.socket, packet: bytes, fds: Sequence[int]) -> None:
    """Sends one packet completely, or raises OSError. The descriptors stay the caller's."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([packet], ancillary, socket.MSG_NOSIGNAL)


def close_fds(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


class PacketReader:
    """Receives from one socket into a buffer that it reuses. Not for two threads at once."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = memoryview(bytearray(PACKET_BYTES_MAX))
        self._was_reset = False

    def receive(self) -> tuple[bytes, list[int]] | None:
        """The next packet and its descriptors, which the caller has to close; None at the end.

        The descriptors are not inheritable. What the peer sent before it went away still arrives. Raises
        PacketError, with nothing left open, if the packet or its descriptors were cut off or are not ours,
        and BlockingIOError if nothing is there.
        """
        while True:
            try:
                size, ancillary, flags, _ = self._sock.recvmsg_into(
                    [self._buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except ConnectionResetError:
                # The peer went away without reading everything. The kernel reports that before its packets.
                if self._was_reset:
                    return None
                self._was_reset = True
                continue
            break
        fds, foreign = _descriptors(ancillary)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or foreign:
            close_fds(fds)
            if flags & socket.MSG_TRUNC:
                raise PacketError(f"a packet was larger than {PACKET_BYTES_MAX} bytes")
            if flags & socket.MSG_CTRUNC:
                raise PacketError(
                    f"descriptors of a packet were cut off: over {FDS_MAX}, or this process has none left"
                )
            raise PacketError("a packet carried control data other than descriptors")
        if size == 0:
            close_fds(fds)
            return None
        return bytes(self._buffer[:size]), fds


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> tuple[list[int], bool]:
    fds = array.array("i")
    foreign = False
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
        else:
            foreign = True
    return list(fds), foreign


class _Queued(NamedTuple):
    packet: bytes
    fds: tuple[int, ...]


class PacketChannel:
    """One end of a SOCK_SEQPACKET connection, on the event loop in which it was made (asyncio's own or
    uvloop's).

    `on_packet(packet, fds)` gets every packet in order, in a callback of the loop, and has to close the
    descriptors. `on_closed(reason)` is called exactly once, whichever side closed the channel, in a callback
    of the loop and never inside a method of the channel; `reason` is a sentence. The channel owns the socket.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_packet: Callable[[bytes, list[int]], None],
        on_closed: Callable[[str], None],
        *,
        queue_packets_max: int = 4_096,
        queue_bytes_max: int = 64 * 1024 * 1024,
    ) -> None:
        """Starts reading at once. Raises ValueError if the socket cannot carry our packets, and leaves it
        open."""
        import asyncio  # here: a worker, which has no event loop, is spared the 5 MiB that it takes

        prepare(sock)
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._fd = sock.fileno()
        self._reader = PacketReader(sock)
        self._on_packet = on_packet
        self._on_closed = on_closed
        self._queue: deque[_Queued] = deque()
        self._queue_bytes = 0
        self._queue_packets_max = queue_packets_max
        self._queue_bytes_max = queue_bytes_max
        self._retries = 0
        self._retry: asyncio.TimerHandle | None = None
        self._writing = False
        self.closed = False
        """True from the moment of closing, even before `on_closed` is called."""
        self._loop.add_reader(self._fd, self._readable)

    @property
    def queued(self) -> tuple[int, int]:
        """Packets and bytes that wait because the peer does not read."""
        return len(self._queue), self._queue_bytes

    def send(self, packet: bytes, fds: Sequence[int] = ()) -> bool:
        """Sends now or queues, and never blocks. Returns False if the channel is closed, including by this
        packet because the queue is full.

        The descriptors stay the caller's, and may be closed once this returns. Raises ValueError if the
        packet is empty, larger than PACKET_BYTES_MAX, or carries too many descriptors. Raises OSError, and
        queues nothing, if descriptors would have to wait and the process cannot copy them.
        """
        check_packet(packet, fds)
        if self.closed:
            return False
        if not self._queue and self._try_send(packet, fds):
            return not self.closed
        if (
            len(self._queue) >= self._queue_packets_max
            or self._queue_bytes + len(packet) > self._queue_bytes_max
        ):
            self.close(
                f"its outgoing queue is full ({len(self._queue)} packets, {self._queue_bytes} bytes): "
                "the peer does not read"
            )
            return False
        self._queue.append(_Queued(packet, tuple(_copies(fds))))
        self._queue_bytes += len(packet)
        if self._retry is None:
            self._want_writable(True)
        return True

    def drain(self) -> None:
        """Passes on every packet that has arrived. For use when the peer is known to be gone."""
        while self._read_one():
            pass

    def close(self, reason: str = "closed on this side") -> None:
        """Closes the socket and forgets what was queued. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        self._want_writable(False)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._sock.close()
        for queued in self._queue:
            close_fds(queued.fds)
        self._queue.clear()
        self._queue_bytes = 0
        self._loop.call_soon(self._on_closed, reason)

    def _readable(self) -> None:
        for _ in range(_PACKETS_PER_TURN):
            if not self._read_one():
                return

    def _read_one(self) -> bool:
        """Reads and passes on one packet. False if there is none, now or ever."""
        if self.closed:
            return False
        try:
            received = self._reader.receive()
        except (BlockingIOError, InterruptedError):
            return False
        except (PacketError, OSError) as error:
            self.close(f"receiving failed: {error}")
            return False
        if received is None:
            self.close(PEER_CLOSED)
            return False
        self._on_packet(*received)
        return True

    def _try_send(self, packet: bytes, fds: Sequence[int]) -> bool:
        """True if nothing is left to do for this packet: it is sent, or nobody is there to read it."""
        try:
            send_packet(self._sock, packet, fds)
        except (BlockingIOError, InterruptedError):
            return False
        except (BrokenPipeError, ConnectionResetError):
            # What the peer sent before it went is still there. The reader gets it, finds the end, and closes.
            return True
        except OSError as error:
            if error.errno in TRANSIENT_ERRNOS and self._retries < _RETRIES_MAX:
                self._retries += 1
                if self._retry is None:
                    self._want_writable(False)
                    self._retry = self._loop.call_later(_RETRY_S, self._retry_now)
                return False
            self.close(f"sending failed: {error}")
            return True
        self._retries = 0
        return True

    def _retry_now(self) -> None:
        self._retry = None
        self._writable()

    def _writable(self) -> None:
        while self._queue:
            packet, fds = self._queue[0]
            if not self._try_send(packet, fds):
                if self._retry is None:
                    self._want_writable(True)
                return
            if self.closed:
                return
            self._queue.popleft()
            self._queue_bytes -= len(packet)
            close_fds(fds)
        self._want_writable(False)

    def _want_writable(self, wanted: bool) -> None:
        if wanted == self._writing:
            return
        self._writing = wanted
        if wanted:
            self._loop.add_writer(self._fd, self._writable)
        else:
            self._loop.remove_writer(self._fd)


def _copies(fds: Sequence[int]) -> list[int]:
    """Copies all of the descriptors, or none and raises OSError."""
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError:
        close_fds(copies)
        raise
    return copies


class BlockingPacketChannel:
    """One end of a SOCK_SEQPACKET connection, which it owns. Any thread may send; only one receives."""

    def __init__(self, sock: socket.socket) -> None:
        """Raises ValueError if the socket cannot carry our packets, and leaves it open."""
        prepare(sock)
        sock.setblocking(True)
        self._sock = sock
        self._reader = PacketReader(sock)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """True if `receive` would not block, False if nothing came within `timeout_s`."""
        return bool(self._poll.poll(timeout_s * 1000))

    def receive(self) -> tuple[bytes, list[int]] | None:
        """As `PacketReader.receive`, but blocks while nothing is there."""
        return self._reader.receive()

    def send(self, packet: bytes, fds: Sequence[int] = ()) -> None:
        """Sends one packet, and blocks while the peer does not read. Raises ChannelEndedError once the peer
        is gone. Raises OSError if the kernel has no room for the packet for seconds: then the packet is lost,
        and the peer lives.

        A packet is sent completely or not at all, so threads need no lock.
        """
        check_packet(packet, fds)
        for retries_left in reversed(range(_RETRIES_MAX)):
            try:
                send_packet(self._sock, packet, fds)
                return
            except (BrokenPipeError, ConnectionResetError):
                raise ChannelEndedError from None
            except OSError as error:
                if error.errno not in TRANSIENT_ERRNOS or not retries_left:
                    raise
            time.sleep(_RETRY_S)

    def close(self) -> None:
        self._sock.close()
