"""Registration step by step: what is told to the daemon, in which order, and what a refusal leads to."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvtier import KvtierError, NotExportableError, Reason, SharedBuffer
from kvtier.connection.steps import NotRegisteredError, SideCall, SideReply, Steps, Work, register, unregister
from kvtier.errors import ConnectionLostError
from kvtier.memory import ChunkPacket
from kvtier.v1 import cache_pb2, side_pb2

from tests.unit.client.peer import BLOCK_BYTES, BLOCKS, Peer

SIZE_BYTES = BLOCKS * BLOCK_BYTES
GPU = "GPU-00000000-0000-0000-0000-000000000000"


class Handles:
    """An export of so many chunks, two in a packet; or of one allocation."""

    def __init__(self, chunks: int) -> None:
        self._left = chunks
        self._count = chunks
        self.open: list[int] = []
        self.closed = False

    def next_packet(self) -> ChunkPacket | None:
        self._close()
        if not self._left:
            return None
        count = min(2, self._left)
        self._left -= count
        self.open = [os.memfd_create("kvtier-chunk") for _ in range(count)]
        return ChunkPacket([SIZE_BYTES // self._count] * count, tuple(self.open))

    def ranges(self) -> list[side_pb2.DeviceRange]:
        if self._count:
            return [
                side_pb2.DeviceRange(
                    bytes=SIZE_BYTES, chunks=side_pb2.CudaChunks(count=self._count, offset=0)
                )
            ]
        return [side_pb2.DeviceRange(bytes=SIZE_BYTES, ipc=side_pb2.CudaIpc(handle=b"h" * 64, buffer_id=3))]

    def close(self) -> None:
        self.closed = True
        self._close()

    def _close(self) -> None:
        while self.open:
            os.close(self.open.pop())


class GpuMemory:
    """Memory of a GPU, without one."""

    device = GPU
    size_bytes = SIZE_BYTES
    range_bytes = (SIZE_BYTES,)

    def __init__(self, chunks: int = 0) -> None:
        self._chunks = chunks
        self.exports: list[Handles] = []
        self.error: KvtierError | None = None

    def export(self) -> Handles:
        if self.error is not None:
            raise self.error
        self.exports.append(Handles(self._chunks))
        return self.exports[-1]

    def stream_doorbells(self, ring: object) -> Any:
        raise NotImplementedError


class Bells:
    """Stream doorbells that note what is exposed."""

    mode = "test"

    def __init__(self) -> None:
        self.exposed: list[int] = []

    def expose(self, buffer: SharedBuffer, size_bytes: int) -> int | None:
        self.exposed.append(size_bytes)
        buffer.keep_mapped()
        return int(buffer.array.ctypes.data)

    def ring_on(self, stream: Any, address: int | None, doorbell: int, value: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Daemon:
    """Answers requests, and remembers them."""

    def __init__(self) -> None:
        self.requests: list[side_pb2.SideRequest] = []
        self.fds: list[int] = []
        self.worker = os.getpid()
        self.refuse: dict[str, list[Reason]] = {}
        self.before: Callable[[str], None] = lambda body: None

    @property
    def bodies(self) -> list[str]:
        return [request.WhichOneof("body") or "" for request in self.requests]

    def perform(self, steps: Steps) -> None:
        """As a shell does it."""
        result, error = None, None
        while True:
            try:
                step = steps.send(result) if error is None else steps.throw(error)
            except StopIteration:
                return
            result, error = None, None
            try:
                if isinstance(step, SideCall):
                    result = self._answer(step)
                else:
                    assert isinstance(step, Work)
                    result = step.call()
            except Exception as caught:
                error = caught

    def _answer(self, call: SideCall) -> SideReply:
        body = call.request.WhichOneof("body") or ""
        self.requests.append(call.request)
        self.fds.append(len(call.fds))
        for fd in call.fds:
            os.fstat(fd)
        self.before(body)
        if self.refuse.get(body):
            raise KvtierError(self.refuse[body].pop(0), "no")
        match body:
            case "register_words":
                words = side_pb2.WordsRegistered(worker_pid=self.worker)
                pidfd = os.pidfd_open(self.worker)
                return SideReply(side_pb2.SideResponse(words_registered=words), [pidfd])
            case "add_chunks":
                return SideReply(side_pb2.SideResponse(chunks_added=side_pb2.ChunksAdded()), [])
            case "register_memory":
                registered = side_pb2.MemoryRegistered(registration_id=41)
                return SideReply(side_pb2.SideResponse(memory_registered=registered), [])
            case _:
                assert body == "unregister_memory"
                gone = side_pb2.MemoryUnregistered()
                return SideReply(side_pb2.SideResponse(memory_unregistered=gone), [])


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.connection.steps.REGISTER_RETRY_S", 0.0)


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


def open_chunks() -> int:
    """Descriptors of chunks that this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:kvtier-chunk")
        except FileNotFoundError:
            pass  # the one by which the folder was read
    return count


