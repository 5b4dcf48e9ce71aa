"""When a daemon does not watch a worker any more, and when a worker that is lost is being taken care of."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable

import pytest
from kvtierd.core.stimuli import WorkerExited, WorkerLive, WorkerLost
from kvtierd.memory.host_pool import HostPool
from kvtierd.workers.supervisor.handles import SupervisorLimits
from kvtierd.workers.supervisor.supervisor import Supervisor

DEADLINE_S = 60.0


class Rig:
    def __init__(self) -> None:
        self.pool = HostPool.open(None, 4 << 20, 1 << 20, lock_timeout_s=0)
        self.events: list[object] = []
        limits = SupervisorLimits(respawn_delay_min_s=0.5)
        self.supervisor = Supervisor(
            pool_fd=self.pool.fd,
            pool_bytes=len(self.pool.array),
            register_writer=self.pool.register_writer,
            events=self.events.append,
            limits=limits,
        )

    @property
    def pid(self) -> int:
        [handle] = self.supervisor.workers.values()
        return handle.pid

    def heard(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)


async def until(condition: Callable[[], object]) -> None:
    """Looks at every turn of the loop."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - processes set no events
            await asyncio.sleep(0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.supervisor.start()
    yield rig
    await rig.supervisor.lives.stop(5)
    rig.pool.close()


async def test_a_live_worker_is_looked_after(rig: Rig) -> None:
    assert rig.supervisor.lives.unattended() == []


async def test_so_is_one_that_was_killed_until_another_is_live(rig: Rig) -> None:
    os.kill(rig.pid, signal.SIGKILL)
    await until(lambda: rig.heard(WorkerExited))

    def replaced() -> bool:
        assert rig.supervisor.lives.unattended() == []
        return rig.heard(WorkerLive) == 2

    await until(replaced)
    assert rig.heard(WorkerLost) == 1


async def test_a_worker_whose_end_went_unnoticed_is_not(rig: Rig) -> None:
    [process] = rig.supervisor.lives.processes.values()
    asyncio.get_running_loop().remove_reader(process.pidfd)  # as if the event had been lost
    process.channel.close()
    os.kill(process.pid, signal.SIGKILL)
    await until(process.ended)
    assert rig.supervisor.lives.unattended() == [], "the event may be on its way"
    assert rig.supervisor.lives.unattended() == ["the end of the worker of cpu was not noticed"]
    process._gone()


async def test_nor_is_a_device_for_which_nothing_is_to_be_started(rig: Rig) -> None:
    lives = rig.supervisor.lives
    # Or another is started before we have looked, if this process has to wait for the processor.
    lives.devices["cpu"].delay_s = DEADLINE_S
    os.kill(rig.pid, signal.SIGKILL)
    await until(lambda: "cpu" in lives._respawn_timers)
    lives._respawn_timers.pop("cpu").cancel()
    assert rig.supervisor.lives.unattended() == ["cpu has no worker, and none is to be started"]


async def test_nor_is_anyone_when_the_watch_has_stopped(rig: Rig) -> None:
    lives = rig.supervisor.lives
    assert lives._watch_timer is not None
    lives._watch_timer.cancel()
    lives.watch.looked_at_s -= 60
    [why] = rig.supervisor.lives.unattended()
    said = re.fullmatch(r"no worker has been looked at for (\d+) s", why)
    assert said is not None, why
    # It counts from the last round, which is as long ago as this process had to wait for the processor.
    assert int(said[1]) >= 60
