"""What engines wish of blocks of the host besides being kept: to be held for a time, to be dropped after one,
to stay off the disks.

Wishes are kept in memory only, and end with the daemon. A held block has one pin, however often it was
wished: it is in nobody's way but eviction's, and goes after all where nothing else could (`room.py`).
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt

from kvtierd.core.blocks import READY, STAMPS_PER_S, Blocks
from kvtierd.core.domains import Domain
from kvtierd.core.entities import Transfer
from kvtierd.core.history import Fate
from kvtierd.core.ids import Entries
from kvtierd.core.status import Tally
from kvtierd.core.stimuli import CoreLimits, Wishes
from kvtierd.core.table import U32, BlockFlag

HOST_ONLY = int(BlockFlag.HOST_ONLY)
CLEAN = int(BlockFlag.CLEAN)
LOOKED_AT_MAX = 8_192
"""Blocks whose time is over, in one tick: what is more waits for the next."""
EXACT_BITS = 9
"""Of long times; the rest is rounded up, so that a calendar has few pages."""
SECONDS_MAX = 2**31
MANY = 64
"""Batches of one second are taken together."""
BATCH_COST = 32
"""What a batch adds to the size of a calendar, besides its entries."""


class Calendar:
    """Which blocks are to be looked at in which second. An entry may come several times, and by then be of
    another block: what counts is its time when it is looked at."""

    def __init__(self, times: U32) -> None:
        """`times`: the second of each entry, 0 if it has none; not changed here."""
        self._times = times
        self._due: dict[int, list[Entries]] = {}
        self._seconds: list[int] = []
        """A heap of the keys."""
        self._size = 0
        self._size_max = 2 * len(times) + (1 << 16)

    def add(self, second: int, entries: Entries) -> None:
        if len(entries) == 0:
            return
        if second not in self._due:
            self._due[second] = []
            heapq.heappush(self._seconds, second)
        self._due[second].append(entries)
        self._size += len(entries) + BATCH_COST
        if self._size > self._size_max:
            self._start_anew()

    def _start_anew(self) -> None:
        """Every block once: blocks that were named over and over fill a calendar that nobody looks at yet."""
        entries = np.flatnonzero(self._times).astype(np.uint32)
        entries = entries[np.argsort(self._times[entries], kind="stable")]
        seconds, first = np.unique(self._times[entries], return_index=True)
        self._seconds = seconds.tolist()  # ascending, and so a heap
        self._due = {
            second: [batch] for second, batch in zip(self._seconds, np.split(entries, first[1:]), strict=True)
        }
        self._size = len(entries) + BATCH_COST * len(self._due)

    def take(self, now: int, most: int) -> Entries:
        """Removes what is due, as far as it is not more than about so many, and returns it, each once."""
        found: list[Entries] = []
        room = most
        while room > 0 and self._seconds and self._seconds[0] <= now:
            batches = self._due[self._seconds[0]]
            while batches and room > 0:
                self._size -= BATCH_COST * (1 if len(batches) < MANY else len(batches))
                found.append(batches.pop(0) if len(batches) < MANY else _merged(batches))
                self._size -= len(found[-1])
                room -= len(found[-1])
            if not batches:
                del self._due[heapq.heappop(self._seconds)]
        return _each_once(np.concatenate(found)) if found else np.empty(0, np.uint32)

    def all(self) -> set[tuple[int, int]]:
        """Every (second, entry). For the validator."""
        return {
            (second, entry)
            for second, batches in self._due.items()
            for batch in batches
            for entry in batch.tolist()
        }


class Retention:
    """Of the host's blocks. Batches; their order is that of a sequence, its head first."""

    def __init__(self, blocks: Blocks, tally: Tally, limits: CoreLimits) -> None:
        self._blocks = blocks
        self._tally = tally
        self._limits = limits
        self.held_until: U32 = np.zeros(blocks.capacity, np.uint32)
        """Second until which each entry is held, by one pin; 0: it is not."""
        self.expires_at: U32 = np.zeros(blocks.capacity, np.uint32)
        """Second in which each entry is dropped; 0: never."""
        self.held: Counter[int] = Counter()
        """Held blocks, by domain."""
        self.held_bytes = 0
        self.ends = Calendar(self.held_until)
        self.expiries = Calendar(self.expires_at)
        self._any_wishes = False
        """Whether there ever was a block with a time, or for the host only."""

    @property
    def held_blocks(self) -> int:
        return self.held.total()

    @property
    def _now(self) -> int:
        return self._blocks.now // STAMPS_PER_S

    def _after(self, milliseconds: int) -> int:
        """A second in which so much time is over for certain."""
        seconds = min(-(-milliseconds // 1000), SECONDS_MAX)
        coarse = max(0, seconds.bit_length() - EXACT_BITS)
        return (self._now + seconds + (1 << coarse)) >> coarse << coarse

    # --- stores ---

    def wished(self, new: Entries, existing: Entries, wishes: Wishes) -> None:
        """A store is submitted, of blocks that are made for it and others that are there, in whatever state.
        Of several wishes for a block the one that keeps it longer is granted, and in more tiers."""
        limited = wishes.host_only or wishes.ttl_ms > 0
        if not limited:
            if self._any_wishes and len(existing):
                self._blocks.table.clear_flags(existing, HOST_ONLY)
                self.expires_at[existing] = 0
            return
        self._any_wishes = True
        self._blocks.table.set_flags(new, HOST_ONLY)
        if not wishes.ttl_ms:
            self.expires_at[existing] = 0
            return
        second = self._after(wishes.ttl_ms)
        self.expires_at[new] = second
        timed = existing[self.expires_at[existing] != 0]
        self._live_until(timed, second)

    def stored(self, domain: Domain, good: Entries, transfer: Transfer) -> None:
        """A store has made blocks READY. Those that were there already are still pinned by it; what has
        failed is gone."""
        wishes = transfer.wishes
        if wishes.ttl_ms:
            timed = good[self.expires_at[good] != 0]
            # What a disk has was stored without a time.
            on_disk = self._blocks.table.flags(timed) & CLEAN != 0
            self.expires_at[timed[on_disk]] = 0
            self._live_until(timed[~on_disk], self._after(wishes.ttl_ms))
        if wishes.hold_ms and not transfer.abandoned:
            batch = good if transfer.batch is None else transfer.batch
            if transfer.failed is not None:
                batch = batch[~np.isin(batch, transfer.entries[transfer.failed])]
            self.hold(domain, batch, wishes.hold_ms)

    def _live_until(self, entries: Entries, second: int) -> None:
        """They have a time, and are not dropped before."""
        self.expires_at[entries] = np.maximum(self.expires_at[entries], np.uint32(second))
        self.expiries.add(second, entries)

    def forget(self, entries: Entries) -> None:
        """They have been removed; none of them is held."""
        if self._any_wishes:
            self.expires_at[entries] = 0

    # --- holds ---

    def hold(self, domain: Domain, entries: Entries, milliseconds: int) -> None:
        """Holds those of the blocks that are READY, as far as there may be; counts the others."""
        if milliseconds == 0 or len(entries) == 0:
            return
        table = self._blocks.table
        second = self._after(min(milliseconds, int(self._limits.hold_s_max * 1000)))
        entries = _each_once(entries[table.states(entries) == READY])
        until = self.held_until[entries]
        longer = entries[(until != 0) & (until < second)]
        new = entries[until == 0]
        most = int(self._limits.held_fraction_max * self._blocks.geometry.capacity_bytes)
        room = max(0, most - self.held_bytes) // domain.block_bytes
        self._tally.unheld_blocks += max(0, len(new) - room)
        new = new[:room]
        try:
            table.pin(new)
        except ValueError:  # so many hold them that they will not go anyway
            self._tally.unheld_blocks += len(new)
            new = new[:0]
        self.held_until[new] = self.held_until[longer] = second
        if len(new):
            self.held[domain.domain] += len(new)
            self.held_bytes += len(new) * domain.block_bytes
        self.ends.add(second, np.concatenate((new, longer)))

    def is_held(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """Which of them have a hold's pin."""
        held: npt.NDArray[np.bool_] = self.held_until[entries] != 0
        return held

    def release(self, entries: Entries) -> int:
        """Ends the holds of those that are held, and returns how many."""
        entries = _each_once(entries[self.held_until[entries] != 0])
        self.held_until[entries] = 0
        for domain, chosen in self._by_domain(entries):
            self.held[domain.domain] -= len(chosen)
            self.held += Counter()  # without those that are zero
            self.held_bytes -= len(chosen) * domain.block_bytes
            self._blocks.unpin(domain, chosen)
        return len(entries)

    def give_up(self, domains: Collection[Domain], wanted: int) -> int:
        """Ends holds of blocks of these domains, those that would end first before others, `wanted` at most;
        returns how many."""
        numbers = [domain.domain for domain in domains if self.held[domain.domain]]
        if not numbers:
            return 0
        held = np.flatnonzero(self.held_until).astype(np.uint32)
        held = held[np.isin(self._blocks.table.domains(held), numbers)]
        first = held[np.argsort(self.held_until[held], kind="stable")[:wanted]]
        return self.give_up_these(first)

    def give_up_these(self, entries: Entries) -> int:
        """Ends the holds of those that are held before their time, and returns how many."""
        released = self.release(entries)
        self._tally.unheld_blocks += released
        return released

    # --- time ---

    def tick(self) -> None:
        now = self._now
        due = self.ends.take(now, LOOKED_AT_MAX)
        self.release(due[self.held_until[due] <= now])
        due = self.expiries.take(now, LOOKED_AT_MAX)
        due = due[(self.expires_at[due] != 0) & (self.expires_at[due] <= now)]
        table = self._blocks.table
        free = (table.states(due) == READY) & (table.pins(due) == 0)
        self.expiries.add(now + 1, due[~free])
        self._tally.expired_blocks += int(np.count_nonzero(free))
        for domain, chosen in self._by_domain(due[free]):
            self._blocks.drop(domain, chosen, Fate.EXPIRED)
            self._blocks.domains.forget_idle(domain)

    def _by_domain(self, entries: Entries) -> Iterator[tuple[Domain, Entries]]:
        domains = self._blocks.table.domains(entries)
        for number in np.unique(domains).tolist():
            yield self._blocks.domains.by_id[number], entries[domains == number]


def _merged(batches: list[Entries]) -> Entries:
    """All of many small batches, at once."""
    merged = np.concatenate(batches)
    batches.clear()
    return merged


def _each_once(entries: Entries) -> Entries:
    """In the order in which they come first."""
    _, first = np.unique(entries, return_index=True)
    return entries[np.sort(first)]
