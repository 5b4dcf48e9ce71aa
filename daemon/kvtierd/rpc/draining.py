"""Admin.Drain and Admin.Resume: nothing new is taken, running transfers end, and then the daemon waits or
stops."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from kvtier.v1 import admin_pb2

from kvtierd.cache import Cache
from kvtierd.core.errors import Reason, Refusal
from kvtierd.rpc.status import AboutDaemon

POLL_S = 0.02
REPORT_S = 0.5
"""A caller hears at least this often that the daemon is still waiting."""


class Draining:
    """Whether the daemon takes anything new, as operators decide. Any number of callers may watch a drain."""

    def __init__(
        self,
        cache: Cache,
        about: AboutDaemon,
        tell_health: Callable[[bool], Awaitable[None]],
        stop: Callable[[], None],
    ) -> None:
        """`tell_health(serving)` answers health checks; `stop` begins the end of the daemon."""
        self._cache = cache
        self._about = about
        self._tell_health = tell_health
        self._stop = stop
        self._stopping = False

    async def stopping(self) -> None:
        """The daemon stops, and nobody can take that back any more: health checks say that nothing new should
        come here."""
        self._stopping = True
        await self._tell_health(False)

    async def drain(self, request: admin_pb2.DrainRequest) -> AsyncIterator[admin_pb2.DrainProgress]:
        """Admin.Drain. If a caller asks for a restart and goes away, there is no restart, but the drain
        stays. Raises Refusal."""
        if request.for_restart and not self._cache.snapshot().pool.path:
            raise _nothing_would_be_left()
        deadline_s = time.monotonic() + request.timeout_ms / 1000
        self._cache.drain()
        await self._tell_health(False)
        told: int | None = None
        told_at_s = 0.0
        while (state := self._state(request.for_restart, deadline_s)) == "waiting":
            active, now_s = self._cache.transfers_active, time.monotonic()
            if active != told or now_s - told_at_s >= REPORT_S:
                told, told_at_s = active, now_s
                yield self._progress(state)
            await asyncio.sleep(POLL_S)
        progress = self._progress(state)
        if state == "stopping":
            self._stop()  # even if the caller has just gone: it was asked for, and the moment has come
        yield progress

    async def resume(self, request: admin_pb2.ResumeRequest) -> admin_pb2.ResumeResponse:
        """Admin.Resume. Raises Refusal."""
        if self._stopping or self._cache.poisoned.is_set():
            raise Refusal(Reason.DRAINING, "the daemon is stopping: start it again")
        was_draining = self._cache.draining
        self._cache.resume()
        await self._tell_health(True)
        return admin_pb2.ResumeResponse(was_draining=was_draining)

    def _state(self, for_restart: bool, deadline_s: float) -> str:
        if not self._cache.draining:
            return "serving"
        if not self._cache.is_under_way:
            return "stopping" if for_restart else "drained"
        return "late" if time.monotonic() >= deadline_s else "waiting"

    def _progress(self, state: str) -> admin_pb2.DrainProgress:
        snapshot = self._cache.snapshot()
        return admin_pb2.DrainProgress(
            state=state,
            transfers_active=snapshot.core.transfers_active,
            kept_blocks=snapshot.core.blocks.ready,
            kept_bytes=snapshot.core.used_bytes,
            pid=self._about.pid,
            pool_path=snapshot.pool.path,
            start_again=self._about.command,
        )


def _nothing_would_be_left() -> Refusal:
    return Refusal(
        Reason.MODE_UNSUPPORTED,
        "the pool is anonymous memory and every block would be lost: stop the daemon with SIGTERM, and set "
        "pool.persistent to keep blocks across restarts",
        field="for_restart",
        value=True,
    )
