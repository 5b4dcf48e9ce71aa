"""The lives of workers: how they are started, watched, lost, ended and replaced."""

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import WorkerId
from kvtierd.core.stimuli import WorkerExited, WorkerLost
from kvtierd.logs import logger
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.packets import PEER_CLOSED, close_fds
from kvtierd.workers.channel.status import StatusWord
from kvtierd.workers.supervisor import handles
from kvtierd.workers.supervisor.devices import SupervisedDevices
from kvtierd.workers.supervisor.kinds import BelowOptions, WorkerKind, gpu_environment
from kvtierd.workers.supervisor.process import EXITED_WELL, WorkerProcess
from kvtierd.workers.supervisor.reserve import DescriptorReserve
from kvtierd.workers.supervisor.watch import Watch

_log = logger(__name__)

EXIT_GRACE_S = 1.0
"""How long a worker that has closed its channel may take to be gone before it is killed. Its exit status says
more than a kill does, and on a busy machine comes late."""
AUTO, ONE_BY_ONE = "auto", "loop"
"""Values of `WorkerOptions.gpu_copy_method`: what the driver does best, and a call for each copy."""
WATCH_SILENCE_MAX_S = 5.0
"""The longest time between two rounds of the watch; normally there are 20 in that time."""
_STOP = wire.ToWorker(stop=wire.Stop()).SerializeToString()


