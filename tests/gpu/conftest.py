"""Engines with memory on a GPU, and daemons that serve them: on the real driver where there is one, and as
far as no kernel is needed on the fake one."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvtier.v1 import admin_pb2

from tests.gpu.parts.child import Child
from tests.gpu.parts.device import Device, open_device
from tests.gpu.parts.engine_memory import ENVIRONMENT, EXPANDABLE, POOL, WITH_TORCH, WITHOUT_TORCH
from tests.support.daemon import DaemonHost
from tests.support.fake_cuda import FakeCuda, make_fake_cuda

__all__ = ["make_fake_cuda"]

MIB = 1 << 20
MAY_BE_KEPT = (EXPANDABLE, POOL)
"""Kinds of memory that torch may allocate in a way that the driver shares with nobody."""
READY_S = 90.0
"""torch takes its time to load."""
StartEngine = Callable[..., Child]


@dataclass(frozen=True)
class Place:
    """What a test runs on: a driver and a kind of memory."""

    real: bool
    kind: str

    def pick(self, real: int, fake: int) -> int:
        """A size, or a number of rounds."""
        return real if self.real else fake


def places(
    real: tuple[str, ...] = WITHOUT_TORCH + WITH_TORCH, fake: tuple[str, ...] = WITHOUT_TORCH
) -> list[Any]:
    """Parameters of the fixture `place`."""
    torch = importlib.util.find_spec("torch") is not None
    without_torch = pytest.mark.skipif(not torch, reason="torch is not installed")
    on_real = [
        pytest.param(
            Place(True, kind),
            id=kind,
            marks=[pytest.mark.gpu, *([without_torch] if kind in WITH_TORCH else [])],
        )
        for kind in real
    ]
    return on_real + [
        pytest.param(Place(False, kind), id=f"fake-{kind}", marks=[pytest.mark.fake_gpu]) for kind in fake
    ]


@pytest.fixture(params=places())
def place(request: pytest.FixtureRequest) -> Place:
    """Every kind of memory on the real driver, and those without torch on the fake one."""
    chosen: Place = request.param
    return chosen


@pytest.fixture
def fake_bandwidth() -> int:
    """Bytes per second of the fake link."""
    return 800 * MIB


@pytest.fixture
def fake(
    place: Place,
    make_fake_cuda: Callable[..., FakeCuda],
    monkeypatch: pytest.MonkeyPatch,
    fake_bandwidth: int,
) -> FakeCuda | None:
    """The fake machine, if the place has one; all processes started from now on use it."""
    if place.real:
        return None
    machine = make_fake_cuda(bandwidth=fake_bandwidth, hbm=512 * MIB)
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    return machine


@pytest.fixture
def device(fake: FakeCuda | None) -> Iterator[Device]:
    """The GPU, its context current in this thread."""
    with open_device() as device:
        yield device


@pytest.fixture
def pool_mib(place: Place) -> int:
    """Size of the daemon's pool."""
    return place.pick(1026, 66)


@pytest.fixture
def host(
    place: Place, fake: FakeCuda | None, socket_dir: Path, shm_dir: Path, pool_mib: int
) -> Iterator[DaemonHost]:
    """A running daemon."""
    settings = {"pool__size": f"{pool_mib}MiB", "pool__extent_size": f"{place.pick(16, 1)}MiB"}
    host = DaemonHost(socket_dir, shm_dir / "pool", server__heartbeat_interval_s="0.2", **settings)
    host.start()
    host.daemon.wait_whole()
    yield host
    host.stop()


@pytest.fixture
def start_engine(place: Place, host: DaemonHost) -> Iterator[StartEngine]:
    """`start_engine("one")` is an engine that is ready; named arguments replace what it is made of."""
    engines: list[Child] = []

    def start(instance: str = "one", kind: str | None = None, **changed: object) -> Child:
        kind = kind or place.kind
        engine = Child("tests.gpu.children.kv_engine", ENVIRONMENT.get(kind, {}))
        engines.append(engine)
        asked: dict[str, Any] = {
            "kind": kind,
            "instance": instance,
            "socket": str(host.socket),
            "num_blocks": 64,
            "planes": 4,
            "fragment_bytes": place.pick(256, 16) << 10,
            "long_bytes": place.pick(64 * MIB, MIB // 4),
        }
        answer = engine.ask("open", timeout_s=READY_S, **(asked | changed))
        if answer.fields.get("not_exportable") and kind in MAY_BE_KEPT:
            pytest.skip(f"{kind} memory cannot be exported here: {answer['why']}")
        assert answer["ready"], answer["why"]
        return engine

    yield start
    for engine in engines:
        engine.close()


def gpu_worker(host: DaemonHost) -> admin_pb2.WorkerStatus:
    """The copy worker that serves the GPU."""
    [worker] = [w for w in host.status().workers if w.device.startswith("GPU-") and w.state == "live"]
    return worker


@pytest.fixture
def family() -> str:
    """A name that no block ever had: fresh contents in every run."""
    return uuid.uuid4().hex
