"""What a test may not leave behind: files of ours in /dev/shm, and processes that it started, orphans
included.

Every process that descends from this test run carries `RUN_ID` in its environment, so an orphan is found even
after its parent has died and init has adopted it.
"""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

from tools.leftovers import RUN_VARIABLE, SHM, shm_prefix, socket_prefix

__all__ = ["SHM", "SHM_PREFIX", "SOCKET_PREFIX", "LeakCheck", "live_processes", "shm_files"]


def _run_id() -> str:
    """Returns the name of this run: given by `tools.stages`, which ends whatever carries it when a stage
    ends, or made up. Workers of pytest-xdist run side by side, and each looks only after what it has started,
    so the worker's name is part of it. Processes that a worker has started keep that name."""
    given = os.environ.get(RUN_VARIABLE) or uuid.uuid4().hex[:8]
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    return given if worker is None or given.endswith(f"-{worker}") else f"{given}-{worker}"


RUN_ID = os.environ[RUN_VARIABLE] = _run_id()
# Engine processes retitle themselves; without this they overwrite the environment that /proc shows.
os.environ.setdefault("SPT_NOENV", "1")

SHM_PREFIX = shm_prefix(RUN_ID)
SOCKET_PREFIX = socket_prefix(RUN_ID)
"""The prefix of the folders that the run makes for Unix sockets, in `/tmp` because paths must be short."""
# Python's own helpers, which on purpose live as long as the process that used shared memory, or has forks.
TOLERATED_COMMANDS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
FORKED = "kvtier-fork"
"""What forks call themselves (/proc/PID/comm): their command line is that of their parent, a helper."""
SETTLE_S = 10.0


def shm_files() -> set[str]:
    """Returns this run's names in /dev/shm. Those of other runs and daemons may come and go."""
    return {entry.name for entry in SHM.iterdir() if entry.name.startswith(SHM_PREFIX)}


def _command(process: Path) -> str:
    return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def live_processes() -> dict[int, str]:
    """Returns the command lines, by pid, of all processes of this test run except this one. Zombies do not
    count."""
    marker = f"{RUN_VARIABLE}={RUN_ID}".encode()
    found = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            if marker in (process / "environ").read_bytes().split(b"\0"):
                command, name = _command(process), (process / "comm").read_text().strip()
                helps = any(tolerated in command for tolerated in TOLERATED_COMMANDS)
                if command and (not helps or name == FORKED):
                    found[int(process.name)] = f"{FORKED}: {command}" if helps else command
        except OSError:  # it ended meanwhile, or belongs to somebody else
            continue
    return found


class LeakCheck:
    """Remembers what exists now; `verify` fails if more exists than that, after a time to settle."""

    def __init__(self) -> None:
        self._files = shm_files()
        self._processes = set(live_processes())

    def leaks(self) -> list[str]:
        """Returns one line per file or process that was not there at the start."""
        files = [f"file left in {SHM}: {name}" for name in sorted(shm_files() - self._files)]
        left = {pid: command for pid, command in live_processes().items() if pid not in self._processes}
        return files + [f"process left: {pid} {command[:200]}" for pid, command in sorted(left.items())]

    def verify(self) -> None:
        """Raises AssertionError, naming every leak that is still there after SETTLE_S seconds."""
        deadline = time.monotonic() + SETTLE_S
        while (leaks := self.leaks()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not leaks, "the test left something behind:\n" + "\n".join(leaks)
