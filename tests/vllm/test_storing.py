"""The scheduler's account of stores, with a client that only numbers them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvtier import Client, Outcome, PartRef, StoreResult, TransferState
from kvtier_vllm.groups import Groups, GroupShape
from kvtier_vllm.scheduler.holding import BlockHolds
from kvtier_vllm.scheduler.storing import (
    FAILURES_MAX,
    PAUSE_MAX_S,
    PAUSE_MIN_S,
    PENDING_S,
    Storer,
    StoreState,
)

pytestmark = pytest.mark.vllm

ACTIVE = Outcome(TransferState.ACTIVE, fenced=False)
LOST = Outcome(TransferState.FAILED, fenced=False)
ACCEPTED, EXISTS, PENDING, THROTTLED, UNWANTED = StoreResult


class Numbering:
    """A client, whose transfers end when the test says so. Its tickets begin with 1, as each client's do."""

    transfer_blocks_max = 0

    def __init__(self) -> None:
        self.transfers: list[SimpleNamespace] = []
        self.stored: list[list[int]] = []
        """The blocks of each store."""
        self.chains: list[list[tuple[int, bytes]]] = []
        """How those of each belong together."""

    def known_run(self, hashes: Sequence[bytes], first: int, end: int, **options: Any) -> int:
        """Nothing is evicted."""
        return end - first

    def end(self, *results: StoreResult) -> None:
        """Ends the last store with these results."""
        succeeded = bytes(one in (ACCEPTED, EXISTS) for one in results)
        state = TransferState.DONE if all(succeeded) else TransferState.FAILED
        last = self.transfers[-1]
        last.outcome, last.results = Outcome(state, fenced=True, succeeded=succeeded), results

    def store(self, hashes: Sequence[bytes], block_ids: Sequence[int], **options: Any) -> SimpleNamespace:
        self.stored.append(list(block_ids))
        self.chains.append([(chain.blocks, chain.previous[:1]) for chain in options["chains"]])
        ticket = len(self.transfers) + 1
        made = SimpleNamespace(part=PartRef(1, ticket, ticket - 1, "store"), outcome=ACTIVE, results=None)
        self.transfers.append(made)
        return made


