"""The state of the daemon at one moment, for Status and metrics. It is immutable, and safe in other
threads."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvtierd.core.ids import SessionId
from kvtierd.core.status import CoreStatus, DiskStatus


@dataclass(frozen=True, slots=True)
class SessionAbout:
    """What people may want to know about a session, beyond what the core knows."""

    role: str
    """"scheduler", "rank 0", "scheduler and rank 0"."""
    pid: int
    client: str
    attached_at_s: float
    """When it attached, on the façade's clock."""
    configuration: tuple[tuple[str, str], ...] = ()
    """Names and values of the engine's settings, as far as it has sent them."""


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    path: str
    """Empty for an anonymous pool."""
    size_bytes: int
    """The configured size."""
    file_bytes: int
    """The header and `capacity_bytes`, which is what fits into `size_bytes` in whole extents."""
    capacity_bytes: int
    warm: bool
    cold_reason: str
    recovered_blocks: int
    recovered_bytes: int
    quarantined_slots: int
    discarded_slots: int
    recovery_s: float


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    device: str
    pid: int
    state: str
    """"starting", "live", "ending" or "lost"."""
    respawns: int
    parts_active: int
    mapped_bytes: int
    """Bytes of engines' memory, until the worker has let go of it."""
    registered_bytes: int
    """Bytes of the pool that are registered with a GPU's driver."""
    remote_bytes: int
    """Bytes of the pool that seem to lie on another memory node than the GPU."""


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """A device that has, or had, a worker."""

    name: str
    idle: bool
    """Whether it has no worker because no session needs one."""
    respawns: int
    """Workers that were started in place of lost ones."""


@dataclass(frozen=True, slots=True)
class DiskSnapshot:
    path: str
    """The disk's directory."""
    capacity_bytes: int
    state: str
    """"starting", "live", "off" or "failing"."""
    why: str
    """Why the disk is not live, in one sentence."""
    cold_reason: str
    """Why its first worker kept nothing; empty if it kept something, or was not live yet."""
    direct_io: bool
    recovered_blocks: int
    recovered_bytes: int
    recovery_s: float
    core: DiskStatus


@dataclass(frozen=True, slots=True)
class CopySnapshot:
    """Copies in one direction since the daemon started."""

    copied_bytes: int
    copy_s: float
    outcomes: Mapping[str, int]
    """Parts by how they ended."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    state: str
    """"serving" or "draining"."""
    now_s: float
    """The time of the snapshot, on the façade's clock."""
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
