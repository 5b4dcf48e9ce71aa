"""Index pages: what clients may know about a space's blocks without asking.

A page has the hash of every block of its space, in whatever tier and state. A hash that is missing is a miss;
one that is there has to be looked up. A page lives as long as someone uses its space.
"""

from dataclasses import dataclass

from kvtierd.core.actions import WithdrawPage
from kvtierd.core.blocks.blocks import Blocks
from kvtierd.core.blocks.table import IndexPage
from kvtierd.core.ids import SpaceId
from kvtierd.core.state.below import Below
from kvtierd.core.state.entities import GroupPlan

ENTRIES_PER_TICK = 1 << 17
"""Entries that one tick looks at while pages are filled. That takes about 2 ms, and three seconds in all for
a pool of four million blocks."""


@dataclass(slots=True, eq=False)
class _Open:
    page: IndexPage
    filling: list[Blocks]
    """The tiers whose blocks are not all in the page yet."""


class IndexPages:
    """The index pages of all spaces that have one."""

    def __init__(self, blocks: Blocks, below: Below) -> None:
        self._host = blocks
        self._tiers = (blocks, *(disk.blocks for disk in below.all))
        self.entries_per_tick = ENTRIES_PER_TICK
        self._open: dict[SpaceId, _Open] = {}
        self._filling: dict[SpaceId, _Open] = {}
        self._spares = True

    def __contains__(self, space: SpaceId) -> bool:
        return space in self._open

    @property
    def filling(self) -> int:
        """How many pages are not complete, so that clients cannot rely on them yet."""
        return len(self._filling)

    def blocks_max(self, plan: GroupPlan) -> int:
        """How many blocks the space of a plan can have at most, on all tiers together."""
        block_bytes = plan.domain.block_bytes
        return sum(min(tier.capacity, tier.geometry.capacity_bytes // block_bytes) for tier in self._tiers)

    def publish(self, space: SpaceId, page: IndexPage) -> None:
        """Begins to fill an empty page of a space that has none and is in use."""
        for tier in self._tiers:
            tier.table.publish(space, page)
        self._open[space] = self._filling[space] = _Open(page, list(self._tiers))
        self.tick()

    def tick(self) -> None:
        """Fills pages a little further."""
        left = self.entries_per_tick
        for space, opened in list(self._filling.items()):
            while opened.filling and left > 0:
                tier = opened.filling[-1]
                step = min(left, tier.capacity)
                left -= step
                if tier.table.publish_more(space, step):
                    opened.filling.pop()
            if not opened.filling:
                if self._spares:
                    opened.page.complete()
                del self._filling[space]

    def spare(self, lookups: bool) -> None:
        """Whether clients need not ask about what they do not find in a page. Pages are kept up to date in
        any case."""
        self._spares = lookups
        for space, opened in self._open.items():
            if space not in self._filling:
                (opened.page.complete if lookups else opened.page.incomplete)()

    def retire(self, space: SpaceId) -> None:
        """Nobody uses the space any more: its page, if it has one, is withdrawn."""
        if self._open.pop(space, None) is None:
            return
        self._filling.pop(space, None)
        for tier in self._tiers:
            tier.table.withdraw(space)
        self._host.actions.append(WithdrawPage(space))
