"""Which workers have to be killed: their deadlines, on a clock that stands still while the front does."""

from kvtierd.logs import logger
from kvtierd.workers.channel.status import StallDetector, StatusWord
from kvtierd.workers.supervisor.handles import SupervisorLimits, WorkerHandle, WorkerProcessState

_log = logger(__name__)


class Watch:
    """A clock, and the deadlines of workers on it."""

    def __init__(self, limits: SupervisorLimits) -> None:
        self.now_s = 0.0
        """It stands still while the front does, so that no worker misses a deadline because the front
        slept."""
        self._limits = limits
        self.looked_at_s = 0.0
        """The event loop's time at the last round."""
        self._elapsed_s = 0.0
        self._stalls: dict[WorkerHandle, StallDetector] = {}

    def start(self, loop_s: float) -> None:
        """`loop_s` is the event loop's time now."""
        self.looked_at_s = loop_s

    def advance(self, loop_s: float) -> None:
        """Called before each round. A round that comes late counts as at most four."""
        self._elapsed_s = min(loop_s - self.looked_at_s, 4 * self._limits.watch_period_s)
        self.looked_at_s = loop_s
        self.now_s += self._elapsed_s

    def forget(self, handle: WorkerHandle) -> None:
        self._stalls.pop(handle, None)

    def overdue(self, handle: WorkerHandle, status: tuple[int, ...]) -> str | None:
        """Why a worker has to be killed now, or None. `status` is what its page says, read once a round."""
        match handle.state:
            case WorkerProcessState.STARTING:
                late = self.now_s >= handle.deadline_s
                return f"not ready after {handle.kind.handshake_deadline_s:g} s" if late else None
            case WorkerProcessState.ENDING:
                late = self.now_s >= handle.deadline_s
                return f"still there {self._limits.end_deadline_s:g} s after it was to end" if late else None
            case WorkerProcessState.LIVE:
                return self._live(handle, status)
            case WorkerProcessState.LOST if self.now_s >= handle.deadline_s:
                handle.deadline_s = float("inf")
                _log.error(
                    f"a {handle.kind.title} is still there after SIGKILL: its blocks stay held until it is "
                    "gone",
                    worker_pid=handle.pid,
                    device=handle.device,
                    waited_s=round(handle.end_s, 1),
                )
        return None

    def stuck_in_copy(self, handle: WorkerHandle) -> bool:
        """Whether a live worker is overdue because a lane is stuck in a copy."""
        stalls = self._stalls.get(handle)
        return stalls is not None and stalls.stuck in (StatusWord.LOAD_LANE, StatusWord.STORE_LANE)

    def _live(self, handle: WorkerHandle, status: tuple[int, ...]) -> str | None:
        stalls = self._stalls.setdefault(handle, StallDetector(handle.kind.operation_deadline_s))
        stuck = stalls.observe(status, self._elapsed_s)
        if stuck is not None:
            return stuck
        if any(self.now_s >= request.deadline_s for request in handle.requests.values()):
            return f"it has not answered a mapping request for {handle.kind.map_deadline_s:g} s"
        if any(self.now_s >= deadlines[0] for deadlines in handle.releases.values()):
            return f"it has not released a session for {self._limits.release_deadline_s:g} s"
        return None
