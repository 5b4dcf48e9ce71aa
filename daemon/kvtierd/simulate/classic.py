"""Policies from books, to compare with: they see blocks by themselves, one access after another, and know
nothing of prompts. The daemon has none of them, because each loses a lot on some trace.

A request accesses its blocks from the last to the first, so that the beginning of a prompt is most recent;
only RoundRobin goes the other way.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


class Policy(Protocol):
    """What is there of at most so many blocks."""

    inserts: int
    """Blocks that were stored."""
    head_first: bool
    """Whether a request accesses its blocks from the first to the last."""

    def __contains__(self, block: int) -> bool: ...

    def access(self, block: int) -> None:
        """A request for a block. If it is not there, it is stored."""


def hits(paths: Sequence[I64], policy: Policy, generated: Mapping[int, I64] | None = None) -> list[int]:
    """For each request how many of its first blocks are there. `generated`: by request, blocks that are
    stored with it though it has not asked for them."""
    found = []
    for number, path in enumerate(paths):
        chain = path.tolist()
        found.append(next((place for place, block in enumerate(chain) if block not in policy), len(chain)))
        if generated and number in generated:
            chain = chain + generated[number].tolist()
        for block in chain if policy.head_first else reversed(chain):
            policy.access(block)
    return found


class Fifo:
    """What was stored first goes first."""

    head_first = False

    def __init__(self, capacity_blocks: int) -> None:
        self.inserts = 0
        self._capacity = capacity_blocks
        self._there: dict[int, None] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._there

    def access(self, block: int) -> None:
        if block in self._there:
            return
        self.inserts += 1
        if len(self._there) == self._capacity:
            del self._there[next(iter(self._there))]
        self._there[block] = None


class RoundRobin(Fifo):
    """Slots are overwritten in turn, with the blocks of a prompt from its first on, as engines store them."""

    head_first = True


class Arc:
    """ARC (N. Megiddo, D. Modha, FAST 2003): one list of blocks that were asked for once, one of those that
    were asked for more often, and for each a list of those that have gone, whose hits move the border."""

    head_first = False

    def __init__(self, capacity_blocks: int) -> None:
        self.inserts = 0
        self._capacity = capacity_blocks
        self._once_target = 0.0
        self._once: OrderedDict[int, None] = OrderedDict()
        self._often: OrderedDict[int, None] = OrderedDict()
        self._once_gone: OrderedDict[int, None] = OrderedDict()
        self._often_gone: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._once or block in self._often

    def access(self, block: int) -> None:
        if block in self:
            self._once.pop(block, None)
            self._often.pop(block, None)
            self._often[block] = None
            return
        self.inserts += 1
        if block in self._once_gone:
            step = max(1.0, len(self._often_gone) / len(self._once_gone))
            self._once_target = min(float(self._capacity), self._once_target + step)
            self._replace(often_gone=False)
            del self._once_gone[block]
            self._often[block] = None
        elif block in self._often_gone:
            step = max(1.0, len(self._once_gone) / len(self._often_gone))
            self._once_target = max(0.0, self._once_target - step)
            self._replace(often_gone=True)
            del self._often_gone[block]
            self._often[block] = None
        else:
            self._make_room()
            self._once[block] = None

    def _make_room(self) -> None:
        if len(self._once) + len(self._once_gone) == self._capacity:
            if self._once_gone:
                self._once_gone.popitem(last=False)
                self._replace(often_gone=False)
            else:
                self._once.popitem(last=False)
            return
        known = sum(map(len, (self._once, self._often, self._once_gone, self._often_gone)))
        if known >= self._capacity:
            if known == 2 * self._capacity:
                self._often_gone.popitem(last=False)
            self._replace(often_gone=False)

    def _replace(self, *, often_gone: bool) -> None:
        once = len(self._once)
        above = once > self._once_target or (often_gone and once == self._once_target)
        if once and (above or not self._often):
            block, _ = self._once.popitem(last=False)
            self._once_gone[block] = None
        else:
            block, _ = self._often.popitem(last=False)
            self._often_gone[block] = None


class S3Fifo:
    """S3-FIFO (J. Yang and others, SOSP 2023), as libCacheSim has it: new blocks pass through a tenth of the
    room, and stay if they are asked for twice there, or soon after they have gone."""

    head_first = False

    OFTEN = 2
    COUNTED_MAX = 3

    def __init__(self, capacity_blocks: int) -> None:
        self.inserts = 0
        self._capacity = capacity_blocks
        self._small_room = max(1, capacity_blocks // 10)
        self._main_room = capacity_blocks - self._small_room
        self._gone_room = capacity_blocks * 9 // 10
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._gone: OrderedDict[int, None] = OrderedDict()
        self._asked: dict[int, int] = {}
        """How often each block that is there was asked for since it came or was moved."""
        self._was_full = False

    def __contains__(self, block: int) -> bool:
        return block in self._asked

    def access(self, block: int) -> None:
        if block in self._asked:
            self._asked[block] = min(self._asked[block] + 1, self.COUNTED_MAX)
            return
        self.inserts += 1
        wanted_again = block in self._gone
        if wanted_again:
            del self._gone[block]
        while len(self._asked) >= self._capacity:
            self._was_full = True
            if self._small and len(self._main) <= self._main_room:
                self._evict_small()
            else:
                self._evict_main()
        first_fill = not self._was_full and len(self._small) >= self._small_room
        (self._main if wanted_again or first_fill else self._small).append(block)
        self._asked[block] = 0

    def _evict_small(self) -> None:
        while self._small:
            block = self._small.popleft()
            if self._asked[block] < self.OFTEN:
                del self._asked[block]
                if self._gone_room:
                    while len(self._gone) >= self._gone_room:
                        self._gone.popitem(last=False)
                    self._gone[block] = None
                return
            self._asked[block] = 0
            self._main.append(block)

    def _evict_main(self) -> None:
        while self._main:
            block = self._main.popleft()
            if not self._asked[block]:
                del self._asked[block]
                return
            self._asked[block] -= 1
            self._main.append(block)
