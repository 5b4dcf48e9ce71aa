"""The side socket: it identifies callers, takes and returns descriptors, and ends a session when its process
is gone."""

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from kvtier.v1 import side_pb2

from kvtierd.cache import CPU, Cache, MappedGroup, PacketChannel
from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import RegistrationId
from kvtierd.core.stimuli import SessionRole
from kvtierd.logs import logger
from kvtierd.rpc import memory_check
from kvtierd.rpc.connections import Connection, Connections
from kvtierd.rpc.errors import to_error
from kvtierd.rpc.hello import choose_version
from kvtierd.rpc.memory_check import ranges_of
from kvtierd.rpc.peers import PeerRules

WAITING_REQUESTS_MAX = 8
"""Requests that a client may send before the first is answered; the protocol asks for one at a time."""
WAITING_DESCRIPTORS_MAX = 64
"""Descriptors that these requests may carry; one request may carry as many."""
QUEUED_REPLIES_MAX = 64
QUEUED_REPLY_BYTES_MAX = 1 << 20
"""Replies, and bytes of replies, that a client has not read yet. Beyond either limit its connection is
closed."""
ACCEPT_RETRY_S = 0.2

log = logger(__name__)


class SideServer:
    """Accepts side connections on a listening socket. Each of them is one session."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        cache: Cache,
        rules: PeerRules,
        descriptors_max: int,
    ) -> None:
        """`descriptors_max`: of all clients, sent and not dealt with yet."""
        self._listener = listener
        self._connections = connections
        self._cache = cache
        self._rules = rules
        self._transit = _Transit(descriptors_max)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Accepts no more connections. Sessions go on."""
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Most likely there are no descriptors left. Sessions that end will free some.
            log.error("a side connection cannot be accepted", error=str(error))
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(ACCEPT_RETRY_S, self._accept_again)
            return
        try:
            peer = self._rules.admit(sock)
        except (OSError, PermissionError) as error:
            log.warning("a side connection was refused", error=str(error))
            sock.close()
            return
        sock.setblocking(False)
        try:
            connection = self._connections.open(peer)
        except Refusal as refusal:
            os.close(peer.pidfd)
            response = side_pb2.SideResponse(error=to_error(refusal))
            try:
                sock.send(response.SerializeToString())
            except OSError:
                pass  # it is gone already, or does not read
            sock.close()
            return
        _SideConnection(sock, connection, self._connections, self._cache, self._transit)

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)


@dataclass(slots=True)
class _Transit:
    """Descriptors that clients have sent, and that are still open."""

    most: int
    count: int = 0


