"""Lookups and transfers that are under way, as both clients give them to their callers; and how somebody
waits.

What waits is a generator of pauses. The blocking client sleeps in each of them, and the asyncio client lets
others run: so what is waited for, and for how long, is written once."""

import time
from collections.abc import Generator
from threading import Event
from typing import TypeVar

from kvtier.connection.threads import ConnectionThreads
from kvtier.lookups import Lookup, LookupRecord
from kvtier.transfers import Outcome, StoreResult, TransferRecord, TransferState
from kvtier.words import Direction, PartRef

_Result = TypeVar("_Result")
Pause = tuple[Event | None, float]
"""So many seconds, or until this event is set."""
Waiting = Generator[Pause, None, _Result]

WORD_POLL_S = 0.005
"""How often a part word is read while its daemon is gone and only its copy worker can end it."""
EVENT_POLL_S = 0.05


def wait_blocking(waiting: Waiting[_Result]) -> _Result:
    """Sleeps as often as it takes. Returns what was waited for."""
    while True:
        try:
            event, seconds = next(waiting)
        except StopIteration as over:
            result: _Result = over.value
            return result
        if event is None:
            time.sleep(seconds)
        else:
            event.wait(seconds)


class LookupCallBase:
    """A lookup on its way."""

    def __init__(self, threads: ConnectionThreads, record: LookupRecord) -> None:
        self._threads = threads
        self._record = record

    def poll(self) -> Lookup | None:
        """The answer if it has come. Does not wait."""
        return self._record.answer

    def abandon(self) -> Lookup:
        """Nobody will ask again: returns the answer if it has come, else a miss. A lease that comes later is
        released; one that is in the answer returned here is the caller's, to load or to release.
        """
        with self._threads.lock:
            return self._threads.session.abandon(self._record)

    def _wait(self, timeout_s: float) -> Waiting[Lookup | None]:
        if self._record.answer is None:
            yield self._record.event, max(0.0, timeout_s)
        return self._record.answer


class TransferBase:
    """A submitted store or load. Its properties are always up to date and never wait."""

    def __init__(self, threads: ConnectionThreads, record: TransferRecord) -> None:
        self._threads = threads
        self._record = record

    @property
    def direction(self) -> Direction:
        """store or load"""
        return self._record.direction

    @property
    def part(self) -> PartRef | None:
        """What the ranks must be told to follow their parts. None if it was refused at once, or there was
        nothing to do.

        If the daemon refuses it later (`outcome.refused`), its parts stay ARMED, because nobody has posted
        them: tell the ranks, or let them revoke what stays ARMED for too long.
        """
        return self._record.part

    @property
    def outcome(self) -> Outcome:
        """How it stands now."""
        session = self._threads.session
        if not session.spec.role.holds_rank:  # no part word has a say in it
            return self._record.outcome
        with self._threads.lock:
            return session.outcome(self._record)

    @property
    def ended(self) -> bool:
        """Whether there is no more to come from the daemon: done, failed, cancelled or refused."""
        return self.outcome.state is not TransferState.ACTIVE

    @property
    def fenced(self) -> bool:
        """Whether its blocks may be reused: nothing of it can still land, nothing still reads."""
        return self.outcome.fenced

    @property
    def results(self) -> tuple[StoreResult, ...] | None:
        """What an accepted store did with each key; None until it was accepted."""
        if not self._record.accepted:
            return None
        return tuple(StoreResult.of(value) for value in self._record.results)

    @property
    def transfer_id(self) -> tuple[int, int] | None:
        """(boot nonce, number) as the daemon's logs have it; None until it was accepted."""
        return self._record.number

    def cancel(self) -> None:
        """Asks the daemon to end it early. Its outcome still comes."""
        with self._threads.lock:
            self._threads.session.cancel(self._record)
            self._threads.wake_writer()

    def revoke(self) -> bool:
        """Ends this client's own part for ever if it has not started; the daemon is not asked. True if the
        blocks may be reused now, False if the part is being copied. Without a rank of its own: False unless
        it is fenced."""
        part, session = self._record.part, self._threads.session
        if part is None or not session.spec.role.holds_rank:
            return self.fenced
        with self._threads.lock:
            return session.words.revoke(part).over

    def _wait(self, timeout_s: float) -> Waiting[Outcome]:
        deadline_s = time.monotonic() + timeout_s
        self._threads.flush()
        while True:
            outcome = self.outcome
            remaining_s = deadline_s - time.monotonic()
            if outcome.state is not TransferState.ACTIVE or remaining_s <= 0:
                return outcome
            if self._record.event.is_set():  # the daemon is gone: only the part word can tell
                yield None, min(remaining_s, WORD_POLL_S)
            else:
                yield self._record.event, min(remaining_s, EVENT_POLL_S)

    def __repr__(self) -> str:
        ticket = self._record.part.ticket if self._record.part else None
        return f"<{type(self).__name__} {self.direction} ticket={ticket} {self.outcome}>"
