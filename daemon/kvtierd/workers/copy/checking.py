"""Checks outside the copy path whether slots still hold what their records say."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PoolRecords

from kvtierd.wire import worker_pb2 as wire

PIECE_S = 0.001
"""About how long it reads before it looks at the lanes again; at least one slot."""

PIECE_SLOTS_MAX = 256

PATIENCE_S = 1.0
"""A check that cannot go on for this long is answered as far as it got, because lanes always go first."""

CHECKS_MAX = 4
"""Checks that may wait. The core asks for one at a time; further ones are answered without a look."""

NICENESS = 10
"""As for everything that nobody waits for."""

YIELD_S = 0.005
"""Time between two looks at whether the lanes are busy."""

Slots = npt.NDArray[np.uint32]
Generations = npt.NDArray[np.uint64]


def find_corrupt(records: PoolRecords, slots: Slots, generations: Generations) -> npt.NDArray[np.bool_]:
    """Which slots do not match their records or checksums, although they still hold the block that they held
    when `generations` was read.

    A slot that is given to another block gets a new generation before any of its bytes change, so a slot that
    still has its old generation after it was read was not given away. A slot that does not exist any more,
    because its extent got another slot size, does not count either.
    """
    sound = records.check(slots, generations).astype(np.bool_)
    sound &= records.verify_data(slots, generations).astype(np.bool_)
    bad: npt.NDArray[np.bool_] = ~sound
    for position in np.flatnonzero(bad):
        bad[position] = _is_held(records, slots[position : position + 1], int(generations[position]))
    return bad


def _is_held(records: PoolRecords, slot: Slots, generation: int) -> bool:
    try:
        return int(records.generations(slot)[0]) == generation
    except ValueError:
        return False  # there is no slot at this page any more


class Checker:
    """A thread that answers checks while the lanes have nothing to do. It changes no byte."""

    def __init__(
        self,
        records: PoolRecords,
        is_busy: Callable[[], bool],
        answer: Callable[[wire.SlotsChecked], None],
    ) -> None:
        """`is_busy()` and `answer(...)` are called from the thread, and `answer` from `ask` as well."""
        self._records = records
        self._is_busy = is_busy
        self._answer = answer
        self._asked: deque[wire.CheckSlots] = deque()
        self._wake = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="checker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self, check: wire.CheckSlots) -> None:
        """Asks for a check. An answer follows, unless the checker is stopped first."""
        with self._wake:
            accepted = len(self._asked) < CHECKS_MAX
            if accepted:
                self._asked.append(check)
                self._wake.notify()
        if not accepted:
            self._answer(wire.SlotsChecked(check=check.check))

    def stop(self) -> None:
        """Ends the thread after its current piece. May be called several times."""
        with self._wake:
            self._stopped = True
            self._wake.notify()

    def join(self, timeout_s: float) -> bool:
        """Waits until the thread has ended; False if it has not. True if it was never started."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (check := self._next()) is not None:
            self._answer(self._look(check))

    def _next(self) -> wire.CheckSlots | None:
        with self._wake:
            while not self._asked and not self._stopped:
                self._wake.wait()
            return None if self._stopped else self._asked.popleft()

    def _look(self, check: wire.CheckSlots) -> wire.SlotsChecked:
        slots = np.frombuffer(check.slots, np.uint32)
        generations = np.frombuffer(check.generations, np.uint64)
        corrupt = np.zeros(len(slots), np.bool_)
        looked_at, count = 0, 1
        while looked_at < len(slots) and self._turn():
            began_s = time.monotonic()
            piece = slice(looked_at, min(looked_at + count, len(slots)))
            corrupt[piece] = find_corrupt(self._records, slots[piece], generations[piece])
            looked_at = piece.stop
            took_s = max(time.monotonic() - began_s, 1e-6)
            count = max(1, min(PIECE_SLOTS_MAX, 2 * count, int(count * PIECE_S / took_s)))
        return wire.SlotsChecked(
            check=check.check,
            looked_at=looked_at,
            corrupt=np.flatnonzero(corrupt).astype("<u4").tobytes(),
        )

    def _turn(self) -> bool:
        """Waits until the lanes have nothing to do. False if that takes too long, or if the thread was
        stopped."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self._is_busy():
            if self._stopped or time.monotonic() > deadline_s:
                return False
            time.sleep(YIELD_S)
        return not self._stopped
