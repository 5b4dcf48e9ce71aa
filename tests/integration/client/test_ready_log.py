"""A client says in the log when it has lost its daemon, and when it works again; or it tells its owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import kvtier
import kvtier.aio
import pytest
from kvtier import ClientStatus, Namespace

from tests.support.daemon import DaemonHost, until
from tests.support.plain_client import READY_S, Cache

Said = Callable[[], list[str]]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    """The lines that clients have logged."""
    caplog.set_level(logging.INFO, "kvtier")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "kvtier"]


@pytest.fixture
def cache() -> Any:
    cache = Cache()
    yield cache
    cache.close()


def options(host: DaemonHost, namespace: Namespace, cache: Cache, **more: Any) -> Any:
    return {
        "instance": namespace.tenant,
        "namespace": namespace,
        "groups": [cache.group],
        "memory": cache.memory,
        "socket": host.socket,
        **more,
    }


def test_after_every_loss_the_log_says_when_the_client_works_again(
    idle_host: DaemonHost, namespace: Namespace, cache: Cache, said: Said
) -> None:
    with kvtier.Client(**options(idle_host, namespace, cache)) as client:
        until(lambda: any("no daemon listens" in line for line in said()), "it says that nobody is there")
        idle_host.start()
        version = idle_host.status().version
        attached = f"kvtier {idle_host.socket}: attached to kvtierd {version}"
        for lives in (1, 2, 3):
            assert client.wait_ready(READY_S)
            until(lambda lives=lives: said().count(attached) == lives, "it says that it works again")
            losses = len(said())
            idle_host.kill9()
            until(lambda losses=losses: len(said()) > losses, "it says that it is lost")
            assert "without it every lookup misses" in said()[losses]
            idle_host.start()


def test_a_daemon_that_was_always_there_is_nothing_to_write_about(
    host: DaemonHost, namespace: Namespace, cache: Cache, said: Said
) -> None:
    with kvtier.Client(**options(host, namespace, cache)) as client:
        assert client.wait_ready(READY_S)
        assert client.status.pool_bytes == host.status().pool.capacity_bytes
    assert said() == []


def test_the_owner_is_told_once_for_each_epoch(
    host: DaemonHost, namespace: Namespace, cache: Cache, said: Said
) -> None:
    told: list[ClientStatus] = []
    with kvtier.Client(**options(host, namespace, cache, on_ready=told.append)) as client:
        until(lambda: len(told) == 1, "it is told")
        assert told[0].namespace_digest == host.status().instances[0].namespace_digest
        assert told[0].daemon_pid == host.daemon.pid
        assert client.release_memory(READY_S)
        client.register_memory(cache.memory)
        assert client.wait_ready(READY_S)
        host.restart()
        until(lambda: len(told) == 2, "it is told again")
        assert told[1].daemon_pid == host.daemon.pid
    assert not any("attached" in line for line in said())


def test_what_the_owner_raises_ends_nothing(
    host: DaemonHost, namespace: Namespace, cache: Cache, said: Said
) -> None:
    def on_ready(status: ClientStatus) -> None:
        raise ValueError(status.state)

    with kvtier.Client(**options(host, namespace, cache, on_ready=on_ready)) as client:
        until(lambda: "kvtier: on_ready failed" in said(), "that is logged")
        assert client.ready


async def test_an_asynchronous_client_does_the_same(
    host: DaemonHost, namespace: Namespace, cache: Cache
) -> None:
    told: asyncio.Queue[ClientStatus] = asyncio.Queue()
    async with (
        kvtier.aio.Client(**options(host, namespace, cache, on_ready=told.put_nowait)) as client,
        asyncio.timeout(READY_S),
    ):
        first = await told.get()
        await asyncio.to_thread(host.restart)
        second = await told.get()
        assert first.epoch != second.epoch == client.epoch
        assert second.daemon_pid == host.daemon.pid
