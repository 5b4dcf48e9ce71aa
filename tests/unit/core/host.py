"""A machine, a clock, and short ways to say what engines and workers do. Performs nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from kvtierd.core.actions import (
    Action,
    Attached,
    InstanceView,
    LookupReply,
    Notify,
    PostPart,
    Reply,
    SubmitReply,
    TransferEnded,
)
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.blocks.table import BlockState
from kvtierd.core.blocks.tenants import TenantShare
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import (
    PAGE_BYTES,
    Epoch,
    LeaseId,
    PartId,
    Rank,
    RegistrationId,
    SessionId,
    TenantTag,
    Ticket,
    WorkerId,
)
from kvtierd.core.machine import Machine
from kvtierd.core.stimuli import (
    NOBODY,
    AttachSession,
    BlockQuery,
    CoreDisks,
    CoreIntegrity,
    CoreLimits,
    GroupGeometry,
    LookupBlocks,
    Owner,
    PartFinished,
    PartOutcome,
    RegisterMemory,
    RegisterWords,
    SessionReleased,
    SessionRole,
    Signals,
    Stimulus,
    SubmitLoad,
    SubmitStore,
    WorkerLive,
)

from tests.oracles.invariants import validate

A = TypeVar("A")
SCHEDULER = -1
BOTH = SessionRole.SCHEDULER | SessionRole.RANK
NONE = np.empty(0, np.uint32)
GEOMETRY = PoolGeometry(extents=4, extent_bytes=1 << 16, first_extent_offset=2 << 20)
"""14 slots of 4 KiB, 7 of 8 KiB or 4 of 12 KiB in each extent."""


def pages_of(geometry: PoolGeometry) -> int:
    """Of the whole file."""
    return (geometry.first_extent_offset + geometry.capacity_bytes) // PAGE_BYTES


def keys(*numbers: int) -> np.ndarray:
    """Block hashes that are easy to tell apart."""
    rows = np.zeros((len(numbers), 32), np.uint8)
    rows[:, 0] = [number % 256 for number in numbers]
    rows[:, 1] = [number // 256 for number in numbers]
    return rows


class Told:
    """What is told of a single group in prefix or exact mode, as the wire has it."""

    def __init__(self, reply: LookupReply, blocks: int, *, exact: bool = False) -> None:
        [group] = reply.groups
        assert group.lease_first == 0
        self.hits = group.hits
        self.states = group.states if exact else group.up_to_first_miss(blocks)
        self.readable = group.readable
        self.lease = group.lease
        self.lease_refused = reply.lease_refused


class Host:
    """One machine. Everything handled is validated."""

    def __init__(
        self,
        table: Any,
        limits: CoreLimits | None = None,
        geometry: PoolGeometry = GEOMETRY,
        *,
        disks: Sequence[PoolGeometry] = (),
        disk_policy: CoreDisks | None = None,
        integrity: CoreIntegrity | None = None,
        shares: Mapping[str, TenantShare] | None = None,
        populated: int | None = None,
        store: PoolGeometry | None = None,
        store_policy: CoreDisks | None = None,
        told_of: Callable[[TenantTag], bool] | None = None,
    ) -> None:
        """`table`: the class of the block table, or a table."""
        make = table if isinstance(table, type) else type(table)
        if isinstance(table, type):
            table = make(256, pages_of(geometry))
        self.now_s = 100.0
        self.machine = Machine(
            table,
            lambda: self.now_s,
            limits or CoreLimits(),
            geometry,
            disks=[(make(256, pages_of(each)), each) for each in disks],
            disk_policy=disk_policy,
            integrity=integrity,
            shares=shares,
            populated=populated,
            store=None if store is None else (make(256, pages_of(store)), store),
            store_policy=store_policy,
            told_of=told_of,
        )
        self.on_actions: list[Callable[[list[Action]], None]] = []
        """Are called with the actions of each stimulus."""
        self.actions: list[Action] = []
        """Of the last stimulus."""
        self.ids = itertools.count(1)

    def do(self, stimulus: Stimulus) -> Reply:
        reply, self.actions = self.machine.handle(stimulus)
        for heard in self.on_actions:
            heard(self.actions)
        self.validate()
        return reply

    def validate(self) -> None:
        validate(self.machine)

    def refused(self, stimulus: Stimulus) -> Refusal:
        """The refusal of a stimulus that must be refused."""
        try:
            self.machine.handle(stimulus)
        except Refusal as refusal:
            self.validate()
            return refusal
        raise AssertionError(f"accepted: {stimulus}")

    def reason(self, stimulus: Stimulus) -> Reason:
        return self.refused(stimulus).reason

    def of(self, kind: type[A]) -> list[A]:
        """The last actions of one kind."""
        return [action for action in self.actions if isinstance(action, kind)]

    def told(self, session: SessionId, kind: type[A]) -> list[A]:
        """Events of one kind that the last actions tell a session."""
        events = [action.event for action in self.of(Notify) if action.session == session]
        return [event for event in events if isinstance(event, kind)]

    @property
    def counters(self) -> Any:
        return self.machine.status().counters

    def worker(self) -> WorkerId:
        """A copy worker comes up."""
        worker = WorkerId(next(self.ids))
        self.do(WorkerLive(worker, "cpu"))
        return worker

    def instance(self, name: str = "engine", **options: Any) -> Instance:
        """An instance that is ready, unless `worker=None`."""
        return Instance(self, name, **options)


class Instance:
    """One engine: its processes, and what they ask."""

    def __init__(
        self,
        host: Host,
        name: str = "engine",
        *,
        sizes: Sequence[Sequence[int]] = ((4096,),),
        block_tokens: Sequence[int] | None = None,
        replicated: Sequence[int] = (),
        together: bool = True,
        fields: bytes = b"namespace",
        owner: Owner = NOBODY,
        blocks: int = 64,
        part_words: int = 16,
        worker: WorkerId | str | None = "new",
        processes: Sequence[int] | None = None,
    ) -> None:
        """`sizes`: slot bytes by group and rank. `block_tokens`: by group. `replicated`: groups of which all
        ranks hold the same. `worker`: its own, a given one, or None if none registers.

        `processes`: only these attach, and nobody registers.
        """
        self.host = host
        self.name = name
        self.sizes = sizes
        self.block_tokens = block_tokens or (16,) * len(sizes)
        self.replicated = replicated
        self.together = together
        self.fields = fields
        self.owner = owner
        self.blocks = blocks
        self.part_words = part_words
        self.sessions: dict[int, SessionId] = {}
        self.epoch = Epoch(0)
        self.words = itertools.cycle(range(part_words))
        self.tickets = itertools.count(1)
        self.worker = host.worker() if worker == "new" else worker
        everyone = [*range(self.world), *([] if together else [SCHEDULER])]
        for process in everyone if processes is None else processes:
            self.attach(process)
        if self.worker is not None and processes is None:
            for rank in range(self.world):
                self.register(rank)

    @property
    def world(self) -> int:
        return len(self.sizes[0])

    @property
    def scheduler(self) -> SessionId:
        return self.sessions[0 if self.together else SCHEDULER]

    def hello(self, process: int, **changes: Any) -> AttachSession:
        role = SessionRole.SCHEDULER if process == SCHEDULER else SessionRole.RANK
        if self.together and process == 0:
            role = BOTH
        groups = tuple(
            GroupGeometry(1, tokens, 0, ((sizes[process], "kv"),), group in self.replicated)
            for group, (sizes, tokens) in enumerate(zip(self.sizes, self.block_tokens, strict=True))
        )
        options: dict[str, Any] = {
            "session": SessionId(next(self.host.ids)),
            "instance": self.name,
            "role": role,
            "rank": Rank(max(process, 0)),
            "world_size": self.world,
            "namespace_fields": self.fields,
            "hash_bytes": 32,
            "model": "model",
            "groups": () if process == SCHEDULER else groups,
            "owner": self.owner,
        }
        return AttachSession(**options | changes)

    def attach(self, process: int, **changes: Any) -> Attached:
        stimulus = self.hello(process, **changes)
        reply = self.host.do(stimulus)
        assert isinstance(reply, Attached)
        self.sessions[process] = stimulus.session
        self.epoch = reply.epoch
        return reply

    def register(self, rank: int, worker: WorkerId | None = None) -> InstanceView:
        if worker is None:
            assert isinstance(self.worker, int)
            worker = WorkerId(self.worker)
        session = self.sessions[rank]
        self.host.do(RegisterWords(session, worker, 2, self.part_words))
        counts = (self.blocks,) * len(self.sizes)
        registration = RegistrationId(next(self.host.ids))
        reply = self.host.do(RegisterMemory(session, worker, registration, counts, 1 << 20))
        assert isinstance(reply, InstanceView)
        return reply

    # --- lookups ---

    def lookup_of(
        self, hashes: np.ndarray, group: int = 0, *, exact: bool = False, **changes: Any
    ) -> LookupBlocks:
        """One query in prefix or exact mode."""
        return self.lookup_groups_of(queries=(BlockQuery(group, hashes, exact=exact),), **changes)

    def lookup(self, *numbers: int, **changes: Any) -> Told:
        reply = self.host.do(self.lookup_of(keys(*numbers), **changes))
        assert isinstance(reply, LookupReply)
        return Told(reply, len(numbers), exact=changes.get("exact", False))

    def lookup_groups(
        self, *asked: tuple[int, Sequence[int]], lease: bool = False, **changes: Any
    ) -> LookupReply:
        """`asked`: for each group, in order, its window in blocks (0: none) and the numbers of its keys."""
        reply = self.host.do(self.lookup_groups_of(*asked, lease=lease, **changes))
        assert isinstance(reply, LookupReply)
        return reply

    def lookup_groups_of(self, *asked: tuple[int, Sequence[int]], **changes: Any) -> LookupBlocks:
        queries = tuple(
            BlockQuery(group, keys(*numbers), window) for group, (window, numbers) in enumerate(asked)
        )
        options: dict[str, Any] = {
            "session": self.scheduler,
            "epoch": self.epoch,
            "queries": queries,
            "lease": False,
        }
        return LookupBlocks(**options | changes)

    def hits(self, *numbers: int, group: int = 0) -> list[int]:
        """Which of these keys are READY; looks without touching."""
        core = self.host.machine.core
        _, states = core.blocks.table.lookup(
            core.names[self.owner, self.name].plans[group].space, keys(*numbers)
        )
        return [number for number, state in zip(numbers, states, strict=True) if state == BlockState.READY]

    def lease(self, *numbers: int) -> LeaseId:
        reply = self.lookup(*numbers, lease=True)
        assert reply.hits == len(numbers)
        assert reply.lease is not None, reply.lease_refused
        return reply.lease

    # --- transfers ---

    def signals(self, **changes: Any) -> Signals:
        options: dict[str, Any] = {
            "ticket": Ticket(next(self.tickets)),
            "part_word": next(self.words),
            "gated": False,
        }
        return Signals(**options | changes)

    def store_of(self, *numbers: int, signals: Signals | None = None, **changes: Any) -> SubmitStore:
        options: dict[str, Any] = {
            "session": self.scheduler,
            "epoch": self.epoch,
            "signals": signals or self.signals(),
            "group": 0,
            "hashes": keys(*numbers),
            "block_ids": np.arange(len(numbers), dtype=np.uint32),
        }
        return SubmitStore(**options | changes)

    def load_of(
        self, lease: int, blocks: Sequence[int], *, signals: Signals | None = None, **changes: Any
    ) -> SubmitLoad:
        options: dict[str, Any] = {
            "session": self.scheduler,
            "epoch": self.epoch,
            "signals": signals or self.signals(),
            "group": 0,
            "lease": LeaseId(lease),
            "first": 0,
            "block_ids": np.array(blocks, np.uint32),
            "keep_lease": False,
        }
        return SubmitLoad(**options | changes)

    def submit(self, stimulus: SubmitStore | SubmitLoad) -> Running:
        reply = self.host.do(stimulus)
        assert isinstance(reply, SubmitReply)
        return Running(self, reply, stimulus.signals.ticket, self.host.of(PostPart))

    def store(self, *numbers: int, **changes: Any) -> Running:
        return self.submit(self.store_of(*numbers, **changes))

    def load(self, lease: int, blocks: Sequence[int], **changes: Any) -> Running:
        return self.submit(self.load_of(lease, blocks, **changes))

    def stored(self, *numbers: int, group: int = 0) -> None:
        """Stores these keys, wholly."""
        ended = self.store(*numbers, group=group).finish()
        assert ended.succeeded.all(), "not everything found room"

    def fill_pool(self, first: int) -> None:
        """Stores so many other blocks, from this number on, that none of the earlier ones is left."""
        for number in range(first, first + 64, 8):
            self.stored(*range(number, number + 8))


class Running:
    """A transfer that was accepted."""

    def __init__(self, instance: Instance, reply: SubmitReply, ticket: Ticket, posts: list[PostPart]) -> None:
        self.instance = instance
        self.host = instance.host
        self.reply = reply
        self.results = reply.results.tolist()
        self.ticket = ticket
        self.posts = posts

    def part(
        self,
        rank: int = 0,
        outcome: PartOutcome = PartOutcome.DONE,
        failed: Sequence[int] = (),
        **options: Any,
    ) -> TransferEnded | None:
        """One rank's part ends; how the transfer ended, if it has."""
        post = self.posts[rank]
        self.host.do(finished(post.worker, post.part, outcome, failed, **options))
        ended = self.host.told(self.instance.scheduler, TransferEnded)
        return ended[0] if ended else None

    def finish(self) -> TransferEnded:
        """Every part is done."""
        ended = [self.part(rank) for rank in range(len(self.posts))][-1]
        assert ended is not None
        return ended

    def ended(self) -> TransferEnded | None:
        """As Wait would tell it."""
        return self.host.machine.transfer(self.instance.scheduler, self.instance.epoch, self.ticket)


def finished(
    worker: WorkerId,
    part: PartId,
    outcome: PartOutcome = PartOutcome.DONE,
    failed: Sequence[int] = (),
    **options: Any,
) -> PartFinished:
    return PartFinished(worker, part, outcome, np.array(failed, np.uint32), **options)


def released(instance: Instance, rank: int = 0) -> SessionReleased:
    assert isinstance(instance.worker, int)
    return SessionReleased(WorkerId(instance.worker), instance.sessions[rank])
