"""Daemons of hosts that share a store. Here they are processes with pools and sockets of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvtier.session import state

from tests.support.daemon import DaemonHost
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.support.plain_client import READY_S, PlainClient

NewHost = Callable[..., DaemonHost]
Connect = Callable[..., PlainClient]


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients take a daemon on a busy machine for slow, and not for dead."""
    monkeypatch.setattr(state, "SILENCE_S", READY_S)


@pytest.fixture
def new_host() -> Iterator[NewHost]:
    """Starts a daemon of another host, with these settings."""
    hosts: list[tuple[DaemonHost, Path, Path]] = []

    def make(**settings: Any) -> DaemonHost:
        run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
        pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
        usual = {
            "server__heartbeat_interval_s": "0.2",
            "store__look_every_s": "0.1",
            "store__write_mode": "through",
        }
        host = DaemonHost(run, pool / "pool", **{**usual, **settings})
        hosts.append((host, run, pool))
        host.start()
        return host

    yield make
    for host, run, pool in hosts:
        host.stop()
        shutil.rmtree(run)
        shutil.rmtree(pool)


@pytest.fixture
def connect_to() -> Iterator[Connect]:
    """Connects clients, which are closed with the test."""
    clients: list[PlainClient] = []

    def connect(host: DaemonHost, instance: str = "one", **options: Any) -> PlainClient:
        clients.append(PlainClient(host.socket, instance, **options).ready())
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
