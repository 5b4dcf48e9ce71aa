"""LMCache's server ("MP"), over ZeroMQ or gRPC, driven by LMCache's own client classes on a CPU.

An engine holds a `RequestClient` and a `TransferContext`, as LMCache's adapter for vLLM does: the context
registers the KV cache and copies, or has the server copy; lookups go through the client. The server runs with
both ways to copy switched on, and with its memory allocated and shared from the beginning, which the way in
which the engine copies needs.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.benchmarks import lmcache_peer
from tests.benchmarks.peers.driver import (
    BLOCK_TOKENS,
    DEADLINE_S,
    ELEMENT_BYTES,
    Peer,
    PeerEngine,
    PeerRefused,
    PeerServer,
    PeerShape,
    PlaceForServers,
    Prompt,
)

DEFAULT_CHUNK_TOKENS = 256
"""What `lmcache server` has without a flag."""
_ENGINE = "tests.benchmarks.peers.lmcache_server_peer:LMCacheEngine"
_MODULES = (
    "torch",
    "zmq",
    "lmcache.v1.multiprocess.transfer_context",
    "lmcache.v1.multiprocess.transport.factory",
    "lmcache.v1.multiprocess.custom_types",
    "lmcache.v1.multiprocess.group_view",
)


def _peer(name: str, title: str, how: str, transport: str, chunk_tokens: int, mode: str) -> Peer:
    return Peer(
        name,
        title,
        how,
        _ENGINE,
        options={"mode": mode, "chunk_tokens": chunk_tokens, "scheme": {"zmq": "tcp"}.get(transport, "grpc")},
        environment=lmcache_peer.environment,
        server=f"lmcache {transport} {chunk_tokens}",
        granularity_blocks=chunk_tokens // BLOCK_TOKENS,
    )


ZMQ = _peer(
    "lmcache_zmq",
    "LMCache, ZeroMQ",
    "Its default transport and chunks of 256 tokens; the server copies, as its defaults have it.",
    "zmq",
    DEFAULT_CHUNK_TOKENS,
    "lmcache_driven",
)
ZMQ_ENGINE_COPIES = _peer(
    "lmcache_zmq_engine",
    "LMCache, ZeroMQ, engine copies",
    "The same server; the engine copies through shared memory, which LMCache chooses by itself on a CPU.",
    "zmq",
    DEFAULT_CHUNK_TOKENS,
    "engine_driven",
)
GRPC = _peer(
    "lmcache_grpc",
    "LMCache, gRPC",
    "As the first, with `--transport grpc`.",
    "grpc",
    DEFAULT_CHUNK_TOKENS,
    "lmcache_driven",
)
ZMQ_FINE = _peer(
    "lmcache_zmq_16",
    "LMCache, ZeroMQ, chunks of 16",
    "Chunks as long as a block, so that one hash is one object in all peers.",
    "zmq",
    BLOCK_TOKENS,
    "lmcache_driven",
)
GRPC_FINE = _peer(
    "lmcache_grpc_16",
    "LMCache, gRPC, chunks of 16",
    "As the one before, with `--transport grpc`.",
    "grpc",
    BLOCK_TOKENS,
    "lmcache_driven",
)


class LMCachePeerServer(PeerServer):
    """`lmcache server` for one transport and length of chunks."""

    def __init__(self, place: PlaceForServers, transport: str, chunk_tokens: int) -> None:
        self._shm_name = f"kvtier-test-bench-{os.getpid()}-{transport}-{chunk_tokens}"
        more = [f"--transport={transport}", "--supported-transfer-mode=auto", "--no-l1-use-lazy"]
        more += [f"--shm-name={self._shm_name}"]
        size_gib = place.pool_bytes / (1 << 30)
        log = place.run / f"lmcache-{transport}-{chunk_tokens}.log"
        self._server = lmcache_peer.LMCacheServer(size_gib, log, chunk_tokens, more)

    @property
    def address(self) -> dict[str, Any]:
        return {"endpoint": f"127.0.0.1:{self._server.port}", "http_port": self._server.http_port}

    def pids(self) -> list[int]:
        server = psutil.Process(self._server.pid)
        return [server.pid, *(child.pid for child in server.children(recursive=True))]

    def kill(self) -> None:
        self._server.kill()

    def restart(self) -> None:
        self._remove_memory()  # it refuses to start while the killed one's is there
        self._server.start()

    def stop(self) -> None:
        self._server.stop()
        self._remove_memory()

    def _remove_memory(self) -> None:
        for left in Path("/dev/shm").glob(f"*{self._shm_name}*"):
            left.unlink(missing_ok=True)


@dataclass(frozen=True)
class TokenNames:
    """A prompt's token ids, of whole chunks."""

    tokens: tuple[int, ...]
    blocks: int


