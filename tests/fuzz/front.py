"""The daemon's front without its processes: the real façade, core, records and connections; a double of the
copy workers, and an event loop whose time passes at once."""

from __future__ import annotations

import asyncio
import functools
import os
import selectors
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from kvtier_kernels import BlockTable, PoolRecords, SharedWords, format_pool
from kvtierd.cache import Cache
from kvtierd.core.actions import CheckSlots, Direction, PostPart
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import PAGE_BYTES, PartId, RegistrationId, SessionId, TenantTag, WorkerId
from kvtierd.core.machine import Machine
from kvtierd.core.stimuli import (
    CoreLimits,
    PartFinished,
    PartOutcome,
    SessionReleased,
    SlotsChecked,
    WorkerLive,
)
from kvtierd.memory.pool_file import config_digest
from kvtierd.memory.recovery import set_aside
from kvtierd.rpc.connections import Connections
from kvtierd.rpc.peers import PeerProcess
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.copy.parts import read_part
from kvtierd.workers.copy.sessions import MappedSession
from kvtierd.workers.supervisor import orders

from tests.oracles.invariants import validate

MIB = 1 << 20
GEOMETRY = PoolGeometry(extents=2, extent_bytes=MIB, first_extent_offset=2 * MIB)
POOL_BYTES = 4 * MIB
LIMITS = CoreLimits(
    lookup_hashes_max=64, transfer_blocks_max=16, transfers_max=6, leases_max=8, terminal_kept=8
)
BOOT_NONCE = 0xB007
WORKER = WorkerId(1)
NONE = np.empty(0, np.uint32)


