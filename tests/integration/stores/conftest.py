"""Hosts that share a store, and plain clients of theirs, closed with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvtier.session import state

from tests.support.daemon import DaemonHost
from tests.support.hosts import NewHost, several_hosts
from tests.support.plain_client import READY_S, PlainClient

Connect = Callable[..., PlainClient]


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients take a daemon on a busy machine for slow, and not for dead."""
    monkeypatch.setattr(state, "SILENCE_S", READY_S)


@pytest.fixture
def new_host() -> Iterator[NewHost]:
    """Starts a daemon of another host, with these settings."""
    with several_hosts() as make:
        yield make


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
