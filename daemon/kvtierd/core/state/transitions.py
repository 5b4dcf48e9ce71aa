"""Every state that something outside the block table can be in, and the one table that says how it changes.

A pair of state and event that is not in the table cannot happen. If it does, the core has a bug, and the
error says what led to it.
"""

import re
from collections import Counter
from dataclasses import dataclass
from enum import Enum


class _Word(Enum):
    """Members are compared and hashed by identity, which is faster than by name; transitions happen often."""

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class State(_Word):
    """The state of any kind of entity."""


class WorkerState(State):
    """One worker process."""

    LIVE = "live"
    LOST = "lost"
    """It takes no more parts, but may still be writing."""
    GONE = "gone"


class MappingState(State):
    """What one worker has mapped of one session: its words, and its memory."""

    MAPPED = "mapped"
    RELEASING = "releasing"
    LOST = "lost"
    GONE = "gone"


class InstanceState(State):
    """One epoch of an engine instance."""

    FORMING = "forming"
    """Some rank has not attached, or its memory is not mapped by a live worker."""
    LIVE = "live"
    FENCING = "fencing"
    """It has ended, but workers still hold mappings of it."""
    GONE = "gone"


class TransferJobState(State):
    """One store or load."""

    ACTIVE = "active"
    CLOSING = "closing"
    """It cannot become what was asked for any more, but some parts are still open."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TransferPartState(State):
    """What one worker does of a transfer."""

    POSTED = "posted"
    LOST = "lost"
    """Its worker is lost, but may still be copying."""
    DONE = "done"
    FAILED = "failed"
    REVOKED = "revoked"


class LeaseState(State):
    """One lease."""

    HELD = "held"
    CONSUMED = "consumed"
    RELEASED = "released"
    EXPIRED = "expired"


class CheckState(State):
    """A comparison of slots with their checksums, by a worker whose lanes are idle."""

    OPEN = "open"
    DONE = "done"
    LOST = "lost"
    """Its worker was lost before it answered."""


class DiskState(State):
    """One disk. Only a LIVE one is looked up, written and read."""

    STARTING = "starting"
    """It is not known yet what the disk holds."""
    LIVE = "live"
    OFF = "off"
    """It has no worker, but what it holds stays known."""
    FAILING = "failing"
    """There were too many errors in a row; after a while, one read decides."""


class DiskJobState(State):
    """A batch of slots that a disk's worker writes, reads or checks."""

    POSTED = "posted"
    DONE = "done"
    """Its worker has said what became of it."""
    LOST = "lost"
    """Its worker is lost, but may still be reading into the pool."""
    FAILED = "failed"


class Event(_Word):
    """What happens to an entity. Each event belongs to a few kinds of entity."""

    # workers and mappings
    LOSE = "lose"
    EXIT = "exit"
    RELEASE = "release"
    RELEASED = "released"
    # instances
    COMPLETE = "complete"
    BREAK = "break"
    END = "end"
    FENCED = "fenced"
    # parts
    DONE = "done"
    FAIL = "fail"
    REVOKED = "revoked"
    GATE_DEADLINE = "gate deadline"
    SESSION_RELEASED = "session released"
    # transfers
    SPOIL = "spoil"
    CANCEL = "cancel"
    # leases
    LOAD = "load"
    LOAD_AND_KEEP = "load and keep"
    EXPIRE = "expire"
    # checks
    CHECKED = "checked"
    # disks
    RECOVER = "recover"
    RETURN = "return"
    HEAL = "heal"


