"""Waiting for transfers: as long as it takes, no longer than asked, and never for what has ended."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from kvtierd.cache.waiters import WAITS_PER_EPOCH_MAX, Waiters
from kvtierd.core.actions import TransferEnd, TransferEnded
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Epoch, Ticket, TransferNumber

EPOCH, OTHER = Epoch(1), Epoch(2)
LONG_S = 60.0

Waiting = asyncio.Task[list[TransferEnded | None]]
StartWait = Callable[..., Waiting]


def ended(ticket: int) -> TransferEnded:
    return TransferEnded(
        TransferNumber(ticket), Ticket(ticket), TransferEnd.DONE, np.zeros(0, np.uint8), None
    )


class Transfers:
    """What the core would say."""

    def __init__(self, waiters: Waiters) -> None:
        self.over: dict[Ticket, TransferEnded] = {}
        self._waiters = waiters

    def ask(self, ticket: Ticket) -> TransferEnded | None:
        return self.over.get(ticket)

    def end(self, ticket: int, epoch: Epoch = EPOCH) -> None:
        self.over[Ticket(ticket)] = ended(ticket)
        self._waiters.transfer_ended(epoch, Ticket(ticket))


@pytest.fixture
def waiters() -> Waiters:
    return Waiters()


@pytest.fixture
def transfers(waiters: Waiters) -> Transfers:
    return Transfers(waiters)


@pytest.fixture
async def wait(waiters: Waiters, transfers: Transfers) -> StartWait:
    def start(*tickets: int, timeout_s: float = LONG_S) -> Waiting:
        named = [Ticket(ticket) for ticket in tickets]
        return asyncio.create_task(waiters.wait(EPOCH, named, timeout_s, transfers.ask))

    return start


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_it_ends_with_the_last_transfer_and_answers_in_order(
    wait: StartWait, transfers: Transfers
) -> None:
    waiting = wait(3, 1, 2)
    await settle()
    for ticket in (1, 3):
        transfers.end(ticket)
        await settle()
        assert not waiting.done()
    transfers.end(2)
    found = await asyncio.wait_for(waiting, LONG_S)
    assert [event and event.ticket for event in found] == [3, 1, 2]


async def test_what_is_over_already_is_not_waited_for(wait: StartWait, transfers: Transfers) -> None:
    transfers.end(1)
    assert [event and event.ticket for event in await asyncio.wait_for(wait(1), LONG_S)] == [1]
    assert await asyncio.wait_for(wait(), LONG_S) == []


async def test_the_deadline_is_an_answer(wait: StartWait, transfers: Transfers) -> None:
    transfers.end(1)
    found = await asyncio.wait_for(wait(1, 2, timeout_s=0.01), LONG_S)
    assert found[0] is not None
    assert found[1] is None
    assert (await asyncio.wait_for(wait(2, timeout_s=0), LONG_S)) == [None]


async def test_a_ticket_of_another_epoch_is_another_transfer(wait: StartWait, transfers: Transfers) -> None:
    waiting = wait(1)
    await settle()
    transfers.end(1, OTHER)
    await settle()
    assert not waiting.done()
    transfers.end(1)
    await asyncio.wait_for(waiting, LONG_S)


async def test_the_end_of_the_epoch_ends_every_wait(wait: StartWait, waiters: Waiters) -> None:
    waits = [wait(1), wait(2, 3)]
    await settle()
    waiters.epoch_ended(EPOCH, Refusal(Reason.EPOCH_ENDED, "over"))
    for waiting in waits:
        with pytest.raises(Refusal, match="over"):
            await asyncio.wait_for(waiting, LONG_S)


async def test_waits_are_bounded_and_given_back(wait: StartWait, transfers: Transfers) -> None:
    waits = [wait(1) for _ in range(WAITS_PER_EPOCH_MAX)]
    await settle()
    with pytest.raises(Refusal) as refusal:
        await wait(1)
    assert refusal.value.reason is Reason.QUEUE_FULL
    waits[0].cancel()
    await settle()
    another = wait(1)
    await settle()
    assert not another.done()
    transfers.end(1)
    await asyncio.wait_for(another, LONG_S)
