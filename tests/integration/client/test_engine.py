"""An engine of three clients, as its connector uses them: one scheduler that submits, two ranks that hold the
memory."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections.abc import Callable, Iterator

import pytest
from kvtier import (
    Client,
    ClientState,
    Doorbell,
    KvtierError,
    Namespace,
    PartRef,
    PartState,
    Reason,
    Role,
    TransferState,
)

from tests.support.daemon import DaemonHost, until
from tests.support.plain_client import BLOCK_BYTES, READY_S, TRANSFER_S, Cache, block_hashes

HASHES = block_hashes("prompt", range(10))
BLOCKS = range(10)
PARTS = 4


class Engine:
    """All three in this process; the references travel between them as bytes."""

    def __init__(
        self, host: DaemonHost, name: str, namespace: Namespace, *, replicated: bool = False
    ) -> None:
        """`replicated`: both ranks hold the same bytes."""
        self._host, self._name, self._namespace = host, name, namespace
        self._replicated = replicated
        self.caches = [Cache(), Cache()]
        self.scheduler = self._client(role=Role.SCHEDULER)
        self.ranks = [self.rank(number) for number in range(2)]

    def _client(self, **options: object) -> Client:
        return Client(
            instance=self._name,
            namespace=self._namespace,
            socket=self._host.socket,
            world_size=2,
            parts=PARTS,
            **options,  # type: ignore[arg-type]
        )

    def rank(self, number: int) -> Client:
        cache = self.caches[number]
        group = dataclasses.replace(cache.group, replicated=self._replicated)
        return self._client(role=Role.RANK, rank=number, groups=[group], memory=cache.memory)

    def ready(self) -> Engine:
        for client in (self.scheduler, *self.ranks):
            assert client.wait_ready(READY_S), client.status
        return self

    def _content(self, number: int, value: bytes) -> bytes:
        """Every rank has bytes of its own, or all have the same."""
        return bytes([0 if self._replicated else number]) + value[1:]

    def fill(self) -> None:
        for number, cache in enumerate(self.caches):
            for block, value in enumerate(HASHES):
                cache.fill(block, self._content(number, value))

    def check(self) -> None:
        for number, cache in enumerate(self.caches):
            for block, value in enumerate(HASHES):
                assert cache.right(block, self._content(number, value)), (number, block)

    def ring(self, step: int) -> None:
        for rank in self.ranks:
            rank.ring(0, step)

    def states(self, part: PartRef) -> list[PartState]:
        sent = pickle.loads(pickle.dumps(part))  # noqa: S301
        return [rank.part_state(sent) for rank in self.ranks]

    def close(self) -> None:
        for client in (self.scheduler, *self.ranks):
            client.close()
        for cache in self.caches:
            cache.close()


@pytest.fixture
def start(shared_host: DaemonHost, namespace: Namespace) -> Iterator[Callable[[str], Engine]]:
    made: list[Engine] = []

    def make(name: str = "engine", host: DaemonHost = shared_host, *, replicated: bool = False) -> Engine:
        made.append(Engine(host, f"{namespace.tenant}/{name}", namespace, replicated=replicated))
        return made[-1].ready()

    yield make
    for engine in made:
        engine.close()


def store(engine: Engine, step: int = 1) -> None:
    engine.fill()
    transfer = engine.scheduler.store(HASHES, BLOCKS, doorbell=Doorbell(0, step))
    assert transfer.part is not None
    assert not any(state.over for state in engine.states(transfer.part))
    engine.ring(step)
    assert transfer.wait(TRANSFER_S).done
    assert engine.states(transfer.part) == [PartState.DONE, PartState.DONE]


def test_a_step_stores_every_ranks_shard_and_another_engine_loads_them(start: Callable[..., Engine]) -> None:
    first, second = start("first"), start("second")
    store(first)
    with second.scheduler.lookup(HASHES, lease=True, timeout_s=READY_S) as hit:
        assert hit.hits == 10
        transfer = second.scheduler.load(hit, BLOCKS, doorbell=Doorbell(0, 41))
    assert transfer.part is not None
    part = transfer.part
    second.ring(41)
    until(lambda: all(state.over for state in second.states(part)), "both parts have landed")
    assert second.states(part) == [PartState.DONE, PartState.DONE]
    second.check()
    assert transfer.wait(TRANSFER_S).done


def test_what_all_ranks_hold_is_stored_once_and_survives_as_that(
    start: Callable[..., Engine], host: DaemonHost
) -> None:
    first, second = (start(name, host, replicated=True) for name in ("first", "second"))
    store(first)
    assert host.status().counters.stored_bytes == 10 * BLOCK_BYTES, "and not once for each rank"
    host.kill9()
    until(lambda: not second.scheduler.ready, "its scheduler has noticed")
    host.start()
    second.ready()
    with second.scheduler.lookup(HASHES, lease=True, timeout_s=READY_S) as hit:
        assert hit.hits == 10
        assert second.scheduler.load(hit, BLOCKS).wait(TRANSFER_S).done
    second.check()


def test_what_all_ranks_hold_comes_from_each_of_them_in_turn(start: Callable[..., Engine]) -> None:
    """So it must be right whoever stored it; and a rank that has nothing to store cannot spoil it."""
    engine = start(replicated=True)
    for step, value in enumerate(HASHES, 1):
        engine.fill()
        transfer = engine.scheduler.store([value], [step - 1], doorbell=Doorbell(0, step))
        engine.ring(step)
        assert transfer.wait(TRANSFER_S).done
    with engine.scheduler.lookup(HASHES, lease=True, timeout_s=READY_S) as hit:
        assert hit.hits == 10
        for cache in engine.caches:
            cache.wipe()
        assert engine.scheduler.load(hit, BLOCKS).wait(TRANSFER_S).done
    engine.check()
    kept = 0
    for number in range(4):
        late = block_hashes(f"late {number}", range(3))
        transfer = engine.scheduler.store(late, range(3), doorbell=Doorbell(1, number + 1))
        assert transfer.part is not None
        assert engine.ranks[1].revoke(transfer.part) is PartState.REVOKED
        for rank in engine.ranks:
            rank.ring(1, number + 1)
        outcome = transfer.wait(TRANSFER_S)
        assert outcome.state is not TransferState.DONE
        hits = engine.scheduler.lookup(late, timeout_s=TRANSFER_S).hits
        assert outcome.succeeded == bytes([hits == 3]) * 3
        kept += hits
    assert kept == 6, "those of the rank that did not revoke"


def test_a_rank_knows_its_part_before_the_daemon_has_answered(start: Callable[..., Engine]) -> None:
    engine = start()
    transfer = engine.scheduler.store(HASHES, BLOCKS, doorbell=Doorbell(0, 1))
    assert transfer.part is not None
    assert engine.states(transfer.part) == [PartState.ARMED, PartState.ARMED]


def test_one_rank_that_revokes_keeps_the_block_out_of_the_cache(start: Callable[..., Engine]) -> None:
    engine = start()
    transfer = engine.scheduler.store(HASHES, BLOCKS, doorbell=Doorbell(0, 1))
    assert transfer.part is not None
    assert engine.ranks[1].revoke(transfer.part) is PartState.REVOKED
    engine.ring(1)
    outcome = transfer.wait(TRANSFER_S)
    assert outcome.state is not TransferState.DONE
    assert outcome.fenced
    assert engine.scheduler.lookup(HASHES, timeout_s=TRANSFER_S).hits == 0


def test_words_in_use_bound_what_is_in_flight_and_come_back(start: Callable[..., Engine]) -> None:
    engine = start()
    waiting = [
        engine.scheduler.store(block_hashes("w", [number]), [number], doorbell=Doorbell(0, 1))
        for number in range(PARTS)
    ]
    refused = engine.scheduler.store(block_hashes("w", [99]), [9], doorbell=Doorbell(0, 1))
    assert refused.part is None
    assert refused.outcome.throttled
    engine.ring(1)
    assert all(transfer.wait(TRANSFER_S).done for transfer in waiting)
    for step in range(2, 30):
        store(engine, step)


def test_a_rank_does_not_submit_and_a_scheduler_holds_no_words(start: Callable[..., Engine]) -> None:
    engine = start()
    for call in (lambda: engine.ranks[0].lookup(HASHES), lambda: engine.ranks[0].store(HASHES, BLOCKS)):
        with pytest.raises(KvtierError) as raised:
            call()
        assert raised.value.reason is Reason.ROLE
    transfer = engine.scheduler.store(HASHES, BLOCKS, doorbell=Doorbell(0, 1))
    assert not transfer.revoke(), "only ranks can"


def test_the_death_of_one_rank_ends_the_epoch_and_the_engine_comes_back_without_it_being_told(
    start: Callable[..., Engine],
) -> None:
    engine = start()
    store(engine)
    old = engine.scheduler.epoch
    transfer = engine.scheduler.store(block_hashes("late", BLOCKS), BLOCKS, doorbell=Doorbell(0, 9))
    assert transfer.part is not None
    until(lambda: transfer.results is not None, "it was accepted")
    engine.ranks[1].close()
    outcome = transfer.wait(TRANSFER_S)
    assert outcome.state in (TransferState.FAILED, TransferState.CANCELLED)
    until(lambda: engine.ranks[0].epoch not in (None, old), "the other rank has attached again")
    until(lambda: engine.scheduler.status.state is not ClientState.READY, "so has the scheduler")
    assert engine.ranks[0].part_state(transfer.part).over
    assert engine.ranks[0].revoke(transfer.part).over
    engine.ranks[1] = engine.rank(1)
    engine.ready()
    assert engine.ranks[1].part_state(transfer.part) is PartState.LOST
    with engine.scheduler.lookup(HASHES, lease=True, timeout_s=READY_S) as hit:
        for cache in engine.caches:
            cache.wipe()
        assert engine.scheduler.load(hit, BLOCKS).wait(TRANSFER_S).done
    engine.check()


def test_a_scheduler_pipelines_its_lookups(start: Callable[..., Engine]) -> None:
    engine = start()
    store(engine)
    calls = [engine.scheduler.start_lookup(HASHES[: 1 + number % 10], lease=True) for number in range(64)]
    for number, call in enumerate(calls):
        with call.wait(READY_S) as hit:
            assert hit.hits == 1 + number % 10
    until(lambda: engine.scheduler.status.leases == 0, "every lease is released")


def test_ranks_ring_while_others_ask(start: Callable[..., Engine]) -> None:
    """The rank's calls and the background threads share a lock; nothing deadlocks and no step is lost."""
    engine = start()
    stop = threading.Event()

    def ring() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            engine.ring(step)

    ringing = threading.Thread(target=ring)
    ringing.start()
    try:
        for number in range(20):
            hashes = block_hashes(f"r{number}", BLOCKS)
            transfer = engine.scheduler.store(hashes, BLOCKS, doorbell=Doorbell(0, number + 1))
            assert transfer.wait(TRANSFER_S).done
    finally:
        stop.set()
        ringing.join(60)
