"""A client made of generated stubs, sockets and numpy: what is tested is the contract itself."""

import array
import fcntl
import itertools
import mmap
import os
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from kvtier.v1 import cache_pb2, cache_pb2_grpc, side_pb2, types_pb2
from kvtier_kernels import SharedWords

from tests.support.process import readable

F_ADD_SEALS = 1033
F_SEAL_SHRINK = 0x0002
DEADLINE_S = 30.0
DOORBELLS = 4
PARTS = 64


class Refused(Exception):
    """The daemon said no, with this error."""

    def __init__(self, error: types_pb2.Error) -> None:
        super().__init__(
            f"{types_pb2.Reason.Name(error.reason)} [{error.field}={error.value}]: {error.message}"
        )
        self.error = error

    @property
    def reason(self) -> str:
        return types_pb2.Reason.Name(self.error.reason).removeprefix("REASON_")


class SideSocket:
    """One side connection."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(str(path))
        self._ids = itertools.count(1)

    def call(self, fds: Sequence[int] = (), **body: Any) -> tuple[side_pb2.SideResponse, list[int]]:
        """One request and its answer, with the descriptors that came along. Raises Refused."""
        request = side_pb2.SideRequest(id=next(self._ids), **body)
        self.send(request.SerializeToString(), fds)
        response, received = self.receive()
        assert response.id == request.id
        if response.HasField("error"):
            raise Refused(response.error)
        return response, received

    def send(self, packet: bytes, fds: Sequence[int] = ()) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([packet], ancillary)

    def receive(self) -> tuple[side_pb2.SideResponse, list[int]]:
        packet, fds, _, _ = socket.recv_fds(self.socket, 65_536, 8)
        if not packet:
            raise ConnectionError("the daemon closed the side connection")
        return side_pb2.SideResponse.FromString(packet), list(fds)

    def is_closed(self) -> bool:
        """True once the daemon has closed it."""
        ready = readable(self.socket.fileno(), 0)
        return bool(ready) and self.socket.recv(1, socket.MSG_PEEK) == b""

    def open(self) -> bytes:
        """The token."""
        return self.call(open=side_pb2.SideOpen(protocol_versions=[1]))[0].opened.token

    def close(self) -> None:
        self.socket.close()


class AttachStream:
    """One Attach call: requests are answered by id, everything else lands in `events`."""

    def __init__(self, stub: cache_pb2_grpc.CacheStub) -> None:
        self._outgoing: queue.Queue[cache_pb2.AttachRequest | None] = queue.Queue()
        self._call = stub.Attach(iter(self._requests()), timeout=600)
        self._ids = itertools.count(1)
        self._replies: dict[int, queue.Queue[cache_pb2.AttachResponse]] = {}
        self.events: queue.Queue[cache_pb2.AttachResponse] = queue.Queue()
        self.messages = 0
        """Received, each batch as one."""
        self.batches = 0
        self.ended = threading.Event()
        self.status: grpc.StatusCode | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _requests(self) -> Iterator[cache_pb2.AttachRequest]:
        while (request := self._outgoing.get()) is not None:
            yield request

    def _read(self) -> None:
        try:
            for message in self._call:
                self.messages += 1
                self.batches += message.HasField("batch")
                for response in message.batch.responses if message.HasField("batch") else [message]:
                    waiting = self._replies.get(response.id) if response.id else None
                    (waiting or self.events).put(response)
        except grpc.RpcError:
            pass
        self.status = self._call.code()
        self.ended.set()

    def post(self, **body: Any) -> int:
        """Sends a request and does not wait; its id."""
        request = cache_pb2.AttachRequest(id=next(self._ids), **body)
        self._replies[request.id] = queue.Queue()
        self._outgoing.put(request)
        return request.id

    def post_batch(self, *bodies: dict[str, Any]) -> list[int]:
        """Sends several requests in one message; their ids."""
        requests = [cache_pb2.AttachRequest(id=next(self._ids), **body) for body in bodies]
        for request in requests:
            self._replies[request.id] = queue.Queue()
        self.post_plain(batch=cache_pb2.RequestBatch(requests=requests))
        return [request.id for request in requests]

    def post_plain(self, **fields: Any) -> None:
        """Sends a message as it is: nobody waits for its answer."""
        self._outgoing.put(cache_pb2.AttachRequest(**fields))

    def answer(self, request: int) -> cache_pb2.AttachResponse:
        """The answer to a posted request. Raises Refused."""
        response = self._replies[request].get(timeout=DEADLINE_S)
        del self._replies[request]
        if response.HasField("error"):
            raise Refused(response.error)
        return response

    def call(self, **body: Any) -> cache_pb2.AttachResponse:
        return self.answer(self.post(**body))

    def event(self, kind: str) -> Any:
        """The next event of this kind; others before it are passed over."""
        while True:
            response = self.events.get(timeout=DEADLINE_S)
            if response.WhichOneof("body") == kind:
                return getattr(response, kind)

    def goodbye(self) -> str:
        """The reason in Goodbye, whatever comes before it."""
        while True:
            response = self.events.get(timeout=DEADLINE_S)
            if response.HasField("goodbye"):
                return types_pb2.Reason.Name(response.goodbye.why.reason).removeprefix("REASON_")

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()
        self._reader.join(DEADLINE_S)


def memfd(size_bytes: int, *, seal: bool = True, sparse: bool = False) -> int:
    fd = os.memfd_create("kvtier-test-client", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    if size_bytes and not sparse:
        os.posix_fallocate(fd, 0, size_bytes)
    if seal:
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)
    return fd


class RawSession:
    """One session: side connection, stream, words, and a cache of `num_blocks` blocks of a few planes."""

    def __init__(
        self, socket_path: Path, *, fragments: Sequence[int] = (4096, 8192), num_blocks: int = 32
    ) -> None:
        """Opens the side connection and the channel; nothing else."""
        self.device = ""
        self.fragments = fragments
        self.num_blocks = num_blocks
        self.side = SideSocket(socket_path.with_name("kvtierd.side.sock"))
        self.channel = grpc.insecure_channel(
            f"unix:{socket_path}",
            options=[
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", -1),
                (
                    "grpc.http2.bdp_probe",
                    0,
                ),  # a window that does not grow: what is not read is soon held back
            ],
        )
        self.stub = cache_pb2_grpc.CacheStub(self.channel)
        self.token = b""
        self.epoch = 0
        self.stream: AttachStream | None = None
        self._tickets = itertools.count(1)
        self._close: list[Any] = [self.channel.close, self.side.close]

    # --- attaching ---

    @property
    def attached(self) -> AttachStream:
        assert self.stream is not None
        return self.stream

    def hello(self, **changes: Any) -> cache_pb2.Hello:
        fields: dict[str, Any] = {
            "protocol_versions": [1],
            "token": self.token,
            "instance": "engine",
            "role": types_pb2.ROLE_SCHEDULER_AND_RANK,
            "world_size": 1,
            "namespace": types_pb2.Namespace(
                model="tiny", kv_dtype="uint8", hash_scheme="test:1", hash_bytes=32
            ),
            "groups": [
                types_pb2.Group(
                    kind=types_pb2.GROUP_KIND_FULL_ATTENTION,
                    block_tokens=16,
                    planes=[types_pb2.PlaneGeometry(fragment_bytes=size) for size in self.fragments],
                )
            ],
            "client": "raw test client",
        }
        return cache_pb2.Hello(**(fields | changes))

    def attach(self, **changes: Any) -> cache_pb2.Welcome:
        """Side connection, stream, Hello. Raises Refused."""
        if not self.token:
            self.token = self.side.open()
        welcome = self.open_stream().call(hello=self.hello(**changes)).welcome
        self.epoch = welcome.epoch
        return welcome

    def open_stream(self) -> AttachStream:
        """A stream on which nothing has been said."""
        stream = AttachStream(self.stub)
        self._close.insert(0, stream.close)
        self.stream = stream
        return stream

    def words_request(self) -> side_pb2.RegisterWords:
        return side_pb2.RegisterWords(doorbells=DOORBELLS, parts=PARTS, device=self.device)

    def register_words(self) -> int:
        """A pidfd of the worker, closed with the session."""
        size = (DOORBELLS + PARTS) * 8
        fd = memfd(size)
        mapped = mmap.mmap(fd, size)
        try:
            response, fds = self.side.call([fd], register_words=self.words_request())
        finally:
            os.close(fd)
        assert response.words_registered.worker_pid > 0
        assert len(fds) == 1
        self.words = SharedWords(mapped, DOORBELLS + PARTS)
        self.worker_pid = response.words_registered.worker_pid
        self.worker_pidfd = fds[0]
        self._close.append(lambda: os.close(fds[0]))
        return fds[0]

    def places(self) -> side_pb2.RegisterMemory:
        """Plane after plane, blocks side by side in each."""
        offset, planes = 0, []
        for size in self.fragments:
            planes.append(side_pb2.Plane(base_offset=offset, block_stride_bytes=size))
            offset += size * self.num_blocks
        group = side_pb2.GroupMemory(group=0, num_blocks=self.num_blocks, planes=planes)
        return side_pb2.RegisterMemory(mapping_bytes=offset, groups=[group])

    def register_memory(self, fd: int | None = None, *, sparse: bool = False) -> int:
        """`fd`: a memfd to share, which becomes this object's, instead of a new one."""
        request = self.places()
        request.sparse = sparse
        fd = memfd(request.mapping_bytes, sparse=sparse) if fd is None else fd
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, request.mapping_bytes), np.uint8)
        try:
            response, _ = self.side.call([fd], register_memory=request)
            self.registration = response.memory_registered.registration_id
            return self.registration
        finally:
            os.close(fd)

    def ready(self, **changes: Any) -> "RawSession":
        """Attached and registered."""
        self.attach(**changes)
        self.register_words()
        self.register_memory()
        return self

    # --- data ---

    def planes(self, memory: npt.NDArray[np.uint8] | None = None) -> list[npt.NDArray[np.uint8]]:
        """The cache, or a copy of it, one (num_blocks, fragment) array per plane."""
        found, offset = [], 0
        whole = self.memory if memory is None else memory
        for size in self.fragments:
            length = size * self.num_blocks
            found.append(whole[offset : offset + length].reshape(self.num_blocks, size))
            offset += length
        return found

    def block(self, block_id: int) -> bytes:
        return b"".join(plane[block_id].tobytes() for plane in self.planes())

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, len(self.memory), np.uint8)

    def ring(self, doorbell: int, value: int) -> None:
        self.words.ring(doorbell, value)

    # --- calls on the stream ---

    def ref(self, **changes: Any) -> cache_pb2.SessionRef:
        fields: dict[str, Any] = {"token": self.token, "epoch": self.epoch}
        return cache_pb2.SessionRef(**(fields | changes))

    def lookup_request(self, hashes: bytes, **changes: Any) -> cache_pb2.LookupRequest:
        query = cache_pb2.GroupQuery(mode=cache_pb2.LOOKUP_MODE_PREFIX, hashes=hashes)
        return cache_pb2.LookupRequest(**({"queries": [query]} | changes))

    def lookup(self, hashes: bytes, **changes: Any) -> cache_pb2.LookupResponse:
        return self.attached.call(lookup=self.lookup_request(hashes, **changes)).lookup

    def signals(self, **changes: Any) -> cache_pb2.Signals:
        ticket = changes.pop("ticket", None) or next(self._tickets)
        fields: dict[str, Any] = {"ticket": ticket, "part_word": ticket % PARTS}
        return cache_pb2.Signals(**(fields | changes))

    def store_request(
        self, hashes: bytes, block_ids: Sequence[int], **signals: Any
    ) -> cache_pb2.StoreRequest:
        return cache_pb2.StoreRequest(signals=self.signals(**signals), hashes=hashes, block_ids=block_ids)

    def load_request(
        self, lease: int, block_ids: Sequence[int], first: int = 0, **signals: Any
    ) -> cache_pb2.LoadRequest:
        return cache_pb2.LoadRequest(
            signals=self.signals(**signals), lease_id=lease, first=first, block_ids=block_ids
        )

    def wait(self, ticket: int, timeout_ms: int = 20_000) -> cache_pb2.TransferEvent:
        request = cache_pb2.WaitRequest(tickets=[ticket], timeout_ms=timeout_ms)
        return self.attached.call(wait=request).wait.transfers[0]

    def store(self, hashes: bytes, block_ids: Sequence[int], **signals: Any) -> cache_pb2.TransferEvent:
        """Stores and waits for the end."""
        request = self.store_request(hashes, block_ids, **signals)
        self.attached.call(store=request)
        return self.wait(request.signals.ticket)

    def load(self, hashes: bytes, block_ids: Sequence[int]) -> cache_pb2.TransferEvent:
        """Looks up with a lease, loads all of it, waits for the end."""
        found = self.lookup(hashes, lease=True)
        assert found.answers[0].hits == len(block_ids), found
        request = self.load_request(found.lease_id, block_ids)
        self.attached.call(load=request)
        return self.wait(request.signals.ticket)

    def close(self) -> None:
        for close in self._close:
            close()
        self._close.clear()


def hashes(count: int, seed: int = 0) -> bytes:
    """Hashes that nobody else makes."""
    return np.random.default_rng(seed).integers(0, 256, count * 32, np.uint8).tobytes()
