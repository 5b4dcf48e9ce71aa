"""A daemon of root's whose sockets are for a group, and sessions of the group's members."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.daemon.raw import RawSession
from tests.security.people import GROUP, session
from tests.support.process import Daemon

Start = Callable[..., Daemon]
As = Callable[[int], RawSession]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="only root can become somebody else"))


@pytest.fixture
def start(socket_dir: Path, shm_dir: Path) -> Iterator[Start]:
    """Starts daemons, one after the other, on the same sockets and pool."""
    socket_dir.chmod(0o755)
    run = socket_dir / "run"
    run.mkdir()
    started: list[Daemon] = []

    def start_one(**settings: Any) -> Daemon:
        # These sessions send no heartbeats, and a busy machine takes long to become somebody else.
        options: dict[str, Any] = {"server__group": GROUP, "server__session_silence_s": "600"} | settings
        started.append(Daemon(run, shm_dir / "pool", **options))
        return started[-1]

    yield start_one
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.kill()


@pytest.fixture
def daemon(start: Start) -> Daemon:
    return start()


@pytest.fixture
def connect(socket_dir: Path) -> Iterator[As]:
    """Opens a session of a user, closed at the end of the test."""
    sessions: list[RawSession] = []

    def connect_as(uid: int) -> RawSession:
        sessions.append(session(uid, socket_dir / "run" / "kvtierd.sock"))
        return sessions[-1]

    yield connect_as
    for each in sessions:
        each.close()


@pytest.fixture
def certificates() -> Iterator[Path]:
    """A folder for certificates, which the daemon reads."""
    path = Path(tempfile.mkdtemp(prefix="kvt-certificates-", dir="/tmp"))
    yield path
    shutil.rmtree(path)
