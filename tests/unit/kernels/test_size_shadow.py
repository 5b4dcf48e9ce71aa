"""What half and twice of a pool would hit: by recency exactly what such pools do hit as long as all blocks
are followed, and close to it where only a sample is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_kernels import BlockTable, PoolShadow

SPACE, DOMAIN = 3, 5
BLOCK_BYTES = 10
SIZES = ("missed_half", "missed_now", "missed_twice")
Prompt = list[int]


def hashes(numbers: Sequence[int]) -> npt.NDArray[np.uint8]:
    rows = np.zeros((len(numbers), 32), np.uint8)
    rows[:, :8] = np.array(numbers, "<u8").view(np.uint8).reshape(-1, 8)
    return rows


class Recent:
    """A cache that goes by recency, the end of a prompt first."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.newest_last: dict[int, None] = {}

    def request(self, prompt: Prompt) -> int:
        hits = next((i for i, block in enumerate(prompt) if block not in self.newest_last), len(prompt))
        for block in reversed(prompt):
            self.newest_last.pop(block, None)
            self.newest_last[block] = None
        while len(self.newest_last) > self.blocks:
            del self.newest_last[next(iter(self.newest_last))]
        return hits


def followed(capacity: int, blocks: int = 1 << 14, seed: int = 1) -> PoolShadow:
    """The shadow of a pool of so many blocks."""
    shadow = BlockTable(64, 1 << 10, seed=seed).shadow(blocks)
    shadow.begin(capacity * BLOCK_BYTES, 0)
    return shadow


def prompts_of(tree: list[tuple[int, int]]) -> list[Prompt]:
    """Each pair is a prompt: that of an earlier number, cut or not, with so many new blocks behind it."""
    found: list[Prompt] = [[]]
    fresh = 0
    for which, more in tree:
        base = found[which % len(found)]
        base = base[: len(base) - which % 3] if which % 2 else base
        found.append(base + list(range(fresh + 1, fresh + 1 + more)))
        fresh += more
    return [prompt for prompt in found if prompt]


TREES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), min_size=1, max_size=60).map(prompts_of)


