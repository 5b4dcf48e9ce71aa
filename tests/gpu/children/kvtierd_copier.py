"""A real kvtierd at work: an engine without torch keeps storing and loading through it."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import ExitStack
from typing import Any

from kvtier import Transfer

from tests.gpu.parts.bench import MIB
from tests.gpu.parts.child import Handler
from tests.gpu.parts.device import take_device
from tests.gpu.parts.engine_rig import (
    DEADLINE_S,
    EngineCache,
    connected,
    finish,
    hashes_of,
    place_for_a_daemon,
    running_daemon,
)
from tests.gpu.parts.loops import H2D

BLOCK_BYTES = 2 * MIB
FLIGHTS = 3
"""Transfers submitted and not ended."""
STOP_S = 30.0


class KvtierdCopier:
    """Answers `open`, `start`, `stop` and `close`. One half of the cache is loaded to, the other stored
    from."""

    def open(self, fields: dict[str, Any], fds: list[int]) -> None:
        self._stack = ExitStack()
        region_bytes: int = fields["region_bytes"]
        fragment_bytes: int = fields["fragment_bytes"]
        place = self._stack.enter_context(place_for_a_daemon())
        extent = 64 * MIB if region_bytes > 64 * MIB else MIB
        # An instance may lease a quarter of the pool: room for half the cache.
        daemon = self._stack.enter_context(
            running_daemon(*place, 4 * region_bytes + 2 * MIB, extent, **fields["settings"])
        )
        daemon.wait_whole()
        planes = max(1, min(BLOCK_BYTES, region_bytes // 16) // fragment_bytes)
        self._cache = EngineCache(
            take_device(), region_bytes // planes // fragment_bytes, planes, fragment_bytes
        )
        self._cache.fill()
        self._client = self._stack.enter_context(connected(daemon, self._cache, "copier"))
        self._half = self._cache.num_blocks // 2
        self._names = itertools.count()
        self._threads: list[threading.Thread] = []
        # All of the pool once, so that it is registered.
        for _ in range(9):
            self._store().wait(DEADLINE_S)
        hashes = hashes_of("loaded", self._half)
        finish([self._client.store(hashes, range(self._half))])
        self._lease = self._client.lookup(hashes, lease=True, timeout_s=DEADLINE_S)
        assert self._lease.hits == self._half, self._lease.hits

    def start(self, fields: dict[str, Any], fds: list[int]) -> None:
        """Begins to copy in these directions at once."""
        self._stopping = threading.Event()
        self._copied_bytes = dict.fromkeys(fields["directions"], 0)
        self._threads = [
            threading.Thread(target=self._run, args=(direction,), daemon=True)
            for direction in fields["directions"]
        ]
        self._begin = time.perf_counter()
        for thread in self._threads:
            thread.start()

    def stop(self, fields: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """What was copied meanwhile."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(STOP_S)
            if thread.is_alive():
                raise TimeoutError(f"transfers still run {STOP_S} s after they were told to stop")
        seconds = time.perf_counter() - self._begin
        return {"gb_per_s": round(sum(self._copied_bytes.values()) / seconds / 1e9, 2)}

    def close(self, fields: dict[str, Any], fds: list[int]) -> None:
        self._stack.close()

    def _run(self, direction: str) -> None:
        """Keeps transfers on their way; counts those that were done."""
        submit = self._load if direction == H2D else self._store
        flying: list[Transfer] = []
        while not self._stopping.is_set() or flying:
            while len(flying) < FLIGHTS and not self._stopping.is_set():
                flying.append(submit())
            if flying.pop(0).wait(DEADLINE_S).done:
                self._copied_bytes[direction] += self._half * self._cache.block_bytes

    def _store(self) -> Transfer:
        hashes = hashes_of(f"stored/{next(self._names)}", self._half)
        return self._client.store(hashes, range(self._half, 2 * self._half))

    def _load(self) -> Transfer:
        return self._client.load(self._lease, range(self._half), keep_lease=True)


def handlers() -> dict[str, Handler]:
    copier = KvtierdCopier()
    return {"open": copier.open, "start": copier.start, "stop": copier.stop, "close": copier.close}
