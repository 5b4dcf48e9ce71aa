"""One daemon for all tests of a file: for files most of whose tests neither end it nor want other settings.

    from tests.integration.daemon.shared import connect as connect
    from tests.integration.daemon.shared import daemon as daemon
    from tests.integration.daemon.shared import shared_daemon as shared_daemon

A test that asks for `start` has its own daemon instead, and `connect` leads to that one.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvtier.v1 import admin_pb2, admin_pb2_grpc

from tests.integration.daemon.conftest import Connect
from tests.integration.daemon.raw import RawSession
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.support.process import DEADLINE_S, Daemon, until


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    """A daemon that no test of the file ends."""
    run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    daemon = Daemon(run, pool / "pool")
    yield daemon
    daemon.stop()
    shutil.rmtree(run)
    shutil.rmtree(pool)


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Iterator[Daemon]:
    """The file's daemon, idle and empty. It is so again after the test, or the test has failed."""
    yield shared_daemon
    assert shared_daemon.process.poll() is None, "the test has ended a daemon that others want"
    until(shared_daemon.check_idle, "the daemon is idle")
    clear(shared_daemon)
    assert shared_daemon.new_complaints() == []


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Opens sessions of the daemon, closed at the end of the test."""
    if "start" in request.fixturenames:
        socket: Path = request.getfixturevalue("socket_dir") / "kvtierd.sock"
    else:
        socket = request.getfixturevalue("daemon").socket
    sessions: list[RawSession] = []

    def connect_one(**options: Any) -> RawSession:
        sessions.append(RawSession(socket, **options))
        return sessions[-1]

    yield connect_one
    for session in sessions:
        session.close()


def clear(daemon: Daemon) -> None:
    """Forgets every block."""
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        answer = admin_pb2_grpc.AdminStub(channel).Clear(admin_pb2.ClearRequest(), timeout=DEADLINE_S)
    assert not answer.held_blocks, "an idle daemon holds blocks"
