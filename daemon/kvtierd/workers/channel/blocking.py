"""The blocking twin of the packet channel, for threads of a copy worker."""

import select
import socket
import time
from collections.abc import Sequence

from kvtierd.workers.channel.packets import TRANSIENT_ERRNOS, PacketReader, check_packet, prepare, send_packet

_RETRY_S = 0.005
_RETRIES_MAX = 400


class ChannelEndedError(Exception):
    """The peer is gone: nothing that is sent can arrive."""


class BlockingPacketChannel:
    """One end of a SOCK_SEQPACKET connection, which it owns. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        """ValueError, and the socket left open, if it cannot carry our packets."""
        prepare(sock)
        sock.setblocking(True)
        self._sock = sock
        self._reader = PacketReader(sock)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """True if `receive` would not block, False if nothing came in that time."""
        return bool(self._poll.poll(timeout_s * 1000))

    def receive(self) -> tuple[bytes, list[int]] | None:
        """As `PacketReader.receive`; blocks while nothing is there."""
        return self._reader.receive()

    def send(self, packet: bytes, fds: Sequence[int] = ()) -> None:
        """Sends one packet; blocks while the peer does not read. Raises ChannelEndedError once it is gone,
        and OSError if the kernel has no room for the packet for seconds: it is lost then, and the peer lives.

        A packet goes out whole or not at all, so threads need no lock.
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