@pytest.fixture
def closes_all() -> Iterator[None]:
    """No descriptor of a chunk is left over."""
    assert open_chunks() == 0
    yield
    assert open_chunks() == 0


@pytest.fixture
def attached(make_peer: Callable[..., Peer]) -> Peer:
    """Without anything registered; its memory was taken back."""
    peer = make_peer()
    peer.welcome()
    peer.session.memory.release()
    peer.session.memory.unregistered()
    return peer


def give(peer: Peer, memory: GpuMemory) -> GpuMemory:
    peer.session.memory.give(memory)
    return memory


# --- memory of a GPU ---


def test_an_allocation_goes_as_one_handle_without_descriptors(attached: Peer, daemon: Daemon) -> None:
    memory = give(attached, GpuMemory())
    daemon.perform(register(attached.session, None))
    assert daemon.bodies == ["register_words", "register_memory"]
    assert daemon.fds == [1, 0]
    words, place = daemon.requests[0].register_words, daemon.requests[1].register_memory
    assert words.device == GPU
    assert [part.ipc.buffer_id for part in place.ranges] == [3]
    assert place.mapping_bytes == SIZE_BYTES
    assert attached.session.memory.registration == 41
    assert not attached.session.memory.wants_registration
    assert memory.exports[0].closed


@pytest.mark.usefixtures("closes_all")
def test_chunks_go_packet_by_packet_after_the_words_and_before_the_memory(
    attached: Peer, daemon: Daemon
) -> None:
    memory = give(attached, GpuMemory(chunks=5))
    most: list[int] = []
    daemon.before = lambda body: most.append(open_chunks())
    daemon.perform(register(attached.session, None))
    assert daemon.bodies == ["register_words", *["add_chunks"] * 3, "register_memory"]
    assert daemon.fds == [1, 2, 2, 1, 0]
    assert [len(request.add_chunks.bytes) for request in daemon.requests[1:4]] == [2, 2, 1]
    assert max(most) == 2, "those of the packet before are closed"
    assert memory.exports[0].closed


def test_each_registration_exports_anew(attached: Peer, daemon: Daemon) -> None:
    memory = give(attached, GpuMemory())
    for _ in range(2):
        daemon.perform(register(attached.session, None))
        lose_worker(attached)
    assert len(memory.exports) == 2


def lose_worker(peer: Peer) -> None:
    """The daemon asks for another registration."""
    peer.say(instance=cache_pb2.InstanceEvent(missing_ranks=[0]))
    peer.say(instance=cache_pb2.InstanceEvent(missing_ranks=[0], reregister_ranks=[0]))


def test_doorbells_are_exposed_when_all_else_has_worked(attached: Peer, daemon: Daemon) -> None:
    give(attached, GpuMemory())
    bells = Bells()
    daemon.refuse = {"register_words": [Reason.WORKER_UNAVAILABLE], "register_memory": [Reason.MALFORMED]}
    for expected in (NotRegisteredError, KvtierError):
        with pytest.raises(expected):
            daemon.perform(register(attached.session, bells))
    assert bells.exposed == []
    daemon.perform(register(attached.session, bells))
    assert bells.exposed == [attached.session.spec.doorbells * 8]
    assert attached.session.words.streams.writable


def test_memory_that_is_taken_back_at_the_last_moment_is_not_registered(
    attached: Peer, daemon: Daemon
) -> None:
    give(attached, GpuMemory())
    steps = register(attached.session, None)
    attached.session.memory.release()
    daemon.perform(steps)
    daemon.perform(unregister(attached.session))
    assert daemon.requests == []
    assert attached.session.memory.released


# --- refusals ---


def test_what_this_process_cannot_export_the_daemon_does_not_hear_of(attached: Peer, daemon: Daemon) -> None:
    memory = give(attached, GpuMemory())
    memory.error = NotExportableError("change this")
    with pytest.raises(NotRegisteredError) as raised:
        daemon.perform(register(attached.session, None))
    assert raised.value.lasting
    assert daemon.requests == []
    assert "change this" in attached.session.status().why
    memory.error = None
    daemon.perform(register(attached.session, None))
    assert attached.session.status().why == ""


