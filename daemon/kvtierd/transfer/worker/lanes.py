"""The two lanes of a worker: a thread for loads and one for stores, and what waits for each."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from kvtierd.transfer.worker.copying import Copier
from kvtierd.transfer.worker.gates import Gates
from kvtierd.transfer.worker.log import logger
from kvtierd.transfer.worker.parts import Part, PartState

_log = logger(__name__)

STORE_YIELD_S_MAX = 0.02
"""A store waits at most this long before each chunk while loads have work, so that loads without end leave
stores a chunk every 20 ms (200 MB/s) instead of nothing."""

LANE_DIED_STATUS = 70

Execute = Callable[[Part, Copier, Callable[[], bool]], None]


class _Lane:
    def __init__(self, name: str, copier: Copier, lock: threading.Lock) -> None:
        self.name = name
        self.copier = copier
        self.wake = threading.Condition(lock)
        self.runnable: deque[Part] = deque()
        self.gates = Gates()
        self.running: Part | None = None

    @property
    def busy(self) -> bool:
        return bool(self.runnable) or self.running is not None


class Lanes:
    """Queues parts and runs each in the thread of its lane.

    `execute(part, copier, before_chunk)` runs a part; `end_unstarted(part)` ends one whose gate did not open.
    Both are called in a lane's thread and without the lock; the part is theirs then. `lock` guards every
    queue, and whatever else the owner lets it guard. An exception in either callback ends the process: that
    is a fence, too.
    """

    def __init__(
        self, load: Copier, store: Copier, execute: Execute, end_unstarted: Callable[[Part], None]
    ) -> None:
        self.lock = threading.Lock()
        self._load = _Lane("load", load, self.lock)
        self._store = _Lane("store", store, self.lock)
        self._execute = execute
        self._end_unstarted = end_unstarted
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name=f"{lane.name} lane", daemon=True)
            for lane in (self._load, self._store)
        ]

    @property
    def busy(self) -> bool:
        """Whether a part runs or could run. Without the lock: what it says may be over already."""
        return self._load.busy or self._store.busy

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, part: Part) -> None:
        """Queues a part, behind its doorbell if it has one. With the lock held."""
        lane = self._load if part.is_load else self._store
        if part.doorbell is None:
            lane.runnable.append(part)
        else:
            lane.gates.add(part, time.monotonic())
        lane.wake.notify_all()

    def withdraw(self, wanted: Callable[[Part], bool]) -> list[Part]:
        """Takes out the queued parts for which `wanted` is true; they are the caller's to end. With the lock
        held."""
        taken = []
        for lane in (self._load, self._store):
            taken += lane.gates.take(wanted)
            kept = deque[Part]()
            for part in lane.runnable:
                (taken if wanted(part) else kept).append(part)
            lane.runnable = kept
        for part in taken:
            part.state = PartState.OVER
        return taken

    def abandon(self, parts: Iterable[Part]) -> None:
        """Has those of the parts that run end at their next chunk. With the lock held."""
        for part in parts:
            part.abandoned = True
        self._store.wake.notify_all()

    def stop(self) -> None:
        """Lets each lane end once it has nothing to run; nothing may be submitted after. With the lock
        held."""
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
            while self._serve_next(lane):
                pass
        except BaseException:
            _log.critical("a lane died; so does the worker", lane=lane.name, exc_info=True)
            logging.shutdown()
            os._exit(LANE_DIED_STATUS)

    def _serve_next(self, lane: _Lane) -> bool:
        """Does the lane's next piece of work, waiting for it if need be. False at the end."""
        part, unstarted = self._next(lane)
        for waited in unstarted:
            self._end_unstarted(waited)
        if part is None:
            return bool(unstarted)
        self._execute(part, lane.copier, partial(self._before_chunk, lane, part))
        with self.lock:
            lane.running = None
            if not self._load.busy:
                self._store.wake.notify_all()
        return True

    def _next(self, lane: _Lane) -> tuple[Part | None, list[Part]]:
        """A part to run, or parts to end unstarted; neither at the end."""
        with self.lock:
            while True:
                now_s = time.monotonic()
                lane.runnable.extend(lane.gates.opened(now_s))
                unstarted = lane.gates.swept(now_s)
                if unstarted:
                    for part in unstarted:
                        part.state = PartState.OVER
                    return None, unstarted
                if lane.runnable:
                    lane.running = lane.runnable.popleft()
                    lane.running.state = PartState.RUNNING
                    return lane.running, []
                if self._stopping:
                    return None, []
                lane.wake.wait(lane.gates.wait_s(now_s))

    def _before_chunk(self, lane: _Lane, part: Part) -> bool:
        """Lets loads go first, for a while; False if the part is to end here."""
        if lane is self._store and self._load.busy:
            deadline_s = time.monotonic() + STORE_YIELD_S_MAX
            with self.lock:
                while self._load.busy and not part.abandoned and not self._stopping:
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        break
                    lane.wake.wait(left_s)
        return not part.abandoned
