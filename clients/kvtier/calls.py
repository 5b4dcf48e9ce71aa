"""Lookups and transfers under way, as both clients hand them to their callers, and how to wait for them.

A wait is a generator of pauses. The blocking client sleeps in each pause, and the asyncio client lets other
tasks run, so each wait is written only once.
"""

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
"""How many seconds to pause at most, and the event that ends the pause early, if there is one."""
Waiting = Generator[Pause, None, _Result]

WORD_POLL_S = 0.005
"""The interval at which a part word is read while its daemon is gone and only its copy worker can end it."""
EVENT_POLL_S = 0.05


def wait_blocking(waiting: Waiting[_Result]) -> _Result:
    """Sleeps in the pauses that the generator asks for. Returns its result."""
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
    """A lookup that was sent, and whose answer may still be on its way."""

    def __init__(self, threads: ConnectionThreads, record: LookupRecord) -> None:
        self._threads = threads
        self._record = record

    def poll(self) -> Lookup | None:
        """Returns the answer, or None if it has not come yet. Does not wait."""
        return self._record.answer

    @property
    def took_s(self) -> float | None:
        """Seconds from when the lookup was sent until the daemon answered, whoever waited for it; None
        while there is none."""
        return self._record.took_s

    def abandon(self) -> Lookup:
        """Gives the lookup up: returns the answer if it has come, else a miss. A lease that comes later is
        released by the client. A lease in the answer that is returned here is the caller's, to load or to
        release."""
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
        """Whether this is a store or a load."""
        return self._record.direction

    @property
    def part(self) -> PartRef | None:
        """What the ranks need to know to follow their parts. None if the transfer was refused at once, or had
        nothing to do.

        If the daemon refuses it later (`outcome.refused`), its parts are never posted and stay ARMED: tell
        the ranks, or let them revoke parts that stay ARMED for too long.
        """
        return self._record.part

    @property
    def outcome(self) -> Outcome:
        """How the transfer stands now."""
        session = self._threads.session
        if not session.spec.role.holds_rank:  # no part word has a say in it
            return self._record.outcome
        with self._threads.lock:
            return session.outcome(self._record)

    @property
    def ended(self) -> bool:
        """Whether the outcome is known: done, failed, cancelled or refused."""
        return self.outcome.state is not TransferState.ACTIVE

    @property
    def fenced(self) -> bool:
        """Whether its blocks may be reused: no copy of it can still land, and none still reads."""
        return self.outcome.fenced

    @property
    def results(self) -> tuple[StoreResult, ...] | None:
        """What an accepted store did with each key, or None until it was accepted."""
        if not self._record.accepted:
            return None
        return tuple(StoreResult.of(value) for value in self._record.results)

    @property
    def transfer_id(self) -> tuple[int, int] | None:
        """The transfer's id in the daemon's logs, as (boot nonce, number), or None until it was accepted."""
        return self._record.number

    def cancel(self) -> None:
        """Asks the daemon to end the transfer early. Its outcome still comes."""
        with self._threads.lock:
            self._threads.session.cancel(self._record)
            self._threads.wake_writer()

    def revoke(self) -> bool:
        """Ends this client's own part for good without asking the daemon, if it has not started; a store's
        part also while it runs. Returns whether the blocks may be reused now. A client without a rank ends
        nothing, and returns `fenced`."""
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
            if self._record.event.is_set():  # the daemon is gone, so only the part word can tell
                yield None, min(remaining_s, WORD_POLL_S)
            else:
                yield self._record.event, min(remaining_s, EVENT_POLL_S)

    def __repr__(self) -> str:
        ticket = self._record.part.ticket if self._record.part else None
        return f"<{type(self).__name__} {self.direction} ticket={ticket} {self.outcome}>"
