"""What engines wish of blocks of the host besides being kept: to be held for a time, to be dropped after one,
to stay off the disks.

Wishes are kept in memory only, and end with the daemon. A held block has one pin, however often it was
wished: it is in nobody's way but eviction's, and goes after all where nothing else could (`room.py`).

Nothing is queued: times lie in arrays, one word for each entry of the table, which are looked through part by
part. That takes a millisecond a second for four million entries, and the same whatever clients wish.
"""

from collections import Counter
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from kvtierd.core.blocks.blocks import READY, STAMPS_PER_S, Blocks
from kvtierd.core.blocks.domains import Domain
from kvtierd.core.blocks.history import Fate
from kvtierd.core.blocks.table import U32, BlockFlag, BlockState
from kvtierd.core.ids import Entries
from kvtierd.core.state.entities import TransferJob
from kvtierd.core.status import Tally
from kvtierd.core.stimuli import CoreLimits, RetentionRequest

WRITING = int(BlockState.WRITING)
HOST_ONLY = int(BlockFlag.HOST_ONLY)
CLEAN = int(BlockFlag.CLEAN)
TICKS_PER_ROUND = 10
"""In so many ticks everything is looked at, if not much is due."""
LOOKED_AT_LEAST = 4_096
"""Entries in one tick."""
DUE_MAX = 8_192
"""Blocks whose time is over, in one tick: the others are found in the next."""
CANDIDATES_MAX = 4_096
"""Blocks that are found at once to give way, and remembered."""
SEARCH_PAUSE_S = 1.0
"""When no hold was found that could make room, none is looked for again for this long."""
SECONDS_MAX = 2**31


