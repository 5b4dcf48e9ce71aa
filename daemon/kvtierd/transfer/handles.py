"""What is known of a copy worker while its process exists, and the deadlines it has to keep."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from kvtierd.core.actions import Direction
from kvtierd.core.ids import PartId, SessionId, WorkerId


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """Deadlines of the supervisor; all positive seconds. Time during which the front itself stood still is
    not counted."""

    copy_deadline_s: float = 10.0
    """A lane inside one copy call for longer, or a main thread that does not come round: the worker is
    killed."""
    handshake_deadline_s: float = 30.0
    """From start to Ready: an interpreter starts and maps the pool."""
    map_deadline_s: float = 10.0
    """For an answer to MapWords or MapMemory."""
    release_deadline_s: float = 10.0
    """For an answer to ReleaseSession. A worker that holds a dead engine's memory for longer is killed."""
    kill_deadline_s: float = 5.0
    """A worker still there so long after SIGKILL is reported; its blocks stay held until it is gone."""
    watch_period_s: float = 0.25
    respawn_delay_min_s: float = 0.1
    """Before a worker is replaced; doubles with every replacement that does not last."""
    respawn_delay_max_s: float = 10.0
    steady_s: float = 30.0
    """A worker that lived this long starts the delays from the beginning."""


class WorkerState(Enum):
    STARTING = "starting"
    LIVE = "live"
    LOST = "lost"
    """Being killed; may still be writing."""
    EXITED = "exited"


class WorkerStartError(Exception):
    """A device's first worker did not come up."""


@dataclass(slots=True)
class CopyTotals:
    """What parts of one direction came to, since the start."""

    outcomes: "Counter[str]" = field(default_factory=Counter)
    copied_bytes: int = 0
    copy_ns: int = 0
    """Time inside copy calls, checks and checksums included."""


@dataclass(slots=True)
class MappingRequest:
    """A mapping that the worker has been asked for."""

    session: SessionId
    answer: "asyncio.Future[None]"
    deadline_s: float


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One copy worker process. Read-only for everybody but the supervisor."""

    worker: WorkerId
    device: str
    respawns: int
    """Workers this device had before."""
    state: WorkerState = WorkerState.STARTING
    why: str = ""
    """Why it was lost."""
    writer: int = 0
    """Its writer id in the pool; valid from WorkerLive on."""
    pid: int = 0
    started_s: float = 0.0
    deadline_s: float = 0.0
    """STARTING: for Ready. LOST: for the process to be gone, infinite once that has been reported."""
    parts: dict[PartId, Direction] = field(default_factory=dict)
    """Posted and not finished."""
    requests: dict[int, MappingRequest] = field(default_factory=dict)
    releases: dict[SessionId, list[float]] = field(default_factory=dict)
    """Deadlines of the releases asked for, oldest first."""
    own_releases: "Counter[SessionId]" = field(default_factory=Counter)
    """Of those, how many nobody outside waits for."""
    announced: bool = False

    @property
    def parts_active(self) -> int:
        return len(self.parts)
