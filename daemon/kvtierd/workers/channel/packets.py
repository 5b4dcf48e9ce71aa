"""Packets with file descriptors over a Unix SOCK_SEQPACKET socket: what both kinds of channel share.

One message is one packet. A packet is never empty, because an empty one looks like the end of the connection.
"""

import array
import errno
import os
import socket
from collections.abc import Iterable, Sequence

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


class PacketError(Exception):
    """What arrived is not one of our packets, so the connection cannot be used any longer."""


class ProtocolError(Exception):
    """The front sent a packet that no version of it sends. A worker ends instead of guessing what it
    means."""


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