class Round:
    """Goes through an array of times, again and again."""

    def __init__(self, times: U32) -> None:
        self._times = times
        self._position = 0

    def due(self, now: int) -> Entries:
        """Of the next part the entries whose time, which is not 0, has come."""
        times = self._times
        step = max(LOOKED_AT_LEAST, -(-len(times) // TICKS_PER_ROUND))
        first, end = self._position, min(self._position + step, len(times))
        part = times[first:end]
        found = np.flatnonzero((part != 0) & (part <= now)) + first
        if len(found) > DUE_MAX:
            end = int(found[DUE_MAX])
            found = found[:DUE_MAX]
        self._position = end % len(times)
        return found.astype(np.uint32)


class BlockRetention:
    """Of the host's blocks. Batches; their order is that of a sequence, its head first."""

    def __init__(self, blocks: Blocks, tally: Tally, limits: CoreLimits) -> None:
        """`blocks` tells it from now on which of them are condemned, and which have been removed."""
        self._blocks = blocks
        blocks.condemning, blocks.removed = self.release, self.forget
        self._tally = tally
        self._limits = limits
        self.held_until: U32 = np.zeros(blocks.capacity, np.uint32)
        """Second until which each entry is held, by one pin; 0: it is not."""
        self.expires_at: U32 = np.zeros(blocks.capacity, np.uint32)
        """Second in which each entry is dropped; 0: never."""
        self._to_hold_s: U32 = np.zeros(blocks.capacity, np.uint32)
        """Of WRITING entries: for how long another store has wished them held."""
        self._ranks = np.zeros(blocks.capacity, np.int64)
        """Of held entries: the higher, the later it was wished, or the nearer the head of its sequence."""
        self._rank = 0
        self.held: Counter[int] = Counter()
        """Held blocks, by domain."""
        self.held_bytes = 0
        self._ends = Round(self.held_until)
        self._expiries = Round(self.expires_at)
        self._any_wishes = False
        """Whether there ever was a block with a wish that is kept by entry."""
        self._candidates: tuple[tuple[int, ...], Entries] = ((), np.empty(0, np.uint32))
        """Held blocks of these domains, those to give way first, first."""
        self._search_at = 0
        """When they may be looked for again."""

    @property
    def held_blocks(self) -> int:
        return self.held.total()

    @property
    def _now(self) -> int:
        return self._blocks.now // STAMPS_PER_S

    def _after(self, milliseconds: int) -> int:
        """The second in which so much time is over for certain."""
        return self._now + 1 + min(-(-milliseconds // 1000), SECONDS_MAX)

    # --- stores ---

    def wished(self, new: Entries, existing: Entries, wishes: RetentionRequest) -> None:
        """A store is submitted, of blocks that are made for it and others that are there, in whatever state.
        Of several wishes for a block the one that keeps it longer is granted, and in more tiers."""
        if wishes.hold_ms and len(existing):
            self._any_wishes = True
            writing = existing[self._blocks.table.states(existing) == WRITING]
            seconds = min(-(-wishes.hold_ms // 1000), int(self._limits.hold_s_max) + 1)
            self._to_hold_s[writing] = np.maximum(self._to_hold_s[writing], np.uint32(seconds))
        if not wishes.host_only and not wishes.ttl_ms:
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
        self._live_until(existing[self.expires_at[existing] != 0], second)

    def stored(self, domain: Domain, good: Entries, transfer: TransferJob) -> None:
        """A store has made blocks READY. Those that were there already are still pinned by it; what has
        failed is gone."""
        wishes = transfer.wishes
        if wishes.ttl_ms:
            self._live_until(good[self.expires_at[good] != 0], self._after(wishes.ttl_ms))
        if wishes.hold_ms and not transfer.abandoned:
            batch = good if transfer.batch is None else transfer.batch
            if transfer.failed is not None:
                batch = batch[~np.isin(batch, transfer.entries[transfer.failed])]
            self.hold(domain, batch, wishes.hold_ms)
        self.made(domain, good)

    def made(self, domain: Domain, entries: Entries) -> None:
        """Blocks have become READY: others may have wished them held meanwhile."""
        if not self._any_wishes:
            return
        seconds = self._to_hold_s[entries]
        for wished_s in np.unique(seconds[seconds != 0]).tolist():
            self.hold(domain, entries[seconds == wished_s], wished_s * 1000)
        self._to_hold_s[entries] = 0

    def _live_until(self, entries: Entries, second: int) -> None:
        """They have a time, and are not dropped before."""
        self.expires_at[entries] = np.maximum(self.expires_at[entries], np.uint32(second))

    def forget(self, entries: Entries) -> None:
        """They have been removed; none of them is held."""
        if self._any_wishes:
            self.expires_at[entries] = 0
            self._to_hold_s[entries] = 0

    # --- holds ---

    def hold(self, domain: Domain, entries: Entries, milliseconds: int) -> None:
        """Holds those of the blocks that are READY, as far as there may be; counts the others."""
        if milliseconds == 0 or len(entries) == 0:
            return
        table = self._blocks.table
        second = self._after(min(milliseconds, int(self._limits.hold_s_max * 1000)))
        entries = _each_once(entries[table.states(entries) == READY])
        new = entries[self.held_until[entries] == 0]
        most = int(self._limits.held_fraction_max * self._blocks.geometry.capacity_bytes)
        room = max(0, most - self.held_bytes) // domain.block_bytes
        self._tally.unheld_blocks += max(0, len(new) - room)
        new = new[:room]
        try:
            table.pin(new)
        except ValueError:  # so many hold them that they will not go anyway
            self._tally.unheld_blocks += len(new)
            new = new[:0]
        self.held_until[new] = second
        if len(new):
            self.held[domain.domain] += len(new)
            self.held_bytes += len(new) * domain.block_bytes
        held = entries[self.held_until[entries] != 0]
        self.held_until[held] = np.maximum(self.held_until[held], np.uint32(second))
        self._rank += len(held)
        self._ranks[held] = self._rank - np.arange(len(held))

    def is_held(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """Which of them have a hold's pin."""
        held: npt.NDArray[np.bool_] = self.held_until[entries] != 0
        return held

    def release(self, entries: Entries) -> Entries:
        """Ends the holds of those that are held, and returns these. They are as recent as if they were used
        now, in the order in which they were wished, the head of a sequence most of all."""
        entries = np.unique(entries[self.held_until[entries] != 0])
        entries = entries[np.argsort(-self._ranks[entries])]
        self.held_until[entries] = 0
        self._blocks.used_at[entries] = self._blocks.now
        for domain, chosen in self._blocks.by_domain(entries):
            self.held[domain.domain] -= len(chosen)
            self.held_bytes -= len(chosen) * domain.block_bytes
            self._blocks.unpin(domain, chosen)
        if len(entries):
            self.held += Counter()  # without those that are zero
        return entries

    # --- making way ---

    def give_up(self, domains: Collection[Domain], wanted: int) -> bool:
        """Ends holds of up to `wanted` blocks of these domains that nothing else pins, those that would end
        first before others, and a tail before its head: they are the next to be evicted. False if there are
        none, as far as was looked."""
        numbers = tuple(sorted(domain.domain for domain in domains if self.held[domain.domain]))
        if not numbers:
            return False
        if self._candidates[0] != numbers or not len(self._left()):
            if self._blocks.now < self._search_at:
                return False
            self._candidates = (numbers, self._search(numbers))
        chosen = self._left()[:wanted]
        if not len(chosen):
            self._search_at = self._blocks.now + int(SEARCH_PAUSE_S * STAMPS_PER_S)
            return False
        self.give_up_these(chosen)
        return True

    def _left(self) -> Entries:
        """The candidates that still are some."""
        numbers, entries = self._candidates
        entries = entries[self.held_until[entries] != 0]
        table = self._blocks.table
        left: Entries = entries[(table.pins(entries) == 1) & np.isin(table.domains(entries), numbers)]
        self._candidates = (numbers, left)
        return left

    def _search(self, numbers: tuple[int, ...]) -> Entries:
        table = self._blocks.table
        held = np.flatnonzero(self.held_until).astype(np.uint32)
        held = held[(table.pins(held) == 1) & np.isin(table.domains(held), numbers)]
        order = np.lexsort((self._ranks[held], self.held_until[held]))
        found: Entries = held[order[:CANDIDATES_MAX]]
        return found

    def give_up_these(self, entries: Entries) -> None:
        """Ends the holds of those that are held before their time; the first is the next to be evicted."""
        entries = _each_once(entries[self.held_until[entries] != 0])
        used_at = self._blocks.used_at[entries]
        self.release(entries)
        self._blocks.used_at[entries] = used_at
        for domain, chosen in self._blocks.by_domain(entries):
            self._blocks.cool(domain, np.ascontiguousarray(chosen[::-1]))
        self._tally.unheld_blocks += len(entries)

    # --- time ---

    def tick(self) -> None:
        if self.held:
            self.release(self._ends.due(self._now))
        if self._any_wishes:
            self._expire(self._expiries.due(self._now))

    def _expire(self, due: Entries) -> None:
        """Drops blocks whose time is over, but those that are in use, which are found again."""
        table = self._blocks.table
        # What a disk has was stored without a time.
        on_disk = table.flags(due) & CLEAN != 0
        self.expires_at[due[on_disk]] = 0
        due = due[~on_disk]
        due = due[(table.states(due) == READY) & (table.pins(due) == 0)]
        self._tally.expired_blocks += len(due)
        for domain, chosen in self._blocks.by_domain(due):
            self._blocks.drop(domain, chosen, Fate.EXPIRED)
            self._blocks.domains.forget_idle(domain)


def _each_once(entries: Entries) -> Entries:
    """In the order in which they come first."""
    _, first = np.unique(entries, return_index=True)
    return entries[np.sort(first)]
