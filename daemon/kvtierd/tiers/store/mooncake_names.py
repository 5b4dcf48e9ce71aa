"""Which objects a Mooncake store has: a log of names, made of small objects of the store itself.

Mooncake lists nothing for its clients: only its master's page for administrators has all keys, those of all
other users among them, without sizes. So whoever has put an object writes an *entry*, with the object's name,
length and time, under the first number that nobody has taken: `index/<period>/<number>`. A period has ten
minutes, and its own numbers. An entry is made only if there is none of that number, so of several writers one
has it, and the others take the next one. Whoever lists looks at numbers that he has not read, and remembers
what he has.

Entries may go (a full store evicts them, late, because they are pinned), and numbers may stay without one (a
writer has died in between). A gap is looked at again for as long as its period may still be written to.
Whatever is lost, the numbers of the next period begin anew, and nothing that is lost hides them.
"""

import bisect
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvtierd.tiers.store.objects import Listed, StoreError, StoreTrouble
from kvtierd.tiers.store.threads import BlockingCall

PERIOD_S: Final = 600
"""Writers and readers have to agree upon it: it is part of the format, as ENTRY is."""
REMEMBERED_S: Final = 2 * 86_400
"""A host that starts looks for what was put since. A store in memory has evicted most of what is older."""
AHEAD: Final = 64
"""So many numbers behind the last one are looked at, because those before may have gone."""
PERIODS_AT_ONCE: Final = 24
TRIES_MAX: Final = 4 * AHEAD
"""So many numbers a writer tries."""
ENTRY: Final = struct.Struct("<4sBBHQd")
"""Magic, what has happened, the name's length, 2 bytes that are not used, the object's length, and when. The
name follows."""
ENTRY_BYTES: Final = 256
NAME_BYTES_MAX: Final = ENTRY_BYTES - ENTRY.size
MAGIC: Final = b"KVN1"
PUT: Final = 0
DELETED: Final = 1

Place = tuple[int, int]
"""A period and a number: what comes later is greater."""


