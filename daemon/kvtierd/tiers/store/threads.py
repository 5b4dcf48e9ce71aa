"""Threads for calls of a library that blocks."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from kvtierd.tiers.store.objects import StoreError, StoreTrouble

Result = TypeVar("Result")
SHORTEST_WAIT_S: Final = 0.001


class BlockingCall:
    """One call that a thread makes. Its steps ask it whether anybody still waits for it."""

    def __init__(self, name: str, deadline_s: float) -> None:
        self.name = name
        self._give_up_s = time.monotonic() + deadline_s
        self._given_up = threading.Event()

    @property
    def left_s(self) -> float:
        """How long it may still take, and always a little."""
        return max(SHORTEST_WAIT_S, self._give_up_s - time.monotonic())

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        self._given_up.set()

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for it any more, so that it should begin nothing else."""
        return self._given_up.is_set() or time.monotonic() >= self._give_up_s

    def go_on(self) -> None:
        """Raises StoreError LATE if nobody waits for it any more."""
        if self.given_up:
            raise StoreError(StoreTrouble.LATE, f"{self.name}: no answer in time")


class CallingThreads:
    """A bounded number of threads for calls that block.

    Whoever waits for a call stops waiting at its deadline, or when he is cancelled. The call itself cannot be
    stopped: it keeps its thread until it returns. The end of the process waits for none of them.
    """

    def __init__(self, threads_max: int, deadline_s: float) -> None:
        self._threads_max = threads_max
        self._deadline_s = deadline_s
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._unfinished = 0

    async def run(self, name: str, call: Callable[[BlockingCall], Result]) -> Result:
        """What `call` returns or raises, in a thread. Raises StoreError LATE at the deadline."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()
        made = BlockingCall(name, self._deadline_s)

        def tell(result: Any, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        def work() -> None:
            if made.given_up:
                return
            result: Any = None
            failed: BaseException | None = None
            try:
                result = call(made)
            except BaseException as error:
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(tell, result, failed)

        self._put(work)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await answer
        except TimeoutError:
            raise StoreError(StoreTrouble.LATE, f"{name}: no answer in time") from None
        finally:
            made.give_up()

    def end(self) -> None:
        """Ends the threads that wait for work. None may be given to them any more."""
        with self._lock:
            for _ in range(self._threads):
                self._queue.put(None)

    def _put(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._unfinished += 1
            if self._unfinished > self._threads and self._threads < self._threads_max:
                self._threads += 1
                # A daemon thread, because the end of the interpreter would wait for any other.
                threading.Thread(target=self._serve, name="store-call", daemon=True).start()
        self._queue.put(work)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # an idle thread keeps no bytes
            with self._lock:
                self._unfinished -= 1
