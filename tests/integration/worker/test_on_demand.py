"""Workers of GPUs that are asked for: the supervisor's promises, where a daemon's settings do not reach."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import SessionId
from kvtierd.core.stimuli import WorkerExited, WorkerLive, WorkerLost
from kvtierd.memory.host_pool import HostPool
from kvtierd.workers.supervisor.handles import SupervisorLimits
from kvtierd.workers.supervisor.supervisor import Supervisor, WorkerStimulus

from tests.integration.worker.rig import SLACK_S, live_worker, until
from tests.support.fake_cuda import FakeCuda

pytestmark = [pytest.mark.faults, pytest.mark.fake_gpu]

UNKNOWN = "GPU-0000beef-0000-0000-0000-000000000001"


class Host:
    """A supervisor on a fake machine; without a worker for "cpu"."""

    def __init__(self, fake: FakeCuda, limits: SupervisorLimits, **settings: str) -> None:
        self.device = fake.device_name()
        self.events: list[WorkerStimulus] = []
        self.environment = fake.environment | settings
        self.pool = HostPool.open(None, 66 << 20, 16 << 20, lock_timeout_s=1)
        self.supervisor = Supervisor(
            pool_fd=self.pool.fd,
            pool_bytes=self.pool.array.nbytes,
            register_writer=self.pool.register_writer,
            events=self.events.append,
            devices=(),
            limits=limits,
            environment=self.environment,
        )

    def pids(self) -> list[int]:
        return [worker.pid for worker in self.supervisor.workers.values()]

    async def refused(self, device: str = "") -> Refusal:
        with pytest.raises(Refusal) as refusal:
            await self.supervisor.lives.worker_for(device or self.device)
        return refusal.value

    def told(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


StartHost = Callable[..., Awaitable[Host]]


@pytest_asyncio.fixture
async def start_host(fake_cuda: FakeCuda) -> AsyncIterator[StartHost]:
    hosts: list[Host] = []

    async def start(limits: SupervisorLimits | None = None, **settings: str) -> Host:
        hosts.append(Host(fake_cuda, limits or SupervisorLimits(), **settings))
        await hosts[-1].supervisor.start()
        return hosts[-1]

    yield start
    for host in hosts:
        assert await host.supervisor.lives.stop(SLACK_S)
        host.pool.close()


async def test_all_who_wait_share_one_and_the_core_hears_of_it_first(start_host: StartHost) -> None:
    host = await start_host()
    heard: list[list[str]] = []

    async def ask() -> int:
        worker = await host.supervisor.lives.worker_for(host.device)
        heard.append(host.told())
        return worker

    found = await asyncio.gather(*(ask() for _ in range(8)))
    assert len(set(found)) == 1
    assert heard == [["WorkerLive"]] * 8
    assert live_worker(host.supervisor, host.device) == found[0]
    assert await host.supervisor.lives.worker_for(host.device) == found[0]


async def test_one_who_gives_up_takes_nothing_from_the_others(start_host: StartHost) -> None:
    host = await start_host()
    waiting = [asyncio.create_task(host.supervisor.lives.worker_for(host.device)) for _ in range(3)]
    await until(host.pids)
    waiting[0].cancel()
    waiting[2].cancel()
    assert await waiting[1] == live_worker(host.supervisor, host.device)


async def test_a_worker_that_is_never_ready_ends_at_the_deadline(start_host: StartHost) -> None:
    host = await start_host(SupervisorLimits(gpu_handshake_deadline_s=1.5), FAKE_CUDA_HANG="cuInit:1")
    refusals = await asyncio.gather(host.refused(), host.refused())
    for refusal in refusals:
        assert refusal.reason is Reason.WORKER_UNAVAILABLE
        assert "not ready after 1.5 s" in refusal.message
        assert host.device in refusal.message
    await until(lambda: not host.pids())
    assert host.events == [], "it was never announced"
    assert (await host.refused()).reason is Reason.WORKER_UNAVAILABLE, "not at once again"


async def test_what_cannot_be_used_refuses_all_who_wait_and_is_forgotten(start_host: StartHost) -> None:
    host = await start_host()
    refusals = await asyncio.gather(*(host.refused(UNKNOWN) for _ in range(4)))
    assert {refusal.reason for refusal in refusals} == {Reason.DEVICE_UNKNOWN}
    assert len(host.pids()) <= 1, "one process was asked"
    assert (await host.refused(UNKNOWN)).reason is Reason.DEVICE_UNKNOWN, "asked anew, at once"
    await until(lambda: not host.pids())
    assert list(host.supervisor.devices) == []
    assert host.events == []


async def test_starts_at_once_are_bounded(start_host: StartHost) -> None:
    host = await start_host(SupervisorLimits(starts_max=2))
    names = [UNKNOWN[:-1] + str(number) for number in range(5)]
    reasons = [refusal.reason for refusal in await asyncio.gather(*map(host.refused, names))]
    assert reasons == [Reason.DEVICE_UNKNOWN] * 2 + [Reason.WORKER_UNAVAILABLE] * 3


async def test_a_worker_killed_while_it_starts_is_told_to_who_waits(start_host: StartHost) -> None:
    limits = SupervisorLimits(respawn_delay_min_s=0.05)
    host = await start_host(limits, FAKE_CUDA_HANG="cuInit:1:2000")
    waiting = asyncio.create_task(host.refused())
    await until(host.pids)
    os.kill(host.pids()[0], signal.SIGKILL)
    assert "killed by SIGKILL" in (await waiting).message
    await until(lambda: not host.pids())
    await asyncio.sleep(0.1)
    assert await host.supervisor.lives.worker_for(host.device), (
        "tried again when somebody asks, after a while"
    )


async def test_an_idle_worker_that_does_not_end_is_killed(start_host: StartHost) -> None:
    host = await start_host(SupervisorLimits(gpu_idle_s=0.1, end_deadline_s=1.0))
    worker = await host.supervisor.lives.worker_for(host.device)
    os.kill(host.supervisor.workers[worker].pid, signal.SIGSTOP)
    await until(lambda: live_worker(host.supervisor, host.device) is None)
    refusal = await host.refused()
    assert refusal.reason is Reason.WORKER_UNAVAILABLE
    await until(lambda: not host.pids())
    kinds = [WorkerLive, WorkerLost, WorkerExited]
    assert [type(event) for event in host.events] == kinds


async def test_a_refused_mapping_holds_nothing(start_host: StartHost) -> None:
    host = await start_host()
    worker = await host.supervisor.lives.worker_for(host.device)
    reading, writing = os.pipe()
    with pytest.raises(Refusal):
        await host.supervisor.orders.map_words(worker, SessionId(1), reading, 1, 1)
    with pytest.raises(Refusal):
        await host.supervisor.orders.add_chunks(worker, SessionId(1), [reading], [2 << 20])
    assert host.supervisor.workers[worker].sessions == set()
    host.supervisor.orders.release_session(worker, SessionId(1))
    await until(lambda: len(host.events) == 2)
    assert host.told() == ["WorkerLive", "SessionReleased"]
    os.close(reading)
    os.close(writing)


async def test_who_waits_when_the_daemon_stops_is_told(start_host: StartHost) -> None:
    host = await start_host(FAKE_CUDA_HANG="cuInit:1:5000")
    waiting = asyncio.create_task(host.refused())
    await until(host.pids)
    assert await host.supervisor.lives.stop(0)
    assert (await waiting).reason is Reason.WORKER_UNAVAILABLE
    assert (await host.refused()).reason is Reason.DRAINING