class Lifecycle:
    """The processes behind the supervisor, which gets their packets. Everything happens on one event loop.

    `emit` gets WorkerLost and WorkerExited for workers that `live` has announced.
    """

    def __init__(
        self,
        *,
        pool_fd: int,
        pool_bytes: int,
        reserve: int,
        devices: Sequence[str],
        disks: Sequence[BelowOptions],
        limits: handles.SupervisorLimits,
        environment: Mapping[str, str] | None,
        options: handles.WorkerOptions,
        on_packet: Callable[[handles.WorkerHandle, bytes], None],
        emit: Callable[[WorkerLost | WorkerExited], None],
    ) -> None:
        self.workers: dict[WorkerId, handles.WorkerHandle] = {}
        self.processes: dict[WorkerId, WorkerProcess] = {}
        self._required = tuple(devices)
        self._disks = {disk.device: disk for disk in disks}
        self.devices = SupervisedDevices(devices, limits, tuple(self._disks))
        self.watch = Watch(limits)
        self._limits = limits
        self._pool_fd = pool_fd
        self._pool_bytes = pool_bytes
        self._reserve = DescriptorReserve(reserve)
        self._environment = environment
        self._options = options
        self._on_packet = on_packet
        self._emit = emit
        self._worker_ids = itertools.count(1)
        self._respawn_timers: dict[str, asyncio.TimerHandle] = {}
        self._watch_timer: asyncio.TimerHandle | None = None
        self._told: dict[tuple[str, str], None] = {}
        """What the log has said already about devices that cannot be used and workers that do not start."""
        self._changed = asyncio.Event()
        self._stopping = False
        self._seen_dead: set[WorkerId] = set()
        """Workers whose processes had ended, unnoticed, at the last call of `unattended`."""

    async def start(self) -> None:
        """As `Supervisor.start`."""
        self._loop = asyncio.get_running_loop()
        self.watch.start(self._loop.time())
        self._watch_timer = self._loop.call_later(self._limits.watch_period_s, self._watch_round)
        try:
            first = [self._spawn(device) for device in self._required]
        except (OSError, ValueError) as error:
            await self.stop(0)
            raise handles.WorkerStartError(f"a copy worker cannot be started: {error}") from error
        for device in self._disks:
            self._start_again(device)
        for handle in first:
            await handle.settled.wait()
            if handle.state is not handles.WorkerProcessState.LIVE:
                await self.stop(0)
                raise handles.WorkerStartError(
                    f"the copy worker for {handle.device!r} did not come up: {handle.why}; "
                    "its own messages are on the daemon's stderr"
                )

    async def settle_disks(self, timeout_s: float) -> None:
        """Returns when the first worker of every disk is live, has said that it cannot be, or is lost, but
        after `timeout_s` at the latest."""
        workers = map(self.devices.worker, self._disks)
        try:
            async with asyncio.timeout(timeout_s):
                for handle in workers:
                    if handle is not None:
                        await handle.settled.wait()
        except TimeoutError:
            pass  # the others join later

    async def stop(self, grace_s: float) -> bool:
        """Ends all workers: parts that have not started are revoked, and those that have are finished, for at
        most `grace_s`; then workers get SIGKILL.

        Events go on until the last process is gone. Returns False if one could not be killed within
        `kill_deadline_s`, or longer for one that has memory registered.
        """
        self._stopping = True
        for timer in self._respawn_timers.values():
            timer.cancel()
        self._respawn_timers.clear()
        for handle in list(self.workers.values()):
            if handle.state is handles.WorkerProcessState.STARTING:
                self.lose(handle, "the daemon stops")
            self._tell_to_stop(handle)
        if grace_s > 0:
            await self._all_gone(grace_s)
        for handle in list(self.workers.values()):
            self.lose(handle, "the daemon stops")
        gone = await self._all_gone(max(map(self._end_s, self.workers.values()), default=0.0))
        self._reserve.close()
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

    async def worker_for(self, device: str) -> WorkerId:
        """The live worker of a device, which is started if there is none. All who wait for one share it.

        Returns or raises after the handshake deadline at the latest. Raises Refusal: what the worker said if
        it cannot serve the device; WORKER_UNAVAILABLE if it was lost before it was ready, or its predecessor
        a moment ago; QUEUE_FULL if there are too many workers.
        """
        if self._stopping:
            raise Refusal(Reason.DRAINING, "the daemon is stopping: attach again when it is back")
        handle = self.devices.worker(device) or self._start_for(device)
        # This wait ends with the handshake deadline, whatever happens.
        await handle.settled.wait()
        if handle.state is not handles.WorkerProcessState.LIVE:
            raise handle.refusal or handles.unavailable(handle)
        handle.idle_since_s = None
        return handle.worker

    def _start_for(self, device: str) -> handles.WorkerHandle:
        self.devices.check_start(device, self._loop.time(), list(self.workers.values()))
        try:
            return self._spawn(device)
        except (OSError, ValueError) as error:
            _log.error("a copy worker cannot be started", device=device, error=str(error))
            raise Refusal(
                Reason.WORKER_UNAVAILABLE,
                f"the device's copy worker cannot be started ({error}): try again later",
                field="device",
                value=device,
            ) from error

    def serving(self, worker: WorkerId) -> handles.WorkerHandle:
        """A live worker. Refusal if it is lost, or ends."""
        handle = self.workers.get(worker)
        if handle is None or handle.state is not handles.WorkerProcessState.LIVE:
            raise Refusal(
                Reason.WORKER_UNAVAILABLE,
                "the copy worker is gone; a new one is being started, try again in a second",
                field="worker",
                value=worker,
            )
        return handle

    def _tell_to_stop(self, handle: handles.WorkerHandle) -> bool:
        """False if it is not live, or its queue is full, which loses it."""
        if handle.state is not handles.WorkerProcessState.LIVE:
            return False
        return self.processes[handle.worker].channel.send(_STOP)

    def _spawn(self, device: str) -> handles.WorkerHandle:
        """Starts a worker. Raises OSError or ValueError if no process can be started, and then nothing has
        changed."""
        respawns = self.devices.respawns_of_next(device)
        kind = self._kind(device)
        handle = handles.WorkerHandle(WorkerId(next(self._worker_ids)), device, respawns, kind)
        with self._reserve.lent():
            process = WorkerProcess(
                pool_fd=self._pool_fd,
                pool_bytes=self._pool_bytes,
                kind=kind,
                environment=self._environment,
                log_level=self._options.log_level,
                log_format=self._options.log_format,
                on_packet=lambda packet, fds: self._packet(handle, packet, fds),
                on_closed=lambda reason: self._channel_closed(handle, reason),
                on_exit=lambda: self._exited(handle),
            )
        handle.pid = process.pid
        handle.started_s = self._loop.time()
        handle.deadline_s = self.watch.now_s + kind.handshake_deadline_s
        self.workers[handle.worker] = handle
        self.processes[handle.worker] = process
        self.devices.started(handle)
        return handle

    def _kind(self, device: str) -> WorkerKind:
        """What the next worker of a device is."""
        limits = self._limits
        disk = self._disks.get(device)
        if disk is not None:
            return disk.worker(
                first=not self.devices[device].workers,
                handshake_deadline_s=limits.disk_handshake_deadline_s,
            )
        on_gpu = device != handles.CPU
        arguments: dict[str, object] = {"--device": device, "--copy-deadline-s": limits.copy_deadline_s}
        if on_gpu:
            arguments |= self._gpu_arguments(device)
        return WorkerKind(
            title="copy worker",
            module="kvtierd.workers.copy",
            arguments=arguments,
            handshake_deadline_s=limits.gpu_handshake_deadline_s if on_gpu else limits.handshake_deadline_s,
            operation_deadline_s=limits.copy_deadline_s,
            map_deadline_s=limits.gpu_map_deadline_s if on_gpu else limits.map_deadline_s,
            environment=gpu_environment(device, os.environ) if on_gpu else {},
        )

    def _gpu_arguments(self, device: str) -> dict[str, object]:
        """What the next worker of a GPU is told."""
        options, chunks = self._options, self._options.gpu_chunks
        method = options.gpu_copy_method
        if method == AUTO and self.devices.copies_hung(device):
            method = ONE_BY_ONE
        return {
            "--copy-method": method,
            "--seal-threads": options.seal_threads,
            "--load-chunk-bytes": chunks.load_bytes,
            "--store-chunk-bytes": chunks.store_bytes,
            "--flights": chunks.flights,
            "--pacing": chunks.pacing.value,
            "--paced-chunk-bytes": chunks.paced_bytes,
        }

    def _packet(self, handle: handles.WorkerHandle, packet: bytes, fds: list[int]) -> None:
        close_fds(fds)
        self._on_packet(handle, packet)

    def _channel_closed(self, handle: handles.WorkerHandle, reason: str) -> None:
        if handle.state is handles.WorkerProcessState.ENDING or self._stopping:
            return  # as it was told to; the process may take a while to end
        if reason == PEER_CLOSED:
            # Most likely its process is about to end, and its exit status says better why.
            self._loop.call_later(EXIT_GRACE_S, self.lose, handle, f"its channel broke: {reason}")
        else:
            self.lose(handle, f"its channel broke: {reason}")

    # --- from one state to the next ---

    def live(self, handle: handles.WorkerHandle) -> None:
        """A worker is ready. The caller announces it, and then sets `settled`."""
        handle.state = handles.WorkerProcessState.LIVE
        handle.announced = True
        self.devices.live(handle)
        self._told = {told: None for told in self._told if told[0] != handle.device}
        _log.info(f"{handle.kind.title} live", worker_pid=handle.pid, device=handle.device)

    def reject(self, device: str, why: str) -> None:
        """What a disk's first worker filled the image with cannot be used: the worker is lost, and the next
        one fills the image anew."""
        self.devices[device].workers = 0
        handle = self.devices.worker(device)
        if handle is not None:
            self.lose(handle, why)

    def unusable(self, handle: handles.WorkerHandle, refusal: Refusal) -> None:
        """A worker cannot serve its device, and exits."""
        handle.refusal = refusal
        self.devices.unusable(handle)
        say = _log.warning if self._is_new(handle, f"{refusal.reason.name} {refusal.field}") else _log.debug
        say(
            "a device cannot be used; said once for each reason",
            device=handle.device,
            reason=refusal.reason.name,
            why=refusal.message,
        )
        self._end(handle, refusal.message)

    def renew(self, worker: WorkerId) -> bool:
        """Ends a GPU's worker that serves at most one session; the next session that asks gets one with
        another PID. Returns False, and does nothing, if it serves others as well, if it is not live, or if
        that was tried before in vain."""
        handle = self.workers.get(worker)
        if handle is None or handle.state is not handles.WorkerProcessState.LIVE:
            return False
        if not self.devices.claim_renewal(handle) or not self._tell_to_stop(handle):
            return False
        self._end(handle, "one with another PID may be allowed to open the engine's memory")
        return True

    def memory_mapped(self, worker: WorkerId) -> None:
        """A worker has mapped an engine's memory, so `renew` may be worth a try again."""
        handle = self.workers.get(worker)
        if handle is not None:
            self.devices.memory_mapped(handle)

    def _is_new(self, handle: handles.WorkerHandle, why: str) -> bool:
        """Whether the log has not said this about the device yet. From now on it has."""
        told = (handle.device, why)
        is_new = told not in self._told
        self._told[told] = None
        while len(self._told) > self._limits.devices_max:
            del self._told[next(iter(self._told))]
        return is_new

    def _end(self, handle: handles.WorkerHandle, why: str) -> None:
        """The worker gets nothing more to do, and is to exit by itself."""
        handle.state = handles.WorkerProcessState.ENDING
        handle.why = why
        handle.deadline_s = self.watch.now_s + self._limits.end_deadline_s
        handle.settled.set()
        self.watch.forget(handle)

    def lose(self, handle: handles.WorkerHandle, why: str) -> None:
        """Kills a worker. From now on, only its end is waited for. Does nothing if it is lost already."""
        if handle.state in (handles.WorkerProcessState.LOST, handles.WorkerProcessState.EXITED):
            return
        # A worker that does not start is tried again and again, so the log says so only once.
        is_new = handle.state is not handles.WorkerProcessState.STARTING or self._is_new(handle, why)
        handle.state = handles.WorkerProcessState.LOST
        handle.why = why
        handle.end_s = self._end_s(handle)
        handle.deadline_s = self.watch.now_s + handle.end_s
        process = self.processes[handle.worker]
        process.kill()
        process.channel.close()
        self._forsake(handle, f"its worker was lost: {why}")
        handle.settled.set()
        self.watch.forget(handle)
        say = _log.info if self._stopping else _log.error if is_new else _log.debug
        say(f"{handle.kind.title} lost", worker_pid=handle.pid, device=handle.device, why=why)
        if handle.announced:
            self._emit(WorkerLost(handle.worker, why))

    def _end_s(self, handle: handles.WorkerHandle) -> float:
        """How long the process of a worker that is killed may take to be gone."""
        process, limits = self.processes.get(handle.worker), self._limits
        registered_bytes = 0 if process is None else process.status.read()[StatusWord.REGISTERED_BYTES]
        return limits.kill_deadline_s + registered_bytes / limits.unpin_bytes_per_s

    def _copy_hung(self, handle: handles.WorkerHandle) -> None:
        """A lane of a live worker is stuck in a copy. Batches of copies are known to hang a driver
        (580.159, vllm-project/vllm#49276)."""
        if handle.device == handles.CPU or self._options.gpu_copy_method != AUTO:
            return
        if not self.devices.copies_hung(handle.device):
            _log.warning(
                "a copy hung in the GPU's driver: until the daemon is restarted, workers of this GPU copy "
                "without batches, which hang some drivers. That is slower for small fragments: update the "
                'driver, or keep batches by workers.gpu_copy_method = "batch"',
                device=handle.device,
            )
        self.devices.copy_hung(handle)

    def _forsake(self, handle: handles.WorkerHandle, why: str) -> None:
        """Answers what still waits for the worker, which will not."""
        for request in handle.requests.values():
            if not request.answer.done():
                request.answer.set_exception(handles.unavailable(handle))
        handle.requests.clear()
        for told in handle.persisting.values():
            if not told.done():
                told.set_result(why)
        handle.persisting.clear()

    def _exited(self, handle: handles.WorkerHandle) -> None:
        process = self.processes[handle.worker]
        # Packets that it sent before it ended still count.
        process.channel.drain()
        how = process.ended() or "its process is gone"
        stopped = self._stopping and handle.state is handles.WorkerProcessState.LIVE
        as_told = (stopped or handle.state is handles.WorkerProcessState.ENDING) and how == EXITED_WELL
        if as_told:
            process.channel.close()
            handle.why = handle.why or how
            self._forsake(handle, "its worker has ended")
            _log.info(
                f"{handle.kind.title} ended", worker_pid=handle.pid, device=handle.device, why=handle.why
            )
            if handle.announced:
                self._emit(WorkerLost(handle.worker, handle.why))
        else:
            self.lose(handle, how)
        handle.state = handles.WorkerProcessState.EXITED
        del self.processes[handle.worker]
        process.close()
        self._reserve.fill()
        if handle.announced:
            self._emit(WorkerExited(handle.worker))
        # Only now, so that whoever gets one of its stimuli still finds the worker in `workers`.
        self._loop.call_soon(self._forget, handle, not as_told)

    def _forget(self, handle: handles.WorkerHandle, was_lost: bool) -> None:
        del self.workers[handle.worker]
        self._changed.set()
        delay_s = self.devices.gone(handle, self._loop.time(), lost=was_lost)
        if delay_s is not None and not self._stopping:
            self._schedule_respawn(handle.device, delay_s)

    def _schedule_respawn(self, device: str, delay_s: float) -> None:
        self._respawn_timers[device] = self._loop.call_later(delay_s, self._respawn, device)

    def _respawn(self, device: str) -> None:
        del self._respawn_timers[device]
        self._start_again(device)

    def _start_again(self, device: str) -> None:
        """Starts a worker of a permanent device. If that fails, tries again a little later."""
        try:
            self._spawn(device)
        except (OSError, ValueError) as error:
            _log.error("a worker cannot be started", device=device, error=str(error))
            self._schedule_respawn(device, self.devices.next_delay_s(device))

    def unattended(self) -> list[str]:
        """Workers that nobody looks after, one sentence for each. There should never be any, and no worker
        can cause it.

        Call it again and again, seconds apart. A worker that is late, lost or being replaced is looked after.
        """
        found = []
        silent_s = self._loop.time() - self.watch.looked_at_s
        if silent_s > WATCH_SILENCE_MAX_S:
            found.append(f"no worker has been looked at for {silent_s:.0f} s")
        for device in self.devices.permanent:
            if self.devices.worker(device) is None and device not in self._respawn_timers:
                found.append(f"{device} has no worker, and none is to be started")
        dead = {
            worker
            for worker, process in self.processes.items()
            if self.workers[worker].state is not handles.WorkerProcessState.EXITED
            and process.ended() is not None
        }
        # A process that has just ended will be noticed in a moment.
        for worker in sorted(dead & self._seen_dead):
            found.append(f"the end of the worker of {self.workers[worker].device} was not noticed")
        self._seen_dead = dead
        return [] if self._stopping else found

    def set_log_level(self, level: str) -> None:
        """Sets the log level of workers that are started from now on."""
        self._options = replace(self._options, log_level=level)

    def _watch_round(self) -> None:
        self._watch_timer = self._loop.call_later(self._limits.watch_period_s, self._watch_round)
        self.watch.advance(self._loop.time())
        for handle in list(self.workers.values()):
            if handle.state is not handles.WorkerProcessState.EXITED:
                why = self.watch.overdue(handle, self.processes[handle.worker].status.read())
                if why is not None:
                    if self.watch.stuck_in_copy(handle):
                        self._copy_hung(handle)
                    self.lose(handle, why)
        for handle in self.devices.idle(self.watch.now_s):
            if self._tell_to_stop(handle):
                self._end(handle, f"no session has used it for {self._limits.gpu_idle_s:g} s")
