"""Parts of one lane that wait for a doorbell."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable

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
"""Time between looks at parts for deadlines and revocations, for which nobody waits."""

BELLS_PER_POLL, PARTS_PER_SWEEP = 256, 512
"""How many doorbells and parts of each tenant are looked at in one poll or sweep; the others have their turn
in the next. So a tenant with tens of thousands of parts makes nobody else wait."""


class Gates:
    """The waiting parts of a lane, by doorbell, so that a poll loads each doorbell once, however many parts
    wait.

    Not thread-safe. Parts of one doorbell leave in the order of their values, and then of their arrival.
    """

    def __init__(self) -> None:
        self._tenants: dict[int, _Waiting] = {}
        self._active_s = 0.0
        self._swept_s = 0.0
        self._arrivals = 0

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def add(self, part: PartTask, now_s: float) -> None:
        """Takes a gated part."""
        self._arrivals += 1
        self._tenants.setdefault(part.session.tenant, _Waiting()).add(part, self._arrivals)
        self._active_s = now_s

    def opened(self, now_s: float) -> list[PartTask]:
        """Takes out the parts whose doorbells have rung, as far as it looks at them this time."""
        opened = [entry for waiting in self._tenants.values() for entry in waiting.opened()]
        if opened:
            self._active_s = now_s
            self._forget_empty()
        return [part for _, part in sorted(opened, key=lambda entry: entry[0])]

    def swept(self, now_s: float) -> list[PartTask]:
        """Takes out the parts that need not wait any longer because they are past their deadlines or revoked,
        as far as it looks at them this time. There are seldom any."""
        if now_s - self._swept_s < SWEEP_S:
            return []
        self._swept_s = now_s
        swept = [part for waiting in self._tenants.values() for part in waiting.swept(now_s)]
        self._forget_empty()
        return swept

    def take(self, wanted: Callable[[PartTask], bool]) -> list[PartTask]:
        """Takes out the parts for which `wanted` is true."""
        taken = [part for waiting in self._tenants.values() for part in waiting.take(wanted)]
        self._forget_empty()
        return taken

    def wait_s(self, now_s: float) -> float | None:
        """How long to wait before the next poll; None if nothing waits."""
        if not self._tenants:
            return None
        return min(max((now_s - self._active_s) / QUIET_FRACTION, POLL_S_MIN), POLL_S_MAX)

    def _forget_empty(self) -> None:
        for tenant, waiting in list(self._tenants.items()):
            if not waiting.parts:
                del self._tenants[tenant]


_Bell = tuple[MappedSession, int]


class _Waiting:
    """The waiting parts of one tenant."""

    def __init__(self) -> None:
        self.parts: OrderedDict[int, PartTask] = OrderedDict()
        """By arrival. The first is the one that was looked at longest ago."""
        self._bells: OrderedDict[_Bell, list[tuple[int, int, PartTask]]] = OrderedDict()
        """A heap of values, arrivals and parts for each doorbell. The first is the one that was polled
        longest ago."""

    def add(self, part: PartTask, arrival: int) -> None:
        assert part.doorbell is not None
        heap = self._bells.setdefault((part.session, part.doorbell), [])
        heapq.heappush(heap, (part.doorbell_value, arrival, part))
        self.parts[arrival] = part

    def opened(self) -> Iterable[tuple[int, PartTask]]:
        """Takes out parts whose doorbells have rung, with their arrivals."""
        for _ in range(min(len(self._bells), BELLS_PER_POLL)):
            bell, heap = next(iter(self._bells.items()))
            self._bells.move_to_end(bell)
            session, doorbell = bell
            value = session.load_word(doorbell)
            while heap and heap[0][0] <= value:
                _, arrival, part = heapq.heappop(heap)
                del self.parts[arrival]
                yield arrival, part
            if not heap:
                del self._bells[bell]

    def swept(self, now_s: float) -> list[PartTask]:
        """Takes out parts that are late or revoked."""
        late = set()
        for _ in range(min(len(self.parts), PARTS_PER_SWEEP)):
            arrival, part = next(iter(self.parts.items()))
            self.parts.move_to_end(arrival)
            if part.gate_deadline_s <= now_s or part.session.is_revoked(part.word, part.ticket):
                late.add(arrival)
        return self._remove(late)

    def take(self, wanted: Callable[[PartTask], bool]) -> list[PartTask]:
        return self._remove({arrival for arrival, part in self.parts.items() if wanted(part)})

    def _remove(self, arrivals: set[int]) -> list[PartTask]:
        removed = [self.parts.pop(arrival) for arrival in sorted(arrivals)]
        for bell in {(part.session, part.doorbell) for part in removed if part.doorbell is not None}:
            kept = [entry for entry in self._bells[bell] if entry[1] not in arrivals]
            heapq.heapify(kept)
            if kept:
                self._bells[bell] = kept
            else:
                del self._bells[bell]
        return removed
