"""Which chunk a lane starts next, when it lands, and what becomes of its part."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from kvtier_kernels import PART_REVOKED, PART_STARTED, SharedWords
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.status import StatusPage, StatusWord, create_status_fd
from kvtierd.workers.copy.cpu import CpuDevice
from kvtierd.workers.copy.device import Blocks, Copier, Flight
from kvtierd.workers.copy.lanes import Lanes, PartCalls
from kvtierd.workers.copy.parts import PartEnd, PartTask, PartTaskState
from kvtierd.workers.copy.sessions import MappedSession

SLACK_S = 30.0
BLOCKS = 4
"""Blocks of one chunk."""


@dataclass
class Size:
    slot_bytes: int = 10
    planes: int = 1


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + SLACK_S
    while not condition():
        assert time.monotonic() < deadline_s, condition
        time.sleep(0.001)


class Wire:
    """A copier whose flights land when the test says so."""

    chunk_bytes = BLOCKS * 10
    shared_chunk_bytes = 10
    chunk_fragments = 1_000

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.submitted: list[tuple[int, int]] = []
        """Part and first block of each chunk."""
        self.landed: list[tuple[int, int]] = []
        self.flying: deque[Flight] = deque()
        self.full = False
        self.steps_left = 0
        self.prepared: list[bool] = []
        """For each step of preparing: whether the part had started."""
        self.refuse_chunk_at: int | None = None
        self.lose_chunk_at: int | None = None
        self._allowed = threading.Semaphore(0)

    def let_land(self, flights: int) -> None:
        self._allowed.release(flights)

    def is_full(self) -> bool:
        return self.full

    def prepare(self, part: PartTask, chunk: slice) -> bool:
        self.steps_left -= 1
        if self.steps_left < 0:
            return False
        self.prepared.append(part.run is not None)
        return True

    def submit(self, part: PartTask, chunk: slice) -> Flight:
        if chunk.start == self.refuse_chunk_at:
            raise ValueError("refused")
        self.submitted.append((part.number, chunk.start))
        flight = Flight(part, chunk, np.ones(chunk.stop - chunk.start, np.bool_))
        self.flying.append(flight)
        assert len(self.flying) <= self.depth
        return flight

    def land(self, flight: Flight) -> Blocks:
        assert flight is self.flying[0], "out of order"
        assert self._allowed.acquire(timeout=SLACK_S)
        self.flying.popleft()
        self.landed.append((flight.part.number, flight.chunk.start))
        if flight.chunk.start == self.lose_chunk_at:
            raise ValueError("lost")
        return flight.good

    def settle(self, part: PartTask, end: PartEnd, over: Callable[[PartEnd], None]) -> None:
        over(end)


class Wires(CpuDevice):
    def __init__(self, depth: int) -> None:
        self.steps = 0
        self.load: Wire = Wire(depth)  # type: ignore[assignment]
        self.store: Wire = Wire(depth)  # type: ignore[assignment]

    def engine_stepped(self) -> None:
        self.steps += 1


def session(number: int, tenant: int = 0) -> MappedSession:
    words = SharedWords(bytearray(8 * 64), 64)
    return MappedSession(number, doorbells=0, parts=64, tenant=tenant, words=words)


class Bench:
    def __init__(self, depth: int) -> None:
        self.device = Wires(depth)
        self.load, self.store = self.device.load, self.device.store
        fd = create_status_fd()
        self.status = StatusPage(fd)
        os.close(fd)
        self.ends: dict[int, PartEnd] = {}
        self.unstarted: list[int] = []
        self.startable: Callable[[PartTask], bool] = lambda part: part.session.try_start(
            part.word, part.ticket
        )
        self.lanes = Lanes(
            self.device,
            self.status,
            PartCalls(
                lambda part: self.startable(part), self._landed, lambda p: self.unstarted.append(p.number)
            ),
        )

    def _landed(self, copier: Copier, part: PartTask, end: PartEnd) -> None:
        assert not any(flight.part is part for flight in [*self.load.flying, *self.store.flying])
        assert part.number not in self.ends
        self.ends[part.number] = end

    def post(
        self,
        number: int,
        session: MappedSession,
        blocks: int,
        *,
        is_load: bool = True,
        doorbell: int | None = None,
    ) -> PartTask:
        empty = np.zeros(blocks, np.uint32)
        part = PartTask(
            number=number,
            is_load=is_load,
            session=session,
            plan=Size() if blocks else None,
            ticket=number,
            word=number,
            doorbell=doorbell,
            doorbell_value=1,
            gate_deadline_s=time.monotonic() + SLACK_S,
            block_ids=empty,
            slots=empty,
            generations=empty.astype(np.uint64),
            verify=None,
        )
        with self.lanes.lock:
            self.lanes.submit(part)
        return part

    def withdraw(self, wanted: Callable[[PartTask], bool]) -> list[PartTask]:
        with self.lanes.lock:
            return self.lanes.withdraw(wanted)

    def abandon(self, *parts: PartTask) -> None:
        with self.lanes.lock:
            self.lanes.abandon(parts)

    def word(self, word: StatusWord) -> int:
        return self.status.read()[word]

    def stop(self) -> None:
        with self.lanes.lock:
            self.lanes.stop()
        for copier in (self.load, self.store):
            copier.full = False
            copier.let_land(1_000)
        assert self.lanes.join(SLACK_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(depth=2)
    yield bench
    bench.stop()


def test_sessions_take_turns_chunk_by_chunk(bench: Bench) -> None:
    one, two = session(1), session(2)
    bench.post(11, one, 3 * BLOCKS)
    bench.post(12, one, BLOCKS)
    bench.post(21, two, 2 * BLOCKS)
    bench.lanes.start()
    bench.load.let_land(6)
    until(lambda: len(bench.ends) == 3)
    assert bench.load.submitted == [(11, 0), (21, 0), (11, 4), (21, 4), (11, 8), (12, 0)]
    assert {end.outcome for end in bench.ends.values()} == {wire.DONE}


def test_turns_go_round_by_tenant_and_then_by_session(bench: Bench) -> None:
    """However many sessions a tenant has, another tenant's has every other turn."""
    bench.load.shared_chunk_bytes = bench.load.chunk_bytes
    crowd = [session(number, tenant=1) for number in (1, 2, 3)]
    victim = session(9, tenant=2)
    for one in crowd:
        bench.post(10 * one.number, one, 2 * BLOCKS)
    bench.post(60, victim, 3 * BLOCKS)
    bench.lanes.start()
    bench.load.let_land(9)
    until(lambda: len(bench.ends) == 4)
    assert [number for number, _ in bench.load.submitted] == [10, 60, 20, 60, 30, 60, 10, 20, 30]


