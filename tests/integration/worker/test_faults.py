"""Whatever dies, hangs or sends nonsense: the words become terminal, or the process is proved to be gone."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvtier_kernels import PART_DONE, PART_REVOKED, PART_STARTED
from kvtierd.core.actions import Direction
from kvtierd.core.errors import Refusal
from kvtierd.core.ids import SessionId
from kvtierd.core.stimuli import PartFinished, PartOutcome, WorkerExited, WorkerLive, WorkerLost
from kvtierd.memory.errors import PoolLocked
from kvtierd.memory.host_pool import HostPool
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel import packets
from kvtierd.workers.channel.packets import BlockingPacketChannel, packet_socketpair
from kvtierd.workers.channel.status import StatusPage, StatusWord, create_status_fd
from kvtierd.workers.supervisor.handles import CPU, SupervisorLimits, WorkerStartError

from tests.integration.worker.conftest import StartRig
from tests.integration.worker.devices import ON_CPU, Allocation, Gpu, Memfd, Mode, on
from tests.integration.worker.rig import SLACK_S, Client, Layout, Rig, live_worker, until
from tests.support.process import readable

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[3]
IMPATIENT = SupervisorLimits(copy_deadline_s=4.0)
"""Not less: a worker that is kept from the processor for a second or two is no worker that hangs."""


def life_and_death(rig: Rig) -> list[str]:
    kinds = (WorkerLive, WorkerLost, WorkerExited)
    return [type(event).__name__ for event in rig.events if isinstance(event, kinds)]


async def replaced(rig: Rig) -> None:
    """Waits for the second worker and checks that it was told after the first one's end, and that it
    works."""
    await rig.successor()
    assert life_and_death(rig) == ["WorkerLive", "WorkerLost", "WorkerExited", "WorkerLive"]
    [handle] = rig.supervisor.workers.values()
    assert handle.respawns == rig.supervisor.devices.respawns[rig.device] == 1
    await rig.store(await rig.client(), [0])


async def test_a_worker_killed_in_the_middle_of_a_copy_is_proved_gone_and_replaced(
    start_rig: StartRig,
) -> None:
    rig = await start_rig(fault="hang-in-copy")
    client = await rig.client()
    handle = rig.handle
    pidfd = rig.supervisor.pidfd_for(rig.worker)
    part, ticket = rig.post(client, Direction.STORE, [0], rig.open(1, client.layout.slot_bytes))
    await until(lambda: client.part_state(ticket) == PART_STARTED)
    rig.no_fault()
    os.kill(handle.pid, signal.SIGKILL)
    await until(lambda: rig.seen(WorkerExited))
    assert readable(pidfd, 0)  # the client's own fence
    os.close(pidfd)
    assert not rig.is_over(part)
    assert client.part_state(ticket) == PART_STARTED
    assert "SIGKILL" in rig.seen(WorkerLost)[0].why
    await replaced(rig)


async def test_a_worker_that_dies_by_itself_is_replaced(start_rig: StartRig) -> None:
    rig = await start_rig(fault="die-in-copy")
    client = await rig.client()
    rig.post(client, Direction.STORE, [0], rig.open(1, client.layout.slot_bytes))
    rig.no_fault()
    await replaced(rig)


async def test_a_hanging_copy_is_found_and_its_worker_killed(start_rig: StartRig) -> None:
    rig = await start_rig(fault="hang-in-copy", limits=IMPATIENT)
    client = await rig.client()
    rig.post(client, Direction.STORE, [0], rig.open(1, client.layout.slot_bytes))
    rig.no_fault()
    await until(lambda: rig.seen(WorkerLost))
    assert "store lane has been inside one copy call" in rig.seen(WorkerLost)[0].why
    await replaced(rig)


async def test_slow_copies_are_no_hang(start_rig: StartRig) -> None:
    rig = await start_rig(fault="slow-copy:1000", limits=IMPATIENT, pool_bytes=98 << 20)
    client = await rig.client(Layout(num_blocks=24, fragments=(1 << 20,)))
    await rig.store(client, list(range(20)))  # five chunks, 5 s
    assert life_and_death(rig) == ["WorkerLive"]


async def test_a_stopped_worker_is_killed_though_it_copies_nothing(start_rig: StartRig) -> None:
    limits = SupervisorLimits(copy_deadline_s=2.5)
    rig = await start_rig(limits=limits)
    os.kill(rig.pid, signal.SIGSTOP)
    await until(lambda: rig.seen(WorkerLost))
    assert "main thread" in rig.seen(WorkerLost)[0].why
    await replaced(rig)


async def test_unanswered_requests_lose_the_worker(start_rig: StartRig) -> None:
    rig = await start_rig(limits=SupervisorLimits(map_deadline_s=4.0, gpu_map_deadline_s=4.0))
    os.kill(rig.pid, signal.SIGSTOP)
    client = rig.new_client()
    with pytest.raises(Refusal, match="has not answered a mapping request"):
        await rig.map(client)
    await replaced(rig)


async def test_a_session_that_is_not_released_in_time_loses_the_worker(start_rig: StartRig) -> None:
    rig = await start_rig(limits=SupervisorLimits(release_deadline_s=1.0))
    client = await rig.client()
    os.kill(rig.pid, signal.SIGSTOP)
    rig.supervisor.orders.release_session(rig.worker, client.session)
    await until(lambda: rig.seen(WorkerLost))
    assert "has not released a session" in rig.seen(WorkerLost)[0].why
    await replaced(rig)


async def test_a_worker_whose_queue_overflows_is_lost_but_not_inside_post(start_rig: StartRig) -> None:
    rig = await start_rig()
    client = await rig.client()
    os.kill(rig.pid, signal.SIGSTOP)
    slots = rig.open(400, client.layout.slot_bytes)
    blocks = list(range(64)) * 128
    many = slots[[0] * 8_192]
    worker = rig.worker
    while (
        live_worker(rig.supervisor, rig.device) is not None
        and not rig.supervisor.lives.processes[worker].channel.closed
    ):
        rig.post(client, Direction.STORE, blocks, many, worker=worker)
    assert rig.seen(WorkerLost) == []
    await until(lambda: rig.seen(WorkerLost))
    assert "queue is full" in rig.seen(WorkerLost)[0].why
    await replaced(rig)


async def test_what_finished_before_the_death_still_counts(start_rig: StartRig) -> None:
    rig = await start_rig()
    client = await rig.client()
    pid = rig.pid
    parts = [
        rig.post(client, Direction.STORE, [0], rig.open(1, client.layout.slot_bytes))[0] for _ in range(20)
    ]
    # Without a turn of the loop: all its reports are unread when it dies.
    deadline = asyncio.get_running_loop().time() + SLACK_S
    while client.part_state(20) != PART_DONE:
        assert asyncio.get_running_loop().time() < deadline
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    await until(lambda: rig.seen(WorkerExited))
    finished = [event.part for event in rig.seen(PartFinished)]
    if rig.device == CPU:
        assert finished[:19] == parts[:19]
    else:  # a store's report waits for its checksum, and its word does not
        assert set(finished) <= set(parts)
    kinds = [type(event) for event in rig.events]
    assert PartFinished not in kinds[kinds.index(WorkerLost) :]
    await replaced(rig)


@on(ON_CPU)
async def test_replacements_back_off(start_rig: StartRig) -> None:
    limits = SupervisorLimits(respawn_delay_min_s=0.05, respawn_delay_max_s=0.2)
    rig = await start_rig(limits=limits)
    rig.environment["KVTIER_TEST_WORKER_FAULT"] = "no-such-fault"  # every new worker fails at once
    os.kill(rig.pid, signal.SIGKILL)
    await until(lambda: rig.supervisor.devices.respawns["cpu"] >= 3)
    assert len(rig.supervisor.workers) <= 1
    assert life_and_death(rig) == ["WorkerLive", "WorkerLost", "WorkerExited"]
    with pytest.raises(Refusal, match="being started"):
        rig.supervisor.pidfd_for(rig.seen(WorkerLive)[0].worker)
    rig.no_fault()
    await rig.successor()


async def test_a_first_worker_that_does_not_come_up_says_why() -> None:
    with HostPool.open(None, 66 << 20, 16 << 20, lock_timeout_s=1) as pool:
        rig = Rig(pool)
        with pytest.raises(WorkerStartError, match="exited with status 1"):
            await rig.start("no-such-fault")
        assert rig.supervisor.workers == {}
        assert rig.events == []


async def test_stop_finishes_what_runs_and_revokes_the_rest(start_rig: StartRig) -> None:
    rig = await start_rig(fault="slow-copy:2500")  # longer than the machine may keep us from stopping it
    client = await rig.client()
    slots = rig.open(4, client.layout.slot_bytes)
    runs, running = rig.post(client, Direction.STORE, [0], slots[:1])
    rig.post(client, Direction.STORE, [1], slots[1:2])  # on a GPU it may run, too
    queued, _ = rig.post(client, Direction.STORE, [2], slots[2:3])
    gated, _ = rig.post(client, Direction.STORE, [3], slots[3:], gate=(0, 1))
    await until(lambda: client.part_state(running) == PART_STARTED)
    assert await rig.supervisor.lives.stop(SLACK_S)
    outcomes = {event.part: event.outcome for event in rig.seen(PartFinished)}
    assert outcomes[runs] == PartOutcome.DONE
    assert outcomes[queued] == outcomes[gated] == PartOutcome.REVOKED
    assert life_and_death(rig) == ["WorkerLive", "WorkerLost", "WorkerExited"]
    assert "exited with status 0" in rig.seen(WorkerLost)[0].why


async def test_stop_kills_what_does_not_stop(start_rig: StartRig) -> None:
    rig = await start_rig(fault="hang-in-copy")
    client = await rig.client()
    _, ticket = rig.post(client, Direction.STORE, [0], rig.open(1, client.layout.slot_bytes))
    await until(lambda: client.part_state(ticket) == PART_STARTED)
    assert await rig.supervisor.lives.stop(0.3)
    assert rig.supervisor.workers == {}


# --- without a supervisor: the front is gone, or is not ours ---


def gone(pidfd: int) -> bool:
    return readable(pidfd, SLACK_S)


@dataclass
class Place:
    """A device, and memory of it in this process."""

    device: str
    cache: Memfd | Allocation
    environment: dict[str, str]

    @property
    def for_front(self) -> list[str]:
        """What tells the front of it."""
        if isinstance(self.cache, Memfd):
            return ["memfd", str(self.cache.fd)]
        [range_] = self.cache.ranges()
        return [self.device, str(range_.bytes), range_.ipc_handle.hex(), str(range_.buffer_id)]

    def message(self) -> tuple[dict[str, object], list[int]]:
        """The fields of MapMemory that are about it, and its descriptors."""
        size = self.cache.array.nbytes
        if isinstance(self.cache, Memfd):
            return {"mapping_bytes": size}, [self.cache.fd]
        [range_] = self.cache.ranges()
        wired = wire.DeviceRange(bytes=size, ipc_handle=range_.ipc_handle, buffer_id=range_.buffer_id)
        return {"mapping_bytes": size, "ranges": [wired]}, []


@pytest.fixture
def place(mode: Mode, request: pytest.FixtureRequest) -> Place:
    if not mode.is_gpu:
        return Place(CPU, Memfd(Layout().mapping_bytes), {})
    gpu: Gpu = request.getfixturevalue("gpu")
    return Place(gpu.name, gpu.allocate(Layout().mapping_bytes), gpu.fake.environment)


@pytest.mark.parametrize("end", ["killed", "stopped and killed"])
def test_when_the_front_dies_its_worker_finishes_writes_the_words_and_goes(
    end: str, place: Place, shm_dir: Path
) -> None:
    client = Client(SessionId(1), Layout(), place.cache)
    fds = [client.words_fd] + ([place.cache.fd] if isinstance(place.cache, Memfd) else [])
    path = shm_dir / "pool"
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "tests.integration.worker.front",
        path,
        str(client.words_fd),
    ]
    front = subprocess.Popen(
        [*command, "slow-copy:5000", *place.for_front],
        pass_fds=fds,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | place.environment,
    )
    with front:
        assert front.stdout is not None
        pidfd = os.pidfd_open(int(front.stdout.readline()))
        if end != "killed":
            front.send_signal(signal.SIGSTOP)
        front.kill()
    # While a copy may still land, nobody else gets the pool.
    with pytest.raises(PoolLocked):
        HostPool.open(path, 66 << 20, 16 << 20, lock_timeout_s=0)
    assert client.part_state(1) == PART_STARTED
    assert gone(pidfd)
    os.close(pidfd)
    assert client.part_state(1) == PART_DONE
    assert client.part_state(2) == PART_REVOKED
    client.close()
    with HostPool.open(path, 66 << 20, 16 << 20, lock_timeout_s=0) as pool:
        assert pool.start.warm


@dataclass
class Alone:
    """A worker, and the front's end of its channel in the hands of a test."""

    process: "subprocess.Popen[bytes]"
    front: socket.socket
    heartbeat_at_ready: int = 0

    def send(self, message: wire.ToWorker, fds: Sequence[int] = ()) -> None:
        socket.send_fds(self.front, [message.SerializeToString()], list(fds))

    def receive(self) -> wire.ToFront:
        self.front.settimeout(SLACK_S)
        return wire.ToFront.FromString(self.front.recv(1 << 18))


