"""The errors for which a pool cannot be opened. Each message says what to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Naming:
    """What messages call a file of this format, and the settings for its path and sizes."""

    what: str
    path: str
    size: str
    extent: str


POOL = Naming("pool", "pool.path", "pool.size", "pool.extent_bytes")


class PoolError(Exception):
    """The pool cannot be opened; nothing in it has changed."""


class PoolRefused(PoolError):
    """The path names something that must not become our pool, nor be taken for it."""


class PoolTooLarge(PoolError):
    """There is no room for a pool of this size."""


class PoolLocked(PoolError):
    """Another process can still write this pool."""

    def __init__(self, path: Path, pids: Sequence[int], waited_s: float, naming: Naming = POOL) -> None:
        self.path = path
        self.pids = tuple(pids)
        self.pid = self.pids[0] if self.pids else None
        if self.pids:
            listed = ", ".join(str(pid) for pid in self.pids)
            holders = f"process {listed}" if len(self.pids) == 1 else f"processes {listed}"
        else:
            holders = "a process that is not visible here (another container or user?)"
        super().__init__(
            f"{naming.what} {path} is in use by {holders}; waited {waited_s:.1f} s. "
            f"Stop that daemon first, or give this one a {naming.path} of its own."
        )
