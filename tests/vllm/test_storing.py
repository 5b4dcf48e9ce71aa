"""The scheduler's account of stores, with a client that only numbers them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvtier import Client, Outcome, PartRef, TransferState
from kvtier_vllm.groups import Groups
from kvtier_vllm.scheduler.holding import BlockHolds
from kvtier_vllm.scheduler.storing import Storer, StoreState

pytestmark = pytest.mark.vllm

ACTIVE = Outcome(TransferState.ACTIVE, fenced=False)
LOST = Outcome(TransferState.FAILED, fenced=False)


class Numbering:
    """A client, whose transfers end when the test says so. Its tickets begin with 1, as each client's do."""

    transfer_blocks_max = 0

    def __init__(self) -> None:
        self.transfers: list[SimpleNamespace] = []

    def store(self, hashes: Sequence[bytes], block_ids: Sequence[int], **options: Any) -> SimpleNamespace:
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
