"""How long a prefix will be when everything that is on its way to the host, from stores and from the tier
below, has arrived; and the beginning of what is brought up from below."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtierd.core.blocks.blocks import READY
from kvtierd.core.blocks.prefix import Mask, asked_tokens, common_tokens, longest
from kvtierd.core.blocks.table import U8, BlockState
from kvtierd.core.ids import NO_ENTRY, Entries, Hashes
from kvtierd.core.state.asks import Ask
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.disks import Indexes
from kvtierd.core.state.entities import Instance
from kvtierd.core.tier import Tier

MISS, PENDING, HIT = 0, 1, 2
ABSENT = int(BlockState.ABSENT)
WRITING = int(BlockState.WRITING)
FIRST_WINDOW = 32
"""How many hashes beyond the hits are looked at first; each further window is `WINDOW_GROWTH` times as
long."""
WINDOW_GROWTH = 4

_NO_ENTRIES = np.empty(0, np.uint32)
_TOLD = np.zeros(len(BlockState), np.uint8)
"""The kvtier.v1.BlockState for each state in the table."""
_TOLD[WRITING] = PENDING
_TOLD[READY] = HIT


@dataclass(frozen=True, slots=True)
class _View:
    """Some of one group's blocks."""

    there: Mask
    """Which of them are readable or coming."""
    ready: Entries
    """Entries of those that are readable on the host."""
    below: Indexes
    """Positions in the query of those that only the tier below has; `hashes` and `copies` have their hashes
    and the tier's names for them."""
    hashes: Hashes
    copies: Entries


