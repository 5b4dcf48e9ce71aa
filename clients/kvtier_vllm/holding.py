"""Engine blocks that stay as they are while a store reads them, because vLLM's block pool counts one user
more.

Needed where vLLM writes to blocks before connectors hear that a request has lost them: it zeroes new blocks
of models with recurrent layers, or of mixed precision, at the very beginning of a step. And a recurrent
layer's state leaves its request two steps after it was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

FRACTION_MAX = 0.5
"""Of the engine's blocks, held at once. Most of them are their request's as well, and cost nothing more."""


class BlockPool(Protocol):
    """What is used of vllm.v1.core.block_pool.BlockPool, seen in 0.29 to 0.33."""

    blocks: Sequence[Any]
    """By id."""

    def touch(self, blocks: Any) -> None: ...

    def free_blocks(self, ordered_blocks: Any) -> None: ...

    def get_num_free_blocks(self) -> int: ...


class WholeBlockPool(BlockPool, Protocol):
    """And what more audits use of it, seen in the same releases."""

    def get_new_blocks(self, num_blocks: int) -> list[Any]: ...

    def evict_blocks(self, block_ids: set[int]) -> None: ...


@dataclass(slots=True)
class _Hold:
    block_ids: Sequence[int]
    until_s: float
    withdrawn_step: int | None = None


class BlockHolds:
    """Blocks of stores, by ticket. Called from the scheduler's thread."""

    def __init__(self, pool: BlockPool, hold_s: float, clock: Callable[[], float]) -> None:
        """None is held for much longer than `hold_s`."""
        self._pool = pool
        self._hold_s = hold_s
        self._clock = clock
        self._holds: dict[int, _Hold] = {}
        self._count = 0
        self._most = max(1, int(len(pool.blocks) * FRACTION_MAX))

    def __len__(self) -> int:
        """Stores that hold blocks."""
        return len(self._holds)

    def has_room(self, blocks: int) -> bool:
        """Whether so many more may be held. One store always may."""
        return not self._holds or self._count + blocks <= self._most

    def hold(self, ticket: int, block_ids: Sequence[int]) -> None:
        """They keep what they hold, whoever lets go of them, until `release`."""
        self._pool.touch([self._pool.blocks[block] for block in block_ids])
        self._holds[ticket] = _Hold(block_ids, self._clock() + self._hold_s)
        self._count += len(block_ids)

    def release(self, ticket: int) -> None:
        """The store reads no more, or nothing that it reads counts. Idempotent."""
        hold = self._holds.pop(ticket, None)
        if hold is not None:
            self._count -= len(hold.block_ids)
            # The last of a prefix are the first to go.
            self._pool.free_blocks([self._pool.blocks[block] for block in reversed(hold.block_ids)])

    def end(self, ticket: int) -> None:
        """Its time is over."""
        hold = self._holds.get(ticket)
        if hold is not None:
            hold.until_s = self._clock()

    def overdue(self, step: int, *, everything: bool = False) -> list[int]:
        """Stores that have to be withdrawn in this step, by the workers, before anything else of it. Their
        blocks are released in the next: what vLLM gives away then is written in a later step."""
        now_s = self._clock()
        due: list[int] = []
        for ticket, hold in list(self._holds.items()):
            if hold.withdrawn_step is None:
                if everything or now_s >= hold.until_s:
                    hold.withdrawn_step = step
                    due.append(ticket)
            elif hold.withdrawn_step < step:
                self.release(ticket)
        return due
