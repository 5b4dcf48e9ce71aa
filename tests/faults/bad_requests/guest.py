"""An engine inside the test's process, with sessions, shared words and memory of its own, and a model of
every block that it has stored. Its requests are right and must be answered; wrong requests are made from
them."""

import asyncio
import hashlib
import itertools
import mmap
import os
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from kvtier.v1 import cache_pb2, types_pb2
from kvtier_kernels import SharedWords
from kvtierd.cache import CPU, Event, MappedGroup
from kvtierd.core.actions import SessionEnded, TransferEnd, TransferEnded
from kvtierd.core.stimuli import GroupGeometry
from kvtierd.rpc.connections import Connection

from tests.faults.bad_requests.front import DEADLINE_S, LIMITS, Front
from tests.integration.daemon.raw import memfd

SCHEDULER = -1
DOORBELLS, PARTS = 2, 8
BLOCKS = 48
BATCH = 8
FAMILY = 160
"""Hashes of one group that a guest ever uses; those of all guests together do not fit the pool."""


@dataclass(frozen=True)
class Kind:
    """What an engine is."""

    name: str
    fragments: tuple[tuple[int, ...], ...]
    """Bytes of each plane, by group."""
    world: int = 1
    apart: bool = False
    """Its scheduler is a session of its own."""
    hash_bytes: int = 32

    def hash_of(self, group: int, number: int) -> bytes:
        return hashlib.sha256(f"{self.name}/{group}/{number}".encode()).digest()[: self.hash_bytes]

    @property
    def processes(self) -> list[int]:
        return [*([SCHEDULER] if self.apart else []), *range(self.world)]


@dataclass
class RankMemory:
    """What one rank shares with its copy worker."""

    kind: Kind
    planes: list[list[npt.NDArray[np.uint8]]] = field(default_factory=list)
    """By group and plane: (BLOCKS, bytes)."""
    mappings: list[MappedGroup] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bytes = BLOCKS * sum(map(sum, self.kind.fragments))
        self.fd = memfd(self.bytes)
        whole = np.frombuffer(mmap.mmap(self.fd, self.bytes), np.uint8)
        offset = 0
        for group, sizes in enumerate(self.kind.fragments):
            planes, bases = [], []
            for size in sizes:
                bases.append(offset)
                planes.append(whole[offset : offset + BLOCKS * size].reshape(BLOCKS, size))
                offset += BLOCKS * size
            self.planes.append(planes)
            self.mappings.append(
                MappedGroup(
                    group=group,
                    num_blocks=BLOCKS,
                    base_offsets=bases,
                    block_strides=list(sizes),
                    fragment_bytes=list(sizes),
                )
            )
        words_bytes = 8 * (DOORBELLS + PARTS)
        self.words_fd = memfd(words_bytes)
        self.words = SharedWords(mmap.mmap(self.words_fd, words_bytes), DOORBELLS + PARTS)

    def write(self, group: int, block_ids: list[int], contents: list[npt.NDArray[np.uint8]]) -> None:
        for block_id, content in zip(block_ids, contents, strict=True):
            at = 0
            for plane in self.planes[group]:
                plane[block_id] = content[at : at + plane.shape[1]]
                at += plane.shape[1]

    def read(self, group: int, block_id: int) -> npt.NDArray[np.uint8]:
        return np.concatenate([plane[block_id] for plane in self.planes[group]])

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.words_fd)


@dataclass
class Gated:
    """A store that waits for its doorbell."""

    hashes: list[bytes]
    value: int
    """What the doorbell has to reach."""
    word: int


@dataclass
class Held:
    """A lease."""

    lease: int
    group: int
    hashes: list[bytes]


