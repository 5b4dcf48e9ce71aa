"""Threads for calls of a library that blocks: whoever waits goes on at the deadline, whatever a call does."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from kvtierd.tiers.store.objects import StoreError, StoreTrouble
from kvtierd.tiers.store.threads import BlockingCall, CallingThreads

SOON_S = 0.2


def test_what_a_call_returns_or_raises_comes_back() -> None:
    async def task() -> None:
        threads = CallingThreads(2, 60)
        assert await threads.run("one", lambda call: call.name) == "one"
        with pytest.raises(ZeroDivisionError):
            await threads.run("two", lambda call: 1 // 0)
        threads.end()

    asyncio.run(task())


def test_a_call_that_hangs_is_late_and_the_others_go_on() -> None:
    go_on = threading.Event()

    async def task() -> None:
        threads = CallingThreads(2, SOON_S)
        with pytest.raises(StoreError) as raised:
            await threads.run("hangs", lambda call: go_on.wait())
        assert raised.value.trouble is StoreTrouble.LATE
        assert await threads.run("other", lambda call: 1) == 1
        go_on.set()

    asyncio.run(task())


def test_with_all_threads_in_calls_that_hang_others_are_late_and_never_begin() -> None:
    go_on, begun = threading.Event(), []

    async def task() -> None:
        threads = CallingThreads(2, SOON_S)
        hanging = [threads.run("hangs", lambda call: go_on.wait()) for _ in range(2)]
        told = await asyncio.gather(
            *hanging, threads.run("waits", lambda call: begun.append(1)), return_exceptions=True
        )
        assert all(isinstance(each, StoreError) for each in told)
        go_on.set()
        assert await threads.run("after", lambda call: 1) == 1
        assert not begun

    asyncio.run(task())


def test_a_call_that_is_cancelled_is_told_so() -> None:
    begun, told = threading.Event(), threading.Event()

    def call(made: BlockingCall) -> None:
        begun.set()
        while not made.given_up:
            time.sleep(0.01)
        with pytest.raises(StoreError):
            made.go_on()
        told.set()

    async def task() -> None:
        running = asyncio.create_task(CallingThreads(1, 60).run("one", call))
        await asyncio.to_thread(begun.wait)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await asyncio.to_thread(told.wait, 60)

    asyncio.run(task())


def test_the_end_of_a_process_waits_for_no_call() -> None:
    code = (
        "import asyncio, contextlib, time\n"
        "from kvtierd.tiers.store.objects import StoreError\n"
        "from kvtierd.tiers.store.threads import CallingThreads\n"
        "with contextlib.suppress(StoreError):\n"
        "    asyncio.run(CallingThreads(1, 0.1).run('hangs', lambda call: time.sleep(600)))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
