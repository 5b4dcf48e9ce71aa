"""Which device has which worker, when a worker may be started, and when it should be ended. It only
decides."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtierd.core.errors import Reason, Refusal
from kvtierd.workers.supervisor.handles import SupervisorLimits, WorkerHandle, WorkerProcessState


@dataclass(slots=True, eq=False)
class SupervisedDevice:
    """One device that has, or had, a worker. Only `SupervisedDevices` changes it."""

    name: str
    permanent: bool
    """It has a worker as long as the daemon runs, not only while sessions use it."""
    delay_s: float
    """How long to wait before the next worker is started, if this one does not last."""
    delay_max_s: float
    worker: WorkerHandle | None = None
    """Its latest worker, until the process of that one is gone."""
    workers: int = 0
    """How many of its workers were ever live."""
    respawns: int = 0
    """Workers that were started in place of lost ones."""
    broken: bool = False
    """Its last worker was lost, and none has become live since."""
    not_before_s: float = 0.0
    """The earliest time at which the next worker may be started."""
    last_why: str = ""
    """What became of its last worker; empty once another is live."""
    refused_imports: "Counter[str]" = field(default_factory=Counter)
    """How often the driver did not let its workers open an engine's memory, by the driver's error."""
    refused_why: str = ""
    """What the last of these refusals said: the likely cause, and what to change."""
    renewed: bool = False
    """Its worker was replaced to see whether one with another PID may open an engine's memory. That is not
    done again before one has opened some."""

    copy_hung: bool = False
    """A lane of a worker was stuck in a copy."""

    @property
    def is_known(self) -> bool:
        """False for a device that a client has named and no worker has ever served."""
        return self.permanent or self.workers > 0

    @property
    def why(self) -> str:
        """Why it has no live worker, in one sentence; empty if it has one, or never had any."""
        return (self.worker.why if self.worker is not None else "") or self.last_why

    @property
    def idle(self) -> bool:
        """Whether it has no worker, or will soon have none, because no session needs one."""
        ending = self.worker is None or self.worker.state is WorkerProcessState.ENDING
        return ending and not self.permanent and not self.broken


class SupervisedDevices:
    """All devices. `now_s` is the event loop's time, unless stated otherwise."""

    def __init__(self, permanent: Sequence[str], limits: SupervisorLimits, disks: Sequence[str] = ()) -> None:
        """The devices in `permanent` and `disks` have a worker as long as the daemon runs."""
        self._limits = limits
        self._known = {name: self._new(name, permanent=True) for name in permanent}
        for name in disks:
            self._known[name] = self._new(name, permanent=True, delay_max_s=limits.disk_respawn_delay_max_s)

    def _new(
        self, name: str, *, permanent: bool = False, delay_max_s: float | None = None
    ) -> SupervisedDevice:
        limits = self._limits
        return SupervisedDevice(
            name, permanent, limits.respawn_delay_min_s, delay_max_s or limits.respawn_delay_max_s
        )

    def __iter__(self) -> Iterator[SupervisedDevice]:
        """Devices that have or should have a worker, and those that had one."""
        return iter(self._known.values())

    @property
    def permanent(self) -> list[str]:
        return [device.name for device in self if device.permanent]

    def __getitem__(self, name: str) -> SupervisedDevice:
        """A device that is known."""
        return self._known[name]

    def worker(self, name: str) -> WorkerHandle | None:
        """The device's latest worker, in whatever state, until its process is gone."""
        device = self._known.get(name)
        return None if device is None else device.worker

    def check_start(self, name: str, now_s: float, workers: Sequence[WorkerHandle]) -> None:
        """Raises Refusal if a session cannot have a worker started for this device now.

        `workers` are all that have a process.
        """
        refusal = partial(Refusal, field="device", value=name)
        device = self._known.get(name)
        if device is not None and device.permanent:
            raise refusal(Reason.WORKER_UNAVAILABLE, "the device's copy worker is being started: try again")
        if device is not None and now_s < device.not_before_s:
            raise refusal(
                Reason.WORKER_UNAVAILABLE,
                "the device's copy worker was lost: try again in "
                f"{device.not_before_s - now_s:.1f} s, when another may be started",
            )
        if len(workers) >= self._limits.devices_max:
            raise refusal(
                Reason.QUEUE_FULL,
                f"the daemon runs {self._limits.devices_max} copy workers already, and no more",
            )
        if sum(worker.state is WorkerProcessState.STARTING for worker in workers) >= self._limits.starts_max:
            raise refusal(
                Reason.WORKER_UNAVAILABLE,
                f"{self._limits.starts_max} copy workers are being started already: try again in a second",
            )

    def respawns_of_next(self, name: str) -> int:
        """The value of `WorkerHandle.respawns` for the next worker of a device."""
        device = self._known.get(name)
        return 0 if device is None else device.respawns + device.broken

    def started(self, handle: WorkerHandle) -> None:
        """A process has been started for a device that had none."""
        device = self._known.get(handle.device)
        if device is None:
            self._make_room()
            device = self._known[handle.device] = self._new(handle.device)
        device.worker = handle
        device.respawns = handle.respawns

    def _make_room(self) -> None:
        """If there are too many devices, forgets those that have no worker. With real GPUs there never
        are."""
        unused = [device.name for device in self if device.worker is None and not device.permanent]
        while len(self._known) >= self._limits.devices_max and unused:
            del self._known[unused.pop(0)]

    def live(self, handle: WorkerHandle) -> None:
        """A worker has become live."""
        device = self._known[handle.device]
        device.broken = False
        device.workers += 1
        device.last_why = ""

    def unusable(self, handle: WorkerHandle) -> None:
        """A worker has found that it cannot serve its device. The next session that asks gets another one."""
        device = self._known[handle.device]
        if device.permanent:
            return
        device.worker = None
        if not device.workers:
            del self._known[handle.device]

    def gone(self, handle: WorkerHandle, now_s: float, *, lost: bool) -> float | None:
        """A worker's process is gone; `lost` unless it was meant to end.

        Returns in how many seconds another one has to be started in its place, or None if that can wait until
        a session asks.
        """
        device = self._known.get(handle.device)
        if device is None or device.worker is not handle:
            return None  # the worker could not serve its device
        device.worker = None
        device.last_why = handle.why
        if not lost and not device.permanent:
            return None
        device.broken = True
        if now_s - handle.started_s >= self._limits.steady_s:
            device.delay_s = self._limits.respawn_delay_min_s
        delay_s = self.next_delay_s(handle.device)
        device.not_before_s = now_s + delay_s
        return delay_s if device.permanent else None

    def next_delay_s(self, name: str) -> float:
        """How long to wait before another worker is started. The next delay will be twice as long."""
        device = self._known[name]
        delay_s = device.delay_s
        device.delay_s = min(2 * delay_s, device.delay_max_s)
        return delay_s

    def import_refused(self, handle: WorkerHandle, refusal: Refusal) -> None:
        """The driver did not let a worker open an engine's memory."""
        device = self._known[handle.device]
        device.refused_imports[refusal.value] += 1
        device.refused_why = refusal.message

    def memory_mapped(self, handle: WorkerHandle) -> None:
        """A worker has mapped an engine's memory."""
        self._known[handle.device].renewed = False

    def claim_renewal(self, handle: WorkerHandle) -> bool:
        """Whether a live worker is to be replaced by one with another PID, because it serves at most one
        session. Answers True once until an engine's memory was mapped."""
        device = self._known[handle.device]
        if device.permanent or device.renewed or len(handle.sessions) > 1:
            return False
        device.renewed = True
        return True

    def copy_hung(self, handle: WorkerHandle) -> None:
        """A lane of a live worker was found stuck in a copy."""
        self._known[handle.device].copy_hung = True

    def copies_hung(self, name: str) -> bool:
        """Whether that was ever so with a worker of this device."""
        return name in self._known and self._known[name].copy_hung

    def idle(self, now_s: float) -> list[WorkerHandle]:
        """Live workers that no session has used for so long that they should be ended. `now_s` is the time of
        `Watch`."""
        idle_s = self._limits.gpu_idle_s
        if not idle_s:
            return []
        found = []
        for device in self:
            worker = device.worker
            if device.permanent or worker is None or worker.state is not WorkerProcessState.LIVE:
                continue
            if worker.sessions or worker.requests or worker.idle_since_s is None:
                worker.idle_since_s = now_s
            elif now_s - worker.idle_since_s >= idle_s:
                found.append(worker)
        return found

    @property
    def respawns(self) -> Mapping[str, int]:
        """For each device, the workers that were started in place of lost ones."""
        return {device.name: device.respawns for device in self if device.is_known}
