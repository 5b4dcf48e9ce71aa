"""Admin.Record: one caller at a time is sent what engines look up and store."""

import asyncio
from collections.abc import AsyncIterator

from kvtier.v1 import admin_pb2

from kvtierd.cache import Cache
from kvtierd.core.errors import Reason, Refusal
from kvtierd.rpc.calls import Calls
from kvtierd.rpc.recording import Recording

SEND_EVERY_S = 0.1
TELL_EVERY_S = 1.0
"""A caller hears at least so often that the recording goes on."""


class Recordings:
    """The one recording that there may be."""

    def __init__(self, cache: Cache, calls: Calls) -> None:
        self._cache = cache
        self._calls = calls
        self._ending = False

    def end(self) -> None:
        """The daemon stops: what was recorded is sent, and then the recording ends."""
        self._ending = True

    async def record(self, request: admin_pb2.RecordRequest) -> AsyncIterator[admin_pb2.RecordBatch]:
        """Answers Admin.Record. Raises Refusal QUEUE_FULL while somebody else records."""
        if self._calls.recording is not None:
            raise Refusal(
                Reason.QUEUE_FULL,
                "somebody records already, and one recording at a time is the most: end the other "
                "`kvtierctl record`",
            )
        recording = self._calls.recording = Recording(self._cache.plan_of)
        try:
            rounds = 0
            while True:
                ending = self._ending
                for batch in recording.batches():
                    if batch.kinds or not rounds % round(TELL_EVERY_S / SEND_EVERY_S):
                        yield batch
                if ending:
                    return
                rounds += 1
                await asyncio.sleep(SEND_EVERY_S)
        finally:
            self._calls.recording = None
