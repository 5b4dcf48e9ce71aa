"""What can keep a pool from being opened. Each message says what to do."""

from collections.abc import Sequence
from pathlib import Path


class PoolError(Exception):
    """The pool cannot be opened; nothing in it has changed."""


class PoolRefused(PoolError):
    """The path names something that must not become, or be taken for, our pool."""


class PoolTooLarge(PoolError):
    """There is no room for a pool of this size."""


class PoolLocked(PoolError):
    """Another process can still write this pool."""

    def __init__(self, path: Path, pids: Sequence[int], waited_s: float) -> None:
        self.path = path
        self.pids = tuple(pids)
        self.pid = self.pids[0] if self.pids else None
        if self.pids:
            listed = ", ".join(str(pid) for pid in self.pids)
            holders = f"process {listed}" if len(self.pids) == 1 else f"processes {listed}"
        else:
            holders = "a process that is not visible here (another container or user?)"
        super().__init__(
            f"pool {path} is in use by {holders}; waited {waited_s:.1f} s. "
            "Stop that daemon first, or give this one a pool.path of its own."
        )
