"""The front's side of workers: it starts and watches them, and tells the core what they say. What they are
told to do is in `orders.py`."""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from google.protobuf.message import DecodeError

from kvtierd.core import stimuli
from kvtierd.core.actions import Direction
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import HASH_BYTES_MAX, CheckId, DiskJobId, PartId, SessionId, SpaceId, WorkerId
from kvtierd.logs import logger
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.status import StatusWord
from kvtierd.workers.supervisor import handles
from kvtierd.workers.supervisor.kinds import BelowOptions
from kvtierd.workers.supervisor.lifecycle import Lifecycle
from kvtierd.workers.supervisor.orders import WorkerOrders

_log = logger(__name__)

WorkerStimulus = (
    stimuli.WorkerLive
    | stimuli.PartFinished
    | stimuli.SlotsChecked
    | stimuli.DiskJobFinished
    | stimuli.PackFound
    | stimuli.SessionReleased
    | stimuli.WorkerLost
    | stimuli.WorkerExited
)


class Supervisor:
    """All copy workers, and those of disks. Everything happens on one event loop.

    `devices` have a worker from `start` on, and get a new one when it is lost. So do `disks`, but the daemon
    goes on without one. Any other device gets a worker when `lives.worker_for` asks for it, which is ended
    when no session has used it for `limits.gpu_idle_s`.

    `events` gets each stimulus in a callback of the loop, never inside a method called here. Those of one
    worker come in this order: WorkerLive; PartFinished, SessionReleased and the like; WorkerLost;
    WorkerExited, when its process is gone; and then WorkerLive of its successor. After WorkerLost nothing
    more is reported about a worker, even if it got further: the end of its process is the fence of everything
    that it had.

    `register_writer(pid)` returns a worker's writer id in the pool, before the worker is announced.
    """

    def __init__(
        self,
        *,
        pool_fd: int,
        pool_bytes: int,
        register_writer: Callable[[int], int],
        events: Callable[[WorkerStimulus], object],
        reserve: int = 0,
        devices: Sequence[str] = (handles.CPU,),
        disks: Sequence[BelowOptions] = (),
        limits: handles.SupervisorLimits | None = None,
        environment: Mapping[str, str] | None = None,
        options: handles.WorkerOptions | None = None,
    ) -> None:
        """`pool_fd` stays the caller's. Workers inherit its open file description, which holds the pool's
        lock.

        `environment` is added to the workers' environment. `reserve`: descriptors that are held back for
        starting workers.
        """
        self.limits = limits or handles.SupervisorLimits()
        self.totals = {direction: handles.CopyTotals() for direction in Direction}
        self._register_writer = register_writer
        self._events = events
        self.lives = Lifecycle(
            pool_fd=pool_fd,
            pool_bytes=pool_bytes,
            reserve=reserve,
            devices=devices,
            disks=disks,
            limits=self.limits,
            environment=environment,
            options=options or handles.WorkerOptions(),
            on_packet=self._packet,
            emit=self._emit,
        )
        """The workers' processes: how they start, and how they end."""
        self.workers: Mapping[WorkerId, handles.WorkerHandle] = self.lives.workers
        """Workers from the start of their process until their WorkerExited is delivered."""
        self.devices = self.lives.devices
        self.orders = WorkerOrders(self.lives, self.limits.release_deadline_s)
        """What workers are told to do."""

    async def start(self) -> None:
        """Starts the permanent workers, and returns when all except those of disks are live.

        Raises WorkerStartError if one does not become live, and then leaves none running.
        """
        self._loop = asyncio.get_running_loop()
        await self.lives.start()

    def status_word(self, worker: WorkerId, word: StatusWord) -> int:
        """The value of a word of a worker's status page; 0 if its process is gone."""
        process = self.lives.processes.get(worker)
        return 0 if process is None else process.status.words.load(word)

    def pidfd_for(self, worker: WorkerId) -> int:
        """A pidfd of a live worker, for a client that waits for its end. The caller closes it. Raises Refusal
        if the worker is not live."""
        self.lives.serving(worker)
        return os.dup(self.lives.processes[worker].pidfd)

    def _packet(self, handle: handles.WorkerHandle, packet: bytes) -> None:
        try:
            message = wire.ToFront.FromString(packet)
            kind = message.WhichOneof("body")
            stimulus = self._message(handle, message, kind)
        except (DecodeError, ValueError, KeyError) as error:
            self.lives.lose(handle, f"it sent what cannot be understood: {error!r}")
            return
        if stimulus is not None:
            self._emit(stimulus)
        if isinstance(stimulus, stimuli.WorkerLive):
            handle.settled.set()  # only now, so that the core knows the worker before those who wait do

    def _message(
        self, handle: handles.WorkerHandle, message: wire.ToFront, kind: str | None
    ) -> WorkerStimulus | None:
        """Takes one message, and returns the stimulus if it is one. Raises ValueError or KeyError if the
        message makes no sense now."""
        if (handle.state is handles.WorkerProcessState.STARTING) != (kind in ("ready", "unusable")):
            raise ValueError(f"a {kind} message in state {handle.state.value}")
        if kind == "ready":
            return self._ready(handle, message.ready)
        if kind == "unusable":
            self.lives.unusable(handle, refusal_of(message.unusable))
            return None
        if kind == "part_finished":
            finished = message.part_finished
            stimulus = part_finished(handle.worker, finished)
            totals = self.totals[handle.parts.pop(stimulus.part)]
            totals.outcomes[stimulus.outcome.name] += 1
            totals.copied_bytes += finished.copied_bytes
            totals.copy_ns += finished.copy_ns
            return stimulus
        if kind == "disk_job_finished":
            done = disk_job_finished(handle.worker, message.disk_job_finished)
            handle.jobs.remove(done.job)
            return done
        if kind == "pack_found":
            return pack_found(handle.worker, message.pack_found)
        if kind == "records_persisted":
            answer = handle.persisting.pop(message.records_persisted.request, None)
            if answer is not None and not answer.done():  # else its caller was cancelled
                answer.set_result(message.records_persisted.error)
            return None
        if kind == "slots_checked":
            return slots_checked(handle.worker, message.slots_checked)
        if kind == "session_released":
            session = SessionId(message.session_released.session)
            deadlines = handle.releases[session]
            deadlines.pop(0)
            if not deadlines:
                del handle.releases[session]
                handle.sessions.discard(session)
            if session in handle.own_releases:
                handle.own_releases[session] -= 1
                handle.own_releases += Counter()  # without what has come to 0
                return None
            return stimuli.SessionReleased(handle.worker, session)
        if kind == "mapped":
            request = handle.requests.pop(message.mapped.request, None)
            if request is not None and not request.answer.done():
                request.answer.set_result(None)
            return None
        if kind == "map_refused":
            refusal = refusal_of(message.map_refused)
            if refusal.reason is Reason.IMPORT_REFUSED:
                self.devices.import_refused(handle, refusal)
            request = handle.requests.pop(message.map_refused.request, None)
            if request is not None and not request.answer.done():
                request.answer.set_exception(refusal)
            return None
        raise ValueError(f"a message of kind {kind}")

    def _ready(self, handle: handles.WorkerHandle, ready: wire.Ready) -> WorkerStimulus | None:
        if ready.pid != handle.pid:
            raise ValueError(f"pid {handle.pid} calls itself {ready.pid}")
        try:
            handle.writer = self._register_writer(handle.pid)
        except Exception as error:
            _log.error("a copy worker has no writer id", worker_pid=handle.pid, exc_info=error)
            self.lives.lose(handle, f"it could not be given a writer id: {error}")
            return None
        handle.cold_reason = ready.cold_reason
        handle.direct_io = ready.direct_io
        self.lives.live(handle)
        return stimuli.WorkerLive(handle.worker, handle.device)

    def _emit(self, stimulus: WorkerStimulus) -> None:
        """Tells the core in a callback of its own: never in the middle of a method here, and errors there are
        not ours."""
        self._loop.call_soon(self._events, stimulus)


