"""Parts of one lane that wait for a doorbell."""

import heapq
from collections.abc import Callable

from kvtierd.workers.copy.parts import PartTask
from kvtierd.workers.copy.sessions import MappedSession

POLL_S_MIN = 50e-6
"""The wait while a gate is expected to open. A poll costs about 20 µs of one core."""

POLL_S_MAX = 1e-3
"""The wait after nothing has happened for a while. A thousand polls a second cost 2 % of one core, and end
with the last gated part. The delay that this adds to a part is small against the engine step that its
doorbell ends."""

QUIET_FRACTION = 8
"""A wait is an eighth of the time since something last happened, which is exponential backoff without a
schedule."""

SWEEP_S = 0.02
"""Time between looks at every part for deadlines and revocations, for which nobody waits."""


class Gates:
    """The waiting parts of a lane, by doorbell, so that a poll loads each doorbell once, however many parts
    wait.

    Not thread-safe. Parts of one doorbell leave in the order of their values, and then of their arrival.
    """

    def __init__(self) -> None:
        self._bells: dict[tuple[MappedSession, int], list[tuple[int, int, PartTask]]] = {}
        self._active_s = 0.0
        self._swept_s = 0.0
        self._arrivals = 0

    def __bool__(self) -> bool:
        return bool(self._bells)

    def add(self, part: PartTask, now_s: float) -> None:
        """Takes a gated part."""
        assert part.doorbell is not None
        self._arrivals += 1
        heap = self._bells.setdefault((part.session, part.doorbell), [])
        heapq.heappush(heap, (part.doorbell_value, self._arrivals, part))
        self._active_s = now_s

    def opened(self, now_s: float) -> list[PartTask]:
        """Takes out the parts whose doorbells have rung."""
        opened = []
        for (session, doorbell), heap in list(self._bells.items()):
            value = session.load_word(doorbell)
            while heap and heap[0][0] <= value:
                opened.append(heapq.heappop(heap))
            if not heap:
                del self._bells[session, doorbell]
        if opened:
            self._active_s = now_s
            opened.sort(key=lambda entry: entry[1])
        return [part for _, _, part in opened]

    def swept(self, now_s: float) -> list[PartTask]:
        """Takes out the parts that need not wait any longer because they are past their deadlines or revoked.
        There are seldom any."""
        if now_s - self._swept_s < SWEEP_S:
            return []
        self._swept_s = now_s
        return self.take(
            lambda part: part.gate_deadline_s <= now_s or part.session.is_revoked(part.word, part.ticket)
        )

    def take(self, wanted: Callable[[PartTask], bool]) -> list[PartTask]:
        """Takes out the parts for which `wanted` is true."""
        taken = []
        for bell, heap in list(self._bells.items()):
            kept = []
            for entry in heap:
                if wanted(entry[2]):
                    taken.append(entry[2])
                else:
                    kept.append(entry)
            if len(kept) == len(heap):
                continue
            if kept:
                heapq.heapify(kept)
                self._bells[bell] = kept
            else:
                del self._bells[bell]
        return taken

    def wait_s(self, now_s: float) -> float | None:
        """How long to wait before the next poll; None if nothing waits."""
        if not self._bells:
            return None
        return min(max((now_s - self._active_s) / QUIET_FRACTION, POLL_S_MIN), POLL_S_MAX)
