"""Transfers as their submitter sees them, and the part words and tickets they are submitted under."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from threading import Event

from kvtier_kernels import TICKET_MAX

from kvtier.errors import KvtierError
from kvtier.v1 import cache_pb2
from kvtier.words import Direction, PartRef


class TransferState(Enum):
    """Numbers of kvtier.v1.TransferState."""

    ACTIVE = 1
    """Not over, as far as is known."""
    DONE = 2
    """Every accepted block is committed (store) or in place (load)."""
    FAILED = 3
    """See `error`, and `succeeded` for the keys that did succeed."""
    CANCELLED = 4
    """It ended early because somebody asked for it."""


class StoreResult(Enum):
    """What a submitted store did with one key. Numbers of kvtier.v1.StoreResult."""

    ACCEPTED = 0
    EXISTS = 1
    PENDING = 2
    THROTTLED = 3

    @classmethod
    def of(cls, value: int) -> "StoreResult":
        """What a byte of the wire means. One that this version does not know copies nothing either."""
        return cls(value) if value <= cls.THROTTLED.value else cls.THROTTLED


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a transfer stands, or how it ended."""

    state: TransferState
    fenced: bool
    """No copy of it can still land, and none still reads: its blocks may be reused. Always true for a
    transfer that was refused or whose end the daemon reported. False while it runs, and for one whose daemon
    went away while a copy was running; of the latter a client without a rank never learns more: its ranks do
    (`part_state`)."""
    succeeded: bytes = field(default=b"", repr=False)
    """One byte per submitted key: 1 if it is committed (store) or in place (load). Empty if nothing did or is
    known."""
    error: KvtierError | None = None
    """Unset for ACTIVE and DONE."""

    refused: bool = False
    """It was never accepted: nothing was copied, and no lease was consumed."""

    @property
    def done(self) -> bool:
        """Everything is in place."""
        return self.state is TransferState.DONE

    @property
    def throttled(self) -> bool:
        """It was refused for now: go on without, or try again later."""
        return self.refused and self.error is not None and self.error.throttled


ACTIVE = Outcome(TransferState.ACTIVE, fenced=False)


def refused(error: KvtierError) -> Outcome:
    """The outcome of a transfer that was never accepted."""
    return Outcome(TransferState.FAILED, fenced=True, error=error, refused=True)


@dataclass(slots=True, eq=False)
class TransferRecord:
    """One transfer of this client; its session keeps it up to date."""

    direction: Direction
    count: int
    """Keys submitted."""
    event: Event
    """Set when the outcome is known, or when it will not come from the daemon."""
    part: PartRef | None = None
    """None if it was refused before it was sent."""
    accepted: bool = False
    results: bytes = b""
    outcome: Outcome = ACTIVE
    lost: bool = False
    """Its epoch ended before its end was reported: what is left to know is in the part words."""
    number: tuple[int, int] | None = None
    """Boot nonce and number that the daemon gave it, for people and logs."""

    def end(self, outcome: Outcome) -> None:
        """The outcome is known."""
        self.outcome = outcome
        self.event.set()


def outcome_of(event: cache_pb2.TransferEvent) -> Outcome:
    """The outcome that a TransferEvent reports."""
    error = KvtierError.from_proto(event.error) if event.HasField("error") else None
    try:
        state = TransferState(event.state)
    except ValueError:  # a terminal state that this version does not know is no success
        state = TransferState.FAILED
    return Outcome(state, fenced=True, succeeded=event.succeeded, error=error)


class PartWords:
    """Which part words and tickets are free for the next transfer of one epoch.

    A word is given back when its transfer's end was reported (every rank's part is then fenced). The one that
    has been free for longest is taken next, so that a rank that asks late still finds the state of the
    transfer it asks for.
    """

    def __init__(self, parts: int, first_ticket: int = 1) -> None:
        self._free: deque[int] = deque(range(parts))
        self._used: set[int] = set()
        self.next_ticket = first_ticket

    @property
    def in_use(self) -> int:
        """Words whose transfers have not ended."""
        return len(self._used)

    def take(self) -> tuple[int, int] | None:
        """(ticket, word) for one transfer; tickets rise. None, and nothing changed, if all are in use."""
        if not self._free or self.next_ticket >= TICKET_MAX:
            return None
        ticket, word = self.next_ticket, self._free.popleft()
        self.next_ticket += 1
        self._used.add(word)
        return ticket, word

    def give_back(self, word: int) -> None:
        """The word's transfer is over. Raises KeyError if the word is not in use."""
        self._used.remove(word)
        self._free.append(word)
