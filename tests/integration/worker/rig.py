"""A real pool, a real supervisor with a real worker process, and clients played by the test's own process."""

from __future__ import annotations

import asyncio
import copy
import itertools
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PART_ARMED, PART_REVOKED, PART_STARTED, SharedWords
from kvtierd.core.actions import Direction, PostPart
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import PartId, RegistrationId, SessionId, Ticket, WorkerId
from kvtierd.core.stimuli import PartFinished, SessionReleased, Signals, WorkerLive
from kvtierd.memory.host_pool import HostPool
from kvtierd.wire.worker_pb2 import MappedGroup
from kvtierd.workers.supervisor.handles import (
    CPU,
    SupervisorLimits,
    WorkerHandle,
    WorkerOptions,
    WorkerProcessState,
)
from kvtierd.workers.supervisor.supervisor import Supervisor, WorkerStimulus

from tests.integration.worker.devices import Gpu, Memfd, RankMemory, memfd

SLACK_S = 30.0
"""For anything that takes milliseconds on an idle machine."""

NEVER_MS = 600_000
DOORBELLS = 4
PARTS = 64
GROUP = 3

_Event = TypeVar("_Event")


def live_worker(supervisor: Supervisor, device: str) -> WorkerId | None:
    """The live worker of a device."""
    handle = supervisor.devices.worker(device)
    return handle.worker if handle is not None and handle.state is WorkerProcessState.LIVE else None


@dataclass(frozen=True)
class Layout:
    """Planes with gaps between blocks and between planes, as engines have them."""

    num_blocks: int = 64
    fragments: tuple[int, ...] = (4_096, 1_000, 8_192)

    @property
    def slot_bytes(self) -> int:
        return sum(self.fragments)

    @property
    def strides(self) -> list[int]:
        return [size + 64 * (i % 2) for i, size in enumerate(self.fragments)]

    @property
    def bases(self) -> list[int]:
        ends = itertools.accumulate(stride * self.num_blocks + 128 for stride in self.strides)
        return [0, *ends][:-1]

    @property
    def mapping_bytes(self) -> int:
        return self.bases[-1] + self.strides[-1] * self.num_blocks

    def mapping(self) -> MappedGroup:
        return MappedGroup(
            group=GROUP,
            num_blocks=self.num_blocks,
            base_offsets=self.bases,
            block_strides=self.strides,
            fragment_bytes=self.fragments,
        )

    def block(self, memory: npt.NDArray[np.uint8], block: int) -> bytes:
        """What one block's slot has to hold, said without any code of ours."""
        return b"".join(
            memory[base + block * stride :][:size].tobytes()
            for base, stride, size in zip(self.bases, self.strides, self.fragments, strict=True)
        )


@dataclass
class Client:
    """One rank's process, played by this one."""

    session: SessionId
    layout: Layout
    cache: RankMemory
    words_fd: int = field(default_factory=lambda: memfd(8 * (DOORBELLS + PARTS)))
    registration: RegistrationId = field(default=RegistrationId(1))

    def __post_init__(self) -> None:
        count = DOORBELLS + PARTS
        self.words = SharedWords(mmap.mmap(self.words_fd, 8 * count), count)

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        return self.cache.array

    def fill(self, seed: int) -> None:
        self.cache.write(np.random.default_rng(seed).integers(0, 256, self.layout.mapping_bytes, np.uint8))

    def block(self, block: int) -> bytes:
        return self.layout.block(self.memory, block)

    def ring(self, doorbell: int, value: int) -> None:
        self.words.ring(doorbell, value)

    def part_state(self, ticket: int, word: int | None = None) -> int:
        return self.words.part_state(DOORBELLS + (ticket % PARTS if word is None else word), ticket)

    def revoke(self, ticket: int) -> bool:
        return self.words.try_revoke(DOORBELLS + ticket % PARTS, ticket)

    def withdraw(self, ticket: int) -> bool:
        word, value = DOORBELLS + ticket % PARTS, ticket << 8
        return self.words.compare_exchange(word, value | PART_STARTED, value | PART_REVOKED)

    def close(self) -> None:
        os.close(self.words_fd)
        self.cache.close()


