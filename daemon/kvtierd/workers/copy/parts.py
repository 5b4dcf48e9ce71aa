"""One part, as a worker keeps it from the packet that brings it to the packet that reports it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from kvtier_kernels import TICKET_MAX

from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.copy.memory import FragmentPlan
from kvtierd.workers.copy.sessions import MappedSession

_Item = TypeVar("_Item", np.uint8, np.uint32, np.uint64)


class PartTaskState(Enum):
    QUEUED = "queued"
    """It waits for its doorbell or for its lane."""
    RUNNING = "running"
    """Its lane has it, and nobody else ends it."""
    OVER = "over"


class PartRefusedError(Exception):
    """A part that makes no sense. It fails without being started."""


@dataclass(slots=True, eq=False)
class PartTask:
    """One part, with everything that its lane needs."""

    number: int
    is_load: bool
    session: MappedSession
    plan: FragmentPlan | None
    """None for a part without blocks, and once the part is over, because a session's memory can only be
    unmapped when no plan is left."""
    ticket: int
    word: int
    """Index of its part word among the session's words, doorbells included."""
    doorbell: int | None
    """Index of its doorbell; None if it is not gated."""
    doorbell_value: int
    gate_deadline_s: float
    """On the monotonic clock."""
    block_ids: npt.NDArray[np.uint32]
    slots: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint64]
    verify: npt.NDArray[np.bool_] | None
    state: PartTaskState = PartTaskState.QUEUED
    abandoned: bool = False
    """Set while it runs: no more chunks of it are submitted, and it ends as failed."""
    run: PartRun | None = None
    """None until it starts."""

    @property
    def slot_bytes(self) -> int:
        return 0 if self.plan is None else self.plan.slot_bytes


@dataclass(slots=True)
class PartRun:
    """How far a started part is. It is used by its lane's thread only."""

    good: npt.NDArray[np.bool_]
    """For each block, whether it has landed and passed its checks."""
    submitted: int = 0
    """Blocks of the chunks that were submitted so far."""
    flying: int = 0
    """Chunks that were submitted and have not landed."""
    error: str = ""
    """Why no more chunks are submitted; empty if they are."""
    copy_ns: int = 0

    def end(self, part: PartTask) -> PartEnd:
        """How the part ended. Called when all its chunks have landed."""
        if self.error:
            return PartEnd(wire.FAILED, self.error, copy_ns=self.copy_ns)
        if self.submitted < len(self.good):
            return PartEnd(wire.FAILED, "its session was released while it ran", copy_ns=self.copy_ns)
        copied_bytes = int(np.count_nonzero(self.good)) * part.slot_bytes
        if self.good.all():
            return PartEnd(wire.DONE, copied_bytes=copied_bytes, copy_ns=self.copy_ns)
        failed = np.flatnonzero(~self.good).astype(np.uint32)
        return PartEnd(
            wire.FAILED,
            f"{len(failed)} of {len(self.good)} slots failed the check of their record or their data",
            failed,
            corrupt=part.is_load,
            copied_bytes=copied_bytes,
            copy_ns=self.copy_ns,
        )


@dataclass(frozen=True, slots=True)
class PartEnd:
    """How a part ended."""

    outcome: wire.Outcome.ValueType
    message: str = ""
    failed: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    corrupt: bool = False
    copied_bytes: int = 0
    copy_ns: int = 0


def read_part(message: wire.PostPart, session: MappedSession, now_s: float) -> PartTask:
    """Converts a part, and checks everything about it that can be known before it runs. Raises
    PartRefusedError."""
    if message.direction not in (wire.STORE, wire.LOAD):
        raise PartRefusedError(f"direction={message.direction}: neither STORE nor LOAD")
    block_ids = _array(message.block_ids, np.uint32, "block_ids")
    slots = _array(message.slots, np.uint32, "slots")
    generations = _array(message.generations, np.uint64, "generations")
    verify = _array(message.verify, np.uint8, "verify")
    if len(slots) != len(block_ids) or len(generations) != len(block_ids):
        raise PartRefusedError(
            f"{len(block_ids)} block ids, {len(slots)} slots, {len(generations)} generations"
        )
    if len(verify) not in (0, len(block_ids)):
        raise PartRefusedError(f"{len(block_ids)} block ids, but {len(verify)} verify flags")
    if not 0 < message.ticket <= TICKET_MAX:
        raise PartRefusedError(f"ticket={message.ticket}: use 1 to {TICKET_MAX}")
    if message.part_word >= session.parts:
        raise PartRefusedError(f"part_word={message.part_word}: the session has {session.parts}")
    if message.gated and message.doorbell >= session.doorbells:
        raise PartRefusedError(f"doorbell={message.doorbell}: the session has {session.doorbells}")
    plan = None
    if len(block_ids) > 0:
        plan = session.plans.get((message.registration, message.group))
        if plan is None:
            raise PartRefusedError(
                f"registration={message.registration}, group={message.group}: no such memory is mapped"
            )
    return PartTask(
        number=message.part,
        is_load=message.direction == wire.LOAD,
        session=session,
        plan=plan,
        ticket=message.ticket,
        word=session.doorbells + message.part_word,
        doorbell=message.doorbell if message.gated else None,
        doorbell_value=message.doorbell_value,
        gate_deadline_s=now_s + message.gate_deadline_ms / 1e3,
        block_ids=block_ids,
        slots=slots,
        generations=generations,
        verify=verify.astype(np.bool_) if len(verify) else None,
    )


def _array(data: bytes, dtype: type[_Item], name: str) -> npt.NDArray[_Item]:
    # Little endian on the wire, as on every machine that this runs on.
    item_bytes = np.dtype(dtype).itemsize
    if len(data) % item_bytes:
        raise PartRefusedError(f"{name} of {len(data)} bytes: not a whole number of {item_bytes}-byte items")
    return np.frombuffer(data, dtype)
