"""When a device's copy worker may be started, and when it should be ended."""

from collections.abc import Sequence

import pytest
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import SessionId, WorkerId
from kvtierd.workers.supervisor.devices import SupervisedDevices
from kvtierd.workers.supervisor.handles import SupervisorLimits, WorkerHandle, WorkerProcessState
from kvtierd.workers.supervisor.kinds import WorkerKind

GPU = "GPU-00000000-0000-0000-0000-000000000001"
LIMITS = SupervisorLimits(
    respawn_delay_min_s=1.0,
    respawn_delay_max_s=4.0,
    disk_respawn_delay_max_s=8.0,
    steady_s=30.0,
    gpu_idle_s=10.0,
    devices_max=4,
    starts_max=2,
)


class Host:
    """Devices, with the workers that they are told of."""

    def __init__(self, limits: SupervisorLimits = LIMITS, disks: Sequence[str] = ()) -> None:
        self.devices = SupervisedDevices(["cpu"], limits, disks)
        self.now_s = 100.0
        self.workers: list[WorkerHandle] = []

    def start(self, name: str, state: WorkerProcessState = WorkerProcessState.LIVE) -> WorkerHandle:
        """As on behalf of a session. Raises Refusal."""
        self.devices.check_start(name, self.now_s, self.workers)
        return self.spawn(name, state)

    def spawn(self, name: str, state: WorkerProcessState = WorkerProcessState.LIVE) -> WorkerHandle:
        respawns = self.devices.respawns_of_next(name)
        kind = WorkerKind("copy worker", "none", {}, 1.0, 1.0, 1.0)
        worker = WorkerHandle(WorkerId(len(self.workers) + 1), name, respawns, kind, started_s=self.now_s)
        self.workers.append(worker)
        self.devices.started(worker)
        worker.state = state
        if state is WorkerProcessState.LIVE:
            self.devices.live(worker)
        return worker

    def end(self, worker: WorkerHandle, *, lost: bool) -> float | None:
        self.workers.remove(worker)
        worker.state = WorkerProcessState.EXITED
        return self.devices.gone(worker, self.now_s, lost=lost)

    def refused(self, name: str) -> Refusal:
        with pytest.raises(Refusal) as refusal:
            self.start(name)
        assert (refusal.value.field, refusal.value.value) == ("device", name)
        return refusal.value

    def known(self) -> list[str]:
        return [device.name for device in self.devices]


def test_a_permanent_device_is_started_by_nobody_who_asks_and_replaced_by_itself() -> None:
    host = Host()
    assert host.devices.permanent == ["cpu"]
    assert host.refused("cpu").reason is Reason.WORKER_UNAVAILABLE
    worker = host.spawn("cpu")
    assert host.devices.worker("cpu") is worker
    assert host.end(worker, lost=True) == 1.0
    assert host.refused("cpu").reason is Reason.WORKER_UNAVAILABLE
    assert host.end(host.spawn("cpu"), lost=True) == 2.0
    assert host.end(host.spawn("cpu"), lost=True) == 4.0
    steady = host.spawn("cpu")
    assert host.devices.respawns == {"cpu": 3}
    host.now_s += 30
    assert host.end(steady, lost=True) == 1.0, "it lasted: delays begin anew"


def test_a_lost_gpu_is_replaced_when_somebody_asks_but_not_at_once() -> None:
    host = Host()
    assert host.end(host.start(GPU), lost=True) is None
    refusal = host.refused(GPU)
    assert refusal.reason is Reason.WORKER_UNAVAILABLE
    assert "try again in 1.0 s" in refusal.message
    host.now_s += 1
    assert host.end(host.start(GPU), lost=True) is None
    host.now_s += 1
    assert "try again in 1.0 s" in host.refused(GPU).message, "twice as long"
    host.now_s += 1
    assert host.start(GPU).respawns == 2
    assert host.devices.respawns == {"cpu": 0, GPU: 2}


