"""The most that any cache of a size can hit, which knows the future: Belady's rule for chains.

After each request, of the blocks that are there or were just computed, those stay whose next request comes
first; of blocks that the same request wants next, those nearer to the beginning of its prompt. A block is
asked for whenever one of its children is, so its next request is never later than theirs. What stays is
therefore closed under prefixes, and each hit of a block counts whole: the rule is as good for chains as it is
for blocks by themselves, of which it is known to be the best (L. A. Belady, 1966, with bypassing).
"""

import heapq
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def hits(
    paths: Sequence[I64], blocks: int, capacity_blocks: int, generated: Mapping[int, I64] | None = None
) -> tuple[list[int], int]:
    """For each request how many of its first blocks are there; and how many blocks were stored. `blocks`: how
    many different ones there are; `generated`: by request, blocks that are computed with it though it has not
    asked for them."""
    generated = generated or {}
    nexts, nexts_generated = next_requests(paths, blocks, generated)
    due: dict[int, int] = {}
    """Of each block that is there, the number of the request that wants it next."""
    latest: list[tuple[int, int, int]] = []
    """Heap of (-request, -position, block), with entries that are out of date."""
    found, stored = [], 0
    for number, (path, upcoming) in enumerate(zip(paths, nexts, strict=True)):
        chain = path.tolist()
        count = 0
        while count < len(chain) and chain[count] in due:
            count += 1
        found.append(count)
        come = set()
        wanted = upcoming.tolist()
        if number in generated:
            chain = chain + generated[number].tolist()
            wanted = wanted + nexts_generated[number].tolist()
        for position, (block, request) in enumerate(zip(chain, wanted, strict=True)):
            if block not in due:
                come.add(block)
            if request < 0:
                due.pop(block, None)
                come.discard(block)
            else:
                due[block] = request
                heapq.heappush(latest, (-request, -position, block))
        while len(due) > capacity_blocks:
            request, _, block = heapq.heappop(latest)
            if due.get(block) == -request:
                del due[block]
                come.discard(block)
        stored += len(come)
    return found, stored


def next_requests(
    paths: Sequence[I64], blocks: int, generated: Mapping[int, I64]
) -> tuple[list[I64], dict[int, I64]]:
    """For each block of each request, and for those that are generated with it, the number of the next
    request that wants it; -1 if none does."""
    upcoming = np.full(blocks, -1, np.int64)
    nexts = []
    nexts_generated = {}
    for number in range(len(paths) - 1, -1, -1):
        path = paths[number]
        if number in generated:
            nexts_generated[number] = upcoming[generated[number]]
        nexts.append(upcoming[path])
        upcoming[path] = number
    return nexts[::-1], nexts_generated
