"""Jobs of a disk's worker, and the order in which its threads take them."""

import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtierd.core.actions import DiskJobKind
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.packets import ProtocolError

JOBS_MAX = 4_096
"""Jobs that may wait. The core's limits stay far below it; further ones fail instead of using up memory."""

EVERYTHING_MAX = 64
"""Requests to persist all records that may wait."""

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]
"""Positions in a job."""


IN_ORDER = (DiskJobKind.READ, DiskJobKind.WRITE, DiskJobKind.CHECK)
"""The kinds of jobs in the order in which threads take them."""


@dataclass(frozen=True, slots=True)
class PersistAll:
    """A request to persist all records, and to report that."""

    request: int


@dataclass(eq=False, slots=True)
class SlotJob:
    """A batch of slots. The arrays are parallel. Only one thread at a time works on it."""

    number: int
    kind: DiskJobKind
    disk_slots: U32
    disk_generations: U64
    host_slots: U32
    host_generations: U64
    clocks: U64
    done: int = 0
    """All positions before this one have been dealt with."""
    failed: list[Rows] = field(default_factory=list)
    corrupt: list[Rows] = field(default_factory=list)
    error: str = ""
    moved_bytes: int = 0
    saved_bytes: int = 0
    """By so many fewer bytes than `moved_bytes` went to or from a store, because it has blocks compressed."""
    busy_ns: int = 0
    pack: int = 0
    """ADOPT: the number of what was found."""
    positions: U32 = field(default_factory=lambda: np.empty(0, np.uint32))
    """ADOPT: which of the blocks that were found each slot is to stand for, parallel to `disk_slots`."""
    gone: list[Rows] = field(default_factory=list)
    """What a store does not have any more."""
    refused: bool = False
    """WRITE: all errors were answers of a store that does not take it."""

    def __len__(self) -> int:
        return len(self.disk_slots)

    def fail(self, rows: Rows, error: str = "", *, refused: bool = False) -> None:
        if len(rows):
            self.failed.append(rows)
            if error:
                self.refused = refused and (self.refused or not self.error)
            self.error = self.error or error

    def fail_rest(self, error: str = "") -> None:
        """Fails everything that has not been dealt with."""
        self.fail(np.arange(self.done, len(self)), error)
        self.done = len(self)

    def report(self) -> wire.DiskJobFinished:
        corrupt = _positions(self.corrupt)
        # After an error in the middle of a batch, a position may be named twice.
        failed = np.setdiff1d(_positions(self.failed), corrupt, assume_unique=True)
        return wire.DiskJobFinished(
            job=self.number,
            failed=failed.astype("<u4").tobytes(),
            corrupt=corrupt.astype("<u4").tobytes(),
            error=self.error,
            bytes=self.moved_bytes,
            saved_bytes=self.saved_bytes,
            busy_ns=self.busy_ns,
            gone=np.setdiff1d(_positions(self.gone), corrupt).astype("<u4").tobytes(),
            refused=self.refused,
        )


def _positions(rows: list[Rows]) -> Rows:
    """The positions without repetitions, in ascending order."""
    return np.unique(np.concatenate(rows)) if rows else np.empty(0, np.int64)


def read_job(message: wire.DiskJob) -> SlotJob:
    """Converts a job. Raises ProtocolError for one that makes no sense."""
    try:
        kind = DiskJobKind(message.kind)
    except ValueError:
        raise ProtocolError(f"job {message.job}: there is no kind {message.kind}") from None
    count = len(message.disk_slots) // 4
    on_host = 0 if kind in (DiskJobKind.CHECK, DiskJobKind.ADOPT) else count
    clocks = count if kind in (DiskJobKind.WRITE, DiskJobKind.ADOPT) else 0
    positions = count if kind is DiskJobKind.ADOPT else 0
    wanted = (4 * count, 8 * count, 4 * on_host, 8 * on_host, 8 * clocks, 4 * positions)
    arrays = (
        message.disk_slots,
        message.disk_generations,
        message.host_slots,
        message.host_generations,
        message.clocks,
        message.positions,
    )
    if tuple(map(len, arrays)) != wanted:
        raise ProtocolError(f"job {message.job}: arrays of {[len(a) for a in arrays]} bytes, not {wanted}")
    job = SlotJob(
        message.job,
        kind,
        np.frombuffer(message.disk_slots, np.uint32),
        np.frombuffer(message.disk_generations, np.uint64),
        np.frombuffer(message.host_slots, np.uint32),
        np.frombuffer(message.host_generations, np.uint64),
        np.frombuffer(message.clocks, np.uint64),
        pack=message.pack,
        positions=np.frombuffer(message.positions, np.uint32),
    )
    for name, slots in (("disk", job.disk_slots), ("host", job.host_slots)):
        if len(np.unique(slots)) != len(slots):
            raise ProtocolError(f"job {message.job}: a {name} slot comes twice")
    return job


