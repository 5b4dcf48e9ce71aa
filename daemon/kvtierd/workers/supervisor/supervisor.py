"""Talks to workers, and reports to the core what has become of them."""

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from kvtierd.core.actions import CheckSlots, Direction, PostDiskJob, PostPart
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import PartId, RegistrationId, SessionId, Slots, WorkerId
from kvtierd.core.stimuli import (
    DiskJobFinished,
    PartFinished,
    SessionReleased,
    SlotsChecked,
    WorkerExited,
    WorkerLive,
    WorkerLost,
)
from kvtierd.logs import logger
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.packets import PACKET_BYTES_MAX
from kvtierd.workers.supervisor import messages
from kvtierd.workers.supervisor.handles import (
    CPU,
    CopyTotals,
    MappingRequest,
    SupervisorLimits,
    WorkerHandle,
    WorkerOptions,
    WorkerProcessState,
    WorkerStartError,
    unavailable,
)
from kvtierd.workers.supervisor.kinds import DiskOptions, disk_device
from kvtierd.workers.supervisor.lifecycle import Lifecycle
from kvtierd.workers.supervisor.messages import DeviceRange, GroupMapping

__all__ = [
    "CPU",
    "CopyTotals",
    "DeviceRange",
    "DiskOptions",
    "GroupMapping",
    "Supervisor",
    "SupervisorLimits",
    "WorkerHandle",
    "WorkerOptions",
    "WorkerProcessState",
    "WorkerStartError",
    "WorkerStimulus",
    "disk_device",
]

_log = logger(__name__)

RECORDS_PER_PACKET = 32_768

WorkerStimulus = (
    WorkerLive | PartFinished | SlotsChecked | DiskJobFinished | SessionReleased | WorkerLost | WorkerExited
)