@contextlib.contextmanager
def worker_alone(device: str, environment: dict[str, str]) -> Iterator[Alone]:
    ours, theirs = packet_socketpair()
    status_fd = create_status_fd()
    with HostPool.open(None, 66 << 20, 16 << 20, lock_timeout_s=1) as pool, ours:
        arguments = ["--pool-fd", pool.fd, "--pool-bytes", pool.array.nbytes, "--channel-fd", theirs.fileno()]
        arguments += ["--status-fd", status_fd, "--device", device, "--copy-deadline-s", 2.0]
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtierd.workers.copy", *map(str, arguments)],
            pass_fds=(pool.fd, theirs.fileno(), status_fd),
            env=os.environ | environment,
        )
        theirs.close()
        status = StatusPage(status_fd)
        os.close(status_fd)
        worker = Alone(process, ours)
        try:
            assert worker.receive().ready.pid == process.pid
            worker.heartbeat_at_ready = status.read()[StatusWord.HEARTBEAT]
            yield worker
        finally:
            process.kill()
            process.wait(SLACK_S)


@pytest.fixture
def alone() -> Iterator[Alone]:
    with worker_alone(CPU, {}) as worker:
        yield worker


def test_its_heart_beats_before_it_is_ready(alone: Alone) -> None:
    """A worker that stands still right after Ready would never be found out otherwise."""
    assert alone.heartbeat_at_ready > 0


