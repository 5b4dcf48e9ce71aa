"""A packet channel for the event loop."""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtierd.workers.channel.packets import (
    PACKET_BYTES_MAX,
    TRANSIENT_ERRNOS,
    PacketError,
    PacketReader,
    check_packet,
    close_fds,
    prepare,
    send_packet,
)

__all__ = ["PACKET_BYTES_MAX", "PEER_CLOSED", "PacketChannel"]

PEER_CLOSED = "the peer closed the connection"
"""The reason of a channel whose peer closed it, or died."""

_PACKETS_PER_TURN = 64
"""Packets that are read before other callbacks of the loop get their turn, so that one busy peer does not
starve the others."""

_RETRY_S = 0.005
_RETRIES_MAX = 400


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
