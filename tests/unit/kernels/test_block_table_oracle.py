"""The native block table does what the plain-Python one does, step by step, refusals included."""

import random
from collections.abc import Iterable
from mmap import mmap
from typing import Any

import kvtier_kernels
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.oracles import block_table as oracle

CAPACITY = 12
POOL_PAGES = 48
KEYS = [bytes([i]) * 32 for i in range(8)] + [bytes(31) + bytes([i]) for i in range(8)]

spaces = st.sampled_from([0, 1, 0xFFFF_FFFF])
domains = st.sampled_from([0, 1, 65535])
flag_bits = st.integers(0, 255)
keys = st.lists(st.sampled_from(KEYS), max_size=8).map(
    lambda chosen: np.frombuffer(b"".join(chosen), np.uint8).reshape(-1, 32)
)
# Mostly entries that may be live, sometimes what no table has; duplicates happen.
ids = st.one_of(st.integers(0, CAPACITY), st.sampled_from([kvtier_kernels.NO_ENTRY, 1 << 31]))
batches = st.one_of(
    st.lists(st.integers(0, CAPACITY - 1), max_size=6),
    st.lists(st.integers(0, CAPACITY - 1), max_size=6, unique=True),
    st.lists(ids, max_size=4),
).map(lambda chosen: np.array(chosen, np.uint32))
# Which of the entries that fit: chosen by the machine, which knows the states.
picks = st.lists(st.integers(0, CAPACITY - 1), min_size=1, max_size=6)