class EntryStore(Protocol):
    """What is needed to keep a log of names."""

    def create(
        self, call: BlockingCall, key: str, data: npt.NDArray[np.uint8], *, pinned: bool = False
    ) -> bool:
        """Makes an object of what is in memory that `take` has given; False if there is one."""

    def exist(self, call: BlockingCall, keys: Sequence[str]) -> list[bool]:
        """Whether there are such objects."""

    def read_small(self, call: BlockingCall, keys: Sequence[str], size_bytes: int) -> list[bytes | None]:
        """The content of objects of this length; None for those that are not there."""

    def take(self, call: BlockingCall, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Memory for an entry."""


@dataclass(slots=True)
class _Known:
    listed: Listed
    place: Place


@dataclass(slots=True)
class _Period:
    """What has been read of a period's numbers."""

    next: int = 0
    """Behind the greatest number that was read."""
    last: bytes = b""
    """The entry of that number: it tells whether the store still has what it had."""
    gaps: set[int] = field(default_factory=set)
    """Numbers before it that had no entry."""

    def asked_for(self) -> list[int]:
        """Numbers that may have what was not read yet, and the last one that was read."""
        return [*sorted(self.gaps), *range(max(0, self.next - 1), self.next + AHEAD)]

    def got(self, number: int, entry: bytes) -> None:
        """A number's entry was read, or written."""
        self.gaps.discard(number)
        if number >= self.next:
            self.gaps.update(range(self.next, number))
            self.next, self.last = number + 1, entry


class NameLog:
    """The names of a store's objects, as one host knows them. Safe for several threads."""

    def __init__(
        self,
        entries: EntryStore,
        prefix: str,
        clock: Callable[[], float] = time.time,
        remembered_s: int = REMEMBERED_S,
    ) -> None:
        """`prefix` is what the keys of all entries begin with. What was put longer ago than `remembered_s` is
        not looked for, and not remembered."""
        self._entries = entries
        self._prefix = prefix
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._names: list[str] = []
        """Those of `_known`, in order."""
        self._deleted: dict[str, Place] = {}
        """Names whose entries count no longer, unless they come later than this."""
        self._periods: dict[int, _Period] = {}
        self._periods_remembered = remembered_s // PERIOD_S
        self._oldest = self._now() - self._periods_remembered
        """The first period that may have what was not read."""

    # --- what is there ---

    def known(self, name: str) -> Listed | None:
        """What is known of an object, without asking."""
        known = self._known.get(name)
        return known.listed if known is not None else None

    def forget(self, call: BlockingCall, name: str) -> None:
        """An object has turned out to be gone."""
        with _held(self._lock, call):
            self._drop(name)

    def list(self, call: BlockingCall, prefix: str, after: str, limit: int) -> list[Listed]:
        """The first names in their order that begin with `prefix` and come after `after`, with all whose
        entries were there before the call. Raises StoreError."""
        with _held(self._lock, call):
            self._look(call)
            first = max(bisect.bisect_left(self._names, prefix), bisect.bisect_right(self._names, after))
            some = self._names[first : first + limit]
            return [self._known[name].listed for name in some if name.startswith(prefix)]

    # --- what happens ---

    def add(self, call: BlockingCall, name: str, size_bytes: int) -> None:
        """Tells all hosts of an object that is there. Raises StoreError."""
        self._write(call, PUT, name, size_bytes)

    def delete(self, call: BlockingCall, name: str) -> None:
        """Tells all hosts that an object has gone. Raises StoreError."""
        self._write(call, DELETED, name, 0)

    def _write(self, call: BlockingCall, what: int, name: str, size_bytes: int) -> None:
        now_s = self._clock()
        encoded = name.encode()
        entry = (ENTRY.pack(MAGIC, what, len(encoded), 0, size_bytes, now_s) + encoded).ljust(
            ENTRY_BYTES, b"\0"
        )
        data = self._entries.take(call, ENTRY_BYTES)
        data[:] = np.frombuffer(entry, np.uint8)
        with _held(self._lock, call):
            number = int(now_s // PERIOD_S)
            # Not only the next number: who takes one that was lost, before others that are there, is heard by
            # nobody who has read it.
            self._read_new(call, [number])
            period = self._periods.setdefault(number, _Period())
            place = next(
                (
                    at
                    for at in range(period.next, period.next + TRIES_MAX)
                    if self._entries.create(call, self._key(number, at), data, pinned=True)
                ),
                None,
            )
            if place is None:
                said = f"{TRIES_MAX} numbers are taken, and have no entries"
                raise StoreError(StoreTrouble.OTHER, f"{self._prefix}{number}: {said}")
            period.got(place, entry)
            self._take_in(entry, (number, place))

    # --- reading entries ---

    def _look(self, call: BlockingCall) -> None:
        """Reads what is new. What is old is read once, a part after the other, so that what a call has no
        time for is left to the next one."""
        now = self._now()
        # One before this one, and the next one, because clocks differ; and this one may have been set back.
        self._oldest = min(self._oldest, now - 1)
        while self._oldest < now - 1:
            some = range(self._oldest, min(self._oldest + PERIODS_AT_ONCE, now - 1))
            self._read_new(call, some)
            for number in some:
                self._periods.pop(number, None)
            self._oldest = some.stop
        self._read_new(call, range(self._oldest, now + 2))
        self._forget_old()

    def _read_new(self, call: BlockingCall, numbers: Iterable[int]) -> None:
        """Reads the entries of these periods that were not read yet."""
        left = list(numbers)
        while left:
            periods = {number: self._periods.setdefault(number, _Period()) for number in left}
            asked = [(number, at) for number, period in periods.items() for at in period.asked_for()]
            exist = self._entries.exist(call, [self._key(*place) for place in asked])
            there = [place for place, exists in zip(asked, exist, strict=True) if exists]
            data = self._entries.read_small(call, [self._key(*place) for place in there], ENTRY_BYTES)
            found = dict(zip(there, data, strict=True))
            left = []
            for number, period in periods.items():
                if period.last and found.pop((number, period.next - 1), None) != period.last:
                    # It was lost, and perhaps written anew, by somebody who did not find it. So may others
                    # have been. Names that were read stay known.
                    self._periods[number] = _Period()
                    left.append(number)
            lost = set(left)
            for (number, at), entry in found.items():
                if number not in lost and entry is not None:
                    periods[number].got(at, entry)
                    self._take_in(entry, (number, at))
                    left.append(number)
            left = sorted(set(left))

    def _take_in(self, entry: bytes, place: Place) -> None:
        magic, what, length, _, size_bytes, modified_s = ENTRY.unpack_from(entry)
        if magic != MAGIC:
            return
        name = entry[ENTRY.size : ENTRY.size + length].decode(errors="replace")
        before = self._known.get(name)
        last = max(before.place if before else (0, 0), self._deleted.get(name, (0, 0)))
        if place < last:
            return
        self._drop(name)
        self._deleted.pop(name, None)
        if what == DELETED:
            self._deleted[name] = place
        elif what == PUT:
            self._known[name] = _Known(Listed(name, size_bytes, modified_s), place)
            bisect.insort(self._names, name)

    def _drop(self, name: str) -> None:
        if self._known.pop(name, None) is not None:
            del self._names[bisect.bisect_left(self._names, name)]

    def _forget_old(self) -> None:
        oldest = (self._now() - self._periods_remembered, 0)
        for name in [name for name, known in self._known.items() if known.place < oldest]:
            self._drop(name)
        oldest = (self._oldest - 1, 0)
        for name in [name for name, place in self._deleted.items() if place < oldest]:
            del self._deleted[name]
        for number in [number for number in self._periods if number < self._oldest]:
            del self._periods[number]

    def _now(self) -> int:
        return int(self._clock() // PERIOD_S)

    def _key(self, period: int, number: int) -> str:
        return f"{self._prefix}{period}/{number}"


@contextmanager
def _held(lock: threading.Lock, call: BlockingCall) -> Iterator[None]:
    """Holds a lock, which is waited for no longer than the call may take."""
    if not lock.acquire(timeout=call.left_s):
        raise StoreError(StoreTrouble.LATE, f"{call.name}: no answer in time")
    try:
        yield
    finally:
        lock.release()
