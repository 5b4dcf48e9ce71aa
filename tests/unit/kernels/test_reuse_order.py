"""Tables that rank: which blocks go first, by what was learnt of how blocks like them come back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from kvtier_kernels import NO_ENTRY, BlockTable

U32 = npt.NDArray[np.uint32]
SPACE, DOMAIN = 3, 5
PAGES = 1 << 20


def hashes(*numbers: int) -> npt.NDArray[np.uint8]:
    rows = np.zeros((len(numbers), 32), np.uint8)
    rows[:, :8] = np.array(numbers, "<u8").view(np.uint8).reshape(-1, 8)
    return rows


class Pool:
    """A table that ranks, as the core uses it: a prompt is asked for, and what is missing is stored."""

    def __init__(self, capacity: int, *, history_blocks: int = 1_000, ranks: bool = True) -> None:
        self.table = BlockTable(4 * capacity + 64, PAGES, seed=1, ranks=ranks, history_blocks=history_blocks)
        if ranks:  # at once, as one that goes on with what was learnt before
            assert self.table.restore_learnt(self.table.learnt())
        self.capacity = capacity
        self.there: dict[int, int] = {}
        """Entry by number."""
        self.stored = 0

    def entries(self, *numbers: int) -> U32:
        return np.array([self.there[number] for number in numbers], np.uint32)

    def request(self, *numbers: int) -> int:
        """Returns how many of the first blocks are there."""
        table = self.table
        table.asked(SPACE, DOMAIN, hashes(*numbers))
        hits = next((i for i, number in enumerate(numbers) if number not in self.there), len(numbers))
        found, created = table.insert(SPACE, DOMAIN, hashes(*numbers))
        existing, new = found[created == 0], found[created == 1]
        table.pin(existing)
        table.chained(found)
        kept = table.admitted(DOMAIN, new, self.capacity - len(self.there))
        while len(self.there) + kept > self.capacity:
            victims = table.victims(DOMAIN, len(self.there) + kept - self.capacity)
            if not len(victims):
                kept = self.capacity - len(self.there)
                break
            self.evict(victims)
        table.remove(new[kept:])
        table.commit(np.ascontiguousarray(new[:kept][::-1]))
        table.unpin(np.ascontiguousarray(existing[::-1]))
        missing = [number for number in numbers if number not in self.there]
        self.there |= dict(zip(missing[:kept], new[:kept].tolist(), strict=True))
        self.stored += kept
        return hits

    def evict(self, entries: U32) -> None:
        self.table.begin_evict(entries)
        self.table.remove(entries)
        gone = set(entries.tolist())
        self.there = {number: entry for number, entry in self.there.items() if entry not in gone}

    def victims(self, n: int) -> list[int]:
        """Their numbers."""
        number_of = {entry: number for number, entry in self.there.items()}
        return [number_of[entry] for entry in self.table.victims(DOMAIN, n).tolist()]


def ranks(pool: Pool) -> bool:
    return pool.table.ranks


def test_without_ranks_nothing_is_learnt_and_all_are_admitted() -> None:
    pool = Pool(8, ranks=False)
    assert not pool.table.ranks
    pool.request(1, 2, 3)
    before = pool.table.dump()
    pool.table.asked(SPACE, DOMAIN, hashes(1, 2, 3, 9))
    pool.table.chained(pool.entries(1, 2, 3))
    assert pool.table.admitted(DOMAIN, pool.entries(1, 2), 0) == 2
    assert all(np.array_equal(before[name], now) for name, now in pool.table.dump().items())
    assert pool.victims(8) == [3, 2, 1]


def test_before_anything_is_known_the_longest_untouched_end_goes_first() -> None:
    pool = Pool(100)
    assert pool.table.ranks
    for first in (10, 20, 30):
        pool.request(*range(first, first + 60))
    pool.request(*range(10, 70))
    # 10 to 69 were asked for last; 20 to 79 and 30 to 89 have the rest, and their ends go first.
    assert pool.victims(4) == [79, 78, 77, 76] or pool.victims(4) == [89, 88, 87, 86]


def test_a_block_never_goes_before_those_that_follow_it() -> None:
    pool = Pool(64)
    pool.request(1, 2, 3, 4)
    pool.request(1, 2, 5, 6)
    pool.request(1, 2, 5, 7)
    order = pool.victims(64)
    assert sorted(order) == [1, 2, 3, 4, 5, 6, 7]
    for earlier, later in ((1, 2), (2, 3), (3, 4), (2, 5), (5, 6), (5, 7)):
        assert order.index(later) < order.index(earlier)
    # Only what is asked for comes, and a beginning stays while its end is in use.
    pool.table.pin(pool.entries(4))
    assert set(pool.victims(64)) == {5, 6, 7}
    pool.table.unpin(pool.entries(4))
    assert pool.victims(2) == order[:2] or len(pool.victims(64)) == 7


def test_what_comes_back_stays_and_what_never_does_is_not_even_stored() -> None:
    """Ten conversations that are asked for again and again, among prompts that come once: recency would keep
    the latter."""
    random = np.random.default_rng(0)
    ranked, recent = Pool(120), Pool(120, ranks=False)
    hits = {True: 0, False: 0}
    fresh = 10_000
    for number in range(4_000):
        if number % 4:
            prompt = range(fresh, fresh + 12)
            fresh += 12
        else:
            first = 100 * int(random.integers(10))
            prompt = range(first, first + 8)
        for pool in (ranked, recent):
            found = pool.request(*prompt)
            if number > 2_000:
                hits[pool is ranked] += found
    assert hits[True] > 3_500 > 4 * hits[False]
    assert ranked.stored < recent.stored / 2
    ranked.table.check()


def test_the_first_to_go_are_those_that_were_cooled() -> None:
    pool = Pool(64)
    pool.request(1, 2)
    pool.request(3, 4)
    pool.request(5, 6)
    pool.table.cool(pool.entries(6, 5))
    assert pool.victims(2) == [6, 5]
    pool.request(5, 6)
    assert pool.victims(1) != [6]


def test_children_outlive_a_parent_that_is_dropped_for_another_reason() -> None:
    pool = Pool(64)
    pool.request(1, 2, 3)
    parent = pool.entries(1)
    pool.table.condemn(parent)
    pool.table.remove(parent)
    del pool.there[1]
    pool.table.check()
    pool.request(9)  # takes the parent's entry
    pool.table.check()
    assert pool.victims(4)[:2] == [3, 2]


def test_the_history_has_a_bound() -> None:
    pool = Pool(16, history_blocks=100)
    before = pool.table.stats()["bytes"]
    for number in range(0, 100_000, 10):
        pool.request(*range(number, number + 10))
    assert pool.table.stats()["bytes"] <= before + 2 * 2 * 100 * 16  # a vector may reserve twice what it has


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_events_leaves_the_table_consistent(seed: int) -> None:
    random = np.random.default_rng(seed)
    pool = Pool(40, history_blocks=60)
    parent: dict[int, int] = {}
    paths = [[0]]
    fresh = 1
    pinned: list[U32] = []
    for _ in range(600):
        path = list(paths[int(random.integers(len(paths)))])[: int(random.integers(1, 12))]
        for _ in range(int(random.integers(4))):
            parent[fresh] = path[-1]
            path.append(fresh)
            fresh += 1
        paths.append(path)
        pool.request(*path)
        pool.table.check()
        there = list(pool.there)
        some = random.choice(there, min(3, len(there)), replace=False).tolist() if there else []
        match int(random.integers(5)):
            case 0 if some:
                entries = pool.entries(*some)
                pool.table.pin(entries)
                pinned.append(entries)
            case 1:
                while pinned:
                    pool.table.unpin(pinned.pop())
            case 2 if some:
                pool.table.touch(pool.entries(*some))
            case 3 if some:
                pool.table.cool(pool.entries(*some))
            case _:
                victims = pool.victims(5)
                left = set(pool.there)
                for victim in victims:
                    left.discard(victim)
                    children = [number for number in left if parent.get(number) == victim]
                    assert not children, f"{victim} goes before {children}"
                pool.evict(pool.entries(*victims))
        pool.table.check()
        assert len(pool.there) <= pool.capacity


def test_what_is_no_entry_is_refused() -> None:
    pool = Pool(8)
    pool.request(1)
    wrong = np.array([NO_ENTRY], np.uint32)
    with pytest.raises(ValueError, match="not an entry"):
        pool.table.chained(wrong)
    with pytest.raises(ValueError, match="not an entry"):
        pool.table.admitted(DOMAIN, wrong, 0)
    with pytest.raises(ValueError, match="hashes"):
        pool.table.asked(SPACE, DOMAIN, np.zeros((1, 31), np.uint8))


def test_whoever_says_that_blocks_follow_each_other_in_a_circle_holds_nothing_for_ever() -> None:
    pool = Pool(64)
    pool.request(1, 2, 3)
    pool.table.chained(pool.entries(3, 1))
    pool.request(4)
    pool.request(5)
    pool.table.chained(pool.entries(4, 5))
    pool.table.chained(pool.entries(5, 4))
    pool.table.chained(pool.entries(5, 5, 1, 1))
    assert sorted(pool.victims(64)) == [1, 2, 3, 4, 5]
    pool.table.check()


def test_a_lookup_tells_what_follows_what() -> None:
    """Of blocks that were stored without a word about it, as after a restart."""
    pool = Pool(64)
    for number in (3, 1, 2):
        pool.request(number)
    pool.table.asked(SPACE, DOMAIN, hashes(1, 2, 3))
    assert pool.victims(64) == [3, 2, 1]


def test_blocks_of_another_domain_are_nobodys_parents() -> None:
    """Nobody asks across domains; if it happened, a tree would be searched for what is in another one."""
    pool = Pool(64)
    pool.request(1, 2)
    other, _ = pool.table.insert(SPACE, DOMAIN + 1, hashes(9))
    pool.table.commit(other)
    pool.table.chained(np.concatenate((pool.entries(2), other, pool.entries(1))))
    pool.table.asked(SPACE, DOMAIN, hashes(1, 9, 2))
    pool.table.asked(SPACE, DOMAIN + 1, hashes(1, 9, 2))
    assert pool.victims(64) == [2, 1]
    assert pool.table.victims(DOMAIN + 1, 9).tolist() == other.tolist()
    pool.table.check()


def test_a_table_begins_and_stops_to_rank_with_blocks_in_it() -> None:
    pool = Pool(8, ranks=False)
    for number in (1, 2, 3, 4):
        pool.request(number)
    pool.request(2)
    assert pool.victims(8) == [1, 3, 4, 2]
    pool.table.pin(pool.entries(3))
    pool.table.rank(100)
    assert ranks(pool)
    assert pool.victims(8) == [1, 4, 2]
    pool.table.check()
    pool.table.unpin(pool.entries(3))
    pool.request(1)
    assert set(pool.victims(8)) == {1, 2, 3, 4}
    pool.table.rank(100)  # anew
    pool.table.check()
    pool.table.stop_ranking()
    assert not ranks(pool)
    assert pool.victims(8) == [4, 2, 3, 1]
    pool.table.check()


def taught() -> Pool:
    """It knows that some prompts come back, and most do not."""
    pool = Pool(60)
    for number in range(2_000):
        pool.request(*(range(8) if number % 4 == 0 else range(100 + 12 * number, 112 + 12 * number)))
    return pool


def test_what_was_learnt_goes_on_in_another_table() -> None:
    saved = taught().table.learnt()
    old, new = Pool(60), Pool(60)
    assert new.table.restore_learnt(saved)
    assert new.table.learnt() == saved
    stored = {}
    for pool in (old, new):
        for number in range(40):
            pool.request(*range(50_000 + 12 * number, 50_012 + 12 * number))
        stored[pool is new] = pool.stored
    assert stored[True] < stored[False]


@pytest.mark.parametrize("spoil", ["short", "long", "empty", "other", "negative", "nan"])
def test_what_another_version_has_learnt_is_left_alone(spoil: str) -> None:
    pool = taught()
    before = pool.table.learnt()
    saved = bytearray(before)
    if spoil == "short":
        del saved[-1]
    elif spoil == "long":
        saved += b"\0"
    elif spoil == "empty":
        saved.clear()
    elif spoil == "other":
        saved[7] ^= 1
    else:
        saved[8:12] = np.float32(-1 if spoil == "negative" else np.nan).tobytes()
    assert not pool.table.restore_learnt(bytes(saved))
    assert pool.table.learnt() == before


def test_a_table_that_does_not_rank_has_learnt_nothing() -> None:
    table = Pool(4, ranks=False).table
    assert table.learnt() == b""
    assert not table.restore_learnt(taught().table.learnt())


def test_a_block_that_is_named_twice_does_not_follow_itself() -> None:
    """A store may name a block twice. It was then among the victims twice, which the table refuses."""
    pool = Pool(64)
    pool.request(1, 2, 1)
    assert pool.victims(64) == [2, 1]
    pool.table.check()


def test_until_enough_was_learnt_the_least_recent_goes() -> None:
    """Half as many accesses again as there are blocks: then what is asked for most stays, though others are
    more recent. That holds however few blocks there were when it was first asked who goes."""
    table = BlockTable(64, PAGES, seed=1, ranks=True, history_blocks=100)
    assert not len(table.victims(DOMAIN, 1))
    entries, _ = table.insert(SPACE, DOMAIN, hashes(*range(8)))
    table.chained(entries)
    table.commit(entries)  # the last one of the prompt is the most recent
    assert table.victims(DOMAIN, 8).tolist() == entries.tolist()
    for _ in range(3):
        table.asked(SPACE, DOMAIN, hashes(*range(8)))
    assert table.victims(DOMAIN, 8).tolist() == entries[::-1].tolist()
