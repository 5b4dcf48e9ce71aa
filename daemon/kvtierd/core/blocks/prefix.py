"""The longest prefix that all groups of an engine can serve, where some have sliding windows or recurrent
states beside full attention. The functions are pure and make no Python object per block."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FIRST_ENDS = 16
"""How many ends are tried at first, the longest ones; each further round tries `ENDS_GROWTH` times as
many."""
ENDS_GROWTH = 4

Mask = npt.NDArray[np.bool_]
Leading = Callable[[int, int], int]
"""`leading(query, end)`: how many of a query's blocks are there in a row, from its first one on and below
`end`."""
There = Callable[[int, int, int], Mask]
"""`there(query, first, end)`: which of a query's blocks from `first` to `end` are there."""


@dataclass(slots=True, eq=False)
class Shape:
    """What one group needs of a prefix."""

    block_tokens: int
    window_blocks: int
    """Only this many last blocks are needed; 0 if all of them are."""
    blocks: int
    """How many blocks were asked for."""

    def needed(self, tokens: int) -> tuple[int, int]:
        """The first of its blocks that a prefix of so many tokens needs, and the end of these blocks."""
        end = tokens // self.block_tokens
        return (max(0, end - self.window_blocks) if self.window_blocks else 0), end

    def needed_beyond(self, tokens: int, longer: int) -> tuple[int, int]:
        """The same for a prefix of `longer` tokens, without what a prefix of `tokens` needs already."""
        first, end = self.needed(longer)
        return max(first, tokens // self.block_tokens), end


def common_tokens(shapes: Sequence[Shape]) -> int:
    """After every so many tokens, a block of every group ends."""
    if len(shapes) == 1:
        return shapes[0].block_tokens
    return math.lcm(*[shape.block_tokens for shape in shapes])


def asked_tokens(shapes: Sequence[Shape]) -> int:
    """Tokens that all groups were asked about."""
    if len(shapes) == 1:
        return shapes[0].blocks * shapes[0].block_tokens
    return min([shape.blocks * shape.block_tokens for shape in shapes])


def longest(
    shapes: Sequence[Shape],
    leading: Leading,
    there: There,
    *,
    above: int = 0,
    most_tokens: int | None = None,
) -> int:
    """Tokens of the longest prefix that ends where a block of every group ends, and of which all groups have
    what they need; `above` if none is longer than that. No prefix is longer than `most_tokens`.

    Calls `leading` once for each group that needs all blocks, and `there` only for windows, from the longest
    prefix down to the first that will do.
    """
    first = shapes[0]
    if len(shapes) == 1 and not first.window_blocks:
        end = first.blocks if most_tokens is None else min(first.blocks, most_tokens // first.block_tokens)
        return max(above, leading(0, end) * first.block_tokens)
    step = common_tokens(shapes)
    high = asked_tokens(shapes)
    if most_tokens is not None:
        high = min(high, most_tokens)
    windows = []
    for query, shape in enumerate(shapes):
        high -= high % step
        if shape.window_blocks:
            windows.append(query)
        elif high > above:
            high = min(high, leading(query, high // shape.block_tokens) * shape.block_tokens)
    high -= high % step
    ends = FIRST_ENDS
    while windows and high > above:
        low = max(above - above % step, high - ends * step)
        good = _good_ends(shapes, windows, there, low, high, step)
        if good.any():
            return low + step * (int(np.flatnonzero(good)[-1]) + 1)
        high = low
        ends *= ENDS_GROWTH
    return max(high, above)


def _good_ends(
    shapes: Sequence[Shape], windows: Sequence[int], there: There, low: int, high: int, step: int
) -> Mask:
    """At which of the ends low + step, low + 2 step, … high every window is whole."""
    ends = np.arange(low + step, high + 1, step)
    good = np.ones(len(ends), np.bool_)
    for query in windows:
        shape = shapes[query]
        first, _ = shape.needed(low + step)
        last = high // shape.block_tokens
        index = np.arange(first, last)
        missing = np.where(there(query, first, last), first - 1, index)
        runs = index - np.maximum.accumulate(missing)  # of blocks in a row, up to and with each
        end_blocks = ends // shape.block_tokens
        good &= runs[end_blocks - 1 - first] >= np.minimum(shape.window_blocks, end_blocks)
        if not good.any():
            break
    return good