async def until(condition: Callable[[], object], what: str = "") -> None:
    deadline_s = asyncio.get_running_loop().time() + SLACK_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline_s, (
            f"waited {SLACK_S} s in vain: {what or condition}"
        )
        await asyncio.sleep(0.002)


class Rig:
    """`memory(size)` makes the memory of this rig's clients: it belongs to the device `device`."""

    def __init__(
        self,
        pool: HostPool,
        limits: SupervisorLimits | None = None,
        *,
        device: str = CPU,
        memory: Callable[[int], RankMemory] = Memfd,
        environment: dict[str, str] | None = None,
        options: WorkerOptions | None = None,
        imports: Callable[[int], list[str]] = lambda pid: [],
    ) -> None:
        """`imports(pid)`: the device memory of other processes that a process has open."""
        self.pool = pool
        self._imports = imports
        self.device = device
        self.new_memory = memory
        self.events: list[WorkerStimulus] = []
        self.environment = dict(environment or {})
        """Of workers started from now on."""
        self.supervisor = Supervisor(
            pool_fd=pool.fd,
            pool_bytes=pool.array.nbytes,
            register_writer=pool.register_writer,
            events=self.events.append,
            devices=[CPU] if device == CPU else [],
            limits=limits,
            environment=self.environment,
            options=options,
        )
        self.clients: list[Client] = []
        self._parts = itertools.count(100)
        self._tickets = itertools.count(1)
        self._sessions = itertools.count(7)
        self._extents = itertools.count()
        self._free: dict[int, list[int]] = {}
        self._hashes = np.random.default_rng(1)

    def beside(self, gpu: Gpu) -> Rig:
        """The same daemon, where clients have memory of this GPU."""
        other = copy.copy(self)
        other.device, other.new_memory, other._imports = gpu.name, gpu.allocate, gpu.imports
        return other

    async def start(self, fault: str = "", worker: bool = True) -> None:
        if fault:
            self.environment["KVTIER_TEST_WORKER_FAULT"] = fault
        await self.supervisor.start()
        if not worker:
            return
        if self.device != CPU:
            await self.supervisor.lives.worker_for(self.device)
        await until(lambda: self.seen(WorkerLive))

    async def close(self) -> None:
        assert await self.supervisor.lives.stop(SLACK_S)
        for client in self.clients:
            client.close()
        self.pool.close()

    @property
    def worker(self) -> WorkerId:
        worker = live_worker(self.supervisor, self.device)
        assert worker is not None
        return worker

    @property
    def handle(self) -> WorkerHandle:
        return self.supervisor.workers[self.worker]

    @property
    def pid(self) -> int:
        return self.handle.pid

    def mapped(self) -> list[str]:
        """What the worker holds of tests: memfds, and imported device memory."""
        with open(f"/proc/{self.pid}/maps") as maps:
            memfds = [line.split()[5] for line in maps if "kvt-test" in line]
        return memfds + self._imports(self.pid)

    def no_fault(self) -> None:
        """Workers started from now on are sound."""
        self.environment.pop("KVTIER_TEST_WORKER_FAULT", None)

    async def successor(self) -> None:
        """Waits for the second worker: it comes by itself, or because a session asks for one."""
        deadline_s = asyncio.get_running_loop().time() + SLACK_S
        while len(self.seen(WorkerLive)) < 2:
            assert asyncio.get_running_loop().time() < deadline_s, "waited in vain for a new worker"
            if self.device != CPU:
                try:
                    await self.supervisor.lives.worker_for(self.device)
                except Refusal as refusal:  # the old one is not gone yet, or was a moment ago
                    if refusal.reason is not Reason.WORKER_UNAVAILABLE:
                        raise
            await asyncio.sleep(0.02)

    def seen(self, kind: type[_Event]) -> list[_Event]:
        return [event for event in self.events if isinstance(event, kind)]

    def new_client(self, layout: Layout | None = None, cache: RankMemory | None = None) -> Client:
        """A session of which the worker knows nothing yet; its memory becomes the client's."""
        layout = layout or Layout()
        cache = cache or self.new_memory(layout.mapping_bytes)
        client = Client(SessionId(next(self._sessions)), layout, cache)
        self.clients.append(client)
        return client

    async def client(self, layout: Layout | None = None, cache: RankMemory | None = None) -> Client:
        """A session whose words and memory are mapped by the worker."""
        client = self.new_client(layout, cache)
        await self.map(client)
        return client

    async def map(self, client: Client) -> None:
        await self.map_words(client)
        await self.map_memory(client)

    async def map_words(self, client: Client) -> None:
        await self.supervisor.orders.map_words(self.worker, client.session, client.words_fd, DOORBELLS, PARTS)

    async def map_memory(self, client: Client) -> None:
        groups = [client.layout.mapping()]
        await client.cache.register(self.supervisor, self.worker, client.session, client.registration, groups)

    def slots(self, count: int, slot_bytes: int) -> npt.NDArray[np.uint32]:
        """Free slots of a size."""
        free = self._free.setdefault(slot_bytes, [])
        while len(free) < count:
            extent = next(self._extents)
            self.pool.records.format_extent(extent, slot_bytes)
            free += self.pool.geometry.slots_of(extent, slot_bytes).tolist()
        taken, free[:count] = free[:count], []
        return np.array(taken, np.uint32)

    def give_back(self, slots: npt.NDArray[np.uint32], slot_bytes: int) -> None:
        """Slots that nobody uses any more are handed out again, first of all."""
        self.pool.records.free(slots)
        self._free[slot_bytes][:0] = slots.tolist()

    def open(self, count: int, slot_bytes: int) -> npt.NDArray[np.uint32]:
        """Slots in state WRITING, as the core has them opened before it posts a store."""
        slots = self.slots(count, slot_bytes)
        hashes = self._hashes.integers(0, 256, (count, 32), np.uint8)
        writer = self.handle.writer
        self.pool.records.open(
            slots, writer, self.pool.boot_nonce, 1, bytes(16), GROUP, 0, 1, hashes, slot_bytes
        )
        return slots

    def commit(self, slots: npt.NDArray[np.uint32]) -> None:
        self.pool.records.commit(slots, np.arange(len(slots), 0, -1, dtype=np.uint64))

    def slot(self, slot: int, slot_bytes: int) -> bytes:
        return self.pool.array[slot * 4096 :][:slot_bytes].tobytes()

    def post(
        self,
        client: Client,
        direction: Direction,
        block_ids: Sequence[int],
        slots: npt.NDArray[np.uint32],
        *,
        gate: tuple[int, int] | None = None,
        gate_deadline_ms: int = NEVER_MS,
        verify: bool = False,
        **changed: Any,
    ) -> tuple[PartId, Ticket]:
        """Posts a part; `changed` replaces fields of the action, or `generations`, or `signals`."""
        ticket = Ticket(next(self._tickets))
        doorbell, value = gate or (0, 0)
        generations = changed.pop("generations", None)
        fields: dict[str, Any] = {
            "worker": self.worker,
            "part": PartId(next(self._parts)),
            "direction": direction,
            "session": client.session,
            "registration": client.registration,
            "group": GROUP,
            "signals": Signals(ticket, ticket % PARTS, gate is not None, doorbell, value),
            "block_ids": np.array(block_ids, np.uint32),
            "slots": slots,
            "verify": np.ones(len(slots), np.uint8) if verify else None,
        }
        action = PostPart(**{**fields, **changed})
        if generations is None:
            generations = self.pool.records.generations(slots)
        self.supervisor.orders.post(action, generations, gate_deadline_ms)
        return action.part, ticket

    def is_over(self, part: PartId) -> bool:
        return any(event.part == part for event in self.seen(PartFinished))

    async def finished(self, part: PartId) -> PartFinished:
        await until(lambda: self.is_over(part), f"part {part} to finish")
        [event] = [event for event in self.seen(PartFinished) if event.part == part]
        return event

    async def released(self, session: SessionId) -> None:
        await until(lambda: any(e.session == session for e in self.seen(SessionReleased)))

    async def store(self, client: Client, block_ids: Sequence[int]) -> npt.NDArray[np.uint32]:
        """Stores blocks and commits them."""
        slots = self.open(len(block_ids), client.layout.slot_bytes)
        part, _ = self.post(client, Direction.STORE, block_ids, slots)
        finished = await self.finished(part)
        assert finished.outcome == 1, finished
        self.commit(slots)
        return slots


def is_armed(client: Client, ticket: Ticket) -> bool:
    return client.part_state(ticket) == PART_ARMED
