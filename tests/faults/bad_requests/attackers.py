"""Clients that send what is not right: by unary calls, on the session stream, and on the side socket."""

from __future__ import annotations

import itertools
import math
import os
import queue
import select
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from kvtier.v1 import admin_pb2, cache_pb2, side_pb2, types_pb2

from tests.faults.bad_requests.mutations import mutate
from tests.integration.daemon.raw import RawSession, SideSocket, hashes, memfd
from tests.support.process import readable

DEADLINE_S = 60.0
CACHE = "/kvtier.v1.Cache/"
ADMIN = "/kvtier.v1.Admin/"
MESSAGE_BYTES_MAX = 64 << 10
"""What the daemon is told; what is four times as large, gRPC itself refuses."""
IN_FLIGHT = 32
NAMESPACE = types_pb2.Namespace(model="attacker", kv_dtype="uint8", hash_scheme="test:1", hash_bytes=32)


class Attacker:
    """One session that is attached and registered, and a thousand ways to misuse it."""

    def __init__(self, path: Path, name: str, chance: Random, count: Counter[str]) -> None:
        self.chance = chance
        self.count = count
        self._side_path = path.with_name("kvtierd.side.sock")
        self.session = RawSession(path)
        self.session.ready(instance=name, namespace=NAMESPACE)
        self.session.store(hashes(8, seed=1), range(8))
        self.lease = self.session.lookup(hashes(8, seed=1), lease=True).lease_id
        self._tickets = itertools.count(100)

    def close(self) -> None:
        self.session.close()

    def requests(self) -> dict[str, Any]:
        """A right one for every call, by its name on the stream."""
        ref = self.session.ref()
        ticket = next(self._tickets)
        signals = cache_pb2.Signals(ticket=ticket, part_word=ticket % 64)
        if self.chance.random() < 0.2:
            signals.gate, signals.doorbell_value = types_pb2.GATE_DOORBELL, 1
        first = self.chance.randrange(8)
        mode = self.chance.choice((cache_pb2.LOOKUP_MODE_PREFIX, cache_pb2.LOOKUP_MODE_EXACT))
        query = cache_pb2.GroupQuery(mode=mode, hashes=hashes(8, seed=1))
        return {
            "lookup": cache_pb2.LookupRequest(session=ref, queries=[query], lease=self.chance.random() < 0.3),
            "touch": cache_pb2.TouchRequest(session=ref, queries=[query]),
            "prefetch": cache_pb2.PrefetchRequest(session=ref, queries=[query]),
            "store": cache_pb2.StoreRequest(
                session=ref, signals=signals, hashes=hashes(4, seed=ticket), block_ids=range(first, first + 4)
            ),
            "load": cache_pb2.LoadRequest(
                session=ref, signals=signals, lease_id=self.lease, block_ids=range(4), keep_lease=True
            ),
            "release": cache_pb2.ReleaseRequest(session=ref, lease_ids=[self.lease + 1000]),
            "cancel": cache_pb2.CancelRequest(session=ref, tickets=[1, 2]),
            "wait": cache_pb2.WaitRequest(session=ref, tickets=[1], timeout_ms=5),
        }

    # --- unary ---

    def unary(self, number: int) -> None:
        """So many calls, many at once."""
        running: list[Any] = []
        for _ in range(number):
            method, data = self._unary_bytes()
            send: Any = self.session.channel.unary_unary(method)
            call = send.future(data, timeout=DEADLINE_S)
            running.append((method, data, call))
            if len(running) >= IN_FLIGHT:
                self._judge(*running.pop(0))
        for method, data, call in running:
            self._judge(method, data, call)

    def _unary_bytes(self) -> tuple[str, bytes]:
        if self.chance.random() < 0.04:
            what = self.chance.choice(("Status", "Explain", "Scrub"))
            request = admin_pb2.ExplainRequest(hash=hashes(1), group=3)
            return ADMIN + what, mutate(request.SerializeToString(), self.chance)
        name, request = self.chance.choice(list(self.requests().items()))
        data = mutate(request.SerializeToString(), self.chance)
        if self.chance.random() < 0.003:
            data += (
                b"\xfa\x3f"
                + bytes([0xFF, 0xFF, 0x7F])
                + bytes(self.chance.choice((1, 5)) * MESSAGE_BYTES_MAX)
            )
        return CACHE + name.capitalize(), data

    def _judge(self, method: str, data: bytes, call: Any) -> None:
        """It is answered, or refused with a structured reason."""
        code = call.code()
        if code is grpc.StatusCode.OK:
            self.count["mutants_accepted"] += 1
            return
        where = f"{method} {code} {call.details()!r} {data[:2000].hex()}"
        if len(data) > 4 * MESSAGE_BYTES_MAX:
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, where
        else:
            found = dict(call.trailing_metadata() or ())
            assert "kvtier-error-bin" in found, f"refused without a reason: {where}"
            check_error(types_pb2.Error.FromString(found["kvtier-error-bin"]), where)
        self.count["bad_requests_on_the_wire"] += 1

    # --- the session stream ---

    def stream(self, number: int) -> None:
        """So many messages after a right Hello; fewer, if one of them ends the stream."""
        with attached(self.session) as (send, receive):
            send(cache_pb2.AttachRequest(id=1, hello=self._hello()).SerializeToString())
            assert receive().HasField("welcome")
            for _ in range(number):
                send(self._message())
            last = 2**63 + 1
            send(cache_pb2.AttachRequest(id=last, heartbeat=cache_pb2.Heartbeat()).SerializeToString())
            while (response := receive()).WhichOneof("body") not in (None, "goodbye"):
                if response.HasField("error"):
                    check_error(response.error, "on the stream")
                    self.count["bad_requests_on_the_wire"] += 1
                if response.id == last:
                    return
            assert response.HasField("goodbye"), "the stream ended without a word"
            check_error(response.goodbye.why, "goodbye")
            self.count["bad_requests_on_the_wire"] += 1

    def _hello(self) -> cache_pb2.Hello:
        side = SideSocket(self._side_path)
        self.session._close.append(side.close)
        name = f"stream-{self.chance.getrandbits(60):x}"
        return self.session.hello(token=side.open(), instance=name, namespace=NAMESPACE)

    def _message(self) -> bytes:
        name, request = self.chance.choice(list(self.requests().items()))
        request.ClearField("session")
        request = cache_pb2.AttachRequest(**{"id": self.chance.randrange(2, 10_000), name: request})
        if self.chance.random() < 0.1:
            rate = self.chance.choice((1e4, -1.0, math.nan, math.inf))
            request.heartbeat.CopyFrom(cache_pb2.Heartbeat(prefill_tokens_per_s=rate))
        return mutate(request.SerializeToString(), self.chance)

    def hello(self) -> None:
        """A stream that begins with something else than a right Hello."""
        with attached(self.session) as (send, receive):
            right = cache_pb2.AttachRequest(id=7, hello=self._hello())
            send(mutate(right.SerializeToString(), self.chance))
            send(cache_pb2.AttachRequest(id=8, heartbeat=cache_pb2.Heartbeat()).SerializeToString())
            bodies = []
            while body := (response := receive()).WhichOneof("body"):
                bodies.append(body)
                if body in ("error", "goodbye"):
                    check_error(response.error if body == "error" else response.goodbye.why, "to a Hello")
                if body == "goodbye" or response.id == 8:
                    break
            assert bodies[-1:] in (["goodbye"], ["heartbeat_ack"]), bodies
            self.count["bad_requests_on_the_wire" if bodies[-1] == "goodbye" else "mutants_accepted"] += 1