@pytest.mark.parametrize(
    ("reason", "lasting"),
    [
        (Reason.WORKER_UNAVAILABLE, False),
        (Reason.QUEUE_FULL, False),
        (Reason.DEVICE_UNKNOWN, True),
        (Reason.DEVICE_UNAVAILABLE, True),
        (Reason.DEVICE_OUT_OF_MEMORY, True),
    ],
)
def test_a_device_that_cannot_serve_is_asked_again_in_the_same_session(
    attached: Peer, daemon: Daemon, reason: Reason, lasting: bool
) -> None:
    give(attached, GpuMemory())
    daemon.refuse = {"register_words": [reason]}
    with pytest.raises(NotRegisteredError) as raised:
        daemon.perform(register(attached.session, None))
    assert raised.value.lasting is lasting
    assert reason.name in attached.session.status().why
    daemon.perform(register(attached.session, None))
    assert attached.session.memory.registration == 41


@pytest.mark.usefixtures("closes_all")
@pytest.mark.parametrize("body", ["add_chunks", "register_memory"])
def test_memory_that_is_refused_ends_the_session_and_leaves_no_descriptor(
    attached: Peer, daemon: Daemon, body: str
) -> None:
    memory = give(attached, GpuMemory(chunks=3))
    daemon.refuse = {body: [Reason.DEVICE_MEMORY_INVALID]}
    with pytest.raises(KvtierError) as raised:
        daemon.perform(register(attached.session, None))
    assert raised.value.reason is Reason.DEVICE_MEMORY_INVALID
    assert memory.exports[0].closed
    attached.session.lost("it was refused")


def test_a_worker_that_ends_meanwhile_is_no_end_of_the_session(attached: Peer, daemon: Daemon) -> None:
    """Its successor does not know the words, whatever it is asked."""
    give(attached, GpuMemory())
    process = subprocess.Popen(["sleep", "60"])
    daemon.worker = process.pid

    def end_worker(body: str) -> None:
        if body == "register_memory":
            process.kill()
            process.wait()

    daemon.before = end_worker
    daemon.refuse = {"register_memory": [Reason.NOT_ATTACHED]}
    with pytest.raises(NotRegisteredError) as raised:
        daemon.perform(register(attached.session, None))
    assert not raised.value.lasting
    error = attached.session.memory.error
    assert error is not None
    assert error.reason is Reason.NOT_ATTACHED
    daemon.worker = os.getpid()
    daemon.perform(register(attached.session, None))
    assert attached.session.memory.registration == 41
    assert attached.session.memory.error is None


def test_a_handle_that_is_still_open_as_another_allocation_is_asked_for_again(
    attached: Peer, daemon: Daemon
) -> None:
    give(attached, GpuMemory())
    daemon.refuse = {"register_memory": [Reason.WORKER_UNAVAILABLE] * 3}
    daemon.perform(register(attached.session, None))
    assert daemon.bodies == ["register_words", *["register_memory"] * 4]


def test_but_not_for_ever(attached: Peer, daemon: Daemon) -> None:
    give(attached, GpuMemory())
    daemon.refuse = {"register_memory": [Reason.WORKER_UNAVAILABLE] * 1_000}
    with pytest.raises(NotRegisteredError):
        daemon.perform(register(attached.session, None))
    assert len(daemon.requests) < 200


def test_and_not_once_the_engine_wants_its_memory_back(attached: Peer, daemon: Daemon) -> None:
    give(attached, GpuMemory())
    daemon.refuse = {"register_memory": [Reason.WORKER_UNAVAILABLE] * 1_000}
    daemon.before = lambda body: attached.session.memory.release() if body == "register_memory" else None
    with pytest.raises(NotRegisteredError):
        daemon.perform(register(attached.session, None))
    assert len(daemon.requests) == 2
    assert attached.session.memory.released


