"""A model, daemons and engines. Engines take seconds to start, so files share them."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import DaemonHost, until
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.vllm import cpu_platform, engine_forks
from tests.vllm.engine import Engine, EngineOptions, Generated
from tests.vllm.rig import PATIENT_S, Rig, kv_transfer_config, prompt, start_rig
from tools import tiny_llama

QUICK: dict[str, Any] = {"server__heartbeat_interval_s": "0.2", "workers__copy_deadline_s": "3"}
STORY_TOKENS = 1000

cpu_platform.ensure()
engine_forks.use()


@pytest.fixture(autouse=True)
def leak_check() -> None:
    """Tests restart daemons and engines that live as long as the session, which checks that nothing is
    left."""


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in this process that take a daemon on a busy machine for slow, and not for dead."""
    from kvtier.session import state
    from kvtier_vllm.scheduler import matching

    monkeypatch.setattr(matching, "ANSWER_DEADLINE_S", PATIENT_S)
    monkeypatch.setattr(state, "SILENCE_S", PATIENT_S)


@pytest.fixture
def hurried() -> None:
    """For a test that is about the impatience of its engines: they have it."""


@pytest.fixture
def patience(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of engines in this process, which are `unhurried` besides: what they are to store is stored,
    and what the daemon has they load, however late it gets the processor. Of tests of faults, and of those
    that ask for `hurried`, engines are as impatient as they come."""
    if request.node.get_closest_marker("faults") is not None or "hurried" in request.fixturenames:
        return {}
    request.getfixturevalue("unhurried")
    return {"load_start_deadline_s": PATIENT_S}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' Llama."""
    return tiny_llama.ensure(tmp_path_factory.mktemp("model") / "tiny", tiny_llama.PRESETS["tiny"])


@pytest.fixture(scope="session")
def place() -> Iterator[tuple[Path, Path]]:
    """A folder for sockets and one for a pool, for as long as the tests run."""
    run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    yield run, pool / "pool"
    shutil.rmtree(run)
    shutil.rmtree(pool)


@pytest.fixture(scope="session")
def session_host(place: tuple[Path, Path]) -> Iterator[DaemonHost]:
    """The daemon of the shared engine."""
    # Sampling would find what a negative control spoils before it can show.
    host = DaemonHost(*place, pool__size="258MiB", integrity__sample_bytes_per_s=0, **QUICK)
    host.start()
    yield host
    host.stop()


@dataclass(frozen=True)
class FirstLife:
    """What an engine that is no more has left behind."""

    cold: Generated
    hit: Generated
    """A hit in its own cache."""


@pytest.fixture(scope="session")
def options(model: Path, session_host: DaemonHost) -> EngineOptions:
    """Of both engines of the story. Prefills are chunked."""
    config = kv_transfer_config(session_host.socket, load_start_deadline_s=1.0)
    return EngineOptions(model, kv_transfer_config=config, max_num_batched_tokens=256)


@pytest.fixture(scope="session")
def first_life(
    options: EngineOptions, session_host: DaemonHost, tmp_path_factory: pytest.TempPathFactory
) -> FirstLife:
    """An engine that computed the story's prompt, and was killed with -9."""
    engine = Engine.start(options, tmp_path_factory.mktemp("first") / "log")
    try:
        rig = Rig(session_host, engine)
        rig.patient()
        rig.wait_ready()
        cold = rig.generate(prompt(STORY_TOKENS))
        hit = rig.generate(prompt(STORY_TOKENS))
        rig.wait_stored()
    finally:
        engine.kill()
    until(lambda: not session_host.status().instances, "the daemon noticed the engine's death")
    return FirstLife(cold, hit)


@dataclass(frozen=True)
class SecondLife:
    """The engine that came after it, with its first answer."""

    rig: Rig
    restored: Generated


@pytest.fixture(scope="session")
def second_life(
    first_life: FirstLife,
    options: EngineOptions,
    session_host: DaemonHost,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SecondLife]:
    """The engine that most tests share."""
    rig = start_rig(session_host, options, tmp_path_factory.mktemp("second") / "log")
    with rig.engine:
        yield SecondLife(rig, rig.generate(prompt(STORY_TOKENS)))


@pytest.fixture
def rig(second_life: SecondLife) -> Iterator[Rig]:
    """The shared engine, idle and attached, its own cache empty, and patient."""
    rig = second_life.rig
    rig.patient()
    rig.wait_ready()
    rig.forget()
    yield rig
    rig.host.thaw()


@pytest.fixture(scope="session")
def plain(options: EngineOptions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine like the shared one, without a connector."""
    bare = dataclasses.replace(options, kv_transfer_config=None)
    with Engine.start(bare, tmp_path_factory.mktemp("plain") / "log") as engine:
        yield engine


@pytest.fixture
def with_fault(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """`with_fault("slow-copy:100")` restarts the daemon with copy workers that do that."""

    def restart(fault: str) -> None:
        monkeypatch.setenv("KVTIER_TEST_WORKER_FAULT", fault)
        rig.host.restart()
        rig.wait_ready()

    yield restart
    monkeypatch.delenv("KVTIER_TEST_WORKER_FAULT", raising=False)
    rig.host.restart()