@settings(max_examples=200, deadline=None)
@given(prompts=TREES, capacity=st.integers(1, 60), spares=st.booleans())
def test_by_recency_it_is_exact_while_it_follows_all_blocks(
    prompts: list[Prompt], capacity: int, spares: bool
) -> None:
    """Also if clients do not ask about prompts of which the pool has nothing."""
    shadow = followed(capacity)
    pools = [Recent(capacity // 2), Recent(capacity), Recent(2 * capacity)]
    missed = [0, 0, 0]
    hit = 0
    for prompt in prompts:
        hits = [pool.request(prompt) for pool in pools]
        missed = [before + len(prompt) - here for before, here in zip(missed, hits, strict=True)]
        hit += hits[1]
        if hits[1] or not spares or len(prompt) > capacity:
            shadow.asked(SPACE, hashes(prompt), BLOCK_BYTES, hits[1])
        else:
            shadow.spared(len(prompt), BLOCK_BYTES)
        shadow.stored(SPACE, hashes(prompt), BLOCK_BYTES)
    stats = shadow.stats()
    assert [stats[size] for size in SIZES] == missed
    assert (stats["asked"], stats["hit"]) == (sum(map(len, prompts)), hit)


def conversations(count: int, seed: int) -> list[Prompt]:
    """Conversations that grow, some of them often continued, and prompts that never come again."""
    random = np.random.default_rng(seed)
    lengths: dict[int, int] = {}
    found = []
    for number in range(count):
        if random.random() < 0.3:
            found.append([(1 << 40) + 100 * number + i for i in range(30)])
            continue
        which = min(int(random.zipf(1.2)), 2_000)
        lengths[which] = min(60, lengths.get(which, 8) + 2)
        found.append([which * 1_000 + i for i in range(lengths[which])])
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_is_close_to_all_blocks_and_stays_within_its_bound(seed: int) -> None:
    capacity, bound = 8_000, 4_096
    shadow = followed(capacity, bound, seed)
    all_bytes = shadow.stats()["bytes"]
    pools = [Recent(capacity // 2), Recent(capacity), Recent(2 * capacity)]
    asked, hits = 0, [0, 0, 0]
    for prompt in conversations(6_000, seed):
        here = [pool.request(prompt) for pool in pools]
        asked += len(prompt)
        hits = [before + more for before, more in zip(hits, here, strict=True)]
        shadow.asked(SPACE, hashes(prompt), BLOCK_BYTES, here[1])
        shadow.stored(SPACE, hashes(prompt), BLOCK_BYTES)
        assert shadow.stats()["blocks"] <= bound
    stats = shadow.stats()
    assert stats["share"] == 1 / 4
    assert stats["bytes"] == all_bytes
    for size, expected, points in zip(SIZES, hits, (2, 1, 2), strict=True):
        assert 100 * (1 - stats[size] / asked) == pytest.approx(100 * expected / asked, abs=points), size


def test_counting_begins_when_the_pool_has_been_turned_over() -> None:
    shadow = followed(10)
    shadow.begin(10 * BLOCK_BYTES, 5 * BLOCK_BYTES)
    for _ in range(3):
        shadow.asked(SPACE, hashes([1, 2, 3]), BLOCK_BYTES, 0)
        shadow.stored(SPACE, hashes([1, 2, 3]), BLOCK_BYTES)
    stats = shadow.stats()
    assert stats["asked"] == 3
    assert stats["missed_now"] == 0


def test_what_was_counted_counts_for_less_and_is_forgotten_with_another_size() -> None:
    shadow = followed(10)
    shadow.asked(SPACE, hashes([1, 2, 3, 4]), BLOCK_BYTES, 0)
    shadow.stored(SPACE, hashes([1, 2, 3, 4]), BLOCK_BYTES)
    shadow.fade(0.5)
    assert shadow.stats()["missed_twice"] == 2
    shadow.resize(6 * BLOCK_BYTES)
    assert shadow.stats()["asked"] == 0
    shadow.asked(SPACE, hashes([1, 2, 3, 4]), BLOCK_BYTES, 4)
    stats = shadow.stats()
    assert (stats["missed_half"], stats["missed_now"]) == (1, 0), "the blocks are still there"


def test_blocks_count_by_their_bytes() -> None:
    shadow = followed(10)
    shadow.stored(SPACE, hashes([1, 2, 3]), 6 * BLOCK_BYTES)
    shadow.asked(SPACE, hashes([1, 2, 3]), 6 * BLOCK_BYTES, 1)
    stats = shadow.stats()
    assert [stats[size] for size in SIZES] == [3, 2, 0]


@pytest.mark.parametrize("ranks", [False, True])
def test_of_a_pool_of_which_nothing_is_known_everything_is_missed(ranks: bool) -> None:
    table = BlockTable(64, 1 << 10, seed=1, ranks=ranks)
    shadow = table.shadow(100)
    for _ in range(2):
        table.asked(SPACE, DOMAIN, hashes([1, 2]))
        shadow.asked(SPACE, hashes([1, 2]), BLOCK_BYTES, 0)
        shadow.stored(SPACE, hashes([1, 2]), BLOCK_BYTES)
    assert [shadow.stats()[size] for size in SIZES] == [4, 4, 4]


def test_a_pool_gets_another_size_after_its_table_has_stopped_to_rank() -> None:
    table = BlockTable(64, 1 << 10, seed=1, ranks=True)
    shadow = table.shadow(100)
    table.stop_ranking()
    shadow.resize(10 * BLOCK_BYTES)
    assert shadow.stats()["asked"] == 0


def test_a_table_that_begins_to_rank_begins_anew() -> None:
    table = BlockTable(64, 1 << 10, seed=1)
    shadow = table.shadow(100)
    shadow.begin(10 * BLOCK_BYTES, 0)
    shadow.asked(SPACE, hashes([1, 2]), BLOCK_BYTES, 0)
    table.rank(100)
    table.asked(SPACE, DOMAIN, hashes([1, 2]))
    shadow.asked(SPACE, hashes([1, 2]), BLOCK_BYTES, 0)
    assert shadow.stats()["asked"] == 0


def test_arguments_are_checked() -> None:
    shadow = followed(10)
    with pytest.raises(ValueError, match="hits is 3; expected 0 to 2"):
        shadow.asked(SPACE, hashes([1, 2]), BLOCK_BYTES, 3)
    with pytest.raises(ValueError, match="hashes has rows of 8 elements"):
        shadow.stored(SPACE, np.zeros((2, 8), np.uint8), BLOCK_BYTES)
