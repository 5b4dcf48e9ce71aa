"""The longest prefix that all groups of an engine can serve: what an engine with sliding windows or recurrent
layers beside full attention can go on from. Pure, and without a Python object per block."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FIRST_ENDS = 16
"""Ends that are tried at first, the longest ones; each further round tries this many times as many."""
ENDS_GROWTH = 4

Mask = npt.NDArray[np.bool_]
Leading = Callable[[int, int], int]
"""`leading(query, end)`: how many blocks of a query are there in a row from its first on, of those below
`end`."""
There = Callable[[int, int, int], Mask]
"""`there(query, first, end)`: which blocks of a query are there, of those from `first` to `end`."""


@dataclass(slots=True, eq=False)
class Shape:
    """What one group needs of a prefix."""

    block_tokens: int
    window_blocks: int
    """Only the last so many blocks; 0: all of them."""
    blocks: int
    """Asked for."""

    def needed(self, tokens: int) -> tuple[int, int]:
        """The first of its blocks that a prefix of so many tokens needs, and the end of them."""
        end = tokens // self.block_tokens
        return (max(0, end - self.window_blocks) if self.window_blocks else 0), end

    def needed_beyond(self, tokens: int, longer: int) -> tuple[int, int]:
        """The same of a prefix of `longer` tokens, without what a prefix of `tokens` needs already."""
        first, end = self.needed(longer)
        return max(first, tokens // self.block_tokens), end


def common_tokens(shapes: Sequence[Shape]) -> int:
    """Tokens after which every group has a block's end, again and again."""
    if len(shapes) == 1:
        return shapes[0].block_tokens
    return math.lcm(*[shape.block_tokens for shape in shapes])


def asked_tokens(shapes: Sequence[Shape]) -> int:
    """Tokens that all groups were asked for."""
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
    """Tokens of the longest prefix that ends at a block's end of every group, and of which all groups have
    what they need; `above` if none is longer than that. `most_tokens`: none longer than that is wanted.

    Asks `leading` once of each group that needs all, and `there` of windows only, from the longest prefix
    down to the first that will do.
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
    """Of the ends low + step, low + 2 step, … high: at which of them every window is whole."""
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
