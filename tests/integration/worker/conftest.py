import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop
from kvtierd.memory.host_pool import HostPool
from kvtierd.workers.lane_chunks import LaneChunks
from kvtierd.workers.supervisor import lifecycle
from kvtierd.workers.supervisor.handles import SupervisorLimits, WorkerOptions

from tests.integration.worker.devices import USUAL, Gpu, Mode, params
from tests.integration.worker.rig import SLACK_S, Rig
from tests.support.fake_cuda import FakeCuda
from tests.support.pools import whole

StartRig = Callable[..., Awaitable[Rig]]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The daemon runs on uvloop; the channel's own tests cover both."""
    return {"uvloop": uvloop.new_event_loop}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("modes")
        metafunc.parametrize("mode", params(marker.args if marker else USUAL), indirect=True)


@pytest.fixture(autouse=True)
def _how_workers_ended_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests want to hear how a worker has exited, and on a busy machine that comes long after the end of its
    channel."""
    monkeypatch.setattr(lifecycle, "EXIT_GRACE_S", SLACK_S)


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> Mode:
    """What the test's rigs copy from and to; `on()` asks for others."""
    mode = request.param
    assert isinstance(mode, Mode)
    return mode


@pytest.fixture
def gpu(shm_dir: Path, mode: Mode) -> Iterator[Gpu]:
    """The first GPU of a fake machine, whose context is current in the test's thread."""
    folder = shm_dir / "gpu"
    folder.mkdir()
    with contextlib.closing(FakeCuda(folder, version=mode.driver_version, devices=2, hbm=512 << 20)) as fake:
        gpu = Gpu(fake)
        with gpu.context:
            yield gpu
        assert fake.open_imports() == []


@pytest.fixture
def other_gpu(gpu: Gpu) -> Gpu:
    """The second."""
    return Gpu(gpu.fake, 1)


@pytest_asyncio.fixture
async def start_rig(mode: Mode, request: pytest.FixtureRequest) -> AsyncIterator[StartRig]:
    """Starts rigs: `await start_rig(fault="slow-copy:10", limits=…)`."""
    rigs: list[Rig] = []
    gpu: Gpu | None = request.getfixturevalue("gpu") if mode.is_gpu else None

    async def start(
        fault: str = "",
        limits: SupervisorLimits | None = None,
        pool_bytes: int = 66 << 20,
        environment: dict[str, str] | None = None,
        worker: bool = True,
        chunks: LaneChunks | None = None,
    ) -> Rig:
        """`environment` and `chunks`: for the workers of a GPU. Without `worker`, none is started."""
        pool = whole(HostPool.open(None, pool_bytes, 16 << 20, lock_timeout_s=1))
        of_gpu: dict[str, Any] = {}
        if gpu is not None:
            of_gpu = {
                "device": gpu.name,
                "memory": gpu.allocate,
                "environment": gpu.fake.environment | (environment or {}),
                "imports": gpu.imports,
                "options": WorkerOptions(gpu_copy_method=mode.method, gpu_chunks=chunks or LaneChunks()),
            }
        rigs.append(Rig(pool, limits, **of_gpu))
        await rigs[-1].start(fault, worker)
        return rigs[-1]

    yield start
    for rig in rigs:
        await rig.close()


@pytest_asyncio.fixture
async def rig(start_rig: StartRig) -> Rig:
    return await start_rig()
