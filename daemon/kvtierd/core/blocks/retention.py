"""How engines want blocks of the host to be kept: held for a time, dropped after a time, or kept off the
disks.

These requests are kept in memory only, and end with the daemon. A held block has one pin, however often it
was asked for. That pin only keeps it from being evicted, and is given up where nothing else can be evicted
(`eviction.py`).

Nothing is queued: times lie in arrays, one word for each entry of the table, and the arrays are looked
through part by part. That takes a millisecond per second for four million entries, whatever clients ask for.
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
CLEAN = int(BlockFlag.CLEAN | BlockFlag.STORE_CLEAN)
TICKS_PER_ROUND = 10
"""All entries are looked at in this many ticks, if not much is due."""
LOOKED_AT_LEAST = 4_096
"""Entries that one tick looks at, at least."""
DUE_MAX = 8_192
"""Blocks whose time is over that one tick deals with; the next tick finds the others."""
CANDIDATES_MAX = 4_096
"""Blocks that may give way, as many as one search finds and remembers."""
SEARCH_PAUSE_S = 1.0
"""For this long after a search found no hold that could make room, there is no other search."""
SECONDS_MAX = 2**31


class Round:
    """Goes through an array of times again and again."""

    def __init__(self, times: U32) -> None:
        self._times = times
        self._position = 0

    def due(self, now: int) -> Entries:
        """Entries of the next part whose time has come; 0 is no time."""
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
    """The retention of the host's blocks. In batches, the head of a sequence comes first."""

    def __init__(self, blocks: Blocks, tally: Tally, limits: CoreLimits) -> None:
        """From now on, `blocks` reports which of them are condemned or removed."""
        self._blocks = blocks
        blocks.condemning, blocks.removed = self.release, self.forget
        self._tally = tally
        self._limits = limits
        self.held_until: U32 = np.zeros(blocks.capacity, np.uint32)
        """The second until which each entry is held, by one pin; 0 if it is not."""
        self.expires_at: U32 = np.zeros(blocks.capacity, np.uint32)
        """The second in which each entry is dropped; 0 for never."""
        self._to_hold_s: U32 = np.zeros(blocks.capacity, np.uint32)
        """For WRITING entries, how long another store wants them held."""
        self._ranks = np.zeros(blocks.capacity, np.int64)
        """For held entries, higher if the hold was asked for later, or nearer the head of its sequence."""
        self._rank = 0
        self.held: Counter[int] = Counter()
        """Held blocks, by domain."""
        self.held_bytes = 0
        self._ends = Round(self.held_until)
        self._expiries = Round(self.expires_at)
        self._any_asked = False
        """Whether any block ever had a request that is kept by entry."""
        self._candidates: tuple[tuple[int, ...], Entries] = ((), np.empty(0, np.uint32))
        """Held blocks of these domains, in the order in which they give way."""
        self._search_at = 0
        """When the next search may begin, in the unit of `Blocks.now`."""

    @property
    def _now(self) -> int:
        return self._blocks.now // STAMPS_PER_S

    def _after(self, milliseconds: int) -> int:
        """The second in which at least so many milliseconds have passed."""
        return self._now + 1 + min(-(-milliseconds // 1000), SECONDS_MAX)

    # --- stores ---

    def requested(self, new: Entries, existing: Entries, retention: RetentionRequest) -> None:
        """A store is submitted, of `new` blocks and others that exist, in whatever state. If a block has
        several requests, it gets the one that keeps it longer and in more tiers."""
        if retention.hold_ms and len(existing):
            self._any_asked = True
            writing = existing[self._blocks.table.states(existing) == WRITING]
            seconds = min(-(-retention.hold_ms // 1000), int(self._limits.hold_s_max) + 1)
            self._to_hold_s[writing] = np.maximum(self._to_hold_s[writing], np.uint32(seconds))
        if not retention.host_only and not retention.ttl_ms:
            if self._any_asked and len(existing):
                self._blocks.table.clear_flags(existing, HOST_ONLY)
                self.expires_at[existing] = 0
            return
        self._any_asked = True
        self._blocks.table.set_flags(new, HOST_ONLY)
        if not retention.ttl_ms:
            self.expires_at[existing] = 0
            return
        second = self._after(retention.ttl_ms)
        self.expires_at[new] = second
        self._live_until(existing[self.expires_at[existing] != 0], second)

    def stored(self, domain: Domain, good: Entries, transfer: TransferJob) -> None:
        """A store has made blocks READY. It still pins those that were there before; those that failed are
        gone."""
        retention = transfer.retention
        if retention.ttl_ms:
            self._live_until(good[self.expires_at[good] != 0], self._after(retention.ttl_ms))
        if retention.hold_ms and not transfer.abandoned:
            batch = good if transfer.batch is None else transfer.batch
            if transfer.failed is not None:
                batch = batch[~np.isin(batch, transfer.entries[transfer.failed])]
            self.hold(domain, batch, retention.hold_ms)
        self.made(domain, good)

    def made(self, domain: Domain, entries: Entries) -> None:
        """Blocks have become READY: other stores may have asked meanwhile to have them held."""
        if not self._any_asked:
            return
        seconds = self._to_hold_s[entries]
        for hold_s in np.unique(seconds[seconds != 0]).tolist():
            self.hold(domain, entries[seconds == hold_s], hold_s * 1000)
        self._to_hold_s[entries] = 0

    def _live_until(self, entries: Entries, second: int) -> None:
        """Keeps blocks that have a time until this second, at least."""
        self.expires_at[entries] = np.maximum(self.expires_at[entries], np.uint32(second))

    def forget(self, entries: Entries) -> None:
        """Entries have been removed; none of them is held."""
        if self._any_asked:
            self.expires_at[entries] = 0
            self._to_hold_s[entries] = 0

    # --- holds ---

    def hold(self, domain: Domain, entries: Entries, milliseconds: int) -> None:
        """Holds those of the blocks that are READY, as far as the limits allow; counts the others."""
        if milliseconds == 0 or len(entries) == 0:
            return
        table = self._blocks.table
        second = self._after(min(milliseconds, int(self._limits.hold_s_max * 1000)))
        entries = _each_once(entries[table.states(entries) == READY])
        new = entries[self.held_until[entries] == 0]
        most = int(self._limits.held_fraction_max * self._blocks.slots.capacity_bytes)
        room = max(0, most - self.held_bytes) // domain.block_bytes
        self._tally.unheld_blocks += max(0, len(new) - room)
        new = new[:room]
        try:
            table.pin(new)
        except ValueError:  # they have so many pins that they will stay anyway
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
        """Which of the entries have the pin of a hold."""
        held: npt.NDArray[np.bool_] = self.held_until[entries] != 0
        return held

    def release(self, entries: Entries) -> Entries:
        """Ends the holds of those entries that are held, and returns these. They become as recent as if they
        were used now, in the order in which the holds were asked for, the head of a sequence most of all."""
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
        """Ends holds of up to `wanted` blocks of these domains that nothing else pins. Those that would end
        first go before others, and a tail before its head; they are the next to be evicted. False if there
        are none, as far as was looked."""
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
        """The candidates that may still give way."""
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
        """Ends the holds of those entries that are held, before their time. The first entry is the next to be
        evicted."""
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
        if self._any_asked:
            self._expire(self._expiries.due(self._now))

    def _expire(self, due: Entries) -> None:
        """Drops blocks whose time is over, except those in use, which will be found again."""
        table = self._blocks.table
        # A block that a disk has was also stored without a time.
        on_disk = table.flags(due) & CLEAN != 0
        self.expires_at[due[on_disk]] = 0
        due = due[~on_disk]
        due = due[(table.states(due) == READY) & (table.pins(due) == 0)]
        self._tally.expired_blocks += len(due)
        for domain, chosen in self._blocks.by_domain(due):
            self._blocks.drop(domain, chosen, Fate.EXPIRED)
            self._blocks.domains.forget_idle(domain)


def _each_once(entries: Entries) -> Entries:
    """The entries without repetitions, in the order in which they come first."""
    _, first = np.unique(entries, return_index=True)
    return entries[np.sort(first)]