@pytest.mark.usefixtures("closes_all")
def test_steps_that_are_given_up_leave_no_descriptor(attached: Peer) -> None:
    memory = give(attached, GpuMemory(chunks=3))
    steps = register(attached.session, None)
    step = next(steps)
    while not isinstance(step, SideCall) or step.request.WhichOneof("body") != "add_chunks":
        if isinstance(step, Work):
            step = steps.send(step.call())
        else:
            reply = side_pb2.SideResponse(words_registered=side_pb2.WordsRegistered())
            step = steps.send(SideReply(reply, [os.pidfd_open(os.getpid())]))
    assert open_chunks() == 2
    steps.close()
    assert memory.exports[0].closed
    attached.session.lost("closed")
    attached.session.memory.release()
    assert attached.session.memory.released, "nothing is under way any more"


# --- taking memory back ---


def test_memory_is_taken_back_by_its_number(attached: Peer, daemon: Daemon) -> None:
    give(attached, GpuMemory())
    daemon.perform(register(attached.session, None))
    memory = attached.session.memory
    memory.release()
    assert memory.wants_release
    assert not memory.released
    daemon.perform(unregister(attached.session))
    assert daemon.requests[-1].unregister_memory.registration_id == 41
    assert attached.session.memory.released
    assert not memory.wants_registration


def test_a_worker_that_was_lost_has_released_it(attached: Peer, daemon: Daemon) -> None:
    give(attached, GpuMemory())
    daemon.perform(register(attached.session, None))
    attached.session.memory.release()
    daemon.refuse = {"unregister_memory": [Reason.NOT_ATTACHED]}
    daemon.perform(unregister(attached.session))
    assert attached.session.memory.released


def test_a_daemon_that_cannot_release_it_loses_the_session(attached: Peer, daemon: Daemon) -> None:
    give(attached, GpuMemory())
    daemon.perform(register(attached.session, None))
    attached.session.memory.release()
    daemon.refuse = {"unregister_memory": [Reason.DEADLINE]}
    with pytest.raises(KvtierError):
        daemon.perform(unregister(attached.session))
    assert not attached.session.memory.released
    attached.session.lost("it was refused")
    assert attached.session.memory.released


def test_memory_taken_back_while_it_is_registered_is_registered_first(attached: Peer, daemon: Daemon) -> None:
    give(attached, GpuMemory())
    memory = attached.session.memory
    daemon.before = lambda body: memory.release() if body == "register_memory" else None
    daemon.perform(register(attached.session, None))
    assert memory.wants_release
    assert not memory.released
    daemon.perform(unregister(attached.session))
    assert attached.session.memory.released


def test_a_lost_connection_in_the_middle_gives_it_back(attached: Peer, daemon: Daemon) -> None:
    give(attached, GpuMemory())

    def lose(body: str) -> None:
        if body == "register_memory":
            raise ConnectionLostError("gone")

    daemon.before = lose
    with pytest.raises(ConnectionLostError):
        daemon.perform(register(attached.session, None))
    attached.session.lost("gone")
    attached.session.memory.release()
    assert attached.session.memory.released


def test_memory_comes_only_after_the_last_was_released_and_must_fit(attached: Peer, daemon: Daemon) -> None:
    memory = attached.session.memory
    small = GpuMemory()
    small.size_bytes, small.range_bytes = BLOCK_BYTES, (BLOCK_BYTES,)
    with pytest.raises(KvtierError) as raised:
        memory.give(small)
    assert raised.value.reason is Reason.PLANE_BEYOND_MAPPING
    give(attached, GpuMemory())
    daemon.perform(register(attached.session, None))
    with pytest.raises(KvtierError) as raised:
        memory.give(GpuMemory())
    assert raised.value.reason is Reason.ALREADY_REGISTERED


def test_a_part_that_runs_holds_the_memory(attached: Peer, daemon: Daemon) -> None:
    peer = attached
    give(peer, GpuMemory())
    peer.register()
    transfer = peer.session.store(0, b"h" * 32, [1], None)
    assert transfer.part is not None
    assert peer.start(transfer.part)
    peer.session.memory.release()
    peer.session.memory.unregistered()
    assert not peer.session.memory.released
    peer.finish(transfer.part)
    assert peer.session.memory.released


def test_a_part_that_has_not_started_never_will(attached: Peer, daemon: Daemon) -> None:
    give(attached, GpuMemory())
    attached.register()
    transfer = attached.session.store(0, b"h" * 32, [1], None)
    assert transfer.part is not None
    attached.session.memory.release()
    assert not attached.start(transfer.part)


def test_a_scheduler_has_none(scheduler: Peer) -> None:
    with pytest.raises(KvtierError) as raised:
        scheduler.session.memory.release()
    assert raised.value.reason is Reason.ROLE
