"""The longest prefix that several groups have together, against trying every length."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtierd.core.blocks.prefix import Shape, longest


def ask(
    shapes: Sequence[Shape], have: Sequence[Sequence[bool]], above: int = 0, most: int | None = None
) -> int:
    """`longest` of what is there."""
    arrays = [np.array(row, np.bool_) for row in have]

    def leading(query: int, end: int) -> int:
        row = arrays[query][:end]
        return len(row) if row.all() else int(np.argmin(row))

    def there(query: int, first: int, end: int) -> np.ndarray:
        assert 0 <= first < end <= len(arrays[query])
        return arrays[query][first:end]

    return longest(shapes, leading, there, above=above, most_tokens=most)


def oracle(shapes: Sequence[Shape], have: Sequence[Sequence[bool]], above: int, most: int | None) -> int:
    """The same by trying every length."""
    step = math.lcm(*(shape.block_tokens for shape in shapes))
    best = above
    for tokens in range(0, min(s.blocks * s.block_tokens for s in shapes) + 1, step):
        if most is not None and tokens > most:
            break
        good = True
        for shape, row in zip(shapes, have, strict=True):
            end = tokens // shape.block_tokens
            wanted = min(shape.window_blocks or end, end)
            good &= all(row[end - wanted : end])
        if good:
            best = max(best, tokens)
    return best


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Shape], list[list[bool]], int, int | None]:
    shapes, have = [], []
    length = draw(st.integers(0, 150))
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(st.sampled_from([1, 2, 3, 4, 8]))
        blocks = length // tokens
        window = draw(st.sampled_from([0, 1, 2, 5, 40]))
        row = [True] * blocks
        for hole in draw(st.lists(st.integers(0, max(0, blocks - 1)), max_size=4)):
            if blocks:
                row[hole] = False
        if window and draw(st.booleans()):
            row = [draw(st.booleans()) for _ in range(blocks)]
        shapes.append(Shape(tokens, window, blocks))
        have.append(row)
    step = math.lcm(*(shape.block_tokens for shape in shapes))
    above = draw(st.integers(0, 3)) * step if draw(st.booleans()) else 0
    return shapes, have, above, draw(st.none() | st.integers(0, 150))


@settings(max_examples=400, deadline=None)
@given(cases())
def test_no_longer_prefix_has_what_every_group_needs(
    case: tuple[list[Shape], list[list[bool]], int, int | None],
) -> None:
    shapes, have, above, most = case
    assert ask(shapes, have, above, most) == oracle(shapes, have, above, most)


def test_a_window_needs_its_last_blocks_and_full_attention_all() -> None:
    shapes = [Shape(16, 0, 10), Shape(16, 3, 10)]
    full = [True] * 8 + [False] * 2
    window = [False] * 4 + [True] * 3 + [False] * 3
    assert ask(shapes, [full, window]) == 7 * 16
    assert ask(shapes, [full, [True, *window[1:]]]) == 7 * 16
    assert ask(shapes, [[True, *[False] * 9], [True, *[False] * 9]]) == 16, "to the beginning is enough"
    assert ask(shapes, [full, [False] * 10]) == 0


def test_a_state_alone_is_enough_for_a_recurrent_group() -> None:
    shapes = [Shape(16, 0, 12), Shape(64, 1, 3)]
    assert ask(shapes, [[True] * 12, [False, True, False]]) == 128
    assert ask(shapes, [[True] * 7 + [False] * 5, [False, True, False]]) == 0


def test_groups_of_other_block_sizes_meet_at_common_ends() -> None:
    shapes = [Shape(16, 0, 10), Shape(48, 0, 3), Shape(32, 2, 5)]
    assert ask(shapes, [[True] * 10, [True] * 3, [True] * 5]) == 96
