"""Admin.Record: one caller at a time is sent what engines look up and store."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvtier.v1 import admin_pb2

from kvtierd.cache import Cache
from kvtierd.core.errors import Reason, Refusal
from kvtierd.rpc.calls import Calls
from kvtierd.rpc.recording import Recording

LOOK_EVERY_S = 0.1
"""Time between two looks whether there is enough for a message."""
LOOKS_MAX = 10
"""After so many, what there is is sent: each message costs the front as much as a hundred events."""
END_S = 0.5


class Recordings:
    """The one recording that there may be."""

    def __init__(self, cache: Cache, calls: Calls) -> None:
        self._cache = cache
        self._calls = calls
        self._ending = False
        self._over = asyncio.Event()

    async def end(self) -> None:
        """The daemon stops: what was recorded is sent, if the caller reads, and then the recording ends."""
        self._ending = True
        if self._calls.recording is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self._over.wait()

    async def record(self, request: admin_pb2.RecordRequest) -> AsyncIterator[admin_pb2.RecordBatch]:
        """Answers Admin.Record. Raises Refusal QUEUE_FULL while somebody else records."""
        if self._calls.recording is not None:
            raise Refusal(
                Reason.QUEUE_FULL,
                "somebody records already, and one recording at a time is the most: end the other "
                "`kvtierctl record`",
            )
        self._over.clear()
        recording = self._calls.recording = Recording(self._cache.plan_of)
        try:
            self._cache.show_lookups(every=True)
            looks = LOOKS_MAX  # the first message is sent at once
            while True:
                ending = self._ending
                if looks >= LOOKS_MAX or ending or recording.has_message():
                    looks = 0
                    for batch in recording.batches():
                        yield batch
                if ending:
                    return
                await asyncio.sleep(LOOK_EVERY_S)
                looks += 1
        finally:
            self._calls.recording = None
            self._cache.show_lookups(every=False)
            self._over.set()