class Supervisor:
    """All copy workers, and those of disks. Everything happens on one event loop.

    `devices` have a worker from `start` on, and get a new one when it is lost. So do `disks`, but the daemon
    goes on without one. Any other device gets a worker when `worker_for` asks for it, which is ended when no
    session has used it for `limits.gpu_idle_s`.

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
        devices: Sequence[str] = (CPU,),
        disks: Sequence[DiskOptions] = (),
        limits: SupervisorLimits | None = None,
        environment: Mapping[str, str] | None = None,
        options: WorkerOptions | None = None,
    ) -> None:
        """`pool_fd` stays the caller's. Workers inherit its open file description, which holds the pool's
        lock.

        `environment` is added to the workers' environment.
        """
        self.limits = limits or SupervisorLimits()
        self.totals = {direction: CopyTotals() for direction in Direction}
        self._register_writer = register_writer
        self._events = events
        self._request_ids = itertools.count(1)
        self._lives = Lifecycle(
            pool_fd=pool_fd,
            pool_bytes=pool_bytes,
            devices=devices,
            disks=disks,
            limits=self.limits,
            environment=environment,
            options=options or WorkerOptions(),
            on_packet=self._packet,
            emit=self._emit,
        )
        self.workers: Mapping[WorkerId, WorkerHandle] = self._lives.workers
        """Workers from the start of their process until their WorkerExited is delivered."""
        self.devices = self._lives.devices

    async def start(self) -> None:
        """Starts the permanent workers, and returns when all except those of disks are live.

        Raises WorkerStartError if one does not become live, and then leaves none running.
        """
        self._loop = asyncio.get_running_loop()
        await self._lives.start()

    async def settle_disks(self, timeout_s: float) -> None:
        """Returns when the first worker of every disk is live, has said that it cannot be, or is lost, but
        after `timeout_s` at the latest."""
        await self._lives.settle_disks(timeout_s)

    async def stop(self, grace_s: float) -> bool:
        """Ends all workers: parts that have not started are revoked, and those that have are finished, for at
        most `grace_s`; then workers get SIGKILL.

        Events go on until the last process is gone. Returns False if one could not be killed within
        `kill_deadline_s`.
        """
        return await self._lives.stop(grace_s)

    async def worker_for(self, device: str) -> WorkerId:
        """The live worker of a device, which is started if there is none. All who wait for one share it.

        Returns or raises after the handshake deadline at the latest. Raises Refusal: what the worker said if
        it cannot serve the device; WORKER_UNAVAILABLE if it was lost before it was ready, or its predecessor
        a moment ago; QUEUE_FULL if there are too many workers.
        """
        return (await self._lives.worker_for(device)).worker

    def current(self, device: str) -> WorkerId | None:
        """The live worker of a device, or None."""
        handle = self.devices.worker(device)
        return handle.worker if handle is not None and handle.state is WorkerProcessState.LIVE else None

    def unattended(self) -> list[str]:
        """Workers that nobody looks after, one sentence for each. There should never be any, and no worker
        can cause it.

        Call it again and again, seconds apart. A worker that is late, lost or being replaced is looked after.
        """
        return self._lives.unattended()

    def set_log_level(self, level: str) -> None:
        """Sets the log level of workers that are started from now on."""
        self._lives.set_log_level(level)

    @property
    def respawns(self) -> Mapping[str, int]:
        """For each device, the workers that were started in place of lost ones."""
        return self.devices.respawns

    def registered_bytes(self, worker: WorkerId) -> int:
        """Bytes of the pool that a worker has registered with its GPU's driver."""
        process = self._lives.processes.get(worker)
        return 0 if process is None else process.status.registered_bytes()

    def remote_bytes(self, worker: WorkerId) -> int:
        """Bytes of the pool that seem to lie on another memory node than a worker's GPU."""
        process = self._lives.processes.get(worker)
        return 0 if process is None else process.status.remote_bytes()

    def pidfd_for(self, worker: WorkerId) -> int:
        """A pidfd of a live worker, for a client that waits for its end. The caller closes it. Raises Refusal
        if the worker is not live."""
        self._live(worker)
        return os.dup(self._lives.processes[worker].pidfd)

    def post(self, action: PostPart, generations: npt.NDArray[np.uint64], gate_deadline_ms: int) -> None:
        """Sends a part to its worker. PartFinished follows, or the worker's end. Never blocks.

        Does nothing for a worker that is not live: WorkerLost has been reported, or is about to be. A worker
        whose queue is full is lost. Raises ValueError if the arrays are not parallel or too long, and then
        nothing was posted.
        """
        packet = messages.post_part_packet(action, generations, gate_deadline_ms)
        if len(packet) > PACKET_BYTES_MAX:
            raise ValueError(
                f"part {action.part} of {len(action.block_ids)} blocks is too large for one packet"
            )
        handle = self.workers.get(action.worker)
        if handle is not None and self._lives.send(handle, packet):
            handle.parts[action.part] = action.direction

    def check_slots(self, action: CheckSlots, generations: npt.NDArray[np.uint64]) -> None:
        """Has a worker compare slots with their checksums. SlotsChecked follows, or the worker's end. Workers
        that are not live are treated as in `post`."""
        handle = self.workers.get(action.worker)
        if handle is not None:
            self._lives.send(handle, messages.check_slots_packet(action, generations))

    def post_disk_job(
        self,
        action: PostDiskJob,
        disk_generations: npt.NDArray[np.uint64],
        host_generations: npt.NDArray[np.uint64],
    ) -> None:
        """Sends a job to a disk's worker. DiskJobFinished follows, or the worker's end. Errors, and workers
        that are not live, are treated as in `post`."""
        packet = messages.disk_job_packet(action, disk_generations, host_generations)
        if len(packet) > PACKET_BYTES_MAX:
            raise ValueError(
                f"disk job {action.job} of {len(action.disk_slots)} slots is too large for one packet"
            )
        handle = self.workers.get(action.worker)
        if handle is not None and self._lives.send(handle, packet):
            handle.jobs.add(action.job)

    def persist_records(self, device: str, slots: Slots) -> None:
        """Has a disk's worker write the records of these slots to its file, as they are in the image. Does
        nothing if it has no live worker."""
        handle = self.devices.worker(device)
        if handle is not None:
            for first in range(0, len(slots), RECORDS_PER_PACKET):
                part = slots[first : first + RECORDS_PER_PACKET]
                self._lives.send(handle, messages.persist_records_packet(part))

    async def persist_all(self, device: str) -> str:
        """Has a disk's worker write all records to its file, as they are in the image. Returns "" once they
        are there, or why they are not: there is no live worker, it was lost, or the disk failed. Waits as
        long as the worker takes."""
        worker = self.current(device)
        if worker is None:
            return "it has no worker just now"
        handle, request = self.workers[worker], next(self._request_ids)
        answer: asyncio.Future[str] = self._loop.create_future()
        handle.persisting[request] = answer
        try:
            if not self._lives.send(handle, messages.persist_all_packet(request)):
                return f"its worker was lost: {handle.why}"
            return await answer
        finally:
            handle.persisting.pop(request, None)

    def reject(self, device: str, why: str) -> None:
        """What a disk's first worker filled the image with cannot be used: the worker is lost, and the next
        one fills the image anew."""
        self._lives.reject(device, why)

    def revoke(self, worker: WorkerId, part: PartId) -> None:
        """Ends a part that has not started. PartFinished follows in both cases. Workers that are not live are
        treated as in `post`."""
        handle = self.workers.get(worker)
        if handle is not None:
            self._lives.send(handle, messages.revoke_part_packet(part))

    def release_session(self, worker: WorkerId, session: SessionId) -> None:
        """Fences and unmaps everything that the worker holds of a session. SessionReleased follows, even if
        it held nothing. Workers that are not live are treated as in `post`."""
        handle = self.workers.get(worker)
        if handle is not None and self._lives.send(handle, messages.release_session_packet(session)):
            handle.releases.setdefault(session, []).append(
                self._lives.watch.now_s + self.limits.release_deadline_s
            )

    async def map_words(
        self, worker: WorkerId, session: SessionId, fd: int, doorbells: int, parts: int
    ) -> None:
        """Has the worker map a session's shared words: first `doorbells` words, then `parts` words.

        The descriptor stays the caller's. Raises Refusal if the worker refuses or is lost; a worker that does
        not answer in time is lost. If the caller is cancelled, the session's mappings are released.
        """
        request = next(self._request_ids)
        packet = messages.map_words_packet(request, session, doorbells, parts)
        await self._map(worker, session, request, [fd], packet)

    async def add_chunks(
        self, worker: WorkerId, session: SessionId, fds: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Has a GPU's worker import chunks of physical memory, which the session's next `map_memory` uses up.

        `sizes` are their bytes, parallel to `fds`. Errors and cancellation are as in `map_words`.
        """
        request = next(self._request_ids)
        packet = messages.add_chunks_packet(request, session, sizes)
        await self._map(worker, session, request, fds, packet)

    async def map_memory(
        self,
        worker: WorkerId,
        session: SessionId,
        registration: RegistrationId,
        fd: int | None,
        mapping_bytes: int,
        groups: Sequence[GroupMapping],
        ranges: Sequence[DeviceRange] = (),
    ) -> None:
        """Has the worker map a rank's memory: the first `mapping_bytes` of `fd`, or a GPU's `ranges`, which
        have so many bytes together. Errors and cancellation are as in `map_words`."""
        request = next(self._request_ids)
        packet = messages.map_memory_packet(request, session, registration, mapping_bytes, groups, ranges)
        if len(packet) > PACKET_BYTES_MAX:
            planes = sum(len(group.base_offsets) for group in groups)
            raise Refusal(
                Reason.LAYOUT_INVALID,
                "too many planes and ranges to describe in one packet; register a layout with fewer, larger "
                "ones",
                field="groups.planes",
                value=f"{planes} planes, {len(ranges)} ranges",
            )
        await self._map(worker, session, request, [] if fd is None else [fd], packet)

    async def _map(
        self, worker: WorkerId, session: SessionId, request: int, fds: Sequence[int], packet: bytes
    ) -> None:
        handle = self._live(worker)
        answer: asyncio.Future[None] = self._loop.create_future()
        deadline_s = self._lives.watch.now_s + handle.kind.map_deadline_s
        handle.requests[request] = MappingRequest(session, answer, deadline_s)
        is_first = session not in handle.sessions
        handle.sessions.add(session)
        try:
            if not self._lives.send(handle, packet, fds):
                raise unavailable(handle)
            await answer
        except asyncio.CancelledError:
            # The core does not know about this mapping, so nobody else would have it released. The answer may
            # have come already without reaching the caller.
            if handle.state is WorkerProcessState.LIVE and not _is_refused(answer):
                self.release_session(worker, session)
                handle.own_releases[session] += 1
            raise
        except OSError as error:
            raise Refusal(
                Reason.QUEUE_FULL,
                f"the daemon cannot pass so many descriptors on just now ({error}): try again, or raise its "
                "limit of open files",
                field="descriptors",
                value=len(fds),
            ) from error
        finally:
            handle.requests.pop(request, None)
            if is_first and (not answer.done() or _is_refused(answer)) and session not in handle.releases:
                handle.sessions.discard(session)

    def _live(self, worker: WorkerId) -> WorkerHandle:
        handle = self.workers.get(worker)
        if handle is None or handle.state is not WorkerProcessState.LIVE:
            raise Refusal(
                Reason.WORKER_UNAVAILABLE,
                "the copy worker is gone; a new one is being started, try again in a second",
                field="worker",
                value=worker,
            )
        return handle

    def _packet(self, handle: WorkerHandle, packet: bytes) -> None:
        try:
            message = wire.ToFront.FromString(packet)
            kind = message.WhichOneof("body")
            stimulus = self._message(handle, message, kind)
        except (DecodeError, ValueError, KeyError) as error:
            self._lives.lose(handle, f"it sent what cannot be understood: {error!r}")
            return
        if stimulus is not None:
            self._emit(stimulus)
        if isinstance(stimulus, WorkerLive):
            handle.settled.set()  # only now, so that the core knows the worker before those who wait do

    def _message(
        self, handle: WorkerHandle, message: wire.ToFront, kind: str | None
    ) -> WorkerStimulus | None:
        """Takes one message, and returns the stimulus if it is one. Raises ValueError or KeyError if the
        message makes no sense now."""
        if (handle.state is WorkerProcessState.STARTING) != (kind in ("ready", "unusable")):
            raise ValueError(f"a {kind} message in state {handle.state.value}")
        if kind == "ready":
            return self._ready(handle, message.ready)
        if kind == "unusable":
            self._lives.unusable(handle, messages.refusal_of(message.unusable))
            return None
        if kind == "part_finished":
            finished = message.part_finished
            stimulus = messages.part_finished(handle.worker, finished)
            totals = self.totals[handle.parts.pop(stimulus.part)]
            totals.outcomes[stimulus.outcome.name] += 1
            totals.copied_bytes += finished.copied_bytes
            totals.copy_ns += finished.copy_ns
            return stimulus
        if kind == "disk_job_finished":
            done = messages.disk_job_finished(handle.worker, message.disk_job_finished)
            handle.jobs.remove(done.job)
            return done
        if kind == "records_persisted":
            answer = handle.persisting.pop(message.records_persisted.request, None)
            if answer is not None and not answer.done():  # else its caller was cancelled
                answer.set_result(message.records_persisted.error)
            return None
        if kind == "slots_checked":
            return messages.slots_checked(handle.worker, message.slots_checked)
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
            return SessionReleased(handle.worker, session)
        if kind == "mapped":
            request = handle.requests.pop(message.mapped.request, None)
            if request is not None and not request.answer.done():
                request.answer.set_result(None)
            return None
        if kind == "map_refused":
            refusal = messages.refusal_of(message.map_refused)
            request = handle.requests.pop(message.map_refused.request, None)
            if request is not None and not request.answer.done():
                request.answer.set_exception(refusal)
            return None
        raise ValueError(f"a message of kind {kind}")

    def _ready(self, handle: WorkerHandle, ready: wire.Ready) -> WorkerStimulus | None:
        if ready.pid != handle.pid:
            raise ValueError(f"pid {handle.pid} calls itself {ready.pid}")
        try:
            handle.writer = self._register_writer(handle.pid)
        except Exception as error:
            _log.error("a copy worker has no writer id", worker_pid=handle.pid, exc_info=error)
            self._lives.lose(handle, f"it could not be given a writer id: {error}")
            return None
        handle.cold_reason = ready.cold_reason
        handle.direct_io = ready.direct_io
        self._lives.live(handle)
        return WorkerLive(handle.worker, handle.device)

    def _emit(self, stimulus: WorkerStimulus) -> None:
        """Tells the core in a callback of its own: never in the middle of a method here, and errors there are
        not ours."""
        self._loop.call_soon(self._events, stimulus)


def _is_refused(answer: "asyncio.Future[None]") -> bool:
    return answer.done() and not answer.cancelled() and answer.exception() is not None
