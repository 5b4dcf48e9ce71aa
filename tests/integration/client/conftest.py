"""Daemons, one for a whole file or one for a test that ends it, and plain clients, closed with the test."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvtier import Namespace
from kvtier.session import state

from tests.support.daemon import DaemonHost
from tests.support.engine_gpu import EngineGpu
from tests.support.fake_cuda import FakeCuda
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.support.plain_client import NAMESPACE, READY_S, PlainClient

Connect = Callable[..., PlainClient]
MakeGpu = Callable[..., EngineGpu]
HEARTBEAT = {"server__heartbeat_interval_s": "0.2"}


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients take a daemon on a busy machine for slow, and not for dead. After a second of silence, which is
    nothing unusual there, they would refuse stores, loads and lookups by themselves. Tests of that silence
    set it back."""
    monkeypatch.setattr(state, "SILENCE_S", READY_S)


@pytest.fixture(scope="module")
def shared_host() -> Iterator[DaemonHost]:
    """A running daemon that no test of the file ends."""
    run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    host = DaemonHost(run, pool / "pool", **HEARTBEAT)
    host.start()
    yield host
    host.stop()
    shutil.rmtree(run)
    shutil.rmtree(pool)


@pytest.fixture
def idle_host(socket_dir: Path, shm_dir: Path) -> Iterator[DaemonHost]:
    """Where a daemon could be, but none is yet."""
    host = DaemonHost(socket_dir, shm_dir / "pool", **HEARTBEAT)
    yield host
    host.stop()


@pytest.fixture
def host(idle_host: DaemonHost) -> DaemonHost:
    """A running daemon of the test's own."""
    idle_host.start()
    return idle_host


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Namespace:
    """The test's own."""
    return dataclasses.replace(NAMESPACE, tenant=request.node.name)


@pytest.fixture
def connect_to(namespace: Namespace) -> Iterator[Connect]:
    """Makes plain clients of a daemon; with `ready`, which is the default, waits until they are."""
    made: list[PlainClient] = []

    def connect(
        host: DaemonHost, instance: str = "one", other: Namespace | None = None, *, ready: bool = True
    ) -> PlainClient:
        plain = PlainClient(host.socket, f"{namespace.tenant}/{instance}", other or namespace)
        made.append(plain)
        return plain.ready() if ready else plain

    yield connect
    for plain in made:
        plain.close()


@pytest.fixture
def make_gpu(make_fake_cuda: Callable[..., FakeCuda], monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeGpu]:
    """Of a fake machine that this process and the daemons that it starts are on."""
    made: list[EngineGpu] = []

    def make(**settings: object) -> EngineGpu:
        fake = make_fake_cuda(**settings)
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        made.append(EngineGpu(fake))
        return made[-1]

    yield make
    for gpu in made:
        gpu.driver.library.result("cuCtxSetCurrent", 0)