def test_while_two_tenants_have_work_each_waits_for_a_small_chunk_of_the_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtierd.workers.copy.lanes.SHARED_S", 0.01)
    crowd, victim = session(1, tenant=1), session(2, tenant=2)
    bench.post(1, crowd, 2 * BLOCKS)
    bench.lanes.start()
    until(lambda: len(bench.load.submitted) == 2)  # large, as ever: nobody else is there
    bench.post(3, crowd, 3)
    bench.post(2, victim, 2)
    bench.load.let_land(8)
    until(lambda: len(bench.ends) == 3)
    assert bench.load.submitted[:5] == [(1, 0), (1, 4), (3, 0), (2, 0), (3, 1)]
    time.sleep(0.02)  # the victim is gone
    bench.post(4, crowd, BLOCKS)
    bench.load.let_land(1)
    until(lambda: 4 in bench.ends)
    assert bench.load.submitted[-1] == (4, 0)


def test_chunks_stay_small_between_two_loads_of_another_tenant(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next load will wait for the chunk that is under way then, and has one chunk itself."""
    monkeypatch.setattr("kvtierd.workers.copy.lanes.SHARED_S", 3600.0)
    crowd, victim = session(1, tenant=1), session(2, tenant=2)
    bench.post(1, crowd, BLOCKS)
    bench.lanes.start()
    until(lambda: bench.load.submitted)
    bench.post(2, victim, 1)
    bench.load.let_land(2)
    until(lambda: len(bench.ends) == 2)
    bench.post(3, crowd, 3)
    bench.load.let_land(3)
    until(lambda: 3 in bench.ends)
    assert bench.load.submitted == [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2)]


@pytest.mark.parametrize("others_tenant", [1, 2])
def test_a_store_waits_for_loads_of_its_own_session_and_not_for_those_of_others(
    bench: Bench, others_tenant: int
) -> None:
    bench.store.shared_chunk_bytes = bench.store.chunk_bytes
    loading, other = session(1, tenant=1), session(2, tenant=others_tenant)
    bench.post(1, loading, 50 * BLOCKS)
    bench.lanes.start()
    until(lambda: len(bench.load.flying) == 2)
    bench.post(11, loading, 4 * BLOCKS, is_load=False)
    bench.post(21, other, 4 * BLOCKS, is_load=False)
    bench.store.let_land(8)
    until(lambda: 21 in bench.ends)
    of_other = [index for index, (number, _) in enumerate(bench.store.submitted) if number == 21]
    assert of_other == [0, 1, 2, 3], "the loading session's own store waits for its loads"
    until(lambda: 11 in bench.ends)  # and only so long, even if the loads never end
    assert bench.load.landed == []
    bench.load.let_land(50)


def test_the_device_hears_of_steps_that_are_stored_and_of_no_others(bench: Bench) -> None:
    """Loads may start in a step that computes nothing."""
    one = session(1)
    assert one.words is not None
    bench.post(1, one, BLOCKS, doorbell=62)
    bench.post(2, one, BLOCKS, is_load=False)
    bench.post(3, one, BLOCKS, is_load=False, doorbell=63)
    bench.load.let_land(1)
    bench.store.let_land(2)
    bench.lanes.start()
    one.words.store(62, 1)
    until(lambda: {1, 2} <= set(bench.ends))
    assert bench.device.steps == 0
    one.words.store(63, 1)
    until(lambda: 3 in bench.ends)
    assert bench.device.steps == 1


def test_no_more_fly_than_the_device_wants_and_they_land_in_order(bench: Bench) -> None:
    bench.post(1, session(1), 4 * BLOCKS)
    bench.lanes.start()
    until(lambda: len(bench.load.submitted) == 2)
    bench.load.let_land(1)
    until(lambda: len(bench.load.submitted) == 3)
    assert bench.load.landed == [(1, 0)]
    assert bench.ends == {}
    bench.load.let_land(3)
    until(lambda: bench.ends)
    assert bench.load.landed == [(1, 0), (1, 4), (1, 8), (1, 12)]
    assert bench.ends[1].copied_bytes == 4 * BLOCKS * 10


def test_a_chunk_that_cannot_start_fails_its_part_when_nothing_of_it_flies(bench: Bench) -> None:
    bench.load.refuse_chunk_at = BLOCKS
    bench.post(1, session(1), 3 * BLOCKS)
    bench.post(2, session(2), BLOCKS)
    bench.lanes.start()
    until(lambda: (2, 0) in bench.load.submitted)
    bench.load.let_land(2)
    until(lambda: len(bench.ends) == 2)
    assert bench.ends[1].outcome == wire.FAILED
    assert "refused" in bench.ends[1].message
    assert bench.ends[2].outcome == wire.DONE
    assert bench.load.submitted == [(1, 0), (2, 0)]


def test_a_chunk_that_does_not_land_well_fails_its_part_and_what_flies_lands_first(bench: Bench) -> None:
    bench.load.lose_chunk_at = 0
    bench.post(1, session(1), 3 * BLOCKS)
    bench.lanes.start()
    until(lambda: len(bench.load.submitted) == 2)
    bench.load.let_land(2)
    until(lambda: bench.ends)
    assert "lost" in bench.ends[1].message
    assert bench.load.landed == [(1, 0), (1, 4)]
    assert bench.load.submitted == [(1, 0), (1, 4)]


def test_an_abandoned_part_lands_what_flies_and_fails(bench: Bench) -> None:
    part = bench.post(1, session(1), 5 * BLOCKS)
    bench.lanes.start()
    until(lambda: len(bench.load.submitted) == 2)
    bench.abandon(part)
    assert bench.ends == {}
    bench.load.let_land(2)
    until(lambda: bench.ends)
    assert bench.ends[1].outcome == wire.FAILED
    assert bench.ends[1].copied_bytes == 0
    assert len(bench.load.submitted) == len(bench.load.landed) == 2


def test_an_abandoned_part_does_not_wait_for_its_turn(bench: Bench) -> None:
    """A store that waits for loads, or for checksums, is ended at once."""
    part = bench.post(1, session(1), 2 * BLOCKS, is_load=False)
    bench.store.full = False
    bench.lanes.start()
    until(lambda: len(bench.store.submitted) == 2)
    other = bench.post(2, session(2), 3 * BLOCKS, is_load=False)
    bench.store.let_land(1)
    until(lambda: (2, 0) in bench.store.submitted)
    bench.store.full = True
    bench.store.let_land(2)
    until(lambda: 1 in bench.ends and not bench.store.flying)
    bench.abandon(part, other)
    until(lambda: 2 in bench.ends)
    assert bench.ends[2].outcome == wire.FAILED


def test_what_is_withdrawn_never_starts(bench: Bench) -> None:
    one = session(1)
    bench.post(1, one, 2 * BLOCKS)
    queued = bench.post(2, one, BLOCKS)
    other = bench.post(3, session(2), BLOCKS)
    bench.lanes.start()
    until(lambda: len(bench.load.submitted) == 2)  # parts 1 and 3
    assert bench.withdraw(lambda part: True) == [queued]
    assert queued.state is PartTaskState.OVER
    bench.load.let_land(3)
    until(lambda: len(bench.ends) == 2)
    assert set(bench.ends) == {1, other.number}


def test_a_part_that_may_not_start_is_ended_unstarted(bench: Bench) -> None:
    bench.startable = lambda part: part.number != 1 and part.session.try_start(part.word, part.ticket)
    one = session(1)
    for number, blocks in ((1, 3 * BLOCKS), (2, BLOCKS), (3, 0)):
        bench.post(number, one, blocks)
    bench.lanes.start()
    bench.load.let_land(1)
    until(lambda: len(bench.ends) == 2)
    assert bench.unstarted == [1]
    assert bench.load.submitted == [(2, 0)]
    assert bench.ends[3].outcome == wire.DONE
    until(lambda: not bench.lanes.busy)


def test_what_takes_a_while_comes_before_the_start(bench: Bench) -> None:
    """So that a client can still revoke a part that waits for it."""
    bench.load.steps_left = 3
    bench.post(1, session(1), BLOCKS)
    bench.lanes.start()
    bench.load.let_land(1)
    until(lambda: bench.ends)
    assert bench.load.prepared == [False] * 3


def test_a_store_that_its_client_withdraws_reads_no_further_chunk(bench: Bench) -> None:
    part = bench.post(1, session(1), 5 * BLOCKS, is_load=False)
    bench.lanes.start()
    until(lambda: len(bench.store.submitted) == 2)
    assert part.session.words is not None
    assert part.session.words.compare_exchange(1, 1 << 8 | PART_STARTED, 1 << 8 | PART_REVOKED)
    bench.store.let_land(2)
    until(lambda: bench.ends)
    assert len(bench.store.submitted) == len(bench.store.landed) == 2
    assert bench.ends[1].outcome == wire.FAILED


def test_a_full_copier_gets_nothing_until_it_has_room(bench: Bench) -> None:
    bench.store.full = True
    bench.post(1, session(1), BLOCKS, is_load=False)
    bench.lanes.start()
    bench.post(2, session(1), BLOCKS)
    bench.load.let_land(1)
    until(lambda: 2 in bench.ends)
    assert bench.store.submitted == []
    bench.store.full = False
    bench.lanes.wake()
    bench.store.let_land(1)
    until(lambda: 1 in bench.ends)


def test_stores_let_loads_go_first_but_not_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtierd.workers.copy.lanes.STORE_YIELD_S_MAX", 3600.0)
    one = session(1)
    bench.post(1, one, BLOCKS)
    bench.post(2, one, BLOCKS, is_load=False)
    bench.lanes.start()
    until(lambda: bench.load.submitted)
    assert bench.store.submitted == []
    bench.load.let_land(1)
    until(lambda: bench.store.submitted)
    bench.store.let_land(1)
    until(lambda: 2 in bench.ends)
    monkeypatch.setattr("kvtierd.workers.copy.lanes.STORE_YIELD_S_MAX", 0.001)
    bench.post(3, one, BLOCKS)
    until(lambda: len(bench.load.submitted) == 2)
    bench.post(4, one, BLOCKS, is_load=False)
    until(lambda: len(bench.store.submitted) == 2)
    assert 3 not in bench.ends


def test_a_status_word_counts_from_the_oldest_flight(bench: Bench) -> None:
    bench.post(1, session(1), 3 * BLOCKS)
    bench.lanes.start()
    until(lambda: len(bench.load.submitted) == 2)
    first = bench.word(StatusWord.LOAD_LANE)
    assert first > 0
    bench.load.let_land(1)
    until(lambda: len(bench.load.submitted) == 3)
    assert bench.word(StatusWord.LOAD_LANE) > first
    assert bench.word(StatusWord.STORE_LANE) == 0
    bench.load.let_land(2)
    until(lambda: bench.ends)
    assert bench.word(StatusWord.LOAD_LANE) == 0


def test_stopped_lanes_finish_what_has_started(bench: Bench) -> None:
    part = bench.post(1, session(1), 3 * BLOCKS)
    bench.lanes.start()
    until(lambda: len(bench.load.submitted) == 2)
    assert bench.withdraw(lambda _: True) == []
    bench.stop()
    assert bench.ends[part.number].outcome == wire.DONE
    assert len(bench.load.landed) == 3
