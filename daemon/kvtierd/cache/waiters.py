"""Callers that wait until transfers have ended. Their number is bounded, and every wait has a deadline."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtierd.core.actions import TransferEnded
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Epoch, Ticket

WAITS_PER_EPOCH_MAX = 64


@dataclass(eq=False, slots=True)
class _Wait:
    open: set[Ticket]
    over: asyncio.Future[None]


class Waiters:
    """Who waits for which transfers, by epoch."""

    def __init__(self) -> None:
        self._waits: dict[Epoch, list[_Wait]] = {}

    async def wait(
        self,
        epoch: Epoch,
        tickets: Sequence[Ticket],
        timeout_s: float,
        ask: Callable[[Ticket], TransferEnded | None],
    ) -> list[TransferEnded | None]:
        """How each transfer ended; None for those that did not end within `timeout_s`.

        `ask` says how a transfer ended, and returns None while it is active. Raises what `ask` raises,
        Refusal QUEUE_FULL if this epoch has too many waits, and EPOCH_ENDED if the epoch ends meanwhile.
        """
        answers = [ask(ticket) for ticket in tickets]
        still = {ticket for ticket, answer in zip(tickets, answers, strict=True) if answer is None}
        if not still or timeout_s <= 0:
            return answers
        waits = self._waits.setdefault(epoch, [])
        if len(waits) >= WAITS_PER_EPOCH_MAX:
            raise Refusal(
                Reason.QUEUE_FULL,
                f"{WAITS_PER_EPOCH_MAX} waits at once: name more tickets in one",
            )
        wait = _Wait(still, asyncio.get_running_loop().create_future())
        waits.append(wait)
        try:
            async with asyncio.timeout(timeout_s):
                await wait.over
        except TimeoutError:
            pass  # the answer says which of them are still active
        finally:
            waits.remove(wait)
            if not waits and self._waits.get(epoch) is waits:
                del self._waits[epoch]
        return [ask(ticket) for ticket in tickets]

    def transfer_ended(self, epoch: Epoch, ticket: Ticket) -> None:
        for wait in self._waits.get(epoch, ()):
            wait.open.discard(ticket)
            if not wait.open and not wait.over.done():
                wait.over.set_result(None)

    def epoch_ended(self, epoch: Epoch, why: Refusal) -> None:
        for wait in self._waits.pop(epoch, ()):
            if not wait.over.done():
                wait.over.set_exception(why)