class Outlook:
    def __init__(self, core: CoreState, tier: Tier) -> None:
        self._core = core
        self._host = core.blocks
        self._tier = tier

    # --- a prefix ---

    def beyond(self, instance: Instance, asks: Sequence[Ask], tokens: int, *, host_only: bool) -> int:
        """Tokens of the prefix that there will be when everything on its way has arrived, at least the
        `tokens` that were found. Begins to bring up what that prefix needs from below and nothing else, and
        never evicts what was found for it. With `host_only`, the tier below is left alone."""
        if tokens == asked_tokens(asks):
            return tokens
        below_too = not host_only and self._tier.reads
        for ask in asks:
            if self._ends(ask, tokens, below_too):
                return tokens
        # Nothing is promoted beyond what an instance could lease; blocks that are being written count.
        step, most_tokens = common_tokens(asks), self._leasable_tokens(asks)
        below_too = below_too and tokens + step <= most_tokens
        most_tokens = max(most_tokens, tokens + step)
        longer = self._longest(asks, tokens, most_tokens, below_too)
        if longer == tokens or not below_too:
            return longer
        views = [self._view(ask, *ask.needed_beyond(tokens, longer), True) for ask in asks]
        if not any(len(view.below) for view in views):
            return longer
        if self._loses(instance, asks, views, longer - tokens):
            return self._longest(asks, tokens, most_tokens, below_too=False)
        coming = self._promote(asks, views, longer)
        if coming < longer and any(ask.window_blocks for ask in asks):
            # The windows of a shorter prefix are others, and were not brought up.
            return self._longest(asks, tokens, coming, below_too=False)
        return max(tokens, coming)

    def _ends(self, ask: Ask, tokens: int, below_too: bool) -> bool:
        """Whether it is clear without looking further that this group will have no longer prefix than
        `tokens`."""
        if ask.window_blocks or ask.ended in (READY, WRITING) or len(ask.run) != tokens // ask.block_tokens:
            return False
        if ask.ended != ABSENT or not below_too:
            return True
        behind = ask.query.hashes[len(ask.run) :][:1]
        return bool(self._tier.find(ask.plan.space, behind)[0] == NO_ENTRY)

    def _longest(self, asks: Sequence[Ask], tokens: int, most_tokens: int, below_too: bool) -> int:
        def leading(query: int, end: int) -> int:
            """The run on the host is known; what lies behind it is looked at window by window."""
            ask = asks[query]
            position, length = min(len(ask.run), end), FIRST_WINDOW
            while position < end:
                last = min(position + length, end)
                there = self._view(ask, position, last, below_too).there
                if not there.all():
                    return position + int(np.argmin(there))
                position, length = last, length * WINDOW_GROWTH
            return position

        def there(query: int, first: int, end: int) -> Mask:
            return self._view(asks[query], first, end, below_too).there

        return longest(asks, leading, there, above=tokens, most_tokens=most_tokens)

    def _view(self, ask: Ask, first: int, end: int, below_too: bool) -> _View:
        hashes, table = ask.query.hashes[first:end], self._host.table
        entries, raw = table.lookup(ask.plan.space, hashes)
        there = raw == READY
        ready = entries[there]
        writing = np.flatnonzero(raw == WRITING)
        if len(writing):
            there[writing] = self._tier.in_time(entries[writing])
        below, copies = np.flatnonzero(raw == ABSENT), _NO_ENTRIES
        if below_too and len(below):
            copies = self._tier.find(ask.plan.space, np.ascontiguousarray(hashes[below]))
            below, copies = below[copies != NO_ENTRY], copies[copies != NO_ENTRY]
            there[below] = True
        else:
            below = below[:0]
        return _View(there, ready, below + first, np.ascontiguousarray(hashes[below]), copies)

    def _leasable_tokens(self, asks: Sequence[Ask]) -> int:
        """Tokens of the longest prefix that an instance could lease."""
        room = self._core.lease_budget
        left = float(room.alone_bytes)
        per_token = 0.0
        for ask in asks:
            if ask.window_blocks:
                left -= min(ask.window_blocks, ask.blocks) * room.block_bytes(ask.plan.domain)
            else:
                per_token += room.block_bytes(ask.plan.domain) / ask.block_tokens
        asked = asked_tokens(asks)
        return int(min(asked, max(0.0, left) / per_token)) if per_token else asked

    def _promote(self, asks: Sequence[Ask], views: Sequence[_View], longer: int) -> int:
        """Brings blocks up. Returns the tokens of the longest prefix whose blocks will all come; where there
        is no room for a block, the prefix ends before it."""
        needed = [(ask.plan, view.ready) for ask, view in zip(asks, views, strict=True)]
        needed += [(ask.plan, ask.found) for ask in asks if ask.lease is None]
        pinned = [(plan, entries) for plan, entries in needed if self._pin(entries)]
        for ask, view in zip(asks, views, strict=True):
            if len(view.below):
                in_order = not ask.window_blocks
                coming = self._tier.bring_up(ask.plan, view.hashes, view.copies, in_order=in_order)
                if not coming.all():
                    longer = min(longer, int(view.below[np.argmin(coming)]) * ask.block_tokens)
        for plan, entries in pinned:
            self._host.unpin(plan.domain, entries)
        return longer - longer % common_tokens(asks)

    # --- single blocks ---

    def exact(self, instance: Instance, ask: Ask, *, host_only: bool) -> U8:
        """What the reply says of each block of an exact query. Begins to bring up what the tier below has, as
        `beyond` does."""
        states = self.on_host(ask)
        if len(ask.run) == ask.blocks or host_only or not self._tier.reads:
            return states
        view = self._view(ask, 0, ask.blocks, True)
        gain = len(view.below) * ask.block_tokens
        if not gain or self._loses(instance, [ask], [view], gain):
            return states
        pinned = ask.lease is None and self._pin(ask.found)
        coming = self._tier.bring_up(ask.plan, view.hashes, view.copies, in_order=False)
        states[view.below[coming]] = PENDING
        _, now = self._host.table.lookup(ask.plan.space, np.ascontiguousarray(view.hashes[coming]))
        ask.left = bool((now == ABSENT).any())
        if pinned:
            self._host.unpin(ask.plan.domain, ask.found)
        return states

    def on_host(self, ask: Ask) -> U8:
        """What the reply says of each block of an exact query, without the tier below."""
        states = _TOLD[ask.states]
        if self._tier.keeps_evicted:
            pending = np.flatnonzero(states == PENDING)
            states[pending[~self._tier.in_time(ask.each[pending])]] = MISS
        return states

    # --- both ---

    def _loses(self, instance: Instance, asks: Sequence[Ask], views: Sequence[_View], gain: int) -> bool:
        """Whether computing the `gain` tokens is faster than bringing up the blocks that the tier below has
        of them, which are counted then."""
        wanted = [(ask.plan, view.hashes, view.copies) for ask, view in zip(asks, views, strict=True)]
        if not self._tier.bringing_up_loses(instance, wanted, gain):
            return False
        self._core.tally.recompute_blocks += sum(len(hashes) for _, hashes, _ in wanted)
        return True

    def _pin(self, entries: Entries) -> bool:
        """Pins the entries. Returns False if they have so many pins that they will stay anyway."""
        try:
            self._host.table.pin(entries)
        except ValueError:
            return False
        return True