def same(left: Any, right: Any) -> bool:
    """Equality of results: arrays by dtype, shape and content, tuples and dicts part by part."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    return bool(left == right)


class Tables(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.native = kvtier_kernels.BlockTable(CAPACITY, POOL_PAGES, seed=7)
        self.model = oracle.BlockTable(CAPACITY, POOL_PAGES)
        self.pages: dict[int, tuple[kvtier_kernels.IndexReader, oracle.IndexPage]] = {}
        """What clients see of each space that is published, and what they should."""

    @rule(space=spaces)
    def publish(self, space: int) -> None:
        memory = mmap(-1, kvtier_kernels.IndexPage.bytes_for(CAPACITY))
        native, model = kvtier_kernels.IndexPage(memory, 1, space), oracle.IndexPage()
        known = space in self.pages
        if known:
            with pytest.raises(ValueError, match=f"space {space} has a page already"):
                self.native.publish(space, native)
        else:
            self.native.publish(space, native)
            self.model.publish(space, model)
            self.pages[space] = kvtier_kernels.IndexReader(memory, 32), model

    @rule(space=spaces, n=st.integers(0, 5))
    def publish_more(self, space: int, n: int) -> None:
        self.both("publish_more", space, n)

    @rule(space=spaces)
    def withdraw(self, space: int) -> None:
        self.both("withdraw", space)
        self.pages.pop(space, None)

    @invariant()
    def pages_have_what_the_space_has(self) -> None:
        for reader, model in self.pages.values():
            found = [key for key in KEYS if reader.run([key], 0, 1)]
            assert found == [key for key in KEYS if model.hashes[key]]
            run = next((i for i, key in enumerate(KEYS) if key not in found), len(KEYS))
            assert reader.run(KEYS, 0, 100) == run

    def both(self, name: str, *arguments: Any) -> Any:
        """Calls a method of both tables: they agree in the result, or both refuse and stay as they were."""
        before = self.native.dump()
        try:
            expected = getattr(self.model, name)(*arguments)
        except ValueError:
            with pytest.raises(ValueError):
                getattr(self.native, name)(*arguments)
            assert same(self.native.dump(), before)
            return None
        result = getattr(self.native, name)(*arguments)
        assert same(result, expected), f"{name}{arguments}: {result} is not {expected}"
        return result

    def fitting(self, picked: Iterable[int], state: int, **also: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Distinct entries in this state, chosen by number: batches that will be accepted."""
        fits = [
            entry
            for entry, block in sorted(self.model.blocks.items())
            if block.state == state and all(getattr(block, name) == value for name, value in also.items())
        ]
        return np.array(list(dict.fromkeys(fits[i % len(fits)] for i in picked)) if fits else [], np.uint32)

    @rule(space=spaces, domain=domains, hashes=keys, flags=flag_bits)
    def insert(self, space: int, domain: int, hashes: Any, flags: int) -> None:
        self.both("insert", space, domain, hashes, flags)

    @rule(space=spaces, hashes=keys)
    def look_up(self, space: int, hashes: Any) -> None:
        self.both("lookup", space, hashes)
        self.both("lookup_prefix", space, hashes)

    @rule(entries=batches, world=st.integers(0, 3), data=st.data())
    def attach_any(self, entries: Any, world: int, data: st.DataObject) -> None:
        pages = st.integers(0, POOL_PAGES)
        flat = data.draw(st.lists(pages, min_size=len(entries) * world, max_size=len(entries) * world))
        self.both("attach_slots", entries, np.array(flat, np.uint32).reshape(len(entries), world))

    @rule(picked=picks, world=st.integers(1, 3), order=st.randoms(use_true_random=False))
    def attach_free_slots(self, picked: list[int], world: int, order: Any) -> None:
        entries = self.fitting(picked, oracle.WRITING, slots=[])
        free = sorted(set(range(1, POOL_PAGES)) - self.model.slot_owners.keys())
        order.shuffle(free)
        entries = entries[: len(free) // world]
        slots = np.array(free[: len(entries) * world], np.uint32).reshape(len(entries), world)
        self.both("attach_slots", entries, slots)
        self.both("slots", entries, world)

    @rule(picked=picks)
    def commit(self, picked: list[int]) -> None:
        self.both("commit", self.fitting(picked, oracle.WRITING))

    @rule(picked=picks)
    def begin_evict(self, picked: list[int]) -> None:
        self.both("begin_evict", self.fitting(picked, oracle.READY, pins=0))

    @rule(picked=picks)
    def condemn(self, picked: list[int]) -> None:
        self.both("condemn", self.fitting(picked[:2], oracle.READY))

    @rule(picked=picks, state=st.sampled_from([oracle.WRITING, oracle.EVICTING]))
    def remove(self, picked: list[int], state: int) -> None:
        self.both("remove", self.fitting(picked, state, pins=0))

    @rule(picked=picks, times=st.integers(1, 3), state=st.sampled_from(list(oracle.NAMES)))
    def pin_and_maybe_more_than_once(self, picked: list[int], times: int, state: int) -> None:
        entries = self.fitting(picked, state)
        self.both("pin", np.tile(entries, times))

    @rule(order=st.randoms(use_true_random=False))
    def unpin_everything(self, order: Any) -> None:
        pinned = [entry for entry, block in self.model.blocks.items() for _ in range(block.pins)]
        order.shuffle(pinned)
        self.both("unpin", np.array(pinned, np.uint32))

    @rule(
        name=st.sampled_from(["commit", "begin_evict", "condemn", "remove", "pin", "unpin", "touch", "cool"]),
        entries=batches,
    )
    def change_any(self, name: str, entries: Any) -> None:
        self.both(name, entries)

    @rule(entries=batches, flags=flag_bits, name=st.sampled_from(["set_flags", "clear_flags"]))
    def change_flags(self, entries: Any, flags: int, name: str) -> None:
        self.both(name, entries, flags)

    @rule(entries=batches)
    def read_fields(self, entries: Any) -> None:
        for name in ("states", "pins", "flags", "hashes", "spaces", "domains", "generations"):
            self.both(name, entries)

    @rule(entries=batches, world=st.integers(0, 3))
    def read_slots(self, entries: Any, world: int) -> None:
        self.both("slots", entries, world)

    @rule(slots=st.lists(st.integers(0, POOL_PAGES), max_size=6).map(lambda s: np.array(s, np.uint32)))
    def read_owners(self, slots: Any) -> None:
        self.both("owners", slots)

    @precondition(lambda self: len(self.model.blocks) > CAPACITY // 2)
    @rule(domain=domains, n=st.integers(0, 4))
    def evict(self, domain: int, n: int) -> None:
        victims = self.both("victims", domain, n)
        self.both("begin_evict", victims)
        self.both("remove", victims)

    @rule(domain=domains, n=st.integers(0, 4), flags=flag_bits, horizon=st.integers(0, CAPACITY + 1))
    def look_for_the_coldest(self, domain: int, n: int, flags: int, horizon: int) -> None:
        before = self.native.dump()
        self.both("coldest", domain, n, flags, horizon)
        assert same(self.native.dump(), before)

    @precondition(lambda self: any(block.evictable for block in self.model.blocks.values()))
    @rule(
        bit=st.sampled_from([1, 4, 8, 128]),
        every=st.integers(2, 3),
        n=st.integers(1, CAPACITY),
        data=st.data(),
    )
    def look_for_the_coldest_among_flagged(self, bit: int, every: int, n: int, data: st.DataObject) -> None:
        domain = data.draw(st.sampled_from(sorted(d for d, entries in self.model.recency.items() if entries)))
        victims = self.model.victims(domain, CAPACITY)
        self.both("clear_flags", victims, bit)
        self.both("set_flags", victims[::every].copy(), bit)
        found = self.both("coldest", domain, n, bit, data.draw(st.integers(1, len(victims))))
        assert set(found.tolist()).isdisjoint(victims[::every].tolist())

    @invariant()
    def tables_agree(self) -> None:
        self.native.check()
        self.model.check()
        assert same(self.native.dump(), self.model.dump())
        stats, expected = self.native.stats(), self.model.stats()
        assert stats | {"bytes": 0} == expected
        for domain in (0, 1, 65535):
            assert same(self.native.victims(domain, CAPACITY), self.model.victims(domain, CAPACITY))
        for space in (0, 1, 0xFFFF_FFFF):
            assert self.native.count(space) == self.model.count(space)
            assert same(self.native.entries_of(space), self.model.entries_of(space))
            for first in range(0, CAPACITY + 1, 3):
                ready, following = self.native.ready_among(space, first, 4)
                expected_ready, expected_following = self.model.ready_among(space, first, 4)
                assert same(ready, expected_ready)
                assert following == expected_following


NONE = kvtier_kernels.NO_ENTRY

TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, (1 << 64) - 1), rounds=st.integers(1, 6), order_seed=st.integers(0, (1 << 32) - 1))
def test_a_crowded_index_finds_every_key_after_any_deletions(seed: int, rounds: int, order_seed: int) -> None:
    """Runs of probes merge, wrap round and are torn apart; keys differ in single bytes only."""
    order = random.Random(order_seed)  # thousands of draws: more than hypothesis makes of its own
    capacity = 700
    native = kvtier_kernels.BlockTable(capacity, 2, seed=seed)
    model = oracle.BlockTable(capacity, 2)
    universe = np.zeros((900, 32), np.uint8)
    universe[:, 0] = np.arange(900) % 256
    universe[:, 31] = np.arange(900) // 256
    for _ in range(rounds):
        some = universe[order.sample(range(900), 500)]
        assert same(native.insert(3, 0, some), model.insert(3, 0, some))
        entries = np.array(order.sample(sorted(model.blocks), len(model.blocks) // 2), np.uint32)
        native.remove(entries)
        model.remove(entries)
        assert same(native.lookup(3, universe), model.lookup(3, universe))
    native.check()


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, (1 << 64) - 1),
    order_seed=st.integers(0, (1 << 32) - 1),
    batches=st.lists(
        st.tuples(st.integers(1, 900), st.sampled_from([0.0, 0.1, 0.5, 1.0])), min_size=1, max_size=12
    ),
    distance=st.sampled_from([1, 2, 16, 37]),
)
def test_a_table_that_grows_finds_every_key_and_slot(
    seed: int, order_seed: int, batches: list[tuple[int, float]], distance: int
) -> None:
    """Blocks come in batches of any size, and some go again while the index moves into a larger one."""
    order = random.Random(order_seed)
    capacity, pages = 5_000, 1 << 19
    native = kvtier_kernels.BlockTable(capacity, pages, seed=seed)
    live: dict[int, int] = {}  # key: entry
    free = list(range(capacity))
    order.shuffle(free)

    def keys(numbers: list[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        out = np.zeros((len(numbers), 32), np.uint8)
        out[:, 8:12] = np.array(numbers, "<u4").view(np.uint8).reshape(-1, 4)
        return out

    for number, (count, gone) in enumerate(batches):
        new = [number * 1_000 + i for i in range(min(count, capacity - len(live)))]
        entries, created = native.insert(1, 0, keys(new))
        assert created.all()
        slots = np.array([1 + 2 * distance * free.pop() for _ in new], np.uint32)
        if new:
            native.attach_slots(entries, np.stack([slots, slots + distance], axis=1))
        live.update(zip(new, entries.tolist(), strict=True))
        leaving = order.sample(sorted(live), int(gone * len(live)))
        if leaving:
            out = np.array([live.pop(key) for key in leaving], np.uint32)
            free.extend(((native.slots(out, 2)[:, 0] - 1) // (2 * distance)).tolist())
            native.remove(out)
        native.check()
        every = [number * 1_000 + i for number in range(len(batches)) for i in range(900)]
        found, _ = native.lookup(1, keys(every))
        assert {key: entry for key, entry in zip(every, found.tolist(), strict=True) if entry != NONE} == live
        there = np.array(sorted(live.values()), np.uint32)
        if len(there):
            owners = native.owners(native.slots(there, 2).ravel())
            assert owners.tolist() == np.repeat(there, 2).tolist()
