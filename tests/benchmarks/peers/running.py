"""Servers and engines of one part of a run: started when they are first needed, ended together."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from tests.benchmarks.lmcache_peer import LMCacheError
from tests.benchmarks.peers.driver import (
    Peer,
    PeerAbsent,
    PeerRefused,
    PeerServer,
    PeerShape,
    PlaceForServers,
)
from tests.benchmarks.peers.engine_process import EngineProcessError, PeerProcess
from tests.benchmarks.peers.registry import SERVERS

FAILURES = (EngineProcessError, LMCacheError, PeerAbsent, PeerRefused)
"""Of one peer, that the others' measurements survive."""


class Running:
    """What one part of the benchmark has running. A peer that fails is left out of the rest of the part, and
    `failed` has why."""

    def __init__(self, peers: Iterable[Peer], pool_bytes: int, progress: Callable[[str], None]) -> None:
        self.peers = list(peers)
        self.progress = progress
        self.failed: dict[str, str] = {}
        self._pool_bytes = pool_bytes
        self._stack = ExitStack()
        self._servers: dict[str, PeerServer] = {}
        self._engines: dict[tuple[str, str], PeerProcess] = {}
        self._pids: list[int] = []

    def __enter__(self) -> Running:
        run = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
        self._stack.callback(shutil.rmtree, run, ignore_errors=True)
        shm = Path(tempfile.mkdtemp(prefix="kvtier-test-bench-", dir="/dev/shm"))
        self._stack.callback(shutil.rmtree, shm, ignore_errors=True)
        self.place = PlaceForServers(run, shm, self._pool_bytes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        # LMCache's engines leave these behind if they are killed.
        for pid in self._pids:
            for left in Path("/dev/shm").glob(f"lmcache_kv_{pid}_*"):
                left.unlink(missing_ok=True)

    def start(self) -> None:
        """Starts all servers, which takes some of them ten seconds, at once, and launches all engines. A peer
        whose server fails is left out."""
        wanted = {peer.server: peer for peer in self.peers if peer.server}
        self.progress(f"starting the servers of {', '.join(peer.title for peer in wanted.values())}")
        with ThreadPoolExecutor(max(1, len(wanted))) as threads:
            starts = {name: threads.submit(SERVERS[name], self.place) for name in wanted}
        for name, start in starts.items():
            try:
                self._servers[name] = start.result()
                self._stack.callback(self._servers[name].stop)
            except FAILURES as error:
                for peer in self.peers:
                    if peer.server == name:
                        self.failed[peer.name] = f"start: {error}"
        self.each(0, "start", self._launch)

    def server(self, peer: Peer) -> PeerServer | None:
        """The peer's server; None if it needs none."""
        if not peer.server:
            return None
        return self._servers[peer.server]

    def engine(self, peer: Peer, tag: str = "engine") -> PeerProcess:
        """The peer's engine of this name, a process. Raises one of FAILURES."""
        if (peer.name, tag) not in self._engines:
            server = self.server(peer)
            log = self.place.run / f"{peer.name}-{tag}.log"
            engine = PeerProcess(peer, log, server.prefix if server else ())
            self._engines[peer.name, tag] = engine
            self._pids.append(engine.pid)
            self._stack.callback(engine.stop)
        return self._engines[peer.name, tag]

    def _launch(self, peer: Peer) -> None:
        self.engine(peer)

    def register(self, peer: Peer, shape: PeerShape, blocks: int, tag: str = "engine") -> PeerProcess:
        """The engine, registered with that KV cache. Raises one of FAILURES."""
        engine, server = self.engine(peer, tag), self.server(peer)
        engine.register(server.address if server else {}, shape, blocks, f"peers-{tag}")
        return engine

    def forget(self, peer: Peer, tag: str) -> None:
        """After the engine of this name was killed."""
        self._engines.pop((peer.name, tag)).kill()

    def each(self, turn: int, doing: str, do: Callable[[Peer], None]) -> None:
        """Does something with all peers that have not failed; each turn begins with another one."""
        for peer in self.in_turn(turn):
            began_s = time.monotonic()
            try:
                do(peer)
            except FAILURES as error:
                self.failed[peer.name] = f"{doing}: {error}"
                self.progress(f"{peer.title} is left out from here on: {doing}: {error}")
            if (took_s := time.monotonic() - began_s) > 30:
                self.progress(f"{doing}: {peer.title} took {took_s:.0f} s")

    def in_turn(self, turn: int) -> Iterator[Peer]:
        """Those that have not failed, beginning with another one each time."""
        first = turn % max(1, len(self.peers))
        for peer in self.peers[first:] + self.peers[:first]:
            if peer.name not in self.failed:
                yield peer
