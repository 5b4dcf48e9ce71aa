"""A real daemon and a plain client for the benchmarks that go end to end."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvtier import Client, Group, Namespace, Plane, SharedBuffer

from tests.support.process import Daemon

DEADLINE_S = 120.0


@dataclass(frozen=True)
class Rig:
    """One daemon with one client, ready."""

    daemon: Daemon
    client: Client
    memory: SharedBuffer


@dataclass(frozen=True)
class Load:
    """What a process has done with the machine's cores, all its threads together."""

    run_s: float
    waits_s: float
    """Ready to run, and no core free."""
    taken_s: float

    @classmethod
    def of(cls, pid: int) -> Load:
        """So far; `taken_s` counts from some moment."""
        found = [(task / "schedstat").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
        run_ns, waits_ns = (sum(int(fields[column]) for fields in found) for column in (0, 1))
        return cls(run_ns / 1e9, waits_ns / 1e9, time.perf_counter())

    def since(self, before: Load) -> Load:
        return Load(self.run_s - before.run_s, self.waits_s - before.waits_s, self.taken_s - before.taken_s)


@contextmanager
def rig(
    *, num_blocks: int, planes: int, fragment_bytes: int, pool_size: str, **settings: Any
) -> Iterator[Rig]:
    """Starts both; the engine's cache has `planes` planes with `fragment_bytes` of each block. `settings` are
    the daemon's, written like `store__url="file:///somewhere"`."""
    run = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
    shm = Path(tempfile.mkdtemp(prefix="kvtier-test-bench-", dir="/dev/shm"))
    daemon = Daemon(run, shm / "pool", pool__size=pool_size, pool__extent_size="16MiB", **settings)
    try:
        daemon.wait_whole()
        with connected(daemon.socket, "bench", num_blocks, planes, fragment_bytes) as (client, memory):
            yield Rig(daemon, client, memory)
    finally:
        daemon.kill()
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)


@contextmanager
def connected(
    socket: Path, instance: str, num_blocks: int, planes: int, fragment_bytes: int
) -> Iterator[tuple[Client, SharedBuffer]]:
    """A client that is ready, and its cache. All of one geometry share their blocks."""
    with SharedBuffer.create(num_blocks * planes * fragment_bytes) as memory:
        group = Group(
            block_tokens=16,
            num_blocks=num_blocks,
            planes=tuple(
                Plane(
                    fragment_bytes=fragment_bytes,
                    base_offset=plane * num_blocks * fragment_bytes,
                    block_stride_bytes=fragment_bytes,
                )
                for plane in range(planes)
            ),
        )
        namespace = Namespace(model="bench", kv_dtype="uint8", hash_scheme="sha256")
        with Client(
            instance=instance, namespace=namespace, groups=[group], memory=memory, socket=socket
        ) as client:
            if not client.wait_ready(DEADLINE_S):
                raise RuntimeError(f"the client did not become ready: {client.status.why}")
            yield client, memory


def hashes_of(family: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{family}/{i}".encode()).digest() for i in range(count)]


def microseconds(call: Callable[[], object], times: int, warm_up: int = 20) -> npt.NDArray[np.float64]:
    """How long each of `times` calls took."""
    for _ in range(min(warm_up, times)):
        call()
    taken = np.empty(times)
    for i in range(times):
        start = time.perf_counter_ns()
        call()
        taken[i] = time.perf_counter_ns() - start
    return taken / 1e3
