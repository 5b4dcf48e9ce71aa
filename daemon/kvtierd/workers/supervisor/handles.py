"""What is known of a worker while its process exists, and the deadlines it has to keep."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from kvtierd.core.actions import Direction
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import DiskJobId, PartId, SessionId, WorkerId
from kvtierd.workers.supervisor.kinds import WorkerKind

CPU = "cpu"
"""The device whose memory is the host's; every other is a GPU, by the name that `nvidia-smi -L` prints."""


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """Deadlines of the supervisor; all positive seconds. Time during which the front itself stood still is
    not counted."""

    copy_deadline_s: float = 10.0
    """A lane inside one copy call for longer, or a main thread that does not come round: the worker is
    killed."""
    handshake_deadline_s: float = 30.0
    """From start to Ready: an interpreter starts and maps the pool."""
    gpu_handshake_deadline_s: float = 60.0
    """The same for a GPU's: its driver loads and makes a context, which takes seconds on a busy host."""
    disk_handshake_deadline_s: float = 600.0
    """The same for a disk's: some file systems can only write a new slab file from end to end."""
    map_deadline_s: float = 10.0
    """For an answer to MapWords or MapMemory."""
    gpu_map_deadline_s: float = 60.0
    """The same for a GPU's, and to AddChunks: a large cache is thousands of handles to import and map."""
    gpu_idle_s: float = 300.0
    """A GPU's worker that has held nothing of any session for so long is ended, which frees its context; 0:
    never."""
    end_deadline_s: float = 30.0
    """For a worker that was told to end to be gone: much memory takes a while to be unregistered."""
    devices_max: int = 64
    """Workers at once."""
    starts_max: int = 16
    """Workers being started at once: the most GPUs that a host has."""
    release_deadline_s: float = 10.0
    """For an answer to ReleaseSession. A worker that holds a dead engine's memory for longer is killed."""
    kill_deadline_s: float = 5.0
    """A worker still there so long after SIGKILL is reported; its blocks stay held until it is gone."""
    watch_period_s: float = 0.25
    respawn_delay_min_s: float = 0.1
    """Before a worker is replaced; doubles with every replacement that does not last."""
    respawn_delay_max_s: float = 10.0
    disk_respawn_delay_max_s: float = 30.0
    """The same for a disk's."""
    steady_s: float = 30.0
    """A worker that lived this long starts the delays from the beginning."""


class WorkerProcessState(Enum):
    STARTING = "starting"
    LIVE = "live"
    ENDING = "ending"
    """It takes nothing more and exits by itself: told to, or because it cannot serve its device."""
    LOST = "lost"
    """Being killed; may still be writing."""
    EXITED = "exited"


class WorkerStartError(Exception):
    """The first worker of a device that must have one did not come up."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What workers are told on their command line, besides what they are and what they inherit."""

    gpu_copy_method: str = "auto"
    """How a GPU's worker copies: "auto" (by driver version), "batch", "loop" or "rows"."""
    seal_threads: int = 4
    """Threads of a GPU's worker that compute checksums of what was stored."""
    log_level: str = "info"
    log_format: str = "auto"
    """As `kvtierd.logs.configure` takes them, for the workers' own lines on our stderr."""


@dataclass(slots=True)
class CopyTotals:
    """What parts of one direction came to, since the start."""

    outcomes: "Counter[str]" = field(default_factory=Counter)
    copied_bytes: int = 0
    copy_ns: int = 0
    """Time inside copy calls, checks and checksums included."""


@dataclass(slots=True)
class MappingRequest:
    """A mapping, or an import of chunks, that the worker has been asked for."""

    session: SessionId
    answer: "asyncio.Future[None]"
    deadline_s: float


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker process. Read-only for everybody but the supervisor."""

    worker: WorkerId
    device: str
    respawns: int
    """Workers this device had before."""
    kind: WorkerKind
    state: WorkerProcessState = WorkerProcessState.STARTING
    why: str = ""
    """Why it was lost, or ends."""
    refusal: Refusal | None = None
    """What it said if it cannot serve its device."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is not STARTING any more."""
    writer: int = 0
    """Its writer id in the pool; valid from WorkerLive on."""
    pid: int = 0
    started_s: float = 0.0
    deadline_s: float = 0.0
    """STARTING: for Ready. ENDING: for the process to be gone. LOST: likewise, infinite once that has been
    reported."""
    parts: dict[PartId, Direction] = field(default_factory=dict)
    """Posted and not finished."""
    requests: dict[int, MappingRequest] = field(default_factory=dict)
    sessions: set[SessionId] = field(default_factory=set)
    """Of which it may hold anything."""
    idle_since_s: float | None = None
    """Watch's time of the last round that found it in use; None: no round since it was asked for. Counted
    from a round, because the first one after a stall may jump ahead by more than an idle worker is given."""
    releases: dict[SessionId, list[float]] = field(default_factory=dict)
    """Deadlines of the releases asked for, oldest first."""
    own_releases: "Counter[SessionId]" = field(default_factory=Counter)
    """Of those, how many nobody outside waits for."""
    jobs: set[DiskJobId] = field(default_factory=set)
    """Of a disk's: posted and not finished."""
    persisting: dict[int, "asyncio.Future[str]"] = field(default_factory=dict)
    """Of a disk's: those who wait until its file says what the image says, and get why it does not."""
    cold_reason: str = ""
    """Of a disk's first: why nothing of an earlier daemon was kept."""
    direct_io: bool = False
    """Of a disk's: past the kernel's cache."""
    announced: bool = False

    @property
    def parts_active(self) -> int:
        """Parts, or a disk's jobs."""
        return len(self.parts) + len(self.jobs)


def unavailable(handle: WorkerHandle) -> Refusal:
    """For whoever wanted something of a worker that is not live any more."""
    how = "is ending" if handle.state is WorkerProcessState.ENDING else "was lost"
    return Refusal(
        Reason.WORKER_UNAVAILABLE,
        f"the {handle.kind.title} for {handle.device} {how} ({handle.why or 'its queue is full'}); "
        "there will be a new one: try again in a second",
        field="worker",
        value=handle.worker,
    )
