"""What the daemon is like at one moment, for Status and metrics: immutable, safe in another thread."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from kvtierd.cache.disks import DiskFile
from kvtierd.core.ids import SessionId
from kvtierd.core.status import CoreStatus, DiskStatus
from kvtierd.memory.host_pool import PoolStart
from kvtierd.workers.channel.status import StatusWord
from kvtierd.workers.supervisor.devices import SupervisedDevice
from kvtierd.workers.supervisor.handles import WorkerHandle
from kvtierd.workers.supervisor.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class SessionAbout:
    """What is known of a session besides the core's own view; for people."""

    role: str
    """"scheduler", "rank 0", "scheduler and rank 0"."""
    pid: int
    client: str
    attached_at_s: float
    """On the façade's clock."""
    configuration: tuple[tuple[str, str], ...] = ()
    """Names and values of the engine's settings, as far as it has told them."""
    uid: int = 0
    """The user who runs the process."""


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    path: str
    """Empty for an anonymous pool."""
    size_bytes: int
    """What was configured."""
    file_bytes: int
    """The header and `capacity_bytes`: what fits `size_bytes` in whole extents."""
    capacity_bytes: int
    populated_bytes: int
    """The part of `capacity_bytes` that has memory, and can be used."""
    shortage: str
    """Why the rest gets none; empty if it does."""
    quarantined_slots: int
    start: PoolStart


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    device: str
    pid: int
    state: str
    """"starting", "live", "ending" or "lost"."""
    respawns: int
    parts_active: int
    mapped_bytes: int
    """Of engines' memory, until it has let go of it."""
    registered_bytes: int
    """Of the pool, with a GPU's driver."""
    remote_bytes: int
    """Of the pool, that seem to lie on another memory node than the GPU."""

    @classmethod
    def of(cls, handle: WorkerHandle, workers: Supervisor, mapped_bytes: int) -> Self:
        return cls(
            handle.device,
            handle.pid,
            handle.state.value,
            handle.respawns,
            handle.parts_active,
            mapped_bytes=mapped_bytes,
            registered_bytes=workers.status_word(handle.worker, StatusWord.REGISTERED_BYTES),
            remote_bytes=workers.status_word(handle.worker, StatusWord.REMOTE_BYTES),
        )


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """A device that has, or had, a worker."""

    name: str
    idle: bool
    """It has no worker because no session needs one."""
    respawns: int
    """Workers started in place of lost ones."""
    refused_imports: Mapping[str, int]
    """How often the driver did not let its workers open an engine's memory, by the driver's error."""
    refused_why: str
    """What the last of these refusals said: the likely cause, and what to change."""


@dataclass(frozen=True, slots=True)
class DiskSnapshot:
    path: str
    """The directory, or the URL of the store."""
    capacity_bytes: int
    state: str
    """"starting", "live", "refusing", "off" or "failing"."""
    why: str
    """Why it is not live, in one sentence."""
    cold_reason: str
    """Why its first worker kept nothing; empty if it did, or was not live yet."""
    direct_io: bool
    recovered_blocks: int
    recovered_bytes: int
    recovery_s: float
    core: DiskStatus
    encrypted: bool = False
    shared: bool = False
    """Whether it is the store."""

    @classmethod
    def of(cls, disk: DiskFile, core: DiskStatus, device: SupervisedDevice) -> Self:
        start = disk.start
        # The core knows nothing about a disk that was never live.
        state = "off" if core.state == "starting" and device.why else core.state
        return cls(
            path=disk.place,
            capacity_bytes=disk.image.geometry.capacity_bytes,
            state=state,
            why="" if state == "live" else device.why or core.why,
            cold_reason=start.cold_reason if start else "",
            direct_io=start is not None and start.direct_io,
            recovered_blocks=start.blocks if start else 0,
            recovered_bytes=start.data_bytes if start else 0,
            recovery_s=start.seconds if start else 0.0,
            core=core,
            encrypted=disk.encrypted,
            shared=disk.shared,
        )


@dataclass(frozen=True, slots=True)
class CopySnapshot:
    """Of one direction, since the daemon started."""

    copied_bytes: int
    copy_s: float
    outcomes: Mapping[str, int]
    """Parts by how they ended."""


@dataclass(frozen=True, slots=True)
class EventsSnapshot:
    """What is published for routers. Numbers count since the daemon started."""

    endpoint: str
    replay_endpoint: str
    """Empty: there are no replays."""
    alive: bool
    """Whether anything is still published."""
    streams: int
    """Topics, one for each namespace."""
    batches: int
    stored_blocks: int
    removed_blocks: int
    resets: int
    """How often everything was told anew, because news came faster than they could be published."""
    replays: int
    """Replays that were asked for."""
    replays_refused: int
    """Requests that could not be read, or were too many at once."""
    replays_forgotten: int
    """Replays that did not come to an end, because the subscriber had gone or was too slow."""
    shown: int
    """How often everything of a stream had to be shown, because the batches that were asked for were gone."""
    kept_batches: int
    kept_bytes: int
    """What is kept for replays."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    state: str
    """"serving" or "draining"."""
    now_s: float
    """On the façade's clock."""
    uptime_s: float
    boot_nonce: int
    pool: PoolSnapshot
    core: CoreStatus
    sessions: Mapping[SessionId, SessionAbout]
    devices: tuple[DeviceSnapshot, ...]
    workers: tuple[WorkerSnapshot, ...]
    disks: tuple[DiskSnapshot, ...]
    """In the order of the configuration."""
    copies: Mapping[str, CopySnapshot]
    """By direction: "store" and "load"."""
    events: EventsSnapshot | None = None
    """None: nothing is published."""