class _SideConnection:
    """One side connection. It serves one request after another."""

    def __init__(
        self,
        sock: socket.socket,
        connection: Connection,
        connections: Connections,
        cache: Cache,
        transit: _Transit,
    ) -> None:
        self._transit = transit
        self._connection = connection
        self._connections = connections
        self._cache = cache
        self._opened = False
        self._waiting_descriptors = 0
        self._requests: asyncio.Queue[tuple[bytes, list[int]]] = asyncio.Queue(WAITING_REQUESTS_MAX)
        self._channel = PacketChannel(
            sock,
            self._packet,
            self._closed,
            queue_packets_max=QUEUED_REPLIES_MAX,
            queue_bytes_max=QUEUED_REPLY_BYTES_MAX,
        )
        self._task = asyncio.create_task(self._serve())
        self._task.add_done_callback(self._served)
        connection.on_end.append(self._end)

    def _packet(self, packet: bytes, fds: list[int]) -> None:
        if self._requests.full() or self._waiting_descriptors + len(fds) > WAITING_DESCRIPTORS_MAX:
            why = "it sends on the side socket without reading replies"
        elif self._transit.count + len(fds) > self._transit.most:
            why = (
                f"clients have sent more than {self._transit.most} descriptors at once: register again later"
            )
        else:
            self._waiting_descriptors += len(fds)
            self._transit.count += len(fds)
            self._requests.put_nowait((packet, fds))
            return
        _close(fds)
        self._connections.end(self._connection, Refusal(Reason.QUEUE_FULL, why))

    def _closed(self, reason: str) -> None:
        self._connections.end(
            self._connection, Refusal(Reason.EPOCH_ENDED, f"its side connection has ended: {reason}")
        )

    def _end(self, why: Refusal) -> None:
        self._task.cancel()
        self._channel.close(why.message)
        while not self._requests.empty():
            fds = self._requests.get_nowait()[1]
            self._transit.count -= len(fds)
            _close(fds)

    async def _serve(self) -> None:
        while True:
            packet, fds = await self._requests.get()
            count = len(fds)
            self._waiting_descriptors -= count
            try:
                await self._serve_one(packet, fds)
            finally:
                self._transit.count -= count

    def _served(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a side connection failed", session=self._connection.id, exc_info=error)
            self._connections.end(
                self._connection, Refusal(Reason.INTERNAL, "its side connection failed inside the daemon")
            )

    async def _serve_one(self, packet: bytes, fds: list[int]) -> None:
        """Answers one request. Its descriptors are closed before the answer is sent."""
        self._connections.heard(self._connection)
        request = side_pb2.SideRequest()
        reply_fds: list[int] = []
        try:
            try:
                request.MergeFromString(packet)
            except DecodeError:
                raise Refusal(Reason.MALFORMED, "not a kvtier.v1.SideRequest", field="message") from None
            response = await self._respond(request, fds, reply_fds)
        except Refusal as refusal:
            response = side_pb2.SideResponse(error=to_error(refusal))
        finally:
            _close(fds)
        response.id = request.id
        try:
            self._channel.send(response.SerializeToString(), reply_fds)
        finally:
            _close(reply_fds)

    async def _respond(
        self, request: side_pb2.SideRequest, fds: list[int], reply_fds: list[int]
    ) -> side_pb2.SideResponse:
        body = request.WhichOneof("body")
        _check_descriptors(request, len(fds))
        if body == "open":
            return side_pb2.SideResponse(opened=self._open(request.open))
        if not self._opened:
            raise Refusal(Reason.NOT_ATTACHED, "the first message of a side connection is a SideOpen")
        if body == "register_words":
            pid, pidfd = await self._register_words(request.register_words, fds[0])
            reply_fds.append(pidfd)
            return side_pb2.SideResponse(words_registered=side_pb2.WordsRegistered(worker_pid=pid))
        if body == "register_memory":
            registration = await self._register_memory(request.register_memory, fds)
            return side_pb2.SideResponse(
                memory_registered=side_pb2.MemoryRegistered(registration_id=registration)
            )
        if body == "add_chunks":
            chunks = await self._add_chunks(request.add_chunks, fds)
            return side_pb2.SideResponse(chunks_added=side_pb2.ChunksAdded(chunks=chunks))
        if body == "open_index":
            reply_fds.append(self._cache.pages.open(self._connection.id, request.open_index.group))
            return side_pb2.SideResponse(index_opened=side_pb2.IndexOpened())
        if body == "unregister_memory":
            registration = RegistrationId(request.unregister_memory.registration_id)
            await self._cache.mappings.unregister_memory(self._connection.id, registration)
            return side_pb2.SideResponse(memory_unregistered=side_pb2.MemoryUnregistered())
        raise Refusal(Reason.MALFORMED, "this daemon does not know this request", field="body")

    def _open(self, request: side_pb2.SideOpen) -> side_pb2.SideOpened:
        if self._opened:
            raise Refusal(Reason.SECOND_HELLO, "a side connection is opened once: connect again")
        version = choose_version(request.protocol_versions)
        self._opened = True
        return side_pb2.SideOpened(
            protocol_version=version,
            token=self._connection.token,
            boot_nonce=self._cache.boot_nonce,
            daemon_pid=os.getpid(),
        )

    async def _register_words(self, request: side_pb2.RegisterWords, fd: int) -> tuple[int, int]:
        self._check_rank()
        device = memory_check.device_name(request.device)
        memory_check.check_words(memory_check.inspect(fd), request.doorbells, request.parts)
        return await self._cache.mappings.register_words(
            self._connection.id,
            device,
            fd,
            request.doorbells,
            request.parts,
            tag_of(self._connection.peer.tenant),
        )

    async def _add_chunks(self, request: side_pb2.AddChunks, fds: Sequence[int]) -> int:
        self._check_rank()
        memory_check.check_chunks(len(fds), request.bytes)
        return await self._cache.mappings.add_chunks(self._connection.id, fds, request.bytes)

    async def _register_memory(self, request: side_pb2.RegisterMemory, fds: Sequence[int]) -> RegistrationId:
        self._check_rank()
        device, chunks = self._cache.mappings.expected(self._connection.id)
        ranges, places, geometry = ranges_of(request), request.groups, self._connection.groups
        if (device != CPU) != bool(ranges):
            raise Refusal(
                Reason.DEVICE_MEMORY_INVALID,
                f"the words are registered for {device}: "
                + ("send its ranges, and no descriptor" if ranges == () else "send a memfd, and no ranges"),
                field="ranges",
                value=len(ranges),
            )
        if ranges:
            memory_check.check_ranges(ranges, chunks, request.mapping_bytes, places, geometry)
        else:
            found = memory_check.inspect(fds[0])
            memory_check.check_memory(found, request.mapping_bytes, places, geometry, sparse=request.sparse)
        groups = [
            _mapping(place, [size for size, _ in shape.planes])
            for place, shape in zip(places, geometry, strict=True)
        ]
        fd = fds[0] if fds else None
        return await self._cache.mappings.register_memory(
            self._connection.id, fd, request.mapping_bytes, groups, ranges
        )

    def _check_rank(self) -> None:
        greeting = self._connection.greeting
        if greeting is None:
            raise Refusal(Reason.NOT_ATTACHED, "send Hello on an Attach stream first")
        if not greeting.attach.role & SessionRole.RANK:
            raise Refusal(
                Reason.ROLE, "only a session that holds a rank registers words and memory", field="role"
            )


def _check_descriptors(request: side_pb2.SideRequest, count: int) -> None:
    """Raises Refusal unless the request came with as many descriptors as its kind needs."""
    body = request.WhichOneof("body")
    if body == "add_chunks":
        return  # one for each size; `check_chunks` compares them
    expected = 1 if body == "register_words" else 0
    if body == "register_memory" and not request.register_memory.ranges:
        expected = 1
    if count != expected:
        raise Refusal(
            Reason.MALFORMED,
            f"this request comes with {expected} descriptors",
            field="descriptors",
            value=count,
        )


def _mapping(place: side_pb2.GroupMemory, fragment_bytes: list[int]) -> MappedGroup:
    return MappedGroup(
        group=place.group,
        num_blocks=place.num_blocks,
        base_offsets=[plane.base_offset for plane in place.planes],
        block_strides=[plane.block_stride_bytes for plane in place.planes],
        fragment_bytes=fragment_bytes,
    )


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