class JobQueue:
    """Hands out reads before records to persist, these before writes, and writes before checks. For use from
    any thread."""

    def __init__(self) -> None:
        self._waiting: dict[DiskJobKind, deque[SlotJob]] = {kind: deque() for kind in DiskJobKind}
        self._records: list[U32] = []
        self._everything: deque[PersistAll] = deque()
        self._changed = threading.Condition()
        self._running = 0
        self._checking = False
        self._stopped = False

    @property
    def busy(self) -> bool:
        """Whether a job waits or is being worked on."""
        return self._running > 0 or any(self._waiting.values())

    def put(self, job: SlotJob) -> bool:
        """Queues a job. Only before `stop`. False, and nothing is queued, if too many wait already."""
        with self._changed:
            if sum(map(len, self._waiting.values())) >= JOBS_MAX:
                return False
            self._waiting[job.kind].append(job)
            self._changed.notify()
            return True

    def put_records(self, slots: U32) -> None:
        """Queues slots whose records are to be persisted. Each is kept once, however often it is put."""
        with self._changed:
            self._records.append(slots)
            if len(self._records) > 64:
                self._records = [np.unique(np.concatenate(self._records))]
            self._changed.notify()

    def put_everything(self, task: PersistAll) -> bool:
        """Queues a request. False, and nothing is queued, if too many wait already."""
        with self._changed:
            if len(self._everything) >= EVERYTHING_MAX:
                return False
            self._everything.append(task)
            self._changed.notify()
            return True

    def take(self) -> SlotJob | PersistAll | U32 | None:
        """A job, or slots whose records are to be persisted, for which it waits. None once the queue is
        stopped and no records are left.

        What was taken has to be given back with `put_back` or `finished`.
        """
        with self._changed:
            while (found := self._next()) is None:
                if self._stopped:
                    return None
                self._changed.wait()
            self._running += 1
            return found

    def _next(self) -> SlotJob | PersistAll | U32 | None:
        if self._waiting[DiskJobKind.READ]:
            return self._waiting[DiskJobKind.READ].popleft()
        if self._records:
            slots, self._records = np.unique(np.concatenate(self._records)), []
            return slots
        if self._everything:
            return self._everything.popleft()
        if self._waiting[DiskJobKind.WRITE]:
            return self._waiting[DiskJobKind.WRITE].popleft()
        # Checks run one at a time, because each needs memory of its own, and reads need a thread.
        if self._waiting[DiskJobKind.CHECK] and not self._checking:
            self._checking = True
            return self._waiting[DiskJobKind.CHECK].popleft()
        return None

    def should_yield(self, kind: DiskJobKind) -> bool:
        """Whether something waits that goes before jobs of this kind, and the queue is not stopped."""
        with self._changed:
            earlier = IN_ORDER[: IN_ORDER.index(kind)]
            return not self._stopped and any(self._waiting[first] for first in earlier)

    def put_back(self, job: SlotJob) -> None:
        """Puts a job that was begun back, as the first of its kind."""
        with self._changed:
            if not self._stopped:
                self._waiting[job.kind].appendleft(job)
            self._end(job)

    def finished(self, task: SlotJob | PersistAll | U32) -> None:
        with self._changed:
            self._end(task)

    def _end(self, task: SlotJob | PersistAll | U32) -> None:
        self._running -= 1
        if isinstance(task, SlotJob) and task.kind is DiskJobKind.CHECK:
            self._checking = False
        self._changed.notify()

    def stop(self) -> None:
        """Drops the jobs that wait."""
        with self._changed:
            self._stopped = True
            for waiting in self._waiting.values():
                waiting.clear()
            self._everything.clear()
            self._changed.notify_all()
