"""Keeps one copy worker per device alive, talks to it, and tells the core the truth about it."""

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from kvtierd.core.actions import Direction, PostPart
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import PartId, RegistrationId, SessionId, WorkerId
from kvtierd.core.stimuli import PartFinished, SessionReleased, WorkerExited, WorkerLive, WorkerLost
from kvtierd.logs import logger
from kvtierd.transfer import messages
from kvtierd.transfer.channel import PEER_CLOSED
from kvtierd.transfer.handles import (
    CopyTotals,
    MappingRequest,
    SupervisorLimits,
    WorkerHandle,
    WorkerStartError,
    WorkerState,
)
from kvtierd.transfer.messages import GroupMapping
from kvtierd.transfer.packets import PACKET_BYTES_MAX, close_fds
from kvtierd.transfer.process import WorkerProcess
from kvtierd.transfer.status import StallDetector
from kvtierd.wire import worker_pb2 as wire

__all__ = [
    "CopyTotals",
    "GroupMapping",
    "Supervisor",
    "SupervisorLimits",
    "WorkerHandle",
    "WorkerStartError",
    "WorkerState",
    "WorkerStimulus",
]

_log = logger(__name__)

EXIT_GRACE_S = 0.25
"""For a worker that has closed its channel to be gone, before it is killed."""

WorkerStimulus = WorkerLive | PartFinished | SessionReleased | WorkerLost | WorkerExited