def test_a_gpu_that_was_idle_is_started_again_at_once_and_was_not_lost() -> None:
    host = Host()
    worker = host.start(GPU)
    [_, device] = host.devices
    assert (device.idle, device.broken) == (False, False)
    worker.state = WorkerProcessState.ENDING
    assert (device.idle, device.broken) == (True, False)
    assert host.end(worker, lost=False) is None
    assert (device.idle, device.broken) == (True, False)
    assert host.start(GPU).respawns == 0
    assert not device.idle


def test_what_cannot_be_used_is_forgotten_unless_it_once_was() -> None:
    host = Host()
    bogus = host.start(GPU, WorkerProcessState.STARTING)
    host.devices.unusable(bogus)
    assert host.known() == ["cpu"]
    again = host.start(GPU)
    assert host.end(bogus, lost=False) is None
    assert host.devices.worker(GPU) is again, "the end of the first is not the end of the second"
    host.end(again, lost=False)
    host.devices.unusable(host.start(GPU, WorkerProcessState.STARTING))
    assert host.known() == ["cpu", GPU]
    assert host.devices.worker(GPU) is None
    host.start(GPU)


def test_workers_are_bounded_and_so_are_those_being_started() -> None:
    host = Host()
    host.spawn("cpu")
    for name in "ab":
        host.start(name, WorkerProcessState.STARTING)
    assert host.refused("c").reason is Reason.WORKER_UNAVAILABLE
    for worker in host.workers:
        worker.state = WorkerProcessState.LIVE
    host.start("c")
    assert host.refused("d").reason is Reason.QUEUE_FULL


def test_names_of_the_past_give_way() -> None:
    host = Host()
    kept = host.start(GPU)
    for number in range(10):
        host.end(host.start(f"bogus {number}", WorkerProcessState.STARTING), lost=True)
    assert len(host.known()) <= LIMITS.devices_max
    assert {"cpu", GPU} <= set(host.known())
    assert host.devices.worker(GPU) is kept
    assert host.devices.respawns == {"cpu": 0, GPU: 0}, "what has never worked is not shown"


def test_a_gpu_is_idle_once_no_session_has_held_anything_for_long_enough() -> None:
    host = Host()
    cpu, gpu = host.spawn("cpu"), host.start(GPU)
    host.start("starting", WorkerProcessState.STARTING)
    gpu.sessions.add(SessionId(1))
    assert host.devices.idle(host.now_s + 1_000) == []
    gpu.sessions.clear()
    assert host.devices.idle(host.now_s + 1_009.9) == [], "counted from when it was last seen in use"
    assert host.devices.idle(host.now_s + 1_010) == [gpu]
    assert cpu.idle_since_s is None, "the host itself is never idle"
    gpu.idle_since_s = None
    assert host.devices.idle(host.now_s + 2_000) == [], "asked for: counted from the next round"
    assert host.devices.idle(host.now_s + 2_009.9) == []
    assert host.devices.idle(host.now_s + 2_010) == [gpu]


def test_idle_workers_stay_if_so_configured() -> None:
    host = Host(SupervisorLimits(gpu_idle_s=0))
    host.start(GPU)
    assert host.devices.idle(1e9) == []


def test_a_disk_is_tried_again_more_and_more_rarely_and_says_why_it_is_off() -> None:
    host = Host(disks=["disk-0"])
    assert host.devices.permanent == ["cpu", "disk-0"]
    disk = host.devices["disk-0"]
    assert (disk.is_known, disk.why) == (True, "")
    for delay_s in (1.0, 2.0, 4.0, 8.0, 8.0):
        refused = host.spawn("disk-0", WorkerProcessState.STARTING)
        refused.state, refused.why = WorkerProcessState.ENDING, f"no room, tried again after {delay_s} s"
        host.devices.unusable(refused)
        assert disk.why == refused.why
        assert host.end(refused, lost=False) == delay_s
        assert (disk.why, disk.idle) == (refused.why, False), "until another is live"
    host.spawn("disk-0")
    assert disk.why == ""
