"""Daemons of hosts that share a store. Here they are processes with pools and sockets of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.v1 import admin_pb2

from tests.support.daemon import DaemonHost, until
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX

NewHost = Callable[..., DaemonHost]
USUAL = {
    "server__heartbeat_interval_s": "0.2",
    "store__look_every_s": "0.1",
    "store__write_mode": "through",
}


@contextmanager
def several_hosts() -> Iterator[NewHost]:
    """Yields what starts a daemon of another host, with the settings that it is given. All of them end with
    it."""
    hosts: list[tuple[DaemonHost, Path, Path]] = []

    def make(**settings: Any) -> DaemonHost:
        run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
        pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
        host = DaemonHost(run, pool / "pool", **{**USUAL, **settings})
        hosts.append((host, run, pool))
        host.start()
        return host

    yield make
    for host, run, pool in hosts:
        host.stop()
        shutil.rmtree(run)
        shutil.rmtree(pool)


def below(host: DaemonHost) -> admin_pb2.DiskStatus:
    """How a host sees the store."""
    return next(disk for disk in host.status().disks if disk.shared)


def wait_until_put(host: DaemonHost, blocks: int) -> None:
    """Returns when a host knows of so many blocks in the store, and is putting none there."""
    until(
        lambda: below(host).blocks >= blocks and not below(host).writing_bytes, "the blocks are in the store"
    )
