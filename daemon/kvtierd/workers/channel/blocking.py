"""The blocking form of the packet channel, for threads of a worker."""

import select
import socket
import time
from collections.abc import Sequence

from kvtierd.workers.channel.packets import TRANSIENT_ERRNOS, PacketReader, check_packet, prepare, send_packet

_RETRY_S = 0.005
_RETRIES_MAX = 400


class ChannelEndedError(Exception):
    """The peer is gone, so nothing that is sent can arrive."""


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
