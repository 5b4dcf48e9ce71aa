"""Who may talk to the daemon: its own user, root, and a group if one is named."""

import grp
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.daemon.conftest import Start
from tests.integration.daemon.raw import SideSocket

NOBODY = 65_534
OTHERS_GROUP = 54_321
"""Of no user."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def opens_as_nobody(path: Path, group: int, extra: Sequence[int] = ()) -> str:
    """What a process of another user gets: "answered", "closed", or the name of an error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(extra)
            os.setgid(group)
            os.setuid(NOBODY)
            os.write(writing, _open_side(path).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def _open_side(path: Path) -> str:
    try:
        side = SideSocket(path)
        side.open()
    except OSError as error:
        return "closed" if isinstance(error, ConnectionError) else type(error).__name__
    return "answered"


@pytest.fixture
def reachable(socket_dir: Path) -> Path:
    """A folder that everybody can get to; the daemon makes its own below."""
    socket_dir.chmod(0o755)
    return socket_dir / "run"


def test_others_are_kept_out_by_the_directory_and_by_the_socket(start: Start, reachable: Path) -> None:
    daemon = start(server__socket=reachable / "kvtierd.sock")
    path = reachable / "kvtierd.side.sock"
    assert stat.S_IMODE(reachable.stat().st_mode) == 0o700
    assert opens_as_nobody(path, OTHERS_GROUP) == "PermissionError"
    reachable.chmod(0o755)
    assert opens_as_nobody(path, OTHERS_GROUP) == "PermissionError"
    path.chmod(0o666)
    assert opens_as_nobody(path, OTHERS_GROUP) == "closed"
    assert any("neither this daemon's user" in line for line in daemon.complaints())
    daemon.may_complain = True


def test_a_named_group_is_let_in(start: Start, reachable: Path) -> None:
    group = grp.getgrnam("daemon")
    start(server__socket=reachable / "kvtierd.sock", server__group=group.gr_name)
    path = reachable / "kvtierd.side.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert opens_as_nobody(path, group.gr_gid) == "answered"
    assert opens_as_nobody(path, OTHERS_GROUP, [group.gr_gid]) == "answered"
    assert opens_as_nobody(path, OTHERS_GROUP) == "PermissionError"
