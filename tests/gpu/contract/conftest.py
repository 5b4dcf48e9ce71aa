"""Rigs whose clients have memory on the GPU, read and written through the driver.

The same rigs also run test_copies on the fake driver, so that what is particular to them is known to work
before a GPU is at hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import uvloop
from kvtier_kernels.cuda import Driver, load
from kvtierd.memory.host_pool import HostPool
from kvtierd.wire.worker_pb2 import DeviceRange
from kvtierd.workers.supervisor.handles import SupervisorLimits, WorkerOptions

from tests.gpu.parts.device import find_device
from tests.integration.worker.conftest import StartRig
from tests.integration.worker.devices import Bytes, DeviceMemory, Mode
from tests.integration.worker.rig import Rig
from tests.support.fake_cuda import FakeCuda, make_fake_cuda
from tests.support.pools import whole

__all__ = ["make_fake_cuda"]

REAL = tuple(Mode(f"real-{method}", 13_000, method) for method in ("auto", "loop", "rows"))
ON_FAKE = Mode("as-real", 13_000)
INSIDE_BYTES = 4_352
"""Memory begins so far inside its allocation."""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """As the daemon's."""
    return {"uvloop": uvloop.new_event_loop}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Modules that set METHODS run with those ways of copying, and on the fake driver too; the others with
    the driver's own choice."""
    if "mode" in metafunc.fixturenames:
        wanted = getattr(metafunc.module, "METHODS", None)
        real = [
            pytest.param(mode, id=mode.name, marks=pytest.mark.gpu)
            for mode in REAL
            if mode.method in (wanted or ("auto",))
        ]
        fake = pytest.param(ON_FAKE, id=ON_FAKE.name, marks=pytest.mark.fake_gpu)
        metafunc.parametrize("mode", [*real, fake] if wanted else real, indirect=True)


class ReadThrough(DeviceMemory):
    """From cuMemAlloc, shared by IPC handle. `array` is what the GPU holds at the moment, and cannot be
    written."""

    def __init__(self, driver: Driver, size: int) -> None:
        self._driver, self._size = driver, size
        self._base = driver.alloc(INSIDE_BYTES + size)
        self.write(_zeros(size))

    @property
    def array(self) -> Bytes:  # type: ignore[override]
        content = _zeros(self._size)
        self._driver.copy_to_host(content.ctypes.data, self._base + INSIDE_BYTES, self._size)
        content.setflags(write=False)
        return content

    def write(self, content: Bytes) -> None:
        whole = _zeros(self._size)
        whole[:] = content
        self._driver.copy_to_device(self._base + INSIDE_BYTES, whole.ctypes.data, self._size)

    def ranges(self) -> list[DeviceRange]:
        buffer_id = self._driver.pointer_info(self._base).buffer_id
        return [
            DeviceRange(
                bytes=self._size,
                offset=INSIDE_BYTES,
                ipc_handle=self._driver.ipc_export(self._base),
                buffer_id=buffer_id,
            )
        ]

    def close(self) -> None:
        self._driver.free(self._base)


def _zeros(size: int) -> Bytes:
    return np.zeros(size, np.uint8)


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> Mode:
    """How the rig's worker copies, and on which driver."""
    mode = request.param
    assert isinstance(mode, Mode)
    return mode


@pytest.fixture
def driver(
    mode: Mode, make_fake_cuda: Callable[..., FakeCuda], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Driver]:
    """The driver, with the GPU's context current in the test's thread."""
    if mode is ON_FAKE:
        for name, value in make_fake_cuda(hbm=512 << 20).environment.items():
            monkeypatch.setenv(name, value)
    driver, info = find_device()
    context = driver.retain_primary(info.ordinal)
    with context:
        yield load()
    context.release()


@pytest_asyncio.fixture
async def start_rig(mode: Mode, driver: Driver) -> AsyncIterator[StartRig]:
    """Starts rigs: `await start_rig(fault="slow-copy:10", limits=…)`."""
    rigs: list[Rig] = []
    _, info = find_device()

    async def start(
        fault: str = "",
        limits: SupervisorLimits | None = None,
        pool_bytes: int = 66 << 20,
        environment: dict[str, str] | None = None,
    ) -> Rig:
        pool = whole(HostPool.open(None, pool_bytes, 16 << 20, lock_timeout_s=1))
        of_gpu: dict[str, Any] = {
            "device": info.name,
            "memory": lambda size: ReadThrough(driver, size),
            "environment": environment,
            "options": WorkerOptions(gpu_copy_method=mode.method),
        }
        rigs.append(Rig(pool, limits, **of_gpu))
        await rigs[-1].start(fault)
        return rigs[-1]

    yield start
    for rig in rigs:
        await rig.close()


@pytest_asyncio.fixture
async def rig(start_rig: StartRig) -> Rig:
    return await start_rig()
