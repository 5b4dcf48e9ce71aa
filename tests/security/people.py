"""Users of one host who share a daemon: their processes, and connections that the kernel says are theirs."""

import grp
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration.daemon.raw import RawSession
from tests.support.process import DEADLINE_S

REPO = Path(__file__).resolve().parents[2]
GROUP = "daemon"
"""A group that every system has; the daemon's sockets are for its members."""
GID = grp.getgrnam(GROUP).gr_gid
VICTIM, ATTACKER = 40_001, 40_002
"""Users without a name, and members of the group."""


@contextmanager
def being(uid: int) -> Iterator[None]:
    """Makes every thread of this process a process of this user for now. What is connected meanwhile stays
    this user's."""
    groups = os.getgroups()
    os.setgroups([GID])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def session(uid: int, socket: Path, **options: Any) -> RawSession:
    """A session of this user; its side connection is open, and nothing has been said."""
    if os.geteuid() == uid:
        return RawSession(socket, **options)
    with being(uid):
        return RawSession(socket, **options)


def becoming(uid: int, gid: int | None = None, groups: Sequence[int] = (GID,)) -> list[str]:
    """Words before a command: it is run by this user, with a group of the same number unless given."""
    others = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
    return ["setpriv", f"--reuid={uid}", f"--regid={uid if gid is None else gid}", others]


def run_as(
    uid: int,
    command: Sequence[str],
    *,
    gid: int | None = None,
    groups: Sequence[int] = (GID,),
    inside: Sequence[str] = (),
    python: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program as this user. `inside`: words that put it into namespaces of its own."""
    return subprocess.run(
        [*becoming(uid, gid, groups), *inside, str(python or sys.executable), *command],
        cwd="/",
        env=os.environ | {"KVTIER_CONFIG": "", "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def kvtierctl(
    uid: int, socket: Path, name: str, *arguments: str, inside: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """An operator's command, given by this user."""
    return run_as(uid, ["-m", "kvtierd.ctl", name, f"--socket={socket}", *arguments], inside=inside)