def test_the_end_of_the_channel_ends_the_worker(alone: Alone) -> None:
    alone.front.close()
    assert alone.process.wait(SLACK_S) == 0


def test_signals_for_the_group_do_not_end_it(alone: Alone) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        alone.process.send_signal(number)
    alone.front.send(wire.ToWorker(release_session=wire.ReleaseSession(session=5)).SerializeToString())
    assert alone.receive().session_released.session == 5


@pytest.mark.parametrize(
    "packet",
    [
        b"\xff\xff\xff garbage",
        b"x" * 190_000,
        wire.ToWorker().SerializeToString() or b"\x08",
        wire.ToWorker(
            map_words=wire.MapWords(request=1, session=1, doorbells=1, parts=1)
        ).SerializeToString(),
        wire.ToWorker(post_part=wire.PostPart(part=1, block_ids=b"abc")).SerializeToString()[:-1],
    ],
    ids=["garbage", "much of it", "no body", "a descriptor missing", "cut off"],
)
def test_a_front_that_talks_nonsense_is_left(alone: Alone, packet: bytes) -> None:
    alone.front.send(packet)
    assert alone.process.wait(SLACK_S) == 1


def test_unexpected_descriptors_are_closed_and_the_front_is_left(alone: Alone) -> None:
    fd = os.memfd_create("kvt-test")
    stop = wire.ToWorker(release_session=wire.ReleaseSession(session=1)).SerializeToString()
    socket.send_fds(alone.front, [stop], [fd])
    os.close(fd)
    assert alone.process.wait(SLACK_S) == 1


