"""Transfers as their submitter sees them, and the part words and tickets that they are submitted with."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from threading import Event

from kvtier_kernels import TICKET_MAX

from kvtier.errors import KvtierError
from kvtier.v1 import cache_pb2
from kvtier.words import Direction, PartRef


class TransferState(Enum):
    """How far a transfer is. The numbers are those of kvtier.v1.TransferState."""

    ACTIVE = 1
    """It is not over, as far as this client knows."""
    DONE = 2
    """Every accepted block is committed (store) or in place (load)."""
    FAILED = 3
    """It failed: `error` says why, and `succeeded` which keys were copied all the same."""
    CANCELLED = 4
    """It ended early because somebody asked for it."""


class StoreResult(Enum):
    """What a store did with one key. The numbers are those of kvtier.v1.StoreResult."""

    ACCEPTED = 0
    EXISTS = 1
    PENDING = 2
    THROTTLED = 3
    UNWANTED = 4
    """It is not worth its room, or what comes before it is not there. Do not offer it again for the same
    request."""

    @classmethod
    def of(cls, value: int) -> "StoreResult":
        """Returns the result that a byte of the message means. An unknown one counts as THROTTLED."""
        return _RESULTS[value] if value < len(_RESULTS) else cls.THROTTLED


_RESULTS = tuple(StoreResult)
"""By number."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a transfer stands, or how it ended."""

    state: TransferState
    fenced: bool
    """Whether its blocks may be reused: no copy of it can still land, and none still reads. Always True for a
    transfer that was refused or whose end the daemon reported. False while it runs, and if its daemon went
    away during a copy; in that case a client without a rank never learns more, but its ranks do
    (`part_state`)."""
    succeeded: bytes = field(default=b"", repr=False)
    """One byte per submitted key: 1 if it is committed (store) or in place (load). Empty if none is, or if
    not known."""
    error: KvtierError | None = None
    """Why it failed or was cancelled; None for ACTIVE and DONE."""

    refused: bool = False
    """Whether it was never accepted: nothing was copied, and no lease was consumed."""

    @property
    def done(self) -> bool:
        """Whether all of it was copied."""
        return self.state is TransferState.DONE

    @property
    def throttled(self) -> bool:
        """Whether it was refused only for now: go on without it, or try again later."""
        return self.refused and self.error is not None and self.error.throttled


ACTIVE = Outcome(TransferState.ACTIVE, fenced=False)


def refused(error: KvtierError) -> Outcome:
    """Returns the outcome of a transfer that was never accepted."""
    return Outcome(TransferState.FAILED, fenced=True, error=error, refused=True)


@dataclass(slots=True, eq=False)
class TransferRecord:
    """One transfer of this client; its session keeps it up to date."""

    direction: Direction
    count: int
    """The number of keys that were submitted."""
    event: Event
    """Set when the outcome is known, or when the daemon will not report it."""
    part: PartRef | None = None
    """None if the transfer was refused before it was sent."""
    accepted: bool = False
    results: bytes = b""
    outcome: Outcome = ACTIVE
    lost: bool = False
    """Whether its epoch ended before its end was reported. Only the part words can then tell more."""
    number: tuple[int, int] | None = None
    """The boot nonce and number that the daemon gave it, for people and logs."""

    def end(self, outcome: Outcome) -> None:
        """Sets the outcome and wakes those who wait for it."""
        self.outcome = outcome
        self.event.set()


def outcome_of(event: cache_pb2.TransferEvent) -> Outcome:
    """Returns the outcome that a TransferEvent reports."""
    error = KvtierError.from_proto(event.error) if event.HasField("error") else None
    try:
        state = TransferState(event.state)
    except ValueError:  # an unknown terminal state is no success
        state = TransferState.FAILED
    return Outcome(state, fenced=True, succeeded=event.succeeded, error=error)


class PartWords:
    """Which part words and tickets are free for the next transfer of one epoch.

    A word is given back when its transfer's end was reported, because then every rank's part is fenced. The
    word that has been free for longest is taken next, so a rank that asks late still finds its transfer's
    state.
    """

    def __init__(self, parts: int, first_ticket: int = 1) -> None:
        self._free: deque[int] = deque(range(parts))
        self._used: set[int] = set()
        self.next_ticket = first_ticket

    @property
    def in_use(self) -> int:
        """The number of words whose transfers have not ended."""
        return len(self._used)

    def take(self) -> tuple[int, int] | None:
        """Takes a word for one transfer and returns (ticket, word); tickets rise. Returns None, and changes
        nothing, if all words are in use."""
        if not self._free or self.next_ticket >= TICKET_MAX:
            return None
        ticket, word = self.next_ticket, self._free.popleft()
        self.next_ticket += 1
        self._used.add(word)
        return ticket, word

    def give_back(self, word: int) -> None:
        """Gives the word of a transfer that is over back. Raises KeyError if the word is not in use."""
        self._used.remove(word)
        self._free.append(word)