TABLE: dict[tuple[State, Event], State] = {
    (WorkerState.LIVE, Event.LOSE): WorkerState.LOST,
    (WorkerState.LOST, Event.EXIT): WorkerState.GONE,
    #
    (MappingState.MAPPED, Event.RELEASE): MappingState.RELEASING,
    (MappingState.MAPPED, Event.LOSE): MappingState.LOST,
    (MappingState.RELEASING, Event.RELEASED): MappingState.GONE,
    (MappingState.RELEASING, Event.LOSE): MappingState.LOST,
    (MappingState.LOST, Event.EXIT): MappingState.GONE,
    #
    (InstanceState.FORMING, Event.COMPLETE): InstanceState.LIVE,
    (InstanceState.FORMING, Event.END): InstanceState.FENCING,
    (InstanceState.LIVE, Event.BREAK): InstanceState.FORMING,
    (InstanceState.LIVE, Event.END): InstanceState.FENCING,
    (InstanceState.FENCING, Event.FENCED): InstanceState.GONE,
    #
    (TransferPartState.POSTED, Event.DONE): TransferPartState.DONE,
    (TransferPartState.POSTED, Event.FAIL): TransferPartState.FAILED,
    (TransferPartState.POSTED, Event.REVOKED): TransferPartState.REVOKED,
    (TransferPartState.POSTED, Event.GATE_DEADLINE): TransferPartState.REVOKED,
    (TransferPartState.POSTED, Event.SESSION_RELEASED): TransferPartState.FAILED,
    (TransferPartState.POSTED, Event.LOSE): TransferPartState.LOST,
    (TransferPartState.LOST, Event.EXIT): TransferPartState.FAILED,
    #
    (TransferJobState.ACTIVE, Event.SPOIL): TransferJobState.CLOSING,
    (TransferJobState.ACTIVE, Event.DONE): TransferJobState.DONE,
    (TransferJobState.CLOSING, Event.SPOIL): TransferJobState.CLOSING,
    (TransferJobState.CLOSING, Event.DONE): TransferJobState.DONE,  # it was cancelled too late
    (TransferJobState.CLOSING, Event.FAIL): TransferJobState.FAILED,
    (TransferJobState.CLOSING, Event.CANCEL): TransferJobState.CANCELLED,
    #
    (LeaseState.HELD, Event.LOAD): LeaseState.CONSUMED,
    (LeaseState.HELD, Event.LOAD_AND_KEEP): LeaseState.HELD,
    (LeaseState.HELD, Event.RELEASE): LeaseState.RELEASED,
    (LeaseState.HELD, Event.EXPIRE): LeaseState.EXPIRED,
    (LeaseState.HELD, Event.END): LeaseState.RELEASED,
    #
    (CheckState.OPEN, Event.CHECKED): CheckState.DONE,
    (CheckState.OPEN, Event.LOSE): CheckState.LOST,
    #
    (DiskState.STARTING, Event.RECOVER): DiskState.LIVE,
    (DiskState.LIVE, Event.FAIL): DiskState.FAILING,
    (DiskState.LIVE, Event.LOSE): DiskState.OFF,
    (DiskState.FAILING, Event.HEAL): DiskState.LIVE,
    (DiskState.FAILING, Event.LOSE): DiskState.OFF,
    (DiskState.OFF, Event.RETURN): DiskState.LIVE,
    #
    (DiskJobState.POSTED, Event.DONE): DiskJobState.DONE,
    (DiskJobState.POSTED, Event.LOSE): DiskJobState.LOST,
    (DiskJobState.LOST, Event.EXIT): DiskJobState.FAILED,
}

STORY_LENGTH = 16


@dataclass(slots=True, eq=False, kw_only=True)
class Entity:
    """Something that has a state, and remembers what happened to it lately."""

    state: State
    story: tuple[Event, ...] = ()

    def describe(self) -> str:
        """One line for whoever looks for the bug. It contains no block hashes."""
        events = " → ".join(event.value for event in self.story) or "nothing yet"
        kind = " ".join(re.findall("[A-Z][a-z]+", type(self).__name__)).lower()
        return f"{kind} in state {self.state.name}, after: {events}"


class InvalidTransition(AssertionError):
    """A bug of the core: an event that the table does not allow in this state."""

    def __init__(self, entity: Entity, event: Event) -> None:
        super().__init__(f"{event.name} is impossible for a {entity.describe()}")


class Transitions:
    """Applies the table, and counts how often each of its pairs was used."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[State, Event]] = Counter(dict.fromkeys(TABLE, 0))

    def step(self, entity: Entity, event: Event) -> None:
        """Moves the entity to the state that follows. Raises InvalidTransition if there is none."""
        pair = (entity.state, event)
        after = TABLE.get(pair)
        if after is None:
            raise InvalidTransition(entity, event)
        self.counts[pair] += 1
        entity.story = (*entity.story[1 - STORY_LENGTH :], event)
        entity.state = after