def test_a_packet_that_the_kernel_never_takes_is_no_end_of_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that took it for one would drop a part's report, and the front would wait for it for ever."""
    ours, theirs = packet_socketpair()
    sent = []

    def no_room(*_: object) -> None:
        sent.append(1)
        raise OSError(errno.ENOBUFS, "no buffer space available")

    monkeypatch.setattr(packets, "send_packet", no_room)
    monkeypatch.setattr(packets, "_RETRY_S", 0)
    with theirs, pytest.raises(OSError, match="no buffer space"):
        BlockingPacketChannel(ours).send(b"report")
    assert len(sent) > 1
    ours.close()


def until_started(client: Client, ticket: int) -> None:
    deadline_s = time.monotonic() + SLACK_S
    while client.part_state(ticket) != PART_STARTED:
        assert time.monotonic() < deadline_s, "the part never starts"
        time.sleep(0.005)


def test_a_copy_that_hangs_after_the_front_has_died_ends_with_its_process(place: Place) -> None:
    client = Client(SessionId(1), Layout(), place.cache)
    with worker_alone(
        place.device, place.environment | {"KVTIER_TEST_WORKER_FAULT": "hang-in-copy"}
    ) as alone:
        words = wire.MapWords(request=1, session=1, doorbells=4, parts=64)
        alone.send(wire.ToWorker(map_words=words), [client.words_fd])
        assert alone.receive().mapped.request == 1
        group = client.layout.mapping()
        groups = [
            wire.MappedGroup(
                group=group.group,
                num_blocks=group.num_blocks,
                base_offsets=group.base_offsets,
                block_strides=group.block_strides,
                fragment_bytes=group.fragment_bytes,
            )
        ]
        fields, fds = place.message()
        memory = wire.MapMemory(request=2, session=1, registration=1, groups=groups, **fields)  # type: ignore[arg-type]
        alone.send(wire.ToWorker(map_memory=memory), fds)
        assert alone.receive().mapped.request == 2
        # A page that is no slot: nothing is copied, yet the copy call is entered, and hangs there.
        part = wire.PostPart(
            part=1,
            direction=wire.LOAD,
            session=1,
            registration=1,
            group=group.group,
            ticket=1,
            part_word=1,
            block_ids=bytes(4),
            slots=bytes(4),
            generations=bytes(8),
        )
        alone.send(wire.ToWorker(post_part=part))
        until_started(client, ticket=1)
        with contextlib.suppress(TimeoutError):
            alone.front.settimeout(0.3)
            pytest.fail(f"it did not hang: {alone.front.recv(1 << 18)!r}")
        assert client.part_state(1) == PART_STARTED
        alone.front.close()
        assert alone.process.wait(SLACK_S) == 75
        assert client.part_state(1) == PART_STARTED  # its end is the fence
    client.close()
