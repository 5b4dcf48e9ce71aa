"""The two lanes of a worker, a thread for loads and one for stores, and what waits for each.

A lane works in chunks: it starts the next chunk of the session whose turn it is, and lands the oldest one. So
no session waits for another's large part, and the device always has its next chunk. Turns go round by tenant,
and within a tenant by session, so a tenant gets no more by having more sessions. A turn is a chunk, and the
others wait for all of it, so chunks are smaller while several tenants use a lane.
"""

import itertools
import logging
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from kvtierd.core.errors import Refusal
from kvtierd.workers.channel.status import StatusPage, StatusWord
from kvtierd.workers.copy.device import Copier, Device, Flight
from kvtierd.workers.copy.gates import Gates
from kvtierd.workers.copy.parts import PartEnd, PartRun, PartTask, PartTaskState
from kvtierd.workers.copy.sessions import MappedSession
from kvtierd.workers.log import logger

_log = logger(__name__)

STORE_YIELD_S_MAX = 0.02
"""While loads of its own session have work, a store waits at most this long before each chunk, and never for
loads of other engines. So loads without end leave an engine's own stores a chunk every 20 ms (200 MB/s on the
CPU), and not nothing."""

FULL_POLL_S = 0.05
"""Time between looks at a copier that is full, in case nobody reports that it has room."""

SHARED_S = 1.0
"""A lane counts as shared for so long after two tenants last had work in it. A small load is one chunk, so
between two of them the lane has the other tenant's work alone, and starts what the next one will wait for."""

LANE_DIED_STATUS = 70


@dataclass(frozen=True, slots=True)
class PartCalls:
    """What happens to parts. Called in a lane's thread and without the lock."""

    start: Callable[[PartTask], bool]
    """Whether the part may start. After True it has started, and `landed` follows; after False
    `end_unstarted` ends it."""
    landed: Callable[[Copier, PartTask, PartEnd], None]
    """No copy of a started part is under way, and none will be."""
    end_unstarted: Callable[[PartTask], None]
    """Ends a part whose gate did not open, or that may not start."""


@dataclass(frozen=True, slots=True)
class _EndUnstarted:
    parts: list[PartTask]


@dataclass(frozen=True, slots=True)
class _Submit:
    part: PartTask
    chunk: slice | None
    """None if the part has no chunk, or no more."""


class _Land:
    pass


