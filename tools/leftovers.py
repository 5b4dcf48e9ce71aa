"""Cleans up what a test run leaves on a machine when it is ended: processes, and files in memory and in
`/tmp`.

Each run has a name, which its processes carry in their environment, whatever process group or session they
are in, and whoever their parent is. Workers of pytest-xdist append `-gw0` and so on (tests/support/leaks.py).
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

RUN_VARIABLE = "KVTIER_TEST_RUN"
SHM = Path("/dev/shm")
SOCKETS = Path("/tmp")
"""Where folders for Unix sockets are made: their paths must be shorter than 108 bytes."""
GONE_S = 10.0


def shm_prefix(run: str) -> str:
    """Returns what the names of a run's files in `/dev/shm` begin with."""
    return f"kvtier-test-{run}-"


def socket_prefix(run: str) -> str:
    """Returns what the names of a run's folders for sockets begin with."""
    return f"kvt-{run}-"


def processes(run: str) -> Iterator[int]:
    """Yields the processes, except this one, that carry the run's name, alone or with that of a worker."""
    marker = f"{RUN_VARIABLE}={run}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or it belongs to somebody else
            continue
        if any(each == marker or each.startswith(marker + b"-") for each in variables):
            yield int(entry.name)


def end_processes(run: str) -> None:
    """Kills the run's processes, including those that they start meanwhile. Returns when none is left, or
    after GONE_S seconds."""
    deadline_s = time.monotonic() + GONE_S
    found_none = 0
    while found_none < 2 and time.monotonic() < deadline_s:  # one that is just being executed shows nothing
        left = list(processes(run))
        found_none = 0 if left else found_none + 1
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)


def remove_files(run: str) -> None:
    """Removes the run's files from `/dev/shm`, and its folders for sockets."""
    for folder, prefix in ((SHM, shm_prefix(run)), (SOCKETS, socket_prefix(run))):
        for entry in folder.glob(f"{prefix}*"):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
