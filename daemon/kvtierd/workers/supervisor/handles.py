"""What is known of a worker while its process exists, and the deadlines it has to keep."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from kvtierd.core.actions import Direction
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import DiskJobId, PartId, SessionId, WorkerId
from kvtierd.workers.lane_chunks import LaneChunks
from kvtierd.workers.supervisor.kinds import WorkerKind

CPU = "cpu"
"""The device whose memory is the host's. Every other device is a GPU, named as `nvidia-smi -L` prints it, or
a disk."""


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """Deadlines of the supervisor, all in positive seconds. Time during which the front itself stood still
    does not count."""

    copy_deadline_s: float = 10.0
    """A worker is killed if one of its lanes is inside one copy call for longer, or if its main thread does
    not come round for longer."""
    handshake_deadline_s: float = 30.0
    """From start to Ready, while an interpreter starts and maps the pool."""
    gpu_handshake_deadline_s: float = 60.0
    """The same for a GPU's worker: its driver loads and makes a context, which takes seconds on a busy
    host."""
    disk_handshake_deadline_s: float = 600.0
    """The same for a disk's worker: some file systems can only write a new slab file from end to end."""
    map_deadline_s: float = 10.0
    """For the answer to MapWords or MapMemory."""
    gpu_map_deadline_s: float = 60.0
    """The same for a GPU's worker, and for AddChunks: a large cache has thousands of handles to import and
    map."""
    gpu_idle_s: float = 300.0
    """A GPU's worker that has held nothing of any session for this long is ended, which frees its context; 0
    for never."""
    end_deadline_s: float = 30.0
    """For a worker that was told to end until it is gone; unregistering much memory takes a while."""
    devices_max: int = 64
    """Workers at once."""
    starts_max: int = 16
    """Workers that are being started at once: the most GPUs that a host has."""
    release_deadline_s: float = 10.0
    """For the answer to ReleaseSession. A worker that holds a dead engine's memory for longer is killed."""
    kill_deadline_s: float = 5.0
    """A worker that is still there this long after SIGKILL is reported. Its blocks stay held until it is
    gone."""
    unpin_bytes_per_s: float = 5e9
    """A GPU's worker has longer: its end gives back what it has registered with the driver, and the kernel
    walks all of it in pages of 4 KiB. 10 GB have taken a second (torch-quiver #57), so this is patient."""
    watch_period_s: float = 0.25
    respawn_delay_min_s: float = 0.1
    """Wait before a worker is replaced; it doubles with every replacement that does not last."""
    respawn_delay_max_s: float = 10.0
    disk_respawn_delay_max_s: float = 30.0
    """The same for a disk's worker."""
    steady_s: float = 30.0
    """After a worker that lived this long, the delays start from the minimum again."""


class WorkerProcessState(Enum):
    STARTING = "starting"
    LIVE = "live"
    ENDING = "ending"
    """It takes nothing more and exits by itself, because it was told to or cannot serve its device."""
    LOST = "lost"
    """It is being killed, but may still be writing."""
    EXITED = "exited"


class WorkerStartError(Exception):
    """The first worker of a device that must have one did not become live."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What workers are told on their command line, besides what they are and what they inherit."""

    gpu_copy_method: str = "auto"
    """How a GPU's worker copies: "auto" (what costs least), "batch", "loop" or "rows"."""
    seal_threads: int = 0
    """Threads of a GPU's worker that compute checksums of what was stored; 0: by its processors."""
    gpu_chunks: LaneChunks = field(default_factory=LaneChunks)
    """How much a GPU's worker hands to the driver at a time."""
    log_level: str = "info"
    log_format: str = "auto"
    """As `kvtierd.logs.configure` takes it, for the workers' own lines on our stderr."""


@dataclass(slots=True)
class CopyTotals:
    """Totals of all parts of one direction since the start."""

    outcomes: "Counter[str]" = field(default_factory=Counter)
    copied_bytes: int = 0
    copy_ns: int = 0
    """Time spent in copy calls, with checks and checksums."""


@dataclass(slots=True)
class MappingRequest:
    """A mapping, or an import of chunks, that the worker was asked for."""

    session: SessionId
    answer: "asyncio.Future[None]"
    deadline_s: float


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker process. Only the supervisor changes it."""

    worker: WorkerId
    device: str
    respawns: int
    """How many workers this device had before."""
    kind: WorkerKind
    state: WorkerProcessState = WorkerProcessState.STARTING
    why: str = ""
    """Why it was lost, or is ending."""
    refusal: Refusal | None = None
    """What it said when it could not serve its device."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is no longer STARTING."""
    writer: int = 0
    """Its writer id in the pool, valid once WorkerLive was reported."""
    pid: int = 0
    started_s: float = 0.0
    deadline_s: float = 0.0
    """STARTING: for Ready. ENDING and LOST: for the process to be gone; infinite once a LOST one has been
    reported."""
    end_s: float = 0.0
    """LOST: how long its process may take to be gone."""
    parts: dict[PartId, Direction] = field(default_factory=dict)
    """Parts that were posted and have not finished."""
    requests: dict[int, MappingRequest] = field(default_factory=dict)
    sessions: set[SessionId] = field(default_factory=set)
    """Sessions of which it may hold anything."""
    idle_since_s: float | None = None
    """The time, on the clock of `Watch`, of the last round that found it in use; None if there was no round
    since it was asked for. Counting starts with a round, because the first one after a stall may jump ahead
    by more than the time that an idle worker is given."""
    releases: dict[SessionId, list[float]] = field(default_factory=dict)
    """Deadlines of the releases that were asked for, oldest first."""
    own_releases: "Counter[SessionId]" = field(default_factory=Counter)
    """How many of these releases nobody outside waits for."""
    jobs: set[DiskJobId] = field(default_factory=set)
    """Jobs of a disk's worker that were posted and have not finished."""
    persisting: dict[int, "asyncio.Future[str]"] = field(default_factory=dict)
    """For a disk's worker, who waits until its file says what the image says. The result is why it does not,
    or empty."""
    cold_reason: str = ""
    """For a disk's first worker, why nothing of an earlier daemon was kept."""
    direct_io: bool = False
    """For a disk's worker, whether data bypasses the kernel's cache."""
    announced: bool = False

    @property
    def parts_active(self) -> int:
        """How many parts, or jobs of a disk, it has."""
        return len(self.parts) + len(self.jobs)


def unavailable(handle: WorkerHandle) -> Refusal:
    """A Refusal for callers that wanted something of a worker that is not live any more."""
    how = "is ending" if handle.state is WorkerProcessState.ENDING else "was lost"
    return Refusal(
        Reason.WORKER_UNAVAILABLE,
        f"the {handle.kind.title} for {handle.device} {how} ({handle.why or 'its queue is full'}); "
        "there will be a new one: try again in a second",
        field="worker",
        value=handle.worker,
    )
