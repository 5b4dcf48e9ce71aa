"""A user who may not use the socket is told so, with whose it is, who they are, and what to change."""

import grp
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from kvtier.connection.address import Address
from kvtier.connection.side_socket import SideSocket
from kvtier.errors import ConnectionLostError

from tests.integration.daemon.conftest import Start
from tests.security.people import run_as

NOBODY = 65_534
OTHERS_GROUP = 54_321
"""Of no user, and without a name."""
WHY = """
import sys, time
from kvtier import Client, Namespace, Role

namespace = Namespace(model="m", kv_dtype="uint8", hash_scheme="tests:name", hash_bytes=32)
deadline_s = time.monotonic() + 60
with Client(instance="x", namespace=namespace, role=Role.SCHEDULER, socket=sys.argv[1]) as client:
    while not client.status.last_error and client.epoch is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    print(client.status.why)
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def as_nobody(command: Sequence[str], group: int = OTHERS_GROUP) -> subprocess.CompletedProcess[str]:
    return run_as(NOBODY, command, gid=group, groups=())


def told(path: Path) -> list[str]:
    """What kvtierctl, and a client of the library, are told as nobody."""
    ctl = as_nobody(["-m", "kvtierd.ctl", "status", f"--socket={path}"])
    assert (ctl.returncode, ctl.stderr.count("\n")) == (69, 1), ctl.stderr
    library = as_nobody(["-c", WHY, str(path)])
    assert library.returncode == 0, library.stderr
    return [ctl.stderr, library.stdout]


def test_the_message_says_who_may_and_what_to_change(start: Start, socket_dir: Path) -> None:
    group = grp.getgrnam("daemon")
    socket_dir.chmod(0o755)
    path = socket_dir / "run" / "kvtierd.sock"
    start(server__socket=path, server__group=group.gr_name)

    for said in told(path):  # the group's folder
        assert f"you may not use the socket {path}: the folder" in said
        assert f"the folder {path.parent} on the way to it belongs to user root (0) and group daemon" in said
        assert "mode 0750" in said
        assert f"you are user nobody ({NOBODY}) in group {OTHERS_GROUP}" in said
        assert "usermod -aG daemon nobody" in said
        assert "kvtierd serve" not in said
        assert "no daemon" not in said

    path.parent.chmod(0o755)
    for said in told(path):  # the group's socket
        assert f"it belongs to user root (0) and group daemon ({group.gr_gid}), with mode 0660" in said
        assert "usermod -aG daemon nobody" in said

    for each in (path, path.with_name("kvtierd.side.sock")):
        each.chmod(0o600)
    for said in told(path):  # nobody's but its owner's
        assert "with mode 0600" in said
        assert "server.group" in said
        assert "run this as user root" in said

    socket_dir.chmod(0o700)
    for said in told(path):  # farther up than the daemon's own folder
        assert f"the folder {socket_dir} on the way to it" in said
        assert "put its socket elsewhere" in said
    socket_dir.chmod(0o755)
    assert as_nobody(["-m", "kvtierd.ctl", "status", f"--socket={path}"], group.gr_gid).returncode == 69
    for each in (path, path.with_name("kvtierd.side.sock")):
        each.chmod(0o660)
    assert as_nobody(["-m", "kvtierd.ctl", "status", f"--socket={path}"], group.gr_gid).returncode == 0


def test_what_else_may_be_there_is_told_apart(socket_dir: Path) -> None:
    socket_dir.chmod(0o755)
    (socket_dir / "text.sock").write_text("not a socket")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(socket_dir / "left.sock"))
    (socket_dir / "left.sock").chmod(0o666)
    (socket_dir / "link.sock").symlink_to("nowhere.sock")
    for name, words in (
        ("none.sock", ("no daemon", "does not exist")),
        ("none/none.sock", ("no daemon", f"nor does the folder {socket_dir}/none")),
        ("text.sock", ("is a file, not a socket",)),
        ("left.sock", ("no daemon", "left behind by a daemon that has ended")),
        (".", ("is a folder, not a socket",)),
    ):
        for said in told(socket_dir / name):
            assert all(word in said for word in words), said
            assert "may not" not in said
    ctl = as_nobody(["-m", "kvtierd.ctl", "status", f"--socket={socket_dir / 'link.sock'}"])
    assert "is a link to nowhere.sock, which does not exist" in ctl.stderr


def test_a_configuration_that_one_may_not_look_at_is_told(socket_dir: Path) -> None:
    socket_dir.chmod(0o755)
    (socket_dir / "etc").mkdir(mode=0o700)
    look = "from kvtierd.config import daemon; from kvtierd.ctl.commands import main\n"
    look += "import pathlib, sys; daemon.DEFAULT_FILE = pathlib.Path(sys.argv.pop()); main()"
    done = as_nobody(["-c", look, "status", str(socket_dir / "etc" / "kvtierd.toml")])
    assert (done.returncode, done.stderr.count("\n")) == (78, 1), done.stderr
    assert "Permission denied" in done.stderr


def test_a_container_that_was_given_the_one_file_is_told_so(start: Start, socket_dir: Path) -> None:
    daemon = start()
    daemon.side_socket.rename(socket_dir / "elsewhere")
    try:
        with pytest.raises(ConnectionLostError, match="mount the sockets' folder, not the one file"):
            SideSocket(Address(daemon.socket))
    finally:
        (socket_dir / "elsewhere").rename(daemon.side_socket)


def test_a_stream_that_is_refused_says_the_same(start: Start, socket_dir: Path) -> None:
    """The side socket may be used, the gRPC socket may not: gRPC calls that UNAVAILABLE, and nothing more."""
    socket_dir.chmod(0o755)
    daemon = start(server__group="daemon")
    daemon.side_socket.chmod(0o666)
    assert "may not use" not in daemon.log()
    gid = grp.getgrnam("daemon").gr_gid
    os.chown(daemon.socket, 0, 0)
    library = as_nobody(["-c", WHY, str(daemon.socket)], gid)
    assert f"you may not use the socket {daemon.socket}: it belongs to user root" in library.stdout
    daemon.may_complain = True
