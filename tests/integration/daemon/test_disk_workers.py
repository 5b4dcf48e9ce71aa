"""Workers of disks: started, replaced and given up by the supervisor; what of it the core hears, and when."""

import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from kvtierd.cache.disks import DiskFile, DiskFiles
from kvtierd.core.ids import DiskId
from kvtierd.core.stimuli import DiskRecovered, Stimulus
from kvtierd.memory.host_pool import HostPool
from kvtierd.memory.recovery import Recovery
from kvtierd.tiers.disk.image import DiskImage, disk_geometry
from kvtierd.workers.supervisor.handles import SupervisorLimits, WorkerHandle, WorkerProcessState
from kvtierd.workers.supervisor.kinds import DiskOptions
from kvtierd.workers.supervisor.supervisor import Supervisor

from tests.integration.worker.rig import SLACK_S, until

SIZE_BYTES, EXTENT_BYTES = 10 << 20, 1 << 20

pytestmark = pytest.mark.faults


class Host:
    """A supervisor with one disk and nothing else, and what the core would hear of it."""

    def __init__(self, path: Path, deadline_s: float = 30.0) -> None:
        self.pool = HostPool.open(None, 4 << 20, 1 << 20, lock_timeout_s=1)
        self.image = DiskImage(disk_geometry(SIZE_BYTES, EXTENT_BYTES))
        self.disk = DiskFile(DiskId(0), str(path), self.image)
        self.heard: list[Stimulus] = []
        options = DiskOptions(
            number=0,
            path=path,
            size_bytes=self.image.bytes,
            extent_bytes=EXTENT_BYTES,
            image_fd=self.image.fd,
            threads=1,
            queue_depth=4,
            deadline_s=deadline_s,
        )
        self.supervisor = Supervisor(
            pool_fd=self.pool.fd,
            pool_bytes=self.pool.array.nbytes,
            register_writer=self.pool.register_writer,
            events=lambda stimulus: self.disks.take(stimulus),
            devices=(),
            disks=[options],
            limits=SupervisorLimits(respawn_delay_min_s=0.05, disk_respawn_delay_max_s=0.2),
        )
        self.disks = DiskFiles([self.disk], self.supervisor, self.pool.boot_nonce, self.heard.append)

    async def start(self) -> None:
        await self.supervisor.start()
        await self.supervisor.lives.settle_disks(SLACK_S)
        await self.disks.recovered(SLACK_S)

    @property
    def why(self) -> str:
        return self.supervisor.devices["disk-0"].why

    def worker(self) -> WorkerHandle | None:
        handle = self.supervisor.devices.worker("disk-0")
        return handle if handle is not None and handle.state is WorkerProcessState.LIVE else None

    async def live(self) -> WorkerHandle:
        await until(self.worker)
        handle = self.worker()
        assert handle is not None
        return handle

    def told(self) -> list[str]:
        return [type(stimulus).__name__ for stimulus in self.heard]

    async def close(self) -> None:
        assert await self.supervisor.lives.stop(SLACK_S)
        self.image.close()
        self.pool.close()


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def make(path: Path = tmp_path, **options: float) -> Host:
        hosts.append(Host(path, **options))
        return hosts[-1]

    yield make
    for host in hosts:
        await host.close()


Start = Callable[..., Host]
REPLACED = ["WorkerLive", "DiskRecovered", "WorkerLost", "WorkerExited", "WorkerLive"]


async def test_the_core_hears_of_a_disk_with_what_is_on_it(start: Start, tmp_path: Path) -> None:
    host = start()
    await host.start()
    assert host.told() == ["WorkerLive", "DiskRecovered"]
    recovered = host.heard[1]
    assert isinstance(recovered, DiskRecovered)
    assert (recovered.disk, len(recovered.found.slots)) == (0, 0)
    assert host.disk.start is not None
    assert "no slab yet" in host.disk.start.cold_reason
    assert (tmp_path / "kvtier.slab").stat().st_size == host.image.bytes


async def test_a_killed_worker_is_replaced_and_the_image_is_kept(start: Start) -> None:
    host = start()
    await host.start()
    host.image.records.format_extent(3, 4096)
    os.kill((await host.live()).pid, signal.SIGKILL)
    await until(lambda: host.told() == REPLACED)
    assert host.image.records.extent_info(3) is not None, "what the file does not say is true all the same"
    assert host.why == ""


async def test_a_directory_that_is_not_there_costs_nothing_but_the_disk_until_it_is(
    start: Start, tmp_path: Path
) -> None:
    host = start(tmp_path / "later")
    await host.start()
    assert (host.told(), host.worker()) == ([], None)
    assert "does not exist" in host.why
    (tmp_path / "later").mkdir()
    await until(lambda: host.told() == ["WorkerLive", "DiskRecovered"])
    assert host.why == ""


async def test_a_worker_that_stands_still_is_killed_and_replaced(start: Start) -> None:
    host = start(deadline_s=3)  # a busy machine lets no worker stand still for so long
    await host.start()
    os.kill((await host.live()).pid, signal.SIGSTOP)
    await until(lambda: host.told() == REPLACED)


async def test_whatever_happens_while_records_are_read_follows_in_order(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start()
    reading, go_on = threading.Event(), threading.Event()
    recover = host.image.recover

    def slowly(boot_nonce: int) -> Recovery:
        reading.set()
        assert go_on.wait(SLACK_S)
        return recover(boot_nonce)

    monkeypatch.setattr(host.image, "recover", slowly)
    await host.supervisor.start()
    first = await host.live()
    await until(reading.is_set)
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: (found := host.worker()) is not None and found is not first)
    assert host.told() == []
    go_on.set()
    await until(lambda: host.told() == REPLACED)


async def test_records_that_cannot_be_read_are_loaded_again_by_the_next_worker(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start()
    recover, failures = host.image.recover, iter([OSError("broken"), None])

    def once(boot_nonce: int) -> Recovery:
        if (failure := next(failures)) is not None:
            raise failure
        return recover(boot_nonce)

    monkeypatch.setattr(host.image, "recover", once)
    await host.start()
    await until(lambda: host.disk.start is not None)
    assert host.told() == ["WorkerLive", "DiskRecovered"], "of the first the core has heard nothing"