class SteppedLoop(asyncio.SelectorEventLoop):
    """When nothing is left to do, the next timer is due at once. If there is none either, everything waits
    for ever, which is an AssertionError."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_SteppedSelector(self))

    def time(self) -> float:
        return self.now_s


class _SteppedSelector(selectors.EpollSelector):
    def __init__(self, loop: SteppedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits for ever"
            self._loop.now_s += max(0.0, timeout)
        return ready


def run_stepped(main: Callable[[], Awaitable[None]]) -> None:
    """Runs a coroutine on a loop of its own, and fails if it leaves a task behind."""
    loop = SteppedLoop()
    try:
        loop.run_until_complete(main())
        left = asyncio.all_tasks(loop)
        assert not left, left
    finally:
        loop.close()


class FuzzedPool:
    """As much of a host pool as the façade uses: records over bytes, used again and again."""

    geometry = GEOMETRY
    boot_nonce = BOOT_NONCE

    def __init__(self) -> None:
        pool = _pool_bytes()
        format_pool(pool, MIB, GEOMETRY.extents, config_digest(GEOMETRY))
        self.records = PoolRecords(pool)

    def set_aside(self, slots: Any) -> None:
        set_aside(self.records, slots, BOOT_NONCE)

    def retry_quarantine(self) -> Any:
        return NONE


@functools.cache
def _pool_bytes() -> np.ndarray:
    return np.zeros(POOL_BYTES, np.uint8)


class FuzzedWorkers:
    """The supervisor with one live copy worker, which ends its parts when it is told to. What it is sent is
    read as a worker reads it."""

    def __init__(self, pool: FuzzedPool) -> None:
        self._pool = pool
        self.workers = {WORKER: SimpleNamespace(pid=os.getpid(), writer=1, device="cpu")}
        self.orders = self.lives = self
        self.tell: Callable[[Any], None]
        self.sessions: dict[int, MappedSession] = {}
        self.posted: dict[PartId, PostPart] = {}
        self.map_memory_by: Callable[[MappedSession, int, int | None, wire.MapMemory], None] | None = None

    async def worker_for(self, device: str) -> WorkerId:
        return WORKER

    def pidfd_for(self, worker: WorkerId) -> int:
        return os.pidfd_open(os.getpid())

    async def map_words(
        self, worker: WorkerId, session: SessionId, fd: int, doorbells: int, parts: int, tenant: TenantTag
    ) -> None:
        mapped = MappedSession(session)
        if fd < 0:
            mapped.words = SharedWords(bytearray(8 * (doorbells + parts)), doorbells + parts)
            mapped.doorbells, mapped.parts = doorbells, parts
        else:
            mapped.map_words(fd, doorbells, parts)
        self.sessions[session] = mapped

    async def map_memory(
        self,
        worker: WorkerId,
        session: SessionId,
        registration: RegistrationId,
        fd: int | None,
        mapping_bytes: int,
        groups: Sequence[wire.MappedGroup],
        ranges: Sequence[wire.DeviceRange] = (),
    ) -> None:
        packet = orders.map_memory_packet(1, session, registration, mapping_bytes, groups, ranges)
        message = wire.ToWorker.FromString(packet).map_memory
        if self.map_memory_by is not None:
            self.map_memory_by(self.sessions[session], registration, fd, message)
        for group in message.groups:
            sizes = SimpleNamespace(slot_bytes=sum(group.fragment_bytes), planes=len(group.fragment_bytes))
            self.sessions[session].plans.setdefault((registration, group.group), sizes)

    async def add_chunks(
        self, worker: WorkerId, session: SessionId, fds: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """It has a GPU that takes any."""

    def post(self, action: PostPart, generations: Any, gate_deadline_ms: int) -> None:
        packet = orders.post_part_packet(action, generations, gate_deadline_ms)
        # Whatever the front posts is a part that the worker takes.
        message = wire.ToWorker.FromString(packet).post_part
        part = read_part(message, self.sessions[action.session], 0.0)
        check = self._pool.records.check if part.is_load else self._pool.records.check_writing
        size = part.slot_bytes if len(part.slots) else None
        assert check(part.slots, part.generations, size).all(), "a part of slots in another state"
        assert action.part not in self.posted
        self.posted[action.part] = action

    def revoke(self, worker: WorkerId, part: PartId) -> None:
        if part in self.posted:
            self.tell(self._end(part, PartOutcome.REVOKED))

    def release_session(self, worker: WorkerId, session: SessionId) -> None:
        for part in [part for part, action in self.posted.items() if action.session == session]:
            self.tell(self._end(part, PartOutcome.REVOKED))
        if (mapped := self.sessions.pop(session, None)) is not None:
            mapped.fence()
            mapped.unmap()
        self.tell(SessionReleased(worker, session))

    def check_slots(self, action: CheckSlots, generations: Any) -> None:
        self.tell(SlotsChecked(action.worker, action.check, len(action.slots), NONE))

    def finish(self, part: PartId, outcome: PartOutcome, failed: Sequence[int] = ()) -> None:
        """Ends a part; `failed` are positions."""
        self.tell(self._end(part, outcome, failed))

    def _end(self, part: PartId, outcome: PartOutcome, failed: Sequence[int] = ()) -> PartFinished:
        action = self.posted.pop(part)
        if action.direction is Direction.STORE and outcome is PartOutcome.DONE:
            slots = np.ascontiguousarray(action.slots)
            generations = self._pool.records.generations(slots)
            self._pool.records.set_data_checksums(slots, generations, np.zeros(len(slots), np.uint64))
        blocks = len(action.slots)
        positions = np.array(sorted({each % blocks for each in failed if blocks}), np.uint32)
        return PartFinished(action.worker, part, outcome, positions)


class Front:
    """Everything together. `check` after whatever may have changed something, `check_empty` at the end."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pool = FuzzedPool()
        self.workers = FuzzedWorkers(self.pool)
        pages = (GEOMETRY.first_extent_offset + GEOMETRY.capacity_bytes) // PAGE_BYTES
        self.machine = Machine(BlockTable(64, pages), lambda: self.now_s, LIMITS, GEOMETRY)
        pool: Any = self.pool
        workers: Any = self.workers
        self.cache = Cache(
            self.machine, pool, workers, LIMITS, pool_path=None, pages_max=4, clock=lambda: self.now_s
        )
        self.workers.tell = self.cache.worker_event
        self.cache.worker_event(WorkerLive(WORKER, "cpu"))
        self.connections = Connections(
            self.cache, sessions_max=8, hello_deadline_s=5, silence_s=30, clock=lambda: self.now_s
        )

    def peer(self, uid: int = 1000) -> PeerProcess:
        """This process, as it would connect."""
        return PeerProcess(1, uid, uid, os.pidfd_open(os.getpid()), f"uid:{uid}", operator=False)

    def check(self) -> None:
        assert not self.cache.poisoned.is_set(), "the daemon would have stopped"
        validate(self.machine)

    def check_empty(self) -> None:
        """Every session is over, and nothing is left of any: no lease, no transfer, no slot being written."""
        self.connections.end_all(Refusal(Reason.DRAINING, "the end"))
        self.check()
        core = self.machine.core
        assert not self.workers.posted
        for left in (core.sessions, core.instances, core.leases, core.transfers):
            assert not left, left
        assert (self.pool.records.scan()["states"] == 2).all(), "a slot is still being written"
