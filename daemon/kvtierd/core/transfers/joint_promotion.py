"""A joint prefix beyond what the host can serve: how long it will be when what is being written has come, and
what disks have is brought up."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtierd.core.blocks.blocks import READY
from kvtierd.core.blocks.table import U8, BlockFlag
from kvtierd.core.disk.promotion import FIRST_WINDOW, WINDOW_GROWTH, WRITING
from kvtierd.core.disk.tier import DiskTier
from kvtierd.core.ids import NO_ENTRY, Entries, Hashes
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.disks import Disk, Indexes
from kvtierd.core.state.entities import GroupPlan, Instance
from kvtierd.core.transfers.joint import Shape, longest

LATE = int(BlockFlag.LATE)
MISS, PENDING, HIT = 0, 1, 2

_NO_ENTRIES = np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True)
class Ask:
    """One group's part of a joint lookup."""

    group: int
    plan: GroupPlan
    hashes: Hashes
    shape: Shape


@dataclass(frozen=True, slots=True)
class _View:
    """Some of a group's blocks."""

    there: npt.NDArray[np.bool_]
    """Readable, or coming."""
    ready: npt.NDArray[np.bool_]
    entries: Entries
    """Of the host."""
    absent: Indexes
    """Those that only a disk has, and where."""
    copies: Entries


class JointPromotion:
    def __init__(self, core: CoreState, tier: DiskTier) -> None:
        self._core = core
        self._host = core.blocks
        self._disks = core.disks
        self._tier = tier

    def beyond(
        self,
        instance: Instance,
        asks: Sequence[Ask],
        tokens: int,
        keep: Sequence[Entries],
        *,
        host_only: bool = False,
    ) -> int:
        """Tokens of the prefix that there will be, no fewer than the `tokens` that there are; begins to
        promote what it needs from disks, and nothing else. `keep`: blocks of the host, by group, that must
        not make way for them. `host_only`: disks are left alone."""
        most_tokens = self._leasable_tokens(asks)
        disks = self._disks.any_live and not host_only
        longer = self._longest(asks, tokens, most_tokens, disks)
        if longer == tokens or not disks:
            return longer
        views = [self._needed(ask, longer) for ask in asks]
        if not any(len(view.absent) for view in views):
            return longer
        if self._loses(instance, asks, views, longer, longer - tokens):
            return self._longest(asks, tokens, most_tokens, disks=False)
        return longer if self._promote(asks, views, longer, keep) else tokens

    def states(self, asks: Sequence[Ask], tokens: int, longer: int) -> tuple[U8, ...]:
        """What to tell of each group, of a prefix of `tokens` that will have `longer`."""
        told = []
        for ask in asks:
            states = np.zeros(longer // ask.shape.block_tokens, np.uint8)
            first, end = ask.shape.needed(longer)
            if longer > tokens and end > first:
                _, raw = self._host.table.lookup(ask.plan.space, ask.hashes[first:end])
                states[first:] = np.where(raw == READY, HIT, PENDING)
            first, end = ask.shape.needed(tokens)
            states[first:end] = HIT
            told.append(states)
        return tuple(told)

    # --- looking ---

    def _longest(self, asks: Sequence[Ask], tokens: int, most_tokens: int, disks: bool) -> int:
        def leading(query: int, end: int) -> int:
            """A prefix of `tokens` is there: what lies beyond is looked at window by window."""
            ask = asks[query]
            position, length = min(tokens // ask.shape.block_tokens, end), FIRST_WINDOW
            while position < end:
                last = min(position + length, end)
                there = self._view(ask, position, last, disks).there
                if not there.all():
                    return position + int(np.argmin(there))
                position, length = last, length * WINDOW_GROWTH
            return position

        def there(query: int, first: int, end: int) -> npt.NDArray[np.bool_]:
            return self._view(asks[query], first, end, disks).there

        return longest([ask.shape for ask in asks], leading, there, above=tokens, most_tokens=most_tokens)

    def _view(self, ask: Ask, first: int, end: int, disks: bool) -> _View:
        hashes, table = ask.hashes[first:end], self._host.table
        entries, raw = table.lookup(ask.plan.space, hashes)
        ready = raw == READY
        there = ready.copy()
        writing = np.flatnonzero(raw == WRITING)
        if len(writing):
            late = self._disks.late_jobs and table.flags(entries[writing]) & LATE != 0
            there[writing] = np.logical_not(late)
        absent, copies = np.flatnonzero(raw == 0), _NO_ENTRIES
        if disks and len(absent):
            found = self._disks.find(ask.plan.space, np.ascontiguousarray(hashes[absent]))
            absent, copies = absent[found != NO_ENTRY], found[found != NO_ENTRY]
            there[absent] = True
        else:
            absent = absent[:0]
        return _View(there, ready, entries, absent, copies)

    def _needed(self, ask: Ask, tokens: int) -> _View:
        return self._view(ask, *ask.shape.needed(tokens), True)

    def _leasable_tokens(self, asks: Sequence[Ask]) -> int:
        """No longer prefix than an instance could lease is waited for."""
        room = self._core.lease_budget
        left = float(room.alone_bytes)
        per_token = 0.0
        for ask in asks:
            if ask.shape.window_blocks:
                left -= min(ask.shape.window_blocks, ask.shape.blocks) * room.block_bytes(ask.plan.domain)
            else:
                per_token += room.block_bytes(ask.plan.domain) / ask.shape.block_tokens
        longest_asked = min(ask.shape.blocks * ask.shape.block_tokens for ask in asks)
        return int(min(longest_asked, max(0.0, left) / per_token)) if per_token else longest_asked

    # --- bringing up ---

    def _loses(
        self, instance: Instance, asks: Sequence[Ask], views: Sequence[_View], longer: int, gain: int
    ) -> bool:
        """Whether computing the `gain` tokens is faster; counted."""
        if not instance.prefill_tokens_per_s:
            return False
        wanted, of_disk = [], dict[int, int]()
        for ask, view in zip(asks, views, strict=True):
            first, _ = ask.shape.needed(longer)
            wanted.append((ask.plan, len(view.absent)))
            missing = np.ascontiguousarray(ask.hashes[view.absent + first])
            for disk, own in self._disks.by_disk(missing):
                of_disk[disk.disk] = of_disk.get(disk.disk, 0) + len(own) * ask.plan.domain.block_bytes
        disks: list[tuple[Disk, int]] = [(self._disks.all[disk], count) for disk, count in of_disk.items()]
        if not self._tier.admission.promotions_lose(instance, wanted, disks, gain):
            return False
        self._core.tally.recompute_blocks += sum(len(view.absent) for view in views)
        return True

    def _promote(
        self, asks: Sequence[Ask], views: Sequence[_View], tokens: int, keep: Sequence[Entries]
    ) -> bool:
        """False if some of it cannot come for want of room."""
        pinned: list[tuple[Ask, Entries]] = []
        for ask, view, kept in zip(asks, views, keep, strict=True):
            for entries in (kept, view.entries[view.ready]):
                try:
                    self._host.table.pin(entries)
                except ValueError:  # so many hold them that they will not go anyway
                    continue
                pinned.append((ask, entries))
        come = True
        for ask, view in zip(asks, views, strict=True):
            if len(view.absent):
                first, _ = ask.shape.needed(tokens)
                in_order = not ask.shape.window_blocks
                come &= self._tier.promotion.promote(
                    ask.plan, ask.hashes, view.absent + first, view.copies, in_order=in_order
                )
        for ask, entries in pinned:
            self._host.unpin(ask.plan.domain, entries)
        return come
