"""A daemon for each test that wants one, and clients that are closed with it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.client.conftest import unhurried as unhurried
from tests.integration.daemon.gpu import connect_gpu as connect_gpu
from tests.integration.daemon.gpu import fake as fake
from tests.integration.daemon.gpu import gpu as gpu
from tests.integration.daemon.raw import RawSession
from tests.support.process import Daemon

Start = Callable[..., Daemon]
Connect = Callable[..., RawSession]


@pytest.fixture
def start(socket_dir: Path, shm_dir: Path) -> Iterator[Start]:
    """Starts daemons on the same sockets and pool; settings as `pool__size="1GiB"`."""
    started: list[Daemon] = []

    def start_one(**settings: Any) -> Daemon:
        started.append(Daemon(socket_dir, shm_dir / "pool", **settings))
        return started[-1]

    yield start_one
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.kill()
    for daemon in started:
        if not daemon.may_complain:
            assert daemon.complaints() == []


@pytest.fixture
def daemon(start: Start) -> Daemon:
    return start()


@pytest.fixture
def connect(socket_dir: Path) -> Iterator[Connect]:
    """Opens sessions of the daemon, closed at the end of the test."""
    sessions: list[RawSession] = []

    def connect_one(**options: Any) -> RawSession:
        sessions.append(RawSession(socket_dir / "kvtierd.sock", **options))
        return sessions[-1]

    yield connect_one
    for session in sessions:
        session.close()


@pytest.fixture
def session(daemon: Daemon, connect: Connect) -> RawSession:
    """Attached, registered, with random bytes in its cache."""
    session = connect().ready()
    session.fill(1)
    return session