class Pool:
    """vLLM's blocks, of which the test sees how many use each."""

    def __init__(self, blocks: int) -> None:
        self.blocks: Sequence[Any] = [SimpleNamespace(ref_cnt=0) for _ in range(blocks)]

    def touch(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1

    def get_num_free_blocks(self) -> int:
        return sum(block.ref_cnt == 0 for block in self.blocks)


def test_stores_of_two_clients_are_told_apart_though_their_tickets_are_the_same() -> None:
    """After a change of weights the scheduler has another client, and what the one before had begun may not
    have ended: both requests' blocks stay as they are, each until its own store is over."""
    pool = Pool(8)
    storer = Storer(Groups.one(16), BlockHolds(pool, 60.0, lambda: 0.0), lambda: 0.0)

    def over(client: Numbering, block: int, step: int) -> StoreState:
        request = storer.new_state(SimpleNamespace())
        storer.plan(cast(Client, client), "r", request, [bytes([block]) * 32], [block])
        assert len(storer.submit(cast(Client, client), step)) == 1
        assert storer.keep(request)
        return request

    before, after = Numbering(), Numbering()
    over(before, 5, 1)
    before.transfers[0].outcome = LOST  # it was closed
    storer.poll()
    over(after, 6, 2)
    assert before.transfers[0].part == after.transfers[0].part
    assert [pool.blocks[block].ref_cnt for block in (5, 6)] == [1, 1]
    for step in (3, 4):
        storer.overdue(step)
    assert [pool.blocks[block].ref_cnt for block in (5, 6)] == [0, 1]
    after.transfers[0].outcome = Outcome(TransferState.DONE, fenced=True, succeeded=b"\1")
    storer.poll()
    assert [pool.blocks[block].ref_cnt for block in (5, 6)] == [0, 0]


class Clock:
    """The time, which the test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Running:
    """A request of blocks 1, 2, ... that runs, and its storer."""

    def __init__(self, blocks: int, groups: Groups | None = None, pool: Pool | None = None) -> None:
        self.clock, self.client = Clock(), Numbering()
        holds = None if pool is None else BlockHolds(pool, 60.0, self.clock)
        self.storer = Storer(groups or Groups.one(16), holds, self.clock)
        self.request = self.storer.new_state(SimpleNamespace())
        self.blocks = list(range(1, blocks + 1))

    def step(self) -> list[list[int]]:
        """Does what a step does; returns the blocks of the stores that it submits."""
        client, before = cast(Client, self.client), len(self.client.stored)
        if self.storer.busy:
            self.storer.poll()
        if self.storer.has_room and len(self.blocks) > self.request.next_block[0]:
            hashes = [bytes([block]) * 32 for block in range(1, len(self.blocks) + 1)]
            self.storer.plan(client, "r", self.request, hashes, self.blocks)
        self.storer.submit(client, 1)
        return self.client.stored[before:]


def test_what_a_full_pool_refused_is_stored_a_moment_later() -> None:
    run = Running(4)
    assert run.step() == [[1, 2, 3, 4]]
    run.client.end(ACCEPTED, ACCEPTED, THROTTLED, THROTTLED)
    assert run.step() == []
    run.clock.now_s += PAUSE_MIN_S
    assert run.step() == [[3, 4]]


def test_who_is_refused_again_and_again_asks_ever_less_often() -> None:
    run = Running(1)
    waited = []
    for _ in range(FAILURES_MAX):
        assert run.step() == [[1]]
        run.client.end(THROTTLED)
        since_s = run.clock.now_s
        run.step()
        while not run.storer.has_room:
            run.clock.now_s += PAUSE_MIN_S / 2
        waited.append(run.clock.now_s - since_s)
    assert waited == sorted(waited)
    assert waited[0] == pytest.approx(PAUSE_MIN_S, rel=0.6)
    assert waited[-1] == pytest.approx(PAUSE_MAX_S, rel=0.1)
    assert run.step() == [[1]]
    run.client.end(ACCEPTED)
    assert run.step() == []
    run.blocks.append(2)
    assert run.step() == [[2]]
    run.client.end(THROTTLED)
    run.step()
    run.clock.now_s += PAUSE_MIN_S
    assert run.storer.has_room, "what was stored has shown that there is room"


def test_what_is_not_worth_its_room_is_not_offered_again() -> None:
    run = Running(4)
    assert run.step() == [[1, 2, 3, 4]]
    run.client.end(ACCEPTED, ACCEPTED, UNWANTED, UNWANTED)
    run.clock.now_s += PAUSE_MAX_S
    assert run.step() == []
    assert run.storer.has_room, "others may be worth theirs"
    assert run.request.failures == 0
    run.blocks.append(5)
    assert run.step() == [[5]], "the daemon says so again, for next to nothing"


def test_a_store_says_which_blocks_follow_each_other() -> None:
    run = Running(4)
    run.step()
    run.client.end(ACCEPTED, EXISTS, ACCEPTED, ACCEPTED)
    run.step()
    run.blocks += [5, 6]
    run.storer.loaded(run.request.request, 0, [6], [bytes([7]) * 32])
    run.blocks += [7, 8]
    run.step()
    assert run.client.chains == [[(4, b"")], [(2, b"\4"), (1, b"\7")]]


def test_a_block_that_another_store_was_writing_is_asked_for_again_because_that_one_may_have_failed() -> None:
    run = Running(3)
    assert run.step() == [[1, 2, 3]]
    run.client.end(EXISTS, PENDING, ACCEPTED)
    assert run.step() == []
    assert run.storer.has_room, "that is no refusal"
    run.blocks.append(4)
    assert run.step() == [[4]], "the next blocks do not wait for it"
    run.client.end(ACCEPTED)
    run.clock.now_s += PENDING_S
    assert run.step() == [[2]]
    run.client.end(EXISTS)
    run.clock.now_s += PENDING_S
    assert run.step() == []
    assert not run.storer.busy
    assert run.request.failures == 0


WINDOW = Groups((GroupShape(0, 16, window_tokens=32, window_blocks=2),), 16)


def test_a_store_whose_block_is_given_away_is_repeated_once_it_has_ended() -> None:
    """Before that the daemon would say of its blocks that they are being stored."""
    run = Running(3, WINDOW)
    assert run.step() == [[1, 2, 3]]
    assert len(run.storer.withdraw([1])) == 1
    run.blocks[0] = 0
    assert run.step() == []
    run.client.end(THROTTLED, THROTTLED, THROTTLED)
    assert run.step() == [[2, 3]]
    assert run.request.failures == 0
    assert run.storer.has_room


@pytest.mark.parametrize(("free", "held"), [(25, True), (24, False)])
def test_blocks_that_leave_a_window_are_held_while_there_are_enough_others(free: int, held: bool) -> None:
    pool = Pool(100)
    pool.touch(pool.blocks[free:])
    run = Running(3, WINDOW, pool)
    run.step()
    assert [block.ref_cnt for block in pool.blocks[1:4]] == [int(held)] * 3
    assert run.storer.watches is not held
    run.client.end(ACCEPTED, ACCEPTED, ACCEPTED)
    run.step()
    assert [block.ref_cnt for block in pool.blocks[1:4]] == [0] * 3


def test_a_preempted_request_loses_no_store_that_holds_its_blocks() -> None:
    run = Running(3, WINDOW, Pool(100))
    run.step()
    assert run.storer.forget_open(run.request) == []
    run.client.end(ACCEPTED, ACCEPTED, ACCEPTED)
    assert run.step() == [], "it is known to be stored when the request comes back"
    assert run.storer.counters.withdrawn == 0
