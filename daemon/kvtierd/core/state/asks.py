"""What a lookup, prefetch or touch asks about one group, and what becomes of it."""

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
    """One group's part of a stimulus, filled in step by step. Tokens of an exact query are those of its READY
    blocks, in their order."""

    plan: GroupPlan
    query: BlockQuery
    run: Entries = field(default_factory=lambda: _NO_ENTRIES)
    """Entries of the READY blocks that the hashes begin with, as far as anyone has looked; for an exact
    query, of all READY ones."""
    ended: int = READY
    """The state of the block behind the run; READY as long as nobody has looked there."""
    each: Entries = field(init=False)
    """For an exact query, the entry of every block; NO_ENTRY where there is none."""
    states: U8 = field(init=False)
    """For an exact query, the state of every block, as in the table."""
    found: Entries = field(init=False)
    """Entries of what the readable prefix needs."""
    told: U8 = field(init=False)
    """What the reply says about it, as in `GroupHits.states`."""
    left: bool = False
    """Some of the blocks that come from below wait for room in a queue."""
    lease: LeaseGrant | None = None

    def look(self, table: BlockTable, end: int) -> int:
        """Finds the run among the first `end` blocks. Returns its length."""
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
        """The entries that a readable prefix of so many tokens needs."""
        first, end = self.needed(tokens)
        if first == end:
            return _NO_ENTRIES
        if not self.window_blocks:
            return self.run if len(self.run) == end else self.run[:end]
        entries, _ = table.lookup(self.plan.space, self.query.hashes[first:end])
        return entries
