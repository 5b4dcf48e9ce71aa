import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
import uvloop
from kvtierd.memory import HostPool
from kvtierd.transfer.supervisor import SupervisorLimits

from tests.integration.worker.rig import Rig

StartRig = Callable[..., Awaitable[Rig]]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The daemon runs on uvloop; the channel's own tests cover both."""
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture
async def start_rig() -> AsyncIterator[StartRig]:
    """Starts rigs: `await start_rig(fault="slow-copy:10", limits=…)`."""
    rigs: list[Rig] = []

    async def start(
        fault: str = "", limits: SupervisorLimits | None = None, pool_bytes: int = 66 << 20
    ) -> Rig:
        pool = HostPool.open(None, pool_bytes, 16 << 20, lock_timeout_s=1)
        rigs.append(Rig(pool, limits))
        await rigs[-1].start(fault)
        return rigs[-1]

    yield start
    for rig in rigs:
        await rig.close()


@pytest_asyncio.fixture
async def rig(start_rig: StartRig) -> Rig:
    return await start_rig()
