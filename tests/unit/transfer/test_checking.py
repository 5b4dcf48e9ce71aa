"""Slots are looked at off the copy path: what has rotted is found, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from kvtier_kernels import PoolRecords, xxh3_64
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.copy import checking
from kvtierd.workers.copy.checking import CHECKS_MAX, Checker, find_corrupt

from tests.unit.memory.plain_pool import PAGE, new_pool, slots_of

DEADLINE_S = 10.0
SLOT_BYTES = 8192
COUNT = 24


class Pool:
    """READY slots with random data."""

    def __init__(self) -> None:
        self.memory = new_pool(extents=1)
        self.records = PoolRecords(self.memory)
        self.records.format_extent(0, SLOT_BYTES)
        self.slots = np.asarray(slots_of(self.records, 0)[:COUNT], np.uint32)
        self.generations = self.store(self.slots, 0)

    def store(self, slots: np.ndarray, seed: int) -> np.ndarray:
        hashes = np.random.default_rng(seed).integers(0, 256, (len(slots), 32), np.uint8)
        generations = self.records.open(slots, 1, 1, seed + 1, bytes(16), 0, 0, 1, hashes, SLOT_BYTES)
        sums = []
        for slot in slots.tolist():
            data = self.data(slot)
            data[:] = np.random.default_rng(slot + seed).integers(0, 256, SLOT_BYTES, np.uint8)
            sums.append(xxh3_64(data))
        self.records.set_data_checksums(slots, generations, np.array(sums, np.uint64))
        self.records.commit(slots, np.arange(len(slots), dtype=np.uint64))
        return generations

    def data(self, slot: int) -> np.ndarray:
        return self.memory[slot * PAGE : slot * PAGE + SLOT_BYTES]

    def request(self, number: int = 1) -> wire.CheckSlots:
        return wire.CheckSlots(
            check=number, slots=self.slots.tobytes(), generations=self.generations.tobytes()
        )


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_sound_slots_are_no_findings(pool: Pool) -> None:
    assert not find_corrupt(pool.records, pool.slots, pool.generations).any()


def test_one_flipped_bit_of_data_is_found(pool: Pool) -> None:
    pool.data(int(pool.slots[3]))[SLOT_BYTES - 1] ^= 0x80
    assert np.flatnonzero(find_corrupt(pool.records, pool.slots, pool.generations)).tolist() == [3]


def test_a_damaged_record_is_found(pool: Pool) -> None:
    before = pool.memory[: 4 << 20].copy()
    record = (2 << 20) + PAGE + 5 * 128
    pool.memory[record + 45] ^= 1
    assert np.flatnonzero(find_corrupt(pool.records, pool.slots, pool.generations)).tolist() == [5]
    pool.memory[record + 45] ^= 1
    assert (pool.memory[: 4 << 20] == before).all(), "a look changes nothing"


def test_slots_that_were_given_away_are_no_findings(pool: Pool) -> None:
    pool.records.free(pool.slots[:4])
    pool.records.free(pool.slots[4:8])
    pool.records.open(pool.slots[4:8], 1, 1, 9, bytes(16), 0, 0, 1, np.zeros((4, 32), np.uint8), 100)
    pool.records.free(pool.slots[8:12])
    pool.store(pool.slots[8:12], 77)
    for slot in pool.slots[:12].tolist():
        pool.data(slot)[0] ^= 1
    assert not find_corrupt(pool.records, pool.slots, pool.generations).any()


def test_slots_of_an_extent_that_has_another_size_by_now_are_no_findings(pool: Pool) -> None:
    pool.records.free(pool.slots)
    pool.records.format_extent(0, 5 * SLOT_BYTES)
    assert not find_corrupt(pool.records, pool.slots, pool.generations).any()


class Bench:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.busy = threading.Event()
        self.answers: list[wire.SlotsChecked] = []
        self.told = threading.Condition()
        self.checker = Checker(pool.records, self.busy.is_set, self.answer)

    def answer(self, answer: wire.SlotsChecked) -> None:
        with self.told:
            self.answers.append(answer)
            self.told.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.told:
            assert self.told.wait_for(condition, DEADLINE_S)

    def corrupt(self) -> list[int]:
        return [int(position) for position in np.frombuffer(self.answers[-1].corrupt, np.uint32)]


@pytest.fixture
def bench(pool: Pool) -> Iterator[Bench]:
    bench = Bench(pool)
    yield bench
    bench.busy.clear()
    bench.checker.stop()
    assert bench.checker.join(DEADLINE_S)


def test_a_check_is_answered_whole_when_nothing_is_copied(bench: Bench) -> None:
    bench.pool.data(int(bench.pool.slots[COUNT - 1]))[5] ^= 4
    bench.checker.start()
    bench.checker.ask(bench.pool.request(8))
    bench.wait(lambda: bool(bench.answers))
    assert (bench.answers[0].check, bench.answers[0].looked_at, bench.corrupt()) == (8, COUNT, [COUNT - 1])


def test_nothing_is_read_while_the_lanes_are_busy(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "PATIENCE_S", 0.02)
    bench.busy.set()
    bench.checker.start()
    bench.checker.ask(bench.pool.request())
    bench.wait(lambda: bool(bench.answers))
    assert (bench.answers[0].looked_at, bench.corrupt()) == (0, [])
    bench.busy.clear()
    bench.checker.ask(bench.pool.request(2))
    bench.wait(lambda: len(bench.answers) == 2)
    assert bench.answers[1].looked_at == COUNT


def test_more_than_can_wait_is_answered_unseen(bench: Bench) -> None:
    for number in range(CHECKS_MAX + 2):
        bench.checker.ask(bench.pool.request(number))
    assert [(a.check, a.looked_at) for a in bench.answers] == [(CHECKS_MAX, 0), (CHECKS_MAX + 1, 0)]
    bench.checker.start()
    bench.wait(lambda: len(bench.answers) == CHECKS_MAX + 2)
    assert [a.check for a in bench.answers[2:]] == list(range(CHECKS_MAX))


def test_a_stopped_checker_ends_though_the_lanes_are_busy(bench: Bench) -> None:
    bench.busy.set()
    bench.checker.start()
    bench.checker.ask(bench.pool.request())
    bench.checker.stop()
    assert bench.checker.join(DEADLINE_S)