def check_error(error: types_pb2.Error, where: str) -> None:
    """It says what is wrong, and it is not the daemon's fault."""
    assert error.reason not in (types_pb2.REASON_UNSPECIFIED, types_pb2.REASON_INTERNAL), f"{error} {where}"
    assert error.message, where


Send = Callable[[bytes], None]
Receive = Callable[[], cache_pb2.AttachResponse]


@contextmanager
def attached(session: RawSession) -> Iterator[tuple[Send, Receive]]:
    """An Attach call that takes bytes; `receive` gives an empty message at its end."""
    outgoing: queue.Queue[bytes | None] = queue.Queue()
    begin: Any = session.channel.stream_stream(
        f"{CACHE}Attach", response_deserializer=cache_pb2.AttachResponse.FromString
    )
    call = begin(iter(outgoing.get, None), timeout=DEADLINE_S)

    def receive() -> cache_pb2.AttachResponse:
        try:
            response: cache_pb2.AttachResponse = next(call)
            return response
        except StopIteration:
            pass
        except grpc.RpcError:
            if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        return cache_pb2.AttachResponse()

    try:
        yield outgoing.put, receive
    finally:
        outgoing.put(None)
        call.cancel()


# --- the side socket ---


def wrong_descriptors(stack: ExitStack, chance: Random) -> list[int]:
    """What is not a sealed memfd of the right size, one or many of them."""

    def keep(fd: int) -> int:
        stack.callback(os.close, fd)
        return fd

    def pipe() -> int:
        reader, writer = os.pipe()
        keep(reader)
        return keep(writer)

    def connection() -> int:
        ours, theirs = socket.socketpair()
        stack.callback(ours.close)
        stack.callback(theirs.close)
        if chance.random() < 0.5:
            ours.shutdown(socket.SHUT_RDWR)
        return theirs.fileno()

    def read_only() -> int:
        fd = keep(memfd(1 << 20))
        return keep(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))

    kinds: list[Callable[[], int]] = [
        pipe,
        connection,
        read_only,
        lambda: keep(memfd(1 << 20, seal=False)),
        lambda: keep(memfd(1 << 40, sparse=True)),
        lambda: keep(memfd(1)),
        lambda: keep(memfd(0)),
        lambda: keep(os.open("/", os.O_RDONLY | os.O_DIRECTORY)),
        lambda: keep(os.open("/", os.O_PATH)),
        lambda: keep(os.open("/dev/zero", os.O_RDWR)),
        lambda: keep(os.open("/dev/null", os.O_RDWR)),
        lambda: keep(os.open("/proc/self/status", os.O_RDONLY)),
        lambda: keep(os.eventfd(0)),
        lambda: keep(os.pidfd_open(os.getpid())),
    ]
    return [chance.choice(kinds)() for _ in range(chance.choice((1, 1, 1, 1, 2, 3, 64, 65, 200)))]