class Guest:
    """One instance. `await attach()` before anything else."""

    def __init__(self, front: Front, kind: Kind, chance: Random, count: Counter[str]) -> None:
        self.front = front
        self.kind = kind
        self.count = count
        self.connections: dict[int, Connection] = {}
        self.epoch = 0
        self.past_epochs: list[int] = []
        self.stale_tokens: list[bytes] = []
        self.leases: list[Held] = []
        self.dead_leases: list[int] = []
        """Consumed or released."""
        self.gated: dict[int, Gated] = {}
        """By ticket: stores that wait for their doorbell."""
        self.stored: Counter[tuple[int, bytes]] = Counter()
        """By group and hash: seen DONE so often."""
        self.ranks: list[RankMemory] = []
        self.tickets = itertools.count(1)
        self._chance = chance
        self._ended: dict[int, TransferEnded] = {}
        self._values = itertools.count(1)
        self._kept: dict[tuple[int, int, bytes], npt.NDArray[np.uint8]] = {}
        self.family = [
            [kind.hash_of(group, number) for number in range(FAMILY)] for group in range(len(kind.fragments))
        ]

    # --- being there ---

    @property
    def scheduler(self) -> Connection:
        return self.connections[SCHEDULER if self.kind.apart else 0]

    def hello(self, process: int, token: bytes) -> cache_pb2.Hello:
        """A right one."""
        role = types_pb2.ROLE_SCHEDULER if process == SCHEDULER else types_pb2.ROLE_RANK
        if not self.kind.apart and process == 0:
            role = types_pb2.ROLE_SCHEDULER_AND_RANK
        namespace = types_pb2.Namespace(
            model=self.kind.name, kv_dtype="uint8", hash_scheme="t", hash_bytes=self.kind.hash_bytes
        )
        groups = [
            types_pb2.Group(
                group=group,
                kind=types_pb2.GROUP_KIND_FULL_ATTENTION,
                block_tokens=16,
                planes=[types_pb2.PlaneGeometry(fragment_bytes=size) for size in sizes],
            )
            for group, sizes in enumerate(self.kind.fragments)
        ]
        return cache_pb2.Hello(
            protocol_versions=[1],
            token=token,
            instance=self.kind.name,
            role=role,
            rank=max(0, process),
            world_size=self.kind.world,
            namespace=namespace,
            groups=[] if process == SCHEDULER else groups,
            client="tests",
        )

    async def attach(self, *, register: bool = True) -> None:
        """All its processes, and their memory unless `register` is False."""
        for process in self.kind.processes:
            self.attach_one(process)
        for rank in range(self.kind.world if register else 0):
            await self._register(rank)

    def attach_one(self, process: int) -> None:
        session = self.front.open()
        self.front.hello(self.hello(process, session.token), lambda event: self._event(session, event))
        self.connections[process] = session
        assert session.epoch is not None
        self.epoch = session.epoch

    async def _register(self, rank: int) -> None:
        memory = RankMemory(self.kind)
        self.ranks.append(memory)
        session, mappings = self.connections[rank].id, self.front.cache.mappings
        _, pidfd = await mappings.register_words(session, CPU, memory.words_fd, DOORBELLS, PARTS)
        os.close(pidfd)
        await mappings.register_memory(session, memory.fd, memory.bytes, memory.mappings)

    def _event(self, connection: Connection, event: Event) -> None:
        if isinstance(event, TransferEnded):
            self._ended[event.ticket] = event
        elif isinstance(event, SessionEnded):
            self.front.connections.end(connection, event.why)  # as its stream does

    @property
    def geometry(self) -> tuple[GroupGeometry, ...]:
        return self.connections[0].groups

    async def leave(self, why: Any) -> None:
        """One of its processes ends, and the epoch with it."""
        victim = self._chance.choice(list(self.connections.values()))
        self.stale_tokens = [session.token for session in self.connections.values()]
        self.past_epochs.append(self.epoch)
        self.front.connections.end(victim, why)
        assert all(session.ended for session in self.connections.values())
        self.dead_leases = [held.lease for held in self.leases]
        self.leases.clear()
        self.gated.clear()
        self.connections.clear()
        await self.until(lambda: self.epoch not in self.front.machine.core.instances, "its epoch is over")
        for memory in self.ranks:
            memory.close()
        self.ranks.clear()
        self.tickets = itertools.count(1)

    async def until(self, condition: Any, what: str) -> None:
        deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
        while not condition():
            assert asyncio.get_running_loop().time() < deadline_s, f"still not: {what}"
            await asyncio.sleep(0.0005)

    # --- right requests ---

    def ref(self, process: int | None = None) -> cache_pb2.SessionRef:
        session = self.scheduler if process is None else self.connections[process]
        return cache_pb2.SessionRef(token=session.token, epoch=self.epoch)

    def signals(self, **changes: Any) -> cache_pb2.Signals:
        """A ticket that has not been used; its part word is free."""
        ticket = next(self.tickets)
        return cache_pb2.Signals(**({"ticket": ticket, "part_word": self.free_word()} | changes))

    def free_word(self) -> int:
        taken = {gated.word for gated in self.gated.values()}
        return next(word for word in range(PARTS) if word not in taken)

    def some_hashes(self, group: int, most: int = BATCH) -> list[bytes]:
        """A run of its hashes: some stored, some not."""
        first = self._chance.randrange(FAMILY - most)
        return self.family[group][first : first + self._chance.randint(1, most)]

    def some_group(self) -> int:
        return self._chance.randrange(len(self.kind.fragments))

    def lookup_request(
        self, group: int, hashes: list[bytes], mode: "cache_pb2.LookupMode.ValueType", *, lease: bool
    ) -> cache_pb2.LookupRequest:
        query = cache_pb2.GroupQuery(group=group, mode=mode, hashes=b"".join(hashes))
        return cache_pb2.LookupRequest(session=self.ref(), queries=[query], lease=lease)

    def store_request(
        self, group: int, hashes: list[bytes], first: int, **signals: Any
    ) -> cache_pb2.StoreRequest:
        return cache_pb2.StoreRequest(
            session=self.ref(),
            signals=self.signals(**signals),
            group=group,
            hashes=b"".join(hashes),
            block_ids=range(first, first + len(hashes)),
        )

    def load_request(self, held: Held, first: int, count: int, *, keep: bool) -> cache_pb2.LoadRequest:
        return cache_pb2.LoadRequest(
            session=self.ref(),
            signals=self.signals(),
            group=held.group,
            lease_id=held.lease,
            first=first,
            block_ids=range(count),
            keep_lease=keep,
        )

    # --- what it does with them ---

    def _content(self, group: int, rank: int, value: bytes) -> npt.NDArray[np.uint8]:
        key = (group, rank, value)
        found = self._kept.get(key)
        if found is None:
            seed = [group, rank, *value]
            size = sum(self.kind.fragments[group])
            found = self._kept[key] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        return found

    def _fill(self, group: int, hashes: list[bytes], first: int) -> None:
        ids = list(range(first, first + len(hashes)))
        for rank, memory in enumerate(self.ranks):
            memory.write(group, ids, [self._content(group, rank, value) for value in hashes])

    async def ended(self, ticket: int) -> TransferEnded:
        """How it ended, as its event says; Wait says the same."""
        await self.until(lambda: ticket in self._ended, f"transfer {ticket} has ended")
        event = self._ended.pop(ticket)
        request = cache_pb2.WaitRequest(session=self.ref(), tickets=[ticket])
        told = (await self.front.ask("wait", request.SerializeToString())).transfers[0]
        assert told.succeeded == event.succeeded.tobytes()
        return event

    def lease(
        self,
        group: int,
        hashes: list[bytes],
        mode: "cache_pb2.LookupMode.ValueType" = cache_pb2.LOOKUP_MODE_PREFIX,
    ) -> None:
        """Looks up; what hits is leased, as far as it may."""
        request = self.lookup_request(group, hashes, mode, lease=True)
        reply = self.front.ask("lookup", request.SerializeToString())
        told = zip(hashes, reply.answers[0].states, strict=False)
        hits = [value for value, state in told if state == types_pb2.BLOCK_STATE_HIT]
        assert len(hits) == reply.answers[0].hits
        assert all(self.stored[group, value] for value in hits), "a block is found that nobody has stored"
        if reply.lease_id:
            self.leases.append(Held(reply.lease_id, group, hits))
        self.count["valid_requests"] += 1

    async def store(self) -> None:
        group = self.some_group()
        hashes = self.some_hashes(group)
        self._fill(group, hashes, 0)
        request = self.store_request(group, hashes, 0)
        reply = self.front.ask("store", request.SerializeToString())
        event = await self.ended(request.signals.ticket)
        self._stored(group, hashes, event)
        full = any(result == types_pb2.STORE_RESULT_THROTTLED for result in reply.results)
        assert event.end is TransferEnd.DONE, event
        assert full or all(event.succeeded) or self.gated
        self.count["valid_requests"] += 1

    def _stored(self, group: int, hashes: list[bytes], event: TransferEnded) -> None:
        told = zip(hashes, event.succeeded, strict=True)
        self.stored.update((group, value) for value, good in told if good)

    def hold(self) -> None:
        """A store that waits for its doorbell: its blocks are PENDING, its word and ticket taken."""
        group, value = 0, next(self._values)
        hashes = self.some_hashes(group, 2)
        request = self.store_request(group, hashes, 40, gate=types_pb2.GATE_DOORBELL, doorbell_value=value)
        if not self.gated:
            self._fill(group, hashes, 40)
            self.front.ask("store", request.SerializeToString())
        else:  # there is one set of blocks to store from
            request.ClearField("hashes")
            request.ClearField("block_ids")
            hashes = []
            self.front.ask("store", request.SerializeToString())
        self.gated[request.signals.ticket] = Gated(hashes, value, request.signals.part_word)
        self.count["valid_requests"] += 1

    async def let_go(self) -> None:
        """Rings, or cancels, and waits until nothing waits any more."""
        if self._chance.random() < 0.5:
            for memory in self.ranks:
                memory.words.ring(0, max(gated.value for gated in self.gated.values()))
        else:
            request = cache_pb2.CancelRequest(session=self.ref(), tickets=self.gated)
            self.front.ask("cancel", request.SerializeToString())
        for ticket, gated in list(self.gated.items()):
            event = await self.ended(ticket)
            assert event.end in (TransferEnd.DONE, TransferEnd.CANCELLED), event
            self._stored(0, gated.hashes, event)
            del self.gated[ticket]
        self.count["valid_requests"] += 1

    async def load(self) -> None:
        """Loads of one of its leases, if it has one, and compares every byte."""
        if not self.leases:
            return
        held = self.leases.pop(self._chance.randrange(len(self.leases)))
        first = self._chance.randrange(len(held.hashes))
        count = self._chance.randint(1, len(held.hashes) - first)
        await self._load(held, first, count, keep=self._chance.random() < 0.5)

    async def _load(self, held: Held, first: int, count: int, *, keep: bool) -> None:
        (self.leases if keep else self.dead_leases).append(held if keep else held.lease)  # type: ignore[arg-type]
        for memory in self.ranks:
            for plane in memory.planes[held.group]:
                plane[:count] = 0x5A
        request = self.load_request(held, first, count, keep=keep)
        self.front.ask("load", request.SerializeToString())
        event = await self.ended(request.signals.ticket)
        assert event.end is TransferEnd.DONE, event
        self._compare(held.group, held.hashes[first : first + count])
        self.count["valid_requests"] += 1

    def _compare(self, group: int, hashes: list[bytes]) -> None:
        for rank, memory in enumerate(self.ranks):
            for block_id, value in enumerate(hashes):
                wrong = np.count_nonzero(memory.read(group, block_id) != self._content(group, rank, value))
                self.count["wrong_bytes"] += int(wrong)
                self.count["blocks_compared"] += 1
                assert not wrong, f"{wrong} wrong bytes in block {block_id} of rank {rank}"

    def release(self) -> None:
        """One lease, or none; and some that it does not hold, which is no mistake."""
        own = self.leases.pop() if self.leases else None
        names = [*self.dead_leases[-3:], *([own.lease] if own else []), self._chance.randrange(2**64)]
        if own:
            self.dead_leases.append(own.lease)
        del self.dead_leases[:-16]
        request = cache_pb2.ReleaseRequest(session=self.ref(), lease_ids=names)
        self.front.ask("release", request.SerializeToString())
        self.count["valid_requests"] += 1

    async def check_everything(self) -> None:
        """Loads and compares every block that can be read."""
        if self.gated:
            await self.let_go()
        while self.leases:
            self.release()
        for group, family in enumerate(self.family):
            for first in range(0, FAMILY, BATCH):
                self.lease(group, family[first : first + BATCH], cache_pb2.LOOKUP_MODE_EXACT)
                if self.leases:
                    held = self.leases.pop()
                    await self._load(held, 0, len(held.hashes), keep=False)


assert LIMITS.transfer_blocks_max >= BATCH