class _Lane:
    """The queues of one lane, and what its thread is doing."""

    def __init__(self, name: str, device: Device, word: StatusWord, lock: threading.Lock) -> None:
        self.name = name
        self.copier = device.load if word is StatusWord.LOAD_LANE else device.store
        self.word = word
        self.wake = threading.Condition(lock)
        self.gates = Gates()
        self.runnable: dict[MappedSession, deque[PartTask]] = {}
        """Parts with chunks to submit, in the order of their arrival. Only the first of a session has
        started."""
        self.turns: OrderedDict[int, deque[MappedSession]] = OrderedDict()
        """The sessions of `runnable` by tenant. The first tenant has the next turn, and of it the first
        session."""
        self.active: Counter[MappedSession] = Counter()
        """How many parts of each session are runnable, or have started and not ended."""
        self.tenants: Counter[int] = Counter()
        """The same of each tenant."""
        self.shared_until_s = 0.0
        """Until when the lane counts as shared by several tenants."""
        self.flights: deque[Flight] = deque()
        """Chunks under way, oldest first. This and what follows is used by the lane's thread only, except
        `any_abandoned`."""
        self.landed_ns = 0
        """When a flight last landed."""
        self.yields_until_s: dict[MappedSession, float] = {}
        """Until when a session's next chunk lets its loads go first, for those that do."""
        self.any_abandoned = False
        """Whether it may have a part that was abandoned between two chunks."""

    @property
    def busy(self) -> bool:
        return bool(self.active)

    def add(self, part: PartTask, now_s: float) -> None:
        if part.session not in self.runnable:
            self.runnable[part.session] = deque()
            self.turns.setdefault(part.session.tenant, deque()).append(part.session)
        self.runnable[part.session].append(part)
        self.active[part.session] += 1
        self.tenants[part.session.tenant] += 1
        self._notice_sharing(now_s)

    def over(self, part: PartTask) -> None:
        """The part is not active any more."""
        self.active[part.session] -= 1
        if not self.active[part.session]:
            del self.active[part.session]
        tenant = part.session.tenant
        self.tenants[tenant] -= 1
        if not self.tenants[tenant]:
            del self.tenants[tenant]

    def take(self, wanted: Callable[[PartTask], bool]) -> list[PartTask]:
        """Takes out the runnable parts that have not started and for which `wanted` is true."""
        taken: list[PartTask] = []
        for session, queue in list(self.runnable.items()):
            kept = deque[PartTask]()
            for part in queue:
                (taken if part.state is PartTaskState.QUEUED and wanted(part) else kept).append(part)
            self._keep(session, kept)
        for part in taken:
            self.over(part)
        return taken

    def drop(self, part: PartTask) -> None:
        """Takes out a part that has no more chunks to submit. It stays active."""
        queue = self.runnable.get(part.session)
        if queue and queue[0] is part:
            queue.popleft()
            self._keep(part.session, queue)

    def _keep(self, session: MappedSession, queue: deque[PartTask]) -> None:
        if queue:
            self.runnable[session] = queue
        elif session in self.runnable:
            del self.runnable[session]
            sessions = self.turns[session.tenant]
            sessions.remove(session)
            self.yields_until_s.pop(session, None)
            if not sessions:
                del self.turns[session.tenant]

    def abandoned(self) -> PartTask | None:
        """A part that was abandoned between two chunks, or None."""
        if self.any_abandoned:
            for session in self.runnable:
                part = self.runnable[session][0]
                if part.abandoned and part.run is not None:
                    return part
            self.any_abandoned = False
        return None

    def next_chunk(self, session: MappedSession, now_s: float) -> _Submit:
        """The session's next chunk. Then it is the others' turn."""
        part = self.runnable[session][0]
        sessions = self.turns[session.tenant]
        sessions.remove(session)
        sessions.append(session)
        self.turns.move_to_end(session.tenant)
        part.state = PartTaskState.RUNNING
        first = 0 if part.run is None else part.run.submitted
        last = min(first + self._blocks(part, now_s), len(part.block_ids))
        if last == len(part.block_ids):
            self.drop(part)
        return _Submit(part, slice(first, last) if last > first else None)

    def _blocks(self, part: PartTask, now_s: float) -> int:
        """How many blocks one chunk of a part has."""
        if part.plan is None:
            return 0
        self._notice_sharing(now_s)
        shared = now_s < self.shared_until_s
        chunk_bytes = self.copier.shared_chunk_bytes if shared else self.copier.chunk_bytes
        by_bytes = chunk_bytes // max(1, part.plan.slot_bytes)
        return max(1, min(by_bytes, self.copier.chunk_fragments // max(1, part.plan.planes)))

    def _notice_sharing(self, now_s: float) -> None:
        if len(self.tenants) > 1:
            self.shared_until_s = now_s + SHARED_S


class Lanes:
    """Queues parts, and copies each in the thread of its lane.

    A part that a lane has taken belongs to the lane until it is handed to one of the calls. `lock` guards
    every queue, and whatever else the owner wants it to guard. An exception in a call ends the process, which
    is a fence as well.
    """

    def __init__(self, device: Device, status: StatusPage, calls: PartCalls) -> None:
        self.lock = threading.Lock()
        self._device = device
        self._status = status
        self._calls = calls
        self._load = _Lane("load", device, StatusWord.LOAD_LANE, self.lock)
        self._store = _Lane("store", device, StatusWord.STORE_LANE, self.lock)
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name=f"{lane.name} lane", daemon=True)
            for lane in (self._load, self._store)
        ]

    @property
    def busy(self) -> bool:
        """Whether a part runs or could run. It is read without the lock, so it may be out of date at once."""
        return self._load.busy or self._store.busy

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, part: PartTask) -> None:
        """Queues a part, behind its doorbell if it has one. Call it with the lock held."""
        lane = self._load if part.is_load else self._store
        now_s = time.monotonic()
        if part.doorbell is None:
            lane.add(part, now_s)
        else:
            lane.gates.add(part, now_s)
        lane.wake.notify_all()

    def withdraw(self, wanted: Callable[[PartTask], bool]) -> list[PartTask]:
        """Takes out the queued parts for which `wanted` is true; the caller has to end them. Call it with the
        lock held."""
        taken = []
        for lane in (self._load, self._store):
            taken += lane.gates.take(wanted)
            taken += lane.take(wanted)
        for part in taken:
            part.state = PartTaskState.OVER
        return taken

    def abandon(self, parts: Iterable[PartTask]) -> None:
        """Lets those of the parts that run end after the chunks that are under way. Call it with the lock
        held."""
        for part in parts:
            part.abandoned = True
        for lane in (self._load, self._store):
            lane.any_abandoned = True
        self._store.wake.notify_all()

    def wake(self) -> None:
        """A copier that was full may have room. From any thread, without the lock."""
        with self.lock:
            for lane in (self._load, self._store):
                lane.wake.notify_all()

    def stop(self) -> None:
        """Lets each lane end once it has nothing to run. Nothing may be submitted afterwards. Call it with
        the lock held."""
        self._stopping = True
        for lane in (self._load, self._store):
            lane.wake.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Waits for both lanes to end; False if they have not."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, lane: _Lane) -> None:
        try:
            self._device.enter_thread()
            while True:
                match self._next(lane):
                    case _EndUnstarted(parts):
                        for part in parts:
                            self._calls.end_unstarted(part)
                    case _Submit(part, chunk):
                        self._submit(lane, part, chunk)
                    case _Land():
                        self._land(lane)
                    case None:
                        return
        except BaseException:
            _log.critical("a lane died; so does the worker", lane=lane.name, exc_info=True)
            logging.shutdown()
            os._exit(LANE_DIED_STATUS)

    def _next(self, lane: _Lane) -> _EndUnstarted | _Submit | _Land | None:
        """The lane's next piece of work, for which it waits if there is none; None at the end."""
        with self.lock:
            while True:
                now_s = time.monotonic()
                opened = lane.gates.opened(now_s)
                for part in opened:
                    lane.add(part, now_s)
                if opened and lane is self._store:  # loads may start in steps that compute nothing
                    self._device.engine_stepped()
                unstarted = lane.gates.swept(now_s)
                if unstarted:
                    for part in unstarted:
                        part.state = PartTaskState.OVER
                    return _EndUnstarted(unstarted)
                wait_s = lane.gates.wait_s(now_s)
                if lane.turns and len(lane.flights) < lane.copier.depth:
                    abandoned = lane.abandoned()
                    if abandoned is not None:
                        lane.drop(abandoned)
                        return _Submit(abandoned, None)
                    session, hold_s = self._turn(lane, now_s)
                    if hold_s <= 0:
                        lane.yields_until_s.pop(session, None)
                        return lane.next_chunk(session, now_s)
                    wait_s = hold_s if wait_s is None else min(wait_s, hold_s)
                if lane.flights:
                    return _Land()
                if self._stopping and not lane.turns:
                    return None
                lane.wake.wait(wait_s)

    def _turn(self, lane: _Lane, now_s: float) -> tuple[MappedSession, float]:
        """The session that has the next turn, and how long the lane must not submit, 0 if it may. Stores let
        loads of their own session go first for a while, and everything waits until the copier has room."""
        first = next(iter(lane.turns.values()))[0]
        if lane.copier.is_full():
            return first, FULL_POLL_S
        if lane is self._load or self._stopping:
            return first, 0.0
        hold_s = STORE_YIELD_S_MAX
        for session in itertools.chain.from_iterable(lane.turns.values()):
            if session not in self._load.active:
                return session, 0.0
            until_s = lane.yields_until_s.setdefault(session, now_s + STORE_YIELD_S_MAX)
            if until_s <= now_s:
                return session, 0.0
            hold_s = min(hold_s, until_s - now_s)
        return first, hold_s

    def _submit(self, lane: _Lane, part: PartTask, chunk: slice | None) -> None:
        self._watch(lane)
        if chunk is not None:
            # This comes before the start, so that a client can still revoke a part that waits for it.
            while not part.abandoned and lane.copier.prepare(part, chunk):
                self._status.enter(lane.word)
        if part.run is None:
            if part.abandoned or not self._calls.start(part):
                self._unwatch(lane)
                with self.lock:
                    lane.drop(part)
                self._calls.end_unstarted(part)
                self._ended(lane, part)
                return
            part.run = PartRun(np.zeros(len(part.block_ids), np.bool_))
        elif not part.is_load and part.session.is_revoked(part.word, part.ticket):
            # Its client has withdrawn it, so the blocks that are left may belong to another request by now.
            chunk = None
            part.run.error = part.run.error or "withdrawn"
            with self.lock:
                lane.drop(part)
        if chunk is not None and not part.abandoned:
            started_ns = time.monotonic_ns()
            try:
                flight = lane.copier.submit(part, chunk)
            except Exception as error:
                self._failed(lane, part, error)
            else:
                flight.started_ns = started_ns
                part.run.submitted = chunk.stop
                part.run.flying += 1
                lane.flights.append(flight)
                if len(lane.flights) >= lane.copier.depth:
                    self._land(lane)
                return
        self._unwatch(lane)
        self._end_if_landed(lane, part)

    def _land(self, lane: _Lane) -> None:
        flight = lane.flights[0]
        part, run = flight.part, flight.part.run
        assert run is not None
        try:
            run.good[flight.chunk] = lane.copier.land(flight)
        except Exception as error:
            self._failed(lane, part, error)
        lane.flights.popleft()
        now_ns = time.monotonic_ns()
        self._status.enter(lane.word)
        self._unwatch(lane)
        run.copy_ns += now_ns - max(flight.started_ns, lane.landed_ns)
        lane.landed_ns = now_ns
        run.flying -= 1
        self._end_if_landed(lane, part)

    def _watch(self, lane: _Lane) -> None:
        """The watchdog watches the lane from now on, unless it does already, since its oldest flight."""
        if not lane.flights:
            self._status.enter(lane.word)

    def _unwatch(self, lane: _Lane) -> None:
        if not lane.flights:
            self._status.leave(lane.word)

    def _failed(self, lane: _Lane, part: PartTask, error: Exception) -> None:
        """The part submits nothing any more, and fails when its chunks under way have landed."""
        assert part.run is not None
        if isinstance(error, Refusal):
            _log.warning("a part failed", part=part.number, why=str(error))
            why = str(error)
        else:
            _log.error("a part failed", part=part.number, exc_info=error)
            why = f"{type(error).__name__}: {error}"
        part.run.error = part.run.error or why
        with self.lock:
            lane.drop(part)

    def _end_if_landed(self, lane: _Lane, part: PartTask) -> None:
        run = part.run
        assert run is not None
        if run.flying:
            return
        if run.submitted < len(run.good) and not run.error and not part.abandoned:
            return
        if part.abandoned:
            with self.lock:
                lane.drop(part)
        self._calls.landed(lane.copier, part, run.end(part))
        self._ended(lane, part)

    def _ended(self, lane: _Lane, part: PartTask) -> None:
        with self.lock:
            lane.over(part)
            if lane is self._load and part.session not in lane.active:
                self._store.wake.notify_all()
