"""Engine blocks that stay as they are while a store reads them, because vLLM's block pool counts one user
more.

Needed for requests that are over while stores still read their blocks: vLLM has forgotten such a request, and
what is held comes back without a word of vLLM's or a worker's, also in an engine that takes no further step.

And where vLLM writes to blocks before connectors hear that a request has lost them: it zeroes new blocks of
models with recurrent layers, or of mixed precision, at the very beginning of a step. And a recurrent layer's
state leaves its request two steps after it was computed. There stores hold from their beginning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

FRACTION_MAX = 0.5
"""Of the engine's blocks, held at once. Most of them are their request's as well, and cost nothing more."""
SOON_S = 0.25
"""What has been held for longer is not counted on to come back at once: vLLM need not wait for it."""


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
    since_s: float
    until_s: float
    withdrawn_step: int | None = None


class BlockHolds:
    """Blocks of stores, by the number of each. Called from the scheduler's thread."""

    def __init__(self, pool: BlockPool, hold_s: float, clock: Callable[[], float]) -> None:
        """None is held for much longer than `hold_s`."""
        self._pool = pool
        self._hold_s = hold_s
        self._clock = clock
        self._holds: dict[int, _Hold] = {}
        self._users: Counter[int] = Counter()
        """Of each block that is held, how many of them are ours."""
        self._count = 0
        self._most = max(1, int(len(pool.blocks) * FRACTION_MAX))

    def __len__(self) -> int:
        """Stores that hold blocks."""
        return len(self._holds)

    def __contains__(self, number: int) -> bool:
        return number in self._holds

    @property
    def are_all(self) -> bool:
        """Whether there are some, and nobody else uses any block: without them the whole pool were free."""
        used = len(self._pool.blocks) - 1 - self._pool.get_num_free_blocks()  # but for vLLM's null block
        return bool(self._holds) and used == len(self._users) and all(map(self._solely, self._users))

    @property
    def come_back_soon(self) -> bool:
        """Whether there are blocks that only these stores keep from others, and have not kept for long."""
        since_s = self._clock() - SOON_S
        return any(
            hold.since_s > since_s and any(map(self._solely, hold.block_ids)) for hold in self._holds.values()
        )

    def has_room(self, blocks: int, planned: int = 0) -> bool:
        """Whether so many more may be held, beside those that are about to be. The first always may."""
        return not (self._holds or planned) or self._count + planned + blocks <= self._most

    def hold(self, number: int, block_ids: Sequence[int]) -> None:
        """They keep what they hold, whoever lets go of them, until `release`."""
        self._pool.touch([self._pool.blocks[block] for block in block_ids])
        now_s = self._clock()
        self._holds[number] = _Hold(block_ids, now_s, now_s + self._hold_s)
        self._users.update(block_ids)
        self._count += len(block_ids)

    def release(self, number: int) -> None:
        """The store reads no more, or nothing that it reads counts. Idempotent."""
        hold = self._holds.pop(number, None)
        if hold is not None:
            self._count -= len(hold.block_ids)
            for block in hold.block_ids:
                self._users[block] -= 1
                if not self._users[block]:
                    del self._users[block]
            # The last of a prefix are the first to go.
            self._pool.free_blocks([self._pool.blocks[block] for block in reversed(hold.block_ids)])

    def release_all(self) -> list[int]:
        """As `release`. Returns the numbers that held blocks."""
        numbers = list(self._holds)
        for number in numbers:
            self.release(number)
        return numbers

    def end(self, number: int) -> None:
        """Its time is over."""
        hold = self._holds.get(number)
        if hold is not None:
            hold.until_s = self._clock()

    def overdue(self, step: int, *, everything: bool = False) -> list[int]:
        """Stores that have to be withdrawn in this step, by the workers, before anything else of it. Their
        blocks are released in the next: what vLLM gives away then is written in a later step."""
        now_s = self._clock()
        due: list[int] = []
        for number, hold in list(self._holds.items()):
            if hold.withdrawn_step is None:
                if everything or now_s >= hold.until_s:
                    hold.withdrawn_step = step
                    due.append(number)
            elif hold.withdrawn_step < step:
                self.release(number)
        return due

    def _solely(self, block: int) -> bool:
        """Whether nobody but these stores uses a block that is held."""
        return bool(self._pool.blocks[block].ref_cnt == self._users[block])
