"""Stored blocks get their checksums after the engine has its own blocks back, and before they may be
committed."""

import mmap
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest
from kvtier_kernels import PoolRecords
from kvtierd.core.ids import Slots
from kvtierd.memory.host_pool import HostPool
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.copy.gpu.sealing import Sealer
from kvtierd.workers.copy.parts import PartEnd, PartTask
from kvtierd.workers.copy.sessions import MappedSession

SLACK_S = 30.0
SLOT_BYTES = 10_000
DONE = PartEnd(wire.DONE, copied_bytes=5, copy_ns=7)


class Store:
    """A pool with slots as a store has left them, and a sealer."""

    def __init__(self, threads: int = 2, unsealed_bytes_max: int = 1 << 30) -> None:
        self.pool = HostPool.open(None, 18 << 20, 16 << 20, lock_timeout_s=1)
        self.mapping = mmap.mmap(self.pool.fd, self.pool.array.nbytes)
        self.pool.records.format_extent(0, SLOT_BYTES)
        self._free = self.pool.geometry.slots_of(0, SLOT_BYTES)
        records = PoolRecords(np.frombuffer(self.mapping, np.uint8))
        self.sealer = Sealer(self.mapping, records, threads, lambda: None, unsealed_bytes_max)
        self.room: Future[None] = Future()

    def start(self) -> None:
        self.sealer.start(lambda: self.room.set_result(None))

    def slots(self, count: int) -> tuple[Slots, "np.ndarray[tuple[int], np.dtype[np.uint64]]"]:
        slots, self._free = self._free[:count], self._free[count:]
        hashes = np.zeros((count, 32), np.uint8)
        generations = self.pool.records.open(
            slots, 1, self.pool.boot_nonce, 1, bytes(16), 0, 0, 1, hashes, SLOT_BYTES
        )
        for slot in slots.tolist():
            self.pool.array[slot * 4096 :][:SLOT_BYTES] = np.random.default_rng(slot).integers(
                0, 256, SLOT_BYTES, np.uint8
            )
        return slots, generations

    def settle(self, part: PartTask, end: PartEnd = DONE) -> "Future[PartEnd]":
        over: Future[PartEnd] = Future()
        self.sealer.settle(part, end, over.set_result)
        return over

    def close(self) -> None:
        self.sealer.stop()
        assert self.sealer.join(SLACK_S)
        self.pool.close()


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()


def part() -> PartTask:
    empty = np.empty(0, np.uint32)
    return PartTask(
        1, False, MappedSession(1), None, 1, 0, None, 0, 0.0, empty, empty, np.empty(0, np.uint64), None
    )


def test_a_part_is_over_when_all_its_chunks_are_sealed(store: Store) -> None:
    one = part()
    chunks = [store.slots(3) for _ in range(4)]
    for slots, generations in chunks:
        store.sealer.put(one, slots, generations, SLOT_BYTES)
    over = store.settle(one)
    assert not over.done()
    store.start()
    assert over.result(SLACK_S) == DONE
    for slots, generations in chunks:
        store.pool.records.commit(slots, np.ones(3, np.uint64))
        assert store.pool.records.verify_data(slots, generations).all()


def test_a_part_with_nothing_to_seal_is_over_at_once(store: Store) -> None:
    assert store.settle(part()).result(0) == DONE
    store.start()


def test_a_part_that_settles_after_its_last_chunk_is_sealed_is_over_at_once(store: Store) -> None:
    store.start()
    one, other = part(), part()
    store.sealer.put(one, *store.slots(1), SLOT_BYTES)
    store.sealer.put(other, *store.slots(1), SLOT_BYTES)
    assert store.settle(other).result(SLACK_S) == DONE
    assert store.settle(one).result(SLACK_S) == DONE


def test_a_slot_that_was_taken_back_before_it_was_sealed_fails_the_part(store: Store) -> None:
    one, other = part(), part()
    slots, generations = store.slots(3)
    store.sealer.put(one, slots, generations, SLOT_BYTES)
    store.sealer.put(other, *store.slots(1), SLOT_BYTES)
    store.pool.records.free(slots[1:2])
    failed, fine = store.settle(one), store.settle(other)
    store.start()
    assert failed.result(SLACK_S).outcome == wire.FAILED
    assert str(slots[1]) in failed.result().message
    assert failed.result().copied_bytes == 0
    assert fine.result(SLACK_S) == DONE


def test_a_part_that_failed_or_was_withdrawn_stays_so(store: Store) -> None:
    one = part()
    store.sealer.put(one, *store.slots(1), SLOT_BYTES)
    end = PartEnd(wire.REVOKED, "withdrawn")
    over = store.settle(one, end)
    assert not over.done(), "its slots are still read"
    store.start()
    assert over.result(SLACK_S) == end


def test_it_is_full_when_much_is_unsealed_and_says_when_it_has_room() -> None:
    store = Store(unsealed_bytes_max=3 * SLOT_BYTES)
    one = part()
    store.sealer.put(one, *store.slots(2), SLOT_BYTES)
    assert not store.sealer.is_full()
    store.sealer.put(one, *store.slots(2), SLOT_BYTES)
    assert store.sealer.is_full()
    store.start()
    store.room.result(SLACK_S)
    assert store.settle(one).result(SLACK_S) == DONE
    assert not store.sealer.is_full()
    store.close()


def test_it_ends_when_everything_is_sealed() -> None:
    store = Store(threads=1)
    one = part()
    chunks = [store.slots(2) for _ in range(20)]
    for chunk in chunks:
        store.sealer.put(one, *chunk, SLOT_BYTES)
    over = store.settle(one)
    store.start()
    store.sealer.stop()
    assert store.sealer.join(SLACK_S)
    assert over.result(0) == DONE
    store.pool.close()