class LMCacheEngine(PeerEngine):
    """One worker and the scheduler's client, in one process."""

    _serial = itertools.count(1)

    def __init__(self, mode: str, chunk_tokens: int, scheme: str) -> None:
        self._mode = mode
        self._chunk_blocks = chunk_tokens // BLOCK_TOKENS
        self._scheme = scheme
        self._context: Any = None
        self._client: Any = None
        self._zmq: Any = None
        self._caches: dict[str, Any] = {}
        self._unanswered: list[Any] = []
        self._http_port = 0

    def warm(self) -> None:
        for name in _MODULES:
            importlib.import_module(name)

    def register(self, address: Mapping[str, Any], shape: PeerShape, blocks: int, instance: str) -> None:
        """`RequestClientFactory.create`, `create_transfer_context`, `TransferContext.register`."""
        imported: list[Any] = [importlib.import_module(name) for name in _MODULES]
        torch, zmq, contexts, factory, types, group_view = imported
        self._key_type = types.IPCCacheServerKey
        self._http_port = address["http_port"]
        self._model = f"peers-{shape.name}-{self._mode}"
        self._number = os.getpid() * 1_000 + next(self._serial) % 1_000
        self._zmq = zmq.Context()
        self._zmq.setsockopt(zmq.LINGER, 0)
        url = f"{self._scheme}://{address['endpoint']}"
        self._client = factory.RequestClientFactory.create(url, context=self._zmq)
        one_layer: tuple[int, ...] = (shape.kv, blocks, BLOCK_TOKENS, shape.heads, shape.head_size)
        if shape.kv == 1:
            one_layer = (blocks, BLOCK_TOKENS, shape.heads * shape.head_size)
        assert ELEMENT_BYTES == 2
        self._caches = {
            f"layer.{layer}": torch.zeros(one_layer, dtype=torch.float16) for layer in range(shape.layers)
        }
        self._context = contexts.create_transfer_context(
            self._caches, mode=self._mode, instance_id=self._number, req_client=self._client
        )
        try:
            self._context.register(
                self._caches,
                self._model,
                1,
                self._chunk_blocks,
                DEADLINE_S,
                layout_hints={"kv_layout": "NHD"},
                engine_group_infos=[group_view.EngineGroupInfo(0, tuple(range(shape.layers)), BLOCK_TOKENS)],
            )
        except TimeoutError as error:
            raise PeerRefused("REGISTER was not answered") from error
        # Only now: to share them, it may have moved the tensors.
        self.memory = []
        for tensor in self._caches.values():
            layer = tensor.view(torch.uint8).numpy().reshape(shape.kv, blocks, shape.fragment_bytes)
            self.memory += list(layer)

    def names_of(self, prompt: Prompt) -> TokenNames:
        """Token ids that no other prompt begins with, for each whole chunk of the prompt."""
        chunks = prompt.blocks // self._chunk_blocks
        chance = np.random.default_rng(prompt.seed)
        tokens = chance.integers(0, 1 << 16, chunks * self._chunk_blocks * BLOCK_TOKENS)
        return TokenNames(tuple(tokens.tolist()), chunks * self._chunk_blocks)

    def store(self, names: TokenNames, block_ids: Sequence[int]) -> None:
        """`TransferContext.submit_store` and its future's result: STORE, or PREPARE_STORE, gather and
        COMMIT_STORE where the engine copies."""
        session = f"store-{self._number}-{next(self._serial)}"
        key = self._key(names, session, worker=0)
        event = self._context.create_recorded_event()
        future = self._context.submit_store(
            session, key, self._caches, [list(block_ids)], event, self._chunk_blocks
        )
        if not future.result(timeout=DEADLINE_S):
            raise PeerRefused("STORE failed")
        self._unanswered.append(self._client.end_session(session))

    def lookup(self, names: TokenNames) -> tuple[int, Any]:
        """`RequestClient.lookup`, its acknowledgement, then `wait_prefetch_status`: two messages, and no
        polling. The server hashes the tokens, and holds a read lock on each chunk that it found."""
        session = f"lookup-{self._number}-{next(self._serial)}"
        key = self._key(names, session)
        self._client.lookup(key, 1).result(timeout=DEADLINE_S)
        chunks = self._client.wait_prefetch_status(session, DEADLINE_S).result(timeout=DEADLINE_S)
        return (chunks or 0) * self._chunk_blocks, (session, key)

    def give_back(self, found: Any) -> None:
        """`RequestClient.free_lookup_locks` and `end_session`: two messages, whose answers nobody waits for,
        as its adapter for vLLM sends them."""
        session, key = found
        self._unanswered.append(self._client.free_lookup_locks(key, 1))
        self._unanswered.append(self._client.end_session(session))

    def settle(self) -> None:
        for future in self._unanswered:
            future.result(timeout=DEADLINE_S)
        self._unanswered.clear()

    def load(self, names: TokenNames, found: Any, block_ids: Sequence[int]) -> None:
        """`TransferContext.submit_retrieve` and its future's result: RETRIEVE, or PREPARE_RETRIEVE, scatter
        and COMMIT_RETRIEVE where the engine copies. The read locks are gone afterwards."""
        session, _ = found
        key = self._key(names, session, worker=0)
        event = self._context.create_recorded_event()
        future = self._context.submit_retrieve(
            session, key, self._caches, [list(block_ids)], event, self._chunk_blocks, skip_first_n_tokens=0
        )
        if not future.result(timeout=DEADLINE_S):
            raise PeerRefused("RETRIEVE failed")
        self._unanswered.append(self._client.end_session(session))

    def clear(self) -> None:
        """`RequestClient.clear`, with force: it would keep what its locks hold."""
        self.settle()
        self._client.clear(True).result(timeout=DEADLINE_S)

    def held(self, names: TokenNames) -> int:
        """Read-locked chunks in GET /status, as blocks."""
        locked = [count for name, count in self.stats().items() if name.endswith("read_locked_count")]
        return int(sum(locked)) * self._chunk_blocks

    def stats(self) -> dict[str, float]:
        """GET /status of its HTTP server: every number in it, by its path."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self._http_port}/status", timeout=DEADLINE_S
        ) as answer:
            return dict(_numbers(json.load(answer), ""))

    def close(self) -> None:
        """UNREGISTER_KV_CACHE, and the end of both connections."""
        if self._context is not None:
            self._context.flush_inflight_stores()
            future = self._context.unregister()
            if future is not None:
                future.result(timeout=DEADLINE_S)
            self._context.close()
        self.memory = []
        self._caches = {}
        self._unanswered.clear()
        if self._client is not None:
            self._client.close()
            self._zmq.term()
        self._context = self._client = self._zmq = None

    def _key(self, names: TokenNames, session: str, worker: int | None = None) -> Any:
        return self._key_type(
            model_name=self._model,
            world_size=1,
            worker_id=worker,
            token_ids=names.tokens,
            start=0,
            end=len(names.tokens),
            request_id=session,
            num_kv_readers=1,
        )


def _numbers(value: Any, path: str) -> list[tuple[str, float]]:
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, int | float):
        return [(path, float(value))]
    if isinstance(value, dict):
        return [pair for key, one in value.items() for pair in _numbers(one, f"{path}.{key}".strip("."))]
    return []