class Supervisor:
    """Starts, watches, kills and replaces copy workers. Everything happens on one event loop.

    `events` gets each stimulus from a callback of the loop, never from inside a method called here. Of one
    worker they come in this order: WorkerLive; PartFinished and SessionReleased; WorkerLost; WorkerExited,
    when its process is gone. WorkerLive of its successor comes after that. After WorkerLost nothing more is
    reported of a worker, even if it got further: the end of its process is the fence of all it had.

    `register_writer(pid)` gives a worker its writer id in the pool before it is announced.
    """

    def __init__(
        self,
        *,
        pool_fd: int,
        pool_bytes: int,
        register_writer: Callable[[int], int],
        events: Callable[[WorkerStimulus], object],
        devices: Sequence[str] = ("cpu",),
        limits: SupervisorLimits | None = None,
        environment: Mapping[str, str] | None = None,
        log_level: str = "info",
        log_format: str = "auto",
    ) -> None:
        """`pool_fd` stays the caller's; workers inherit its open file description, which is the pool's lock.

        `environment` is added to the workers' environment; `log_level` and `log_format` are what
        `kvtierd.logs.configure` takes, for the workers' own lines on our stderr.
        """
        self.limits = limits or SupervisorLimits()
        self.workers: dict[WorkerId, WorkerHandle] = {}
        """From the start of a worker's process to the delivery of its WorkerExited."""
        self.respawns = dict.fromkeys(devices, 0)
        """Workers started per device, beyond its first."""
        self.totals = {direction: CopyTotals() for direction in Direction}
        self._pool_fd = pool_fd
        self._pool_bytes = pool_bytes
        self._register_writer = register_writer
        self._events = events
        self._environment = environment
        self._log_level = log_level
        self._log_format = log_format
        self._processes: dict[WorkerId, WorkerProcess] = {}
        self._delays_s = dict.fromkeys(devices, self.limits.respawn_delay_min_s)
        self._respawn_timers: dict[str, asyncio.TimerHandle] = {}
        self._worker_ids = itertools.count(1)
        self._request_ids = itertools.count(1)
        self._watched_s = 0.0
        """A clock that stands still while the front does: a deadline in it is never missed by a sleeping
        watchman."""
        self._watch_timer: asyncio.TimerHandle | None = None
        self._stalls: dict[WorkerId, StallDetector] = {}
        self._changed = asyncio.Event()
        self._stopping = False

    async def start(self) -> None:
        """Starts a worker for every device and returns when all are live. WorkerStartError, and none left, if
        not."""
        self._loop = asyncio.get_running_loop()
        self._last_watch_s = self._loop.time()
        self._watch_timer = self._loop.call_later(self.limits.watch_period_s, self._watch)
        try:
            first = [self._spawn(device, respawns=0) for device in self.respawns]
        except (OSError, ValueError) as error:
            await self.stop(0)
            raise WorkerStartError(f"a copy worker cannot be started: {error}") from error
        while waiting := [handle for handle in first if handle.state is not WorkerState.LIVE]:
            lost = [handle for handle in waiting if handle.state is not WorkerState.STARTING]
            if lost:
                await self.stop(0)
                raise WorkerStartError(
                    f"the copy worker for {lost[0].device!r} did not come up: {lost[0].why}; "
                    "its own messages are on the daemon's stderr"
                )
            self._changed.clear()
            await self._changed.wait()

    async def stop(self, grace_s: float) -> bool:
        """Ends all workers: what has not started is revoked, what has is finished, for at most `grace_s`;
        then SIGKILL.

        Events go on until the last process is gone. False if one could not be killed within
        `kill_deadline_s`.
        """
        self._stopping = True
        for timer in self._respawn_timers.values():
            timer.cancel()
        self._respawn_timers.clear()
        for handle in list(self.workers.values()):
            if handle.state is WorkerState.STARTING:
                self._lose(handle, "the daemon stops")
            self._send(handle, messages.stop_packet())
        if grace_s > 0:
            await self._all_gone(grace_s)
        for handle in list(self.workers.values()):
            self._lose(handle, "the daemon stops")
        gone = await self._all_gone(self.limits.kill_deadline_s)
        if gone and self._watch_timer is not None:
            self._watch_timer.cancel()
            self._watch_timer = None
        return gone

    async def _all_gone(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while self.workers:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def current(self, device: str) -> WorkerId | None:
        """The live worker of a device."""
        for handle in self.workers.values():
            if handle.device == device and handle.state is WorkerState.LIVE:
                return handle.worker
        return None

    def pidfd_for(self, worker: WorkerId) -> int:
        """A pidfd of a live worker, for a client that waits for its end; the caller closes it. Refusal if it
        is lost."""
        self._live(worker)
        return os.dup(self._processes[worker].pidfd)

    def post(self, action: PostPart, generations: npt.NDArray[np.uint64], gate_deadline_ms: int) -> None:
        """Hands a part to its worker; PartFinished follows, or the worker's end. Never blocks.

        For a worker that is not live nothing happens: WorkerLost has been told, or is about to be. A worker
        whose queue is full is lost. ValueError if the arrays are not parallel or too long, and nothing was
        posted.
        """
        packet = messages.post_part_packet(action, generations, gate_deadline_ms)
        if len(packet) > PACKET_BYTES_MAX:
            raise ValueError(
                f"part {action.part} of {len(action.block_ids)} blocks is too large for one packet"
            )
        handle = self.workers.get(action.worker)
        if handle is not None and self._send(handle, packet):
            handle.parts[action.part] = action.direction

    def revoke(self, worker: WorkerId, part: PartId) -> None:
        """Ends a part that has not started; PartFinished follows either way. Otherwise as `post`."""
        handle = self.workers.get(worker)
        if handle is not None:
            self._send(handle, messages.revoke_part_packet(part))

    def release_session(self, worker: WorkerId, session: SessionId) -> None:
        """Fences and unmaps all that the worker holds of a session; SessionReleased follows, also if it held
        nothing.

        Otherwise as `post`.
        """
        handle = self.workers.get(worker)
        if handle is not None and self._send(handle, messages.release_session_packet(session)):
            handle.releases.setdefault(session, []).append(self._watched_s + self.limits.release_deadline_s)

    async def map_words(
        self, worker: WorkerId, session: SessionId, fd: int, doorbells: int, parts: int
    ) -> None:
        """Has the worker map a session's shared words: `doorbells` words, then `parts` words.

        The descriptor stays the caller's. Refusal if the worker refuses it or is lost; a worker that does not
        answer in time is lost. If the caller is cancelled, the session's mappings are released.
        """
        request = next(self._request_ids)
        await self._map(
            worker, session, request, fd, messages.map_words_packet(request, session, doorbells, parts)
        )

    async def map_memory(
        self,
        worker: WorkerId,
        session: SessionId,
        registration: RegistrationId,
        fd: int,
        mapping_bytes: int,
        groups: Sequence[GroupMapping],
    ) -> None:
        """Has the worker map a rank's memory, the first `mapping_bytes` of `fd`. Otherwise as `map_words`."""
        request = next(self._request_ids)
        packet = messages.map_memory_packet(request, session, registration, mapping_bytes, groups)
        if len(packet) > PACKET_BYTES_MAX:
            planes = sum(len(group.base_offsets) for group in groups)
            raise Refusal(
                Reason.LAYOUT_INVALID,
                "too many planes to describe in one packet; register a layout with fewer, larger planes",
                field="groups.planes",
                value=planes,
            )
        await self._map(worker, session, request, fd, packet)

    async def _map(self, worker: WorkerId, session: SessionId, request: int, fd: int, packet: bytes) -> None:
        handle = self._live(worker)
        answer: asyncio.Future[None] = self._loop.create_future()
        handle.requests[request] = MappingRequest(
            session, answer, self._watched_s + self.limits.map_deadline_s
        )
        try:
            if not self._send(handle, packet, [fd]):
                raise _unavailable(handle)
            await answer
        except asyncio.CancelledError:
            # Nobody will tell the core of this mapping, so nobody else would have it released. The answer
            # may have come already, and not been heard.
            refused = answer.done() and not answer.cancelled() and answer.exception() is not None
            if handle.state is WorkerState.LIVE and not refused:
                self.release_session(worker, session)
                handle.own_releases[session] += 1
            raise
        finally:
            handle.requests.pop(request, None)

    def _live(self, worker: WorkerId) -> WorkerHandle:
        handle = self.workers.get(worker)
        if handle is None or handle.state is not WorkerState.LIVE:
            raise Refusal(
                Reason.WORKER_UNAVAILABLE,
                "the copy worker is gone; a new one is being started, try again in a second",
                field="worker",
                value=worker,
            )
        return handle

    def _send(self, handle: WorkerHandle, packet: bytes, fds: Sequence[int] = ()) -> bool:
        if handle.state is not WorkerState.LIVE:
            return False
        return self._processes[handle.worker].channel.send(packet, fds)

    def _spawn(self, device: str, respawns: int) -> WorkerHandle:
        handle = WorkerHandle(WorkerId(next(self._worker_ids)), device, respawns)
        process = WorkerProcess(
            pool_fd=self._pool_fd,
            pool_bytes=self._pool_bytes,
            device=device,
            copy_deadline_s=self.limits.copy_deadline_s,
            environment=self._environment,
            log_level=self._log_level,
            log_format=self._log_format,
            on_packet=lambda packet, fds: self._packet(handle, packet, fds),
            on_closed=lambda reason: self._channel_closed(handle, reason),
            on_exit=lambda: self._exited(handle),
        )
        handle.pid = process.pid
        handle.started_s = self._loop.time()
        handle.deadline_s = self._watched_s + self.limits.handshake_deadline_s
        self.workers[handle.worker] = handle
        self._processes[handle.worker] = process
        return handle

    def _channel_closed(self, handle: WorkerHandle, reason: str) -> None:
        if reason == PEER_CLOSED:
            # Its process is about to end, most likely, and then says better why.
            self._loop.call_later(EXIT_GRACE_S, self._lose, handle, f"its channel broke: {reason}")
        else:
            self._lose(handle, f"its channel broke: {reason}")

    def _packet(self, handle: WorkerHandle, packet: bytes, fds: list[int]) -> None:
        close_fds(fds)
        try:
            message = wire.ToFront.FromString(packet)
            kind = message.WhichOneof("body")
            stimulus = self._message(handle, message, kind)
        except (DecodeError, ValueError, KeyError) as error:
            self._lose(handle, f"it sent what cannot be understood: {error!r}")
            return
        if stimulus is not None:
            self._emit(stimulus)

    def _message(
        self, handle: WorkerHandle, message: wire.ToFront, kind: str | None
    ) -> WorkerStimulus | None:
        """Takes one message; the stimulus it is, if it is one. ValueError or KeyError if it makes no sense
        now."""
        if (handle.state is WorkerState.STARTING) != (kind == "ready"):
            raise ValueError(f"a {kind} message in state {handle.state.value}")
        if kind == "ready":
            return self._ready(handle, message.ready)
        if kind == "part_finished":
            finished = message.part_finished
            stimulus = messages.part_finished(handle.worker, finished)
            totals = self.totals[handle.parts.pop(stimulus.part)]
            totals.outcomes[stimulus.outcome.name] += 1
            totals.copied_bytes += finished.copied_bytes
            totals.copy_ns += finished.copy_ns
            return stimulus
        if kind == "session_released":
            session = SessionId(message.session_released.session)
            deadlines = handle.releases[session]
            deadlines.pop(0)
            if not deadlines:
                del handle.releases[session]
            if handle.own_releases[session] > 0:
                handle.own_releases[session] -= 1
                return None
            return SessionReleased(handle.worker, session)
        if kind == "mapped":
            request = handle.requests.pop(message.mapped.request, None)
            if request is not None and not request.answer.done():
                request.answer.set_result(None)
            return None
        if kind == "map_refused":
            refused = message.map_refused
            request = handle.requests.pop(refused.request, None)
            if request is not None and not request.answer.done():
                request.answer.set_exception(
                    Refusal(Reason(refused.reason), refused.message, field=refused.field, value=refused.value)
                )
            return None
        raise ValueError(f"a message of kind {kind}")

    def _ready(self, handle: WorkerHandle, ready: wire.Ready) -> WorkerStimulus | None:
        if ready.pid != handle.pid:
            raise ValueError(f"pid {handle.pid} calls itself {ready.pid}")
        try:
            handle.writer = self._register_writer(handle.pid)
        except Exception as error:
            _log.error("a copy worker has no writer id", worker_pid=handle.pid, exc_info=error)
            self._lose(handle, f"it could not be given a writer id: {error}")
            return None
        handle.state = WorkerState.LIVE
        handle.announced = True
        self._stalls[handle.worker] = StallDetector(self.limits.copy_deadline_s)
        self._changed.set()
        _log.info("copy worker live", worker_pid=handle.pid, device=handle.device)
        return WorkerLive(handle.worker, handle.device)

    def _lose(self, handle: WorkerHandle, why: str) -> None:
        """From now on the worker is only waited for."""
        if handle.state in (WorkerState.LOST, WorkerState.EXITED):
            return
        handle.state = WorkerState.LOST
        handle.why = why
        handle.deadline_s = self._watched_s + self.limits.kill_deadline_s
        process = self._processes[handle.worker]
        process.kill()
        process.channel.close()
        for request in handle.requests.values():
            if not request.answer.done():
                request.answer.set_exception(_unavailable(handle))
        handle.requests.clear()
        self._stalls.pop(handle.worker, None)
        self._changed.set()
        say = _log.info if self._stopping else _log.error
        say("copy worker lost", worker_pid=handle.pid, device=handle.device, why=why)
        if handle.announced:
            self._emit(WorkerLost(handle.worker, why))

    def _exited(self, handle: WorkerHandle) -> None:
        process = self._processes[handle.worker]
        # What it said before it ended still counts.
        process.channel.drain()
        self._lose(handle, process.ended() or "its process is gone")
        handle.state = WorkerState.EXITED
        del self._processes[handle.worker]
        process.close()
        if handle.announced:
            self._emit(WorkerExited(handle.worker))
        # Only now, so that whoever hears of a worker finds it in `workers`, whatever has happened to it.
        self._loop.call_soon(self._forget, handle)

    def _forget(self, handle: WorkerHandle) -> None:
        del self.workers[handle.worker]
        self._changed.set()
        if not self._stopping:
            self._schedule_respawn(handle.device, self._loop.time() - handle.started_s)

    def _emit(self, stimulus: WorkerStimulus) -> None:
        """Tells the core, in a callback of its own: never in the middle of us, and its errors are its own."""
        self._loop.call_soon(self._events, stimulus)

    def _schedule_respawn(self, device: str, lived_s: float) -> None:
        if lived_s >= self.limits.steady_s:
            self._delays_s[device] = self.limits.respawn_delay_min_s
        delay_s = self._delays_s[device]
        self._delays_s[device] = min(2 * delay_s, self.limits.respawn_delay_max_s)
        self._respawn_timers[device] = self._loop.call_later(delay_s, self._respawn, device)

    def _respawn(self, device: str) -> None:
        del self._respawn_timers[device]
        self.respawns[device] += 1
        try:
            self._spawn(device, self.respawns[device])
        except (OSError, ValueError) as error:
            _log.error("a copy worker cannot be started", device=device, error=str(error))
            self._schedule_respawn(device, 0.0)

    def _watch(self) -> None:
        period_s = self.limits.watch_period_s
        self._watch_timer = self._loop.call_later(period_s, self._watch)
        now_s = self._loop.time()
        elapsed_s = min(now_s - self._last_watch_s, 4 * period_s)
        self._last_watch_s = now_s
        self._watched_s += elapsed_s
        for handle in list(self.workers.values()):
            why = self._overdue(handle, elapsed_s)
            if why is not None:
                self._lose(handle, why)

    def _overdue(self, handle: WorkerHandle, elapsed_s: float) -> str | None:
        """Why a worker has to be killed now, if it has."""
        now_s = self._watched_s
        if handle.state is WorkerState.STARTING:
            return (
                f"not ready after {self.limits.handshake_deadline_s} s"
                if now_s >= handle.deadline_s
                else None
            )
        if handle.state is WorkerState.EXITED:
            return None
        if handle.state is WorkerState.LOST:
            if now_s >= handle.deadline_s:
                handle.deadline_s = float("inf")
                _log.error(
                    "a copy worker is still there after SIGKILL: its blocks stay held until it is gone",
                    worker_pid=handle.pid,
                    device=handle.device,
                    waited_s=self.limits.kill_deadline_s,
                )
            return None
        stuck = self._stalls[handle.worker].observe(self._processes[handle.worker].status.read(), elapsed_s)
        if stuck is not None:
            return stuck
        if any(now_s >= request.deadline_s for request in handle.requests.values()):
            return f"it has not answered a mapping request for {self.limits.map_deadline_s} s"
        if any(now_s >= deadlines[0] for deadlines in handle.releases.values()):
            return f"it has not released a session for {self.limits.release_deadline_s} s"
        return None


def _unavailable(handle: WorkerHandle) -> Refusal:
    return Refusal(
        Reason.WORKER_UNAVAILABLE,
        f"the copy worker was lost ({handle.why or 'its queue is full'}); a new one is being started: "
        "try again in a second",
        field="worker",
        value=handle.worker,
    )
