"""The asyncio client. It has the same calls as `kvtier.Client`, and the same threads behind them; the calls
that wait are coroutines.

A client belongs to the event loop that runs when it is made, and ends with it. The session is kept by
threads, so it loses nothing while the loop is blocked.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from kvtier.base import CLOSE_TIMEOUT_S, ClientBase
from kvtier.calls import LookupCallBase, TransferBase, Waiting
from kvtier.lookups import Lookup
from kvtier.transfers import Outcome

_Result = TypeVar("_Result")


class _AwaitableEvent(threading.Event):
    """An event that any thread may set, and that tasks of any loop may wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[asyncio.Future[None]] = []

    def set(self) -> None:
        super().set()  # first, so that a task that begins to wait now sees it
        for future in self._waiting[:]:
            try:
                future.get_loop().call_soon_threadsafe(_settle, future)
            except RuntimeError:
                pass  # that loop is closed, so nobody waits there any more

    async def wait_in_task(self, timeout_s: float) -> None:
        """Waits until it is set, or until `timeout_s` has passed."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            if not self.is_set():
                await asyncio.wait([future], timeout=timeout_s)
        finally:
            self._waiting.remove(future)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _wait_for(waiting: Waiting[_Result]) -> _Result:
    """Waits in the pauses that the generator asks for, while other tasks run. Returns its result."""
    while True:
        try:
            event, seconds = next(waiting)
        except StopIteration as over:
            result: _Result = over.value
            return result
        if isinstance(event, _AwaitableEvent):
            await event.wait_in_task(seconds)
        else:
            await asyncio.sleep(seconds)


class LookupCall(LookupCallBase):
    """A lookup that was sent, and whose answer may still be on its way."""

    async def wait(self, timeout_s: float) -> Lookup:
        """Returns the answer, or a miss if it has not come in `timeout_s`, and then abandons the lookup.

        If the task is cancelled while it waits, the lookup is abandoned too, and its lease is released.
        """
        try:
            return await _wait_for(self._wait(timeout_s)) or self.abandon()
        except asyncio.CancelledError:
            self.abandon().release()
            raise

    async def wait_for_answer(self, timeout_s: float) -> Lookup | None:
        """Returns the answer, or None if it has not come in `timeout_s`. The lookup is not abandoned."""
        return await _wait_for(self._wait(timeout_s))


class Transfer(TransferBase):
    """A submitted store or load."""

    async def wait(self, timeout_s: float) -> Outcome:
        """Waits until the outcome is known, at most `timeout_s` seconds, and returns it as it is then.

        If `outcome.fenced` is False, a copy may still land: wait again, or `revoke`. Cancelling the task that
        waits does not cancel the transfer.
        """
        return await _wait_for(self._wait(timeout_s))


class Client(ClientBase[LookupCall, Transfer, Coroutine[Any, Any, Lookup], Coroutine[Any, Any, bool]]):
    """An asyncio client of kvtierd. Make it inside a running loop, and close it, or use it with `async with`.

    It connects in the background from the moment it is made, and again each time that the daemon has gone
    away. Calls that do not wait are plain methods.
    """

    _call_type = LookupCall
    _transfer_type = Transfer
    _event_type = _AwaitableEvent

    def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._until_the_end = self._loop.create_task(self._end_with_loop(), name="kvtier-end")

    async def _wait(self, waiting: Waiting[bool]) -> bool:
        return await _wait_for(waiting)

    async def _answer(self, start: Callable[[], LookupCall], timeout_s: float) -> Lookup:
        return await start().wait(timeout_s)

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        self._until_the_end.cancel()
        return await super().close(timeout_s)

    async def _end_with_loop(self) -> None:
        """Ends the session when the loop ends: `asyncio.run` then cancels this task."""
        try:
            await asyncio.Event().wait()
        finally:
            await _wait_for(self._closed(CLOSE_TIMEOUT_S))

    def _hand_over(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            pass  # the loop is closed, and with it the client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
