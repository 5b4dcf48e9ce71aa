"""Engines: processes with memory that holds real contents, shared words, and a scheduler that submits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kvtierd.core.actions import InstanceView
from kvtierd.core.ids import Epoch, LeaseId, Rank, SessionId, Ticket
from kvtierd.core.stimuli import NOBODY, AttachSession, GroupGeometry, Owner, SessionRole

DOORBELLS, PART_WORDS, BLOCKS = 2, 4, 10
CHAINS, CHAIN_LENGTH = 3, 8
STARTED, REVOKED, DONE, FAILED = 1, 2, 3, 4
SCHEDULER = -1


@dataclass(frozen=True, slots=True)
class Kind:
    """What an engine is. Two of the same namespace and layout share blocks."""

    name: str
    namespace: bytes
    sizes: tuple[tuple[int, ...], ...]
    """Slot bytes by group and rank."""
    together: bool
    """The scheduler's process holds rank 0 as well."""
    replicated: tuple[int, ...] = ()
    """Groups of which every rank holds the same."""
    owner: Owner = NOBODY

    @property
    def world(self) -> int:
        return len(self.sizes[0])

    def shards(self, group: int) -> tuple[int, ...]:
        """Slot bytes of each shard of a block."""
        sizes = self.sizes[group]
        return sizes[:1] if group in self.replicated else sizes


KINDS = (
    Kind("alone", b"one", ((4096,),), True),
    Kind("twin", b"one", ((4096,),), False),
    Kind("pair", b"two", ((4096, 4096),), True),
    Kind("wide", b"three", ((8192, 4096, 8192), (12288, 12288, 12288)), False),
    Kind("large", b"four", ((8192,),), False),
    Kind("latent", b"five", ((4096, 4096), (8192, 4096)), False, replicated=(0,)),
    Kind("twin", b"one", ((4096,),), False, owner=Owner("another", 1, b"secret")),
    Kind("twin", b"one", ((4096,),), False, owner=Owner("another", 1)),
)


@dataclass(slots=True)
class Pending:
    """A transfer as the engine knows it."""

    ticket: Ticket
    store: bool
    group: int
    hashes: list[bytes]
    """Of what is copied, in order; for a store, of the accepted keys only."""
    block_ids: list[int]
    part_word: int
    doorbell: int
    doorbell_value: int
    keys: int
    """Submitted."""
    results: list[int]


@dataclass(slots=True)
class HeldLease:
    lease: LeaseId
    group: int
    hashes: list[bytes]


@dataclass(slots=True, eq=False)
class Engine:
    """One life of an engine: all its processes, from the first attach to the end of the epoch."""

    kind: Kind
    sessions: dict[int, SessionId] = field(default_factory=dict)
    """By rank; SCHEDULER for a process that only schedules."""
    epoch: Epoch = field(default_factory=lambda: Epoch(0))
    ended: bool = False
    view: InstanceView | None = None
    words: list[list[tuple[int, int]]] = field(default_factory=list)
    """By rank: (ticket, state)."""
    doorbells: list[list[int]] = field(default_factory=list)
    memory: list[list[list[Any]]] = field(default_factory=list)
    """By rank and group: content of every block."""
    pending: dict[int, Pending] = field(default_factory=dict)
    leases: list[HeldLease] = field(default_factory=list)
    tickets: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        world, groups = self.kind.world, len(self.kind.sizes)
        self.words = [[(0, 0)] * PART_WORDS for _ in range(world)]
        self.doorbells = [[0] * DOORBELLS for _ in range(world)]
        self.memory = [[["empty"] * BLOCKS for _ in range(groups)] for _ in range(world)]

    # --- attaching ---

    def missing(self) -> list[int]:
        """Processes that have not attached."""
        wanted = list(range(self.kind.world)) + ([] if self.kind.together else [SCHEDULER])
        return [process for process in wanted if process not in self.sessions]

    def hello(self, process: int, session: SessionId) -> AttachSession:
        role = SessionRole.SCHEDULER if process == SCHEDULER else SessionRole.RANK
        if self.kind.together and process == 0:
            role |= SessionRole.SCHEDULER
        groups = () if process == SCHEDULER else self.groups(process)
        rank = Rank(max(process, 0))
        kind = self.kind
        return AttachSession(
            session,
            kind.name,
            role,
            rank,
            kind.world,
            kind.namespace,
            32,
            "model",
            groups,
            owner=kind.owner,
        )

    def groups(self, rank: int) -> tuple[GroupGeometry, ...]:
        return tuple(
            GroupGeometry(1, 16, 0, ((sizes[rank], "kv"),), group in self.kind.replicated)
            for group, sizes in enumerate(self.kind.sizes)
        )

    @property
    def scheduler(self) -> SessionId | None:
        return self.sessions.get(0 if self.kind.together else SCHEDULER)

    @property
    def digest(self) -> bytes:
        """Empty until all ranks have attached."""
        return b"" if self.view is None else self.view.namespace or b""

    # --- contents ---

    def content(self, rank: int, group: int, key: bytes) -> Any:
        """What a rank's share of a block must be, whoever stored it."""
        return (
            self.kind.owner.tenant,
            self.kind.namespace,
            group,
            key,
            0 if group in self.kind.replicated else rank,
        )

    def run(self, chain: int, first: int, end: int) -> list[bytes]:
        """Hashes of a part of a sequence; sequences share no block."""
        return [bytes([chain + 1, i + 1]) + bytes(30) for i in range(first, end)]

    def blocks_in_use(self, group: int, *, loads_only: bool) -> set[int]:
        return {
            block
            for pending in self.pending.values()
            if pending.group == group and not (loads_only and pending.store)
            for block in pending.block_ids
        }

    def free_part_words(self) -> list[int]:
        taken = {pending.part_word for pending in self.pending.values()}
        return [word for word in range(PART_WORDS) if word not in taken]

    def fill(self, group: int, hashes: list[bytes], block_ids: list[int]) -> None:
        """The engine computes these blocks, on every rank."""
        for rank in range(self.kind.world):
            for key, block in zip(hashes, block_ids, strict=True):
                self.memory[rank][group][block] = self.content(rank, group, key)


def as_hashes(hashes: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)
