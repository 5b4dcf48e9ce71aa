"""What a lookup, prefetch or touch asks of one group, and what becomes of it."""

from dataclasses import dataclass, field

import numpy as np

from kvtierd.core.blocks.prefix import Shape
from kvtierd.core.blocks.table import U8, BlockState, BlockTable
from kvtierd.core.ids import Entries
from kvtierd.core.state.entities import GroupPlan, LeaseGrant
from kvtierd.core.stimuli import BlockQuery

READY = int(BlockState.READY)
_NO_ENTRIES: Entries = np.empty(0, np.uint32)


@dataclass(slots=True, eq=False)
class Ask(Shape):
    """One group's part of a stimulus, filled in step by step. Of an exact query, so many tokens are those of
    the READY blocks, in their order."""

    plan: GroupPlan
    query: BlockQuery
    run: Entries = field(default_factory=lambda: _NO_ENTRIES)
    """Of the READY blocks that the hashes begin with, as far as somebody has looked; of an exact query, of
    all READY ones."""
    ended: int = READY
    """The state of the block behind the run; READY if nobody has looked so far."""
    each: Entries = field(init=False)
    states: U8 = field(init=False)
    """Of an exact query: of every block, as in the table."""
    found: Entries = field(init=False)
    """What the readable prefix needs."""
    told: U8 = field(init=False)
    """What is told of it, as in `GroupHits.states`."""
    lease: LeaseGrant | None = None

    def look(self, table: BlockTable, end: int) -> int:
        """Looks for the run among the first `end` blocks, once. Returns its length."""
        hashes = self.query.hashes
        self.run, ended = table.lookup_prefix(self.plan.space, hashes if end == self.blocks else hashes[:end])
        count = len(self.run)
        if count < end:
            self.ended = ended
        return count

    def look_at_each(self, table: BlockTable) -> int:
        """Looks at every block by itself. Returns how many are READY."""
        self.each, self.states = table.lookup(self.plan.space, self.query.hashes)
        self.run = self.each[self.states == READY]
        return len(self.run)

    def entries(self, table: BlockTable, tokens: int) -> Entries:
        """Of what a readable prefix of so many tokens needs."""
        first, end = self.needed(tokens)
        if first == end:
            return _NO_ENTRIES
        if not self.window_blocks:
            return self.run if len(self.run) == end else self.run[:end]
        entries, _ = table.lookup(self.plan.space, self.query.hashes[first:end])
        return entries