def refusal_of(message: wire.MapRefused | wire.Unusable) -> Refusal:
    """Raises ValueError if the reason is not one of ours."""
    reason = Reason(message.reason)
    if reason is Reason.UNSPECIFIED:
        raise ValueError("a worker refuses without saying why")
    return Refusal(reason, message.message, field=message.field, value=message.value)


def part_finished(worker: WorkerId, message: wire.PartFinished) -> stimuli.PartFinished:
    """Raises ValueError if the message holds something that no worker of ours sends."""
    return stimuli.PartFinished(
        worker=worker,
        part=PartId(message.part),
        outcome=stimuli.PartOutcome(message.outcome),
        failed=np.frombuffer(message.failed, "<u4").astype(np.uint32, copy=False),
        corrupt=message.corrupt,
        message=message.message,
        copied_bytes=message.copied_bytes,
        copy_s=message.copy_ns / 1e9,
    )


def slots_checked(worker: WorkerId, message: wire.SlotsChecked) -> stimuli.SlotsChecked:
    """Raises ValueError if the message holds something that no worker of ours sends."""
    return stimuli.SlotsChecked(
        worker=worker,
        check=CheckId(message.check),
        looked_at=message.looked_at,
        corrupt=np.frombuffer(message.corrupt, "<u4").astype(np.uint32, copy=False),
    )


def disk_job_finished(worker: WorkerId, message: wire.DiskJobFinished) -> stimuli.DiskJobFinished:
    """Raises ValueError if the message holds something that no worker of ours sends."""
    return stimuli.DiskJobFinished(
        worker=worker,
        job=DiskJobId(message.job),
        failed=np.frombuffer(message.failed, "<u4").astype(np.uint32, copy=False),
        corrupt=np.frombuffer(message.corrupt, "<u4").astype(np.uint32, copy=False),
        error=message.error,
        bytes=message.bytes,
        saved_bytes=message.saved_bytes,
        busy_s=message.busy_ns / 1e9,
        gone=np.frombuffer(message.gone, "<u4").astype(np.uint32, copy=False),
        refused=message.refused,
    )


def pack_found(worker: WorkerId, message: wire.PackFound) -> stimuli.PackFound:
    """Raises ValueError if the message holds something that no worker of ours sends."""
    hashes = np.frombuffer(message.hashes, np.uint8).reshape(-1, HASH_BYTES_MAX)
    return stimuli.PackFound(worker, message.pack, SpaceId(message.space), hashes)