class SideAttacker:
    """One side connection, attached or not, that sends packets until it is closed or a number is reached."""

    def __init__(self, path: Path, chance: Random, count: Counter[str]) -> None:
        self._path = path
        self._chance = chance
        self._count = count
        self._ids = itertools.count(1)

    def run(self, number: int) -> None:
        """Ends with its connection, and all that it has opened."""
        chance = self._chance
        with ExitStack() as stack:
            session = RawSession(self._path)
            stack.callback(session.close)
            state = chance.choice((0, 1, 2, 3, 3, 3))
            if state > 1:
                session.attach(instance=f"side-{chance.getrandbits(60):x}", namespace=NAMESPACE)
            elif state == 1:
                session.token = session.side.open()
            if state > 2:
                session.register_words()
            for _ in range(number):
                with ExitStack() as sent:
                    if not self._send(session, sent):
                        return

    def _requests(self, session: RawSession) -> list[side_pb2.SideRequest]:
        number = next(self._ids)
        return [
            side_pb2.SideRequest(id=number, open=side_pb2.SideOpen(protocol_versions=[1])),
            side_pb2.SideRequest(id=number, register_words=session.words_request()),
            side_pb2.SideRequest(id=number, register_memory=session.places()),
            side_pb2.SideRequest(id=number, unregister_memory=side_pb2.UnregisterMemory(registration_id=1)),
            side_pb2.SideRequest(id=number, add_chunks=side_pb2.AddChunks(bytes=[4096, 4096])),
        ]

    def _send(self, session: RawSession, sent: ExitStack) -> bool:
        """One packet, and its answer; False if there will be no more."""
        chance = self._chance
        request = chance.choice(self._requests(session))
        data = request.SerializeToString()
        dice = chance.random()
        fds: list[int] = []
        if dice < 0.5:
            data = mutate(data, chance) or b"\0"
        elif dice < 0.55:
            data = chance.randbytes(chance.choice((1, 100, 5_000, 150_000, 200_000)))
        if dice > 0.4 or chance.random() < 0.3:
            fds = wrong_descriptors(sent, chance)
        try:
            session.side.send(data, fds)
        except OSError:  # closed, or more than the kernel takes
            return False
        ready = readable(session.side.socket.fileno(), DEADLINE_S)
        assert ready, f"no answer to {data[:2000].hex()} with {len(fds)} descriptors"
        try:
            response, received = session.side.receive()
        except (ConnectionError, DecodeError):
            self._count["bad_packets_on_the_side"] += 1
            return False
        for fd in received:
            os.close(fd)
        if response.HasField("error"):
            check_error(response.error, f"on the side socket, {data[:2000].hex()}")
            self._count["bad_packets_on_the_side"] += 1
        else:
            self._count["mutants_accepted"] += 1
        return True


def flood(path: Path) -> None:
    """A client that sends and never reads is dropped."""
    side = SideSocket(path)
    try:
        packet = side_pb2.SideRequest(id=1, open=side_pb2.SideOpen(protocol_versions=[1])).SerializeToString()
        side.socket.setblocking(False)
        for _ in range(10_000):
            try:
                side.send(packet)
            except BlockingIOError:
                select.select([], [side.socket], [], 0.05)
            except OSError:
                return
        raise AssertionError("it may send for ever")
    finally:
        side.close()
