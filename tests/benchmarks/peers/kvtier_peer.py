"""kvtier: a `kvtierd serve` with its defaults, and the blocking client, as an engine uses it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import psutil
from kvtier import Client, Group, Namespace, Plane, SharedBuffer
from kvtier.v1 import admin_pb2, admin_pb2_grpc

from tests.benchmarks.peers.driver import (
    BLOCK_TOKENS,
    DEADLINE_S,
    Peer,
    PeerEngine,
    PeerRefused,
    PeerServer,
    PeerShape,
    PlaceForServers,
    Prompt,
    planes_of,
)
from tests.support.daemon import DaemonHost

KVTIER = Peer(
    "kvtier",
    "kvtier",
    "kvtierd with its defaults and a pool of the same size; the client library's blocking client.",
    "tests.benchmarks.peers.kvtier_peer:KvtierEngine",
    server="kvtier",
    ours=True,
)


class KvtierServer(PeerServer):
    """`kvtierd serve` in a process of its own, not a fork of a warm one: its starts are timed."""

    def __init__(self, place: PlaceForServers) -> None:
        run = place.run / "kvtier"
        run.mkdir(mode=0o700)
        self._host = DaemonHost(
            run,
            place.shm / "pool",
            wrap=("env",),
            pool__size=place.pool_bytes,
            pool__extent_size=None,
        )
        self._host.start()

    @property
    def address(self) -> dict[str, Any]:
        return {"socket": str(self._host.socket)}

    def pids(self) -> list[int]:
        front = psutil.Process(self._host.daemon.pid)
        return [front.pid, *(child.pid for child in front.children(recursive=True))]

    def kill(self) -> None:
        self._host.kill9()

    def restart(self) -> None:
        self._host.start()

    def stop(self) -> None:
        self._host.stop()


class KvtierEngine(PeerEngine):
    """An engine of one process with its KV cache in a SharedBuffer."""

    def __init__(self) -> None:
        self._buffer: SharedBuffer | None = None
        self._client: Client | None = None
        self._address = ""

    @property
    def client(self) -> Client:
        assert self._client is not None, "register first"
        return self._client

    def register(self, address: Mapping[str, Any], shape: PeerShape, blocks: int, instance: str) -> None:
        """`SharedBuffer.create`, `Client(...)`, and `wait_ready`: the daemon has mapped the memory then."""
        self._address = address["socket"]
        size = shape.fragment_bytes
        self._buffer = SharedBuffer.create(blocks * shape.block_bytes)
        planes = (
            Plane(fragment_bytes=size, base_offset=plane * blocks * size, block_stride_bytes=size)
            for plane in range(shape.planes)
        )
        group = Group(block_tokens=BLOCK_TOKENS, num_blocks=blocks, planes=tuple(planes))
        namespace = Namespace(model=f"peers-{shape.name}", kv_dtype="uint8", hash_scheme="sha256")
        self._client = Client(
            instance=instance,
            namespace=namespace,
            groups=[group],
            memory=self._buffer,
            socket=self._address,
        )
        if not self._client.wait_ready(DEADLINE_S):
            raise PeerRefused(f"the client did not become ready: {self._client.status.why}")
        self.memory = planes_of(self._buffer.array, shape, blocks)

    def names_of(self, prompt: Prompt) -> bytes:
        """SHA-256 of each block's place, joined."""
        return b"".join(
            hashlib.sha256(f"{prompt.seed}/{block}".encode()).digest() for block in range(prompt.blocks)
        )

    def store(self, names: bytes, block_ids: Sequence[int]) -> None:
        """`Client.store` for as many blocks as the daemon takes at once, all begun before the first
        `Transfer.wait`: every block is committed, and can be found."""
        most = self.client.transfer_blocks_max
        transfers = [
            self.client.store(names[32 * first : 32 * (first + most)], block_ids[first : first + most])
            for first in range(0, len(block_ids), most)
        ]
        for transfer in transfers:
            outcome = transfer.wait(DEADLINE_S)
            if not outcome.done:
                raise PeerRefused(str(outcome))

    def lookup(self, names: bytes) -> tuple[int, Any]:
        """`Client.lookup(lease=True)`: a message to the daemon and its answer, which grants a lease."""
        found = self.client.lookup(names, lease=True, timeout_s=DEADLINE_S)
        return found.hits, found

    def give_back(self, found: Any) -> None:
        """`Lookup.release`: sends a message, whose answer nobody waits for. It goes the way of the next
        lookup, so that one is answered after it."""
        found.release()

    def load(self, names: bytes, found: Any, block_ids: Sequence[int]) -> None:
        """`Client.load` with the lookup's lease, and `Transfer.wait`: the bytes are in the engine's memory,
        and the lease is given back."""
        outcome = self.client.load(found, block_ids).wait(DEADLINE_S)
        if not outcome.done:
            raise PeerRefused(str(outcome))

    def cancel(self, names: bytes, found: Any, block_ids: Sequence[int]) -> str:
        """`Client.load`, `Transfer.revoke`, `Transfer.cancel`, then `Transfer.wait` until it is fenced."""
        transfer = self.client.load(found, block_ids)
        if transfer.revoke():
            return "revoked before it started, without asking the daemon"
        transfer.cancel()
        give_up_s = time.monotonic() + DEADLINE_S
        while not transfer.wait(DEADLINE_S).fenced:
            if time.monotonic() > give_up_s:
                raise PeerRefused("a cancelled load is not fenced")
        return "cancelled: ended at a boundary between chunks"

    def clear(self) -> None:
        """`Admin.Clear`, as `kvtierctl clear` does."""
        with grpc.insecure_channel(f"unix:{self._address}") as channel:
            admin_pb2_grpc.AdminStub(channel).Clear(admin_pb2.ClearRequest(), timeout=DEADLINE_S)

    def held(self, names: bytes) -> int:
        """Leased blocks in `Admin.Status`."""
        return int(self._status().leased_blocks)

    def stats(self) -> dict[str, float]:
        """`Admin.Status`, as `kvtierctl status` does."""
        status = self._status()
        return {"ready_blocks": status.blocks.ready, "leases": status.leases}

    def _status(self) -> admin_pb2.StatusResponse:
        with grpc.insecure_channel(f"unix:{self._address}") as channel:
            return admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=DEADLINE_S)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self.memory = []
        if self._buffer is not None:
            self._buffer.close()
        self._client = self._buffer = None
