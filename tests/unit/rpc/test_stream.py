"""What an Attach stream sends, and when: messages that may wait for others wait, and all of them are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop
from kvtier.v1 import cache_pb2
from kvtierd.rpc import stream
from kvtierd.rpc.stream import AttachStream, StreamSettings

EVENTS = 5


class Written:
    """The gRPC context, as far as a stream writes."""

    def __init__(self) -> None:
        self.messages: list[cache_pb2.AttachResponse] = []
        self.all = asyncio.Event()

    async def write(self, message: cache_pb2.AttachResponse) -> None:
        self.messages.append(message)
        if len(self.messages) == EVENTS:
            self.all.set()


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
@pytest.mark.parametrize("delay_s", [-1.0, 0.0, 0.0001, 0.02])
def test_what_may_wait_is_sent_also_if_its_time_has_come_already(
    new_loop: Callable[[], asyncio.AbstractEventLoop], delay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the loop may have waited for a core since it was asked what time it is. uvloop then
    gives a handle that does not know when."""
    monkeypatch.setattr(stream, "EVENT_DELAY_S", delay_s)

    async def task() -> None:
        context = Written()
        settings = StreamSettings(1.0, 64, cache_pb2.Limits(), "test", 1 << 20)
        attached = AttachStream(
            cast(Any, SimpleNamespace(boot_nonce=1)),
            cast(Any, None),
            lambda renewal: None,
            settings,
            lambda name, seconds: None,
            cast(Any, context),
        )
        writer = asyncio.create_task(attached._write())
        for ticket in range(1, EVENTS + 1):
            event = cache_pb2.TransferEvent(ticket=ticket)
            attached._push(cache_pb2.AttachResponse(transfer=event), lazily=True)
        async with asyncio.timeout(30):
            await context.all.wait()
        assert [message.transfer.ticket for message in context.messages] == list(range(1, EVENTS + 1))
        writer.cancel()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(task())
