"""Holds blocks of the engine while a store reads them, by counting as one more user in vLLM's block pool.

This is needed for requests that are over while stores still read their blocks: vLLM has forgotten such a
request, and what is held comes back without a message from vLLM or a worker, even if the engine takes no
further step.

It is of use for blocks of a window, which leave a running request as soon as the window has passed them:
while vLLM has others to give away, a store of theirs need not be withdrawn.

It is also needed where vLLM writes to blocks before connectors hear that a request has lost them. vLLM zeroes
new blocks of models with recurrent layers, or of mixed precision, at the very beginning of a step. And the
state of a recurrent layer leaves its request two steps after it was computed. In these cases stores hold
their blocks from the beginning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

FRACTION_MAX = 0.5
"""The largest share of the engine's blocks that is held at once. Most of these are their request's as well,
and cost nothing more."""
SPARE_FRACTION = 0.25
"""The share of the engine's blocks that must be free if some are to be held that leave their requests."""
SOON_S = 0.25
"""vLLM need not wait for blocks that have been held for longer: they are not expected back at once."""


class BlockPool(Protocol):
    """What is used of vllm.v1.core.block_pool.BlockPool, as seen in 0.29 to 0.33."""

    blocks: Sequence[Any]
    """The blocks by id."""

    def touch(self, blocks: Any) -> None: ...

    def free_blocks(self, ordered_blocks: Any) -> None: ...

    def get_num_free_blocks(self) -> int: ...


class WholeBlockPool(BlockPool, Protocol):
    """What audits use of it besides, as seen in the same releases."""

    def get_new_blocks(self, num_blocks: int) -> list[Any]: ...

    def evict_blocks(self, block_ids: set[int]) -> None: ...


@dataclass(slots=True)
class _Hold:
    block_ids: Sequence[int]
    since_s: float
    until_s: float
    withdrawn_step: int | None = None


class BlockHolds:
    """The blocks that stores hold, by the number of each store. Called from the scheduler's thread."""

    def __init__(self, pool: BlockPool, hold_s: float, clock: Callable[[], float]) -> None:
        """No block is held for much longer than `hold_s` seconds."""
        self._pool = pool
        self._hold_s = hold_s
        self._clock = clock
        self._holds: dict[int, _Hold] = {}
        self._users: Counter[int] = Counter()
        """For each block that is held, how many of its users are ours."""
        self._count = 0
        self._most = max(1, int(len(pool.blocks) * FRACTION_MAX))

    def __len__(self) -> int:
        """Returns the number of stores that hold blocks."""
        return len(self._holds)

    def __contains__(self, number: int) -> bool:
        return number in self._holds

    @property
    def are_all(self) -> bool:
        """Whether blocks are held and nobody else uses any block: without them all were free."""
        used = len(self._pool.blocks) - 1 - self._pool.get_num_free_blocks()  # without vLLM's null block
        return bool(self._holds) and used == len(self._users) and all(map(self._solely, self._users))

    @property
    def come_back_soon(self) -> bool:
        """Whether there are blocks that only these stores keep from others, and have not kept for long."""
        since_s = self._clock() - SOON_S
        return any(
            hold.since_s > since_s and any(map(self._solely, hold.block_ids)) for hold in self._holds.values()
        )

    def has_room(self, blocks: int, planned: int = 0) -> bool:
        """Returns whether so many more blocks may be held, beside `planned` ones. The first always may."""
        return not (self._holds or planned) or self._count + planned + blocks <= self._most

    def can_spare(self, blocks: int) -> bool:
        """Returns whether so many more blocks, which requests use now, may be held when these have left them,
        without vLLM running short of blocks."""
        free = self._pool.get_num_free_blocks()
        return self._count + blocks <= self._most and free >= SPARE_FRACTION * len(self._pool.blocks)

    def hold(self, number: int, block_ids: Sequence[int]) -> None:
        """Holds these blocks for a store until `release`: they keep their content until then."""
        self._pool.touch([self._pool.blocks[block] for block in block_ids])
        now_s = self._clock()
        self._holds[number] = _Hold(block_ids, now_s, now_s + self._hold_s)
        self._users.update(block_ids)
        self._count += len(block_ids)

    def release(self, number: int) -> None:
        """Lets go of a store's blocks, because what it reads counts no more, or it reads nothing. Safe to
        call twice."""
        hold = self._holds.pop(number, None)
        if hold is not None:
            self._count -= len(hold.block_ids)
            for block in hold.block_ids:
                self._users[block] -= 1
                if not self._users[block]:
                    del self._users[block]
            # The last blocks of a prefix are the first to be reused.
            self._pool.free_blocks([self._pool.blocks[block] for block in reversed(hold.block_ids)])

    def release_all(self) -> list[int]:
        """Lets go of all blocks. Returns the numbers of the stores that held some."""
        numbers = list(self._holds)
        for number in numbers:
            self.release(number)
        return numbers

    def end(self, number: int) -> None:
        """Ends a store's time to hold blocks."""
        hold = self._holds.get(number)
        if hold is not None:
            hold.until_s = self._clock()

    def overdue(self, step: int, *, everything: bool = False) -> list[int]:
        """Returns the stores that workers have to withdraw in this step, before anything else in it. Their
        blocks are released in the next step: what vLLM gives away then is written in a later one."""
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
        """Returns whether only these stores use a block that is held."""
        return bool(self._pool.blocks[block].ref_cnt == self._users[block])
