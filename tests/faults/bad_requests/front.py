"""The daemon without its sockets: a real pool, core, façade and copy worker, and the checks in front of them.
A request meets here what it meets in `kvtierd.rpc.server`, from its bytes on."""

import asyncio
import os
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import numpy as np
from google.protobuf.message import Message
from kvtier.v1 import cache_pb2
from kvtier_kernels import BlockTable
from kvtierd.cache import Cache, Event, run_ticks
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.core.machine import Machine
from kvtierd.core.status import Tally
from kvtierd.core.stimuli import CoreLimits, WorkerLive
from kvtierd.memory.host_pool import HostPool
from kvtierd.rpc.calls import Calls
from kvtierd.rpc.connections import Connection, Connections
from kvtierd.rpc.guard import Undecodable, decoder
from kvtierd.rpc.hello import greeting_of
from kvtierd.rpc.peers import PeerProcess
from kvtierd.workers.supervisor.supervisor import Supervisor, WorkerStimulus

from tests.oracles.invariants import validate
from tests.simulation.world import snapshot

POOL_BYTES = 5 << 20
"""Less than all blocks of all guests: some are evicted."""

EXTENT_BYTES = 1 << 20
MESSAGE_BYTES_MAX = 1 << 17
DEADLINE_S = 60.0
LIMITS = CoreLimits(
    lookup_hashes_max=64,
    transfer_blocks_max=16,
    transfers_max=6,
    leases_max=12,
    leased_fraction_max=0.1,
    terminal_kept=32,
    lease_ttl_s=DEADLINE_S,
    gate_deadline_s=DEADLINE_S,
)
"""Small, so that one request can pass each of them."""
TALLY: Callable[[Tally], tuple[Any, ...]] = attrgetter(*Tally.__dataclass_fields__)


class Front:
    """Everything of one daemon but its sockets. `await start()`, and `await close()`."""

    def __init__(
        self, pool: Path, *, clock: Callable[[], float] = time.monotonic, silence_s: float = 3_600
    ) -> None:
        self.pool = HostPool.open(pool, POOL_BYTES, EXTENT_BYTES, lock_timeout_s=DEADLINE_S)
        pages = len(self.pool.array) // PAGE_BYTES
        self.machine = Machine(
            BlockTable(pages, pages),
            clock,
            LIMITS,
            self.pool.geometry,
            randomness=np.random.default_rng(0),
        )
        self._live = asyncio.Event()
        self.workers = Supervisor(
            pool_fd=self.pool.fd,
            pool_bytes=len(self.pool.array),
            register_writer=self.pool.register_writer,
            events=self._worker_event,
        )
        self.cache = Cache(
            self.machine, self.pool, self.workers, LIMITS, pool_path=None, pages_max=64, clock=clock
        )
        self.cache.handle(self.pool.recovered)
        self.connections = Connections(
            self.cache, sessions_max=64, hello_deadline_s=3_600, silence_s=silence_s, clock=clock
        )
        calls = Calls(self.cache, LIMITS)
        self._calls: dict[str, tuple[Callable[[bytes], Any], Callable[..., Any]]] = {}
        for name, request in REQUESTS.items():
            self._calls[name] = (decoder(request, MESSAGE_BYTES_MAX), getattr(calls, name))

    async def start(self) -> Self:
        await self.workers.start()
        await asyncio.wait_for(self._live.wait(), DEADLINE_S)
        self._ticks = asyncio.create_task(run_ticks(self.cache, self.pool))
        return self

    def _worker_event(self, stimulus: WorkerStimulus) -> None:
        self.cache.worker_event(stimulus)
        if isinstance(stimulus, WorkerLive):
            self._live.set()

    async def close(self) -> None:
        self._ticks.cancel()
        await asyncio.gather(self._ticks, return_exceptions=True)
        assert await self.workers.lives.stop(DEADLINE_S)
        self.pool.close()

    # --- what clients do ---

    def ask(self, call: str, data: bytes) -> Any:
        """What the unary service does with a request's bytes; a coroutine for `wait`. Raises Refusal."""
        decode, serve = self._calls[call]
        request = decode(data)
        if isinstance(request, Undecodable):
            raise request.refusal
        connection = self.connections.by_token(request.session.token)
        self.connections.heard(connection)
        return serve(request, connection.caller(request.session.epoch))

    def open(self) -> Connection:
        """A session of this process, as the side socket makes one."""
        return self.connections.open(
            PeerProcess(
                os.getpid(), os.getuid(), os.getgid(), os.pidfd_open(os.getpid()), "tenant", operator=True
            )
        )

    def hello(self, hello: cache_pb2.Hello, listener: Callable[[Event], None]) -> Connection:
        """What the session stream does with its first message. Raises Refusal."""
        connection = self.connections.by_token(hello.token)
        self.connections.attach(connection, greeting_of(hello, connection.id, connection.peer), listener)
        return connection

    # --- what may not change ---

    def glance(self) -> tuple[Any, ...]:
        """Every counter and the size of every book: what a refusal could change, in microseconds."""
        core = self.machine.core
        return (
            TALLY(core.tally),
            core.blocks.live,
            core.blocks.condemned,
            core.blocks.history.total,
            len(core.leases),
            len(core.transfers),
            len(core.parts),
            len(core.sessions),
            len(core.instances),
            len(self.connections),
            [(i.last_ticket, i.alive_at_s, i.leased_bytes) for i in core.instances.values()],
        )

    def picture(self) -> tuple[Any, ...]:
        """All of it, with every record of the pool; the core is validated on the way."""
        validate(self.machine)
        records = self.pool.records.scan()
        return snapshot(self.machine), {name: column.tobytes() for name, column in records.items()}


REQUESTS: dict[str, type[Message]] = {
    "lookup": cache_pb2.LookupRequest,
    "touch": cache_pb2.TouchRequest,
    "prefetch": cache_pb2.PrefetchRequest,
    "store": cache_pb2.StoreRequest,
    "load": cache_pb2.LoadRequest,
    "release": cache_pb2.ReleaseRequest,
    "cancel": cache_pb2.CancelRequest,
    "wait": cache_pb2.WaitRequest,
}
