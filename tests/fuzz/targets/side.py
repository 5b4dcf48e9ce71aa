"""A side connection: any packets, with any descriptors. What the front takes, the worker takes as well, and
no descriptor is left open."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import functools
import mmap
import os
import socket
from collections.abc import Sequence
from typing import Any

from kvtier.v1 import side_pb2, types_pb2
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import SessionId
from kvtierd.rpc.connections import Connection
from kvtierd.rpc.hello import greeting_of
from kvtierd.rpc.side import _SideConnection, _Transit
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.copy.cpu import CpuDevice
from kvtierd.workers.copy.sessions import MappedSession

from tests.fuzz.front import Front, run_stepped
from tests.fuzz.messages import edited
from tests.fuzz.source import Source
from tests.fuzz.target import Target
from tests.fuzz.targets.hello import REFUSAL_BYTES_MAX, hello

PACKETS_MAX = 24
MEMFD_BYTES = 64 << 10
GPU = "GPU-0000beef-0000-0000-0000-000000000001"
DESCRIPTORS_MAX = 200
PATIENCE = 200
"""Turns of the event loop until a packet must have been answered."""
SHRINK, GROW, WRITE = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE


def _memfd(seals: int, *, size_bytes: int = MEMFD_BYTES, sparse: bool = False) -> int:
    fd = os.memfd_create("kvtier-fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    if not sparse and size_bytes:
        os.posix_fallocate(fd, 0, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@functools.cache
def _descriptors() -> Sequence[int]:
    """One of each kind. The first is the one that is meant."""
    good = _memfd(SHRINK)
    fds = [
        good,
        good,
        _memfd(0),
        _memfd(SHRINK, sparse=True),
        _memfd(SHRINK, size_bytes=0),
        _memfd(SHRINK, size_bytes=4097),
        _memfd(SHRINK | WRITE),
        _memfd(SHRINK | GROW),
        _memfd(SHRINK, size_bytes=1 << 40, sparse=True),
        os.open(f"/proc/self/fd/{good}", os.O_RDONLY | os.O_CLOEXEC),
        *os.pipe(),
        os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC),
        os.open("/proc/self", os.O_RDONLY | os.O_CLOEXEC),
        os.eventfd(0),
        *(each.detach() for each in socket.socketpair()),
    ]
    return fds


def _map(session: MappedSession, registration: int, fd: int | None, message: wire.MapMemory) -> None:
    """As a copy worker on the CPU maps what the front has accepted. It may refuse for want of address space,
    and for nothing else."""
    if fd is None:
        return
    device = CpuDevice(mmap.mmap(-1, mmap.PAGESIZE), None, None)  # type: ignore[arg-type]
    try:
        session.map_memory(device, [fd], message)
    except Refusal as refusal:
        no_room = os.strerror(errno.ENOMEM) in refusal.message
        assert no_room, f"the front has accepted what the worker refuses: {refusal}"
        raise


class _Client:
    """The other end of the connection, which the input directs."""

    def __init__(self, sock: socket.socket, source: Source, groups: int) -> None:
        self._sock = sock
        self._source = source
        self._groups = groups
        self._number = 0
        self._plan = ["open", "register_words", "register_memory", "open_index", "unregister_memory"]

    def _request(self) -> side_pb2.SideRequest:
        source = self._source
        request = side_pb2.SideRequest(id=self._number)
        kind = source.choice((self._plan[self._number % len(self._plan)], *self._plan, "add_chunks"))
        self._number += 1
        message: Any = getattr(request, kind)
        message.SetInParent()
        if kind == "open":
            message.protocol_versions.append(1)
        elif kind == "register_words":
            message.doorbells, message.parts = 2, 8
            message.device = source.choice(("", "", "cpu", GPU))
        elif kind == "register_memory":
            self._memory(message)
        elif kind == "unregister_memory":
            message.registration_id = 1
        elif kind == "add_chunks":
            message.bytes.extend([4096] * source.below(4))
        if source.one_in(3):
            edited(request, source)
        return request

    def _memory(self, message: side_pb2.RegisterMemory) -> None:
        message.mapping_bytes = MEMFD_BYTES
        for group in range(self._groups):
            place = message.groups.add(group=group, num_blocks=4)
            for plane in range(2):
                base = (2 * group + plane) * 4 * 2048
                place.planes.add(base_offset=base, block_stride_bytes=2048)
        if self._source.one_in(4):
            ipc = side_pb2.CudaIpc(handle=bytes(64))
            message.ranges.add(bytes=MEMFD_BYTES, ipc=ipc)
        elif self._source.one_in(4):
            message.ranges.add(bytes=MEMFD_BYTES, chunks=side_pb2.CudaChunks(count=self._source.below(3)))

    def _fds(self, request: side_pb2.SideRequest) -> list[int]:
        source = self._source
        count = int(request.HasField("register_words"))
        if request.HasField("register_memory"):
            count = int(not request.register_memory.ranges)
        if request.HasField("add_chunks"):
            count = min(len(request.add_chunks.bytes), 64)
        if source.one_in(8):
            count = source.choice((0, 1, 2, 64))
        fds = _descriptors()
        return [fds[0] if source.below(3) else source.choice(fds) for _ in range(count)]

    def send(self) -> None:
        """Sends a packet; nothing if the connection is closed, or full."""
        request = self._request()
        raw = self._source.take(40) if self._source.one_in(24) else request.SerializeToString()
        try:
            socket.send_fds(self._sock, [raw or b"\0"], self._fds(request))
        except OSError as error:
            assert error.errno in (errno.EPIPE, errno.ECONNRESET, errno.EAGAIN, errno.EMSGSIZE), error

    def receive(self) -> side_pb2.SideResponse | None:
        """An answer, if there is one."""
        try:
            packet, fds, _, _ = socket.recv_fds(self._sock, 1 << 20, 4)
        except (BlockingIOError, ConnectionResetError):
            return None
        if not packet:
            return None  # the daemon has closed the connection
        for fd in fds:
            os.close(fd)
        response = side_pb2.SideResponse.FromString(packet)
        if response.HasField("error"):
            assert response.error.message
            assert response.error.reason in types_pb2.Reason.values()
            assert response.error.reason != types_pb2.REASON_INTERNAL, response.error
            assert response.ByteSize() <= REFUSAL_BYTES_MAX
        return response


def _attach(front: Front, connection: Connection, source: Source) -> int:
    """Says Hello, or does not. Returns how many groups it named."""
    if source.one_in(8):
        return 2
    message = hello()
    if source.flag():
        del message.groups[1:]
    if source.one_in(4):
        message.role = types_pb2.ROLE_SCHEDULER
        del message.groups[:]
    greeting = greeting_of(message, SessionId(connection.id), connection.peer)
    front.connections.attach(connection, greeting, lambda event: None)
    return len(message.groups)


def run(data: bytes) -> None:
    source = Source(data)
    _descriptors()
    before = len(os.listdir("/proc/self/fd"))

    async def main() -> None:
        front = Front()
        front.workers.map_memory_by = _map
        connection = front.connections.open(front.peer())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        theirs.setblocking(False)
        groups = _attach(front, connection, source)
        transit = _Transit(DESCRIPTORS_MAX)
        _SideConnection(theirs, connection, front.connections, front.cache, transit)
        client = _Client(ours, source, groups)
        for _ in range(PACKETS_MAX):
            if source.is_empty or connection.ended:
                break
            at_once = 1 if source.below(8) else source.below(12)
            for _ in range(at_once):
                client.send()
            await _answers(client, connection, at_once)
            front.check()
        front.connections.end(connection, Refusal(Reason.EPOCH_ENDED, "the end"))
        for _ in range(8):
            await asyncio.sleep(0)
        ours.close()
        front.check_empty()
        assert transit.count == 0, "descriptors in transit are not counted back"

    run_stepped(main)
    assert len(os.listdir("/proc/self/fd")) <= before, "a descriptor was left open"


async def _answers(client: _Client, connection: Connection, wanted: int) -> None:
    """Each packet gets one answer, unless the connection is ended."""
    for _ in range(PATIENCE):
        await asyncio.sleep(0)
        while client.receive() is not None:
            wanted -= 1
        if wanted <= 0 or connection.ended:
            return
    raise AssertionError(f"{wanted} packets were not answered")


TARGET = Target(
    run,
    ("kvtierd.rpc.side", "kvtierd.rpc.memory_check", "kvtierd.cache.mappings", "kvtierd.cache.pages"),
    bytes_max=500,
)
