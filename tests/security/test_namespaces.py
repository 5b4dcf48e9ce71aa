"""Engines and daemons in pid and user namespaces of their own: a process is who the host's kernel says, not
who it takes itself for."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvtier.v1 import admin_pb2, types_pb2

from tests.integration.daemon.raw import RawSession
from tests.security.caller import Caller
from tests.security.conftest import As, Start
from tests.security.guest import BLOCKS
from tests.security.people import ATTACKER, GID, REPO, VICTIM, becoming, kvtierctl, run_as
from tests.support.leaks import SOCKET_PREFIX
from tests.support.process import DEADLINE_S, Daemon, readable, until

OWN_PIDS = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
ROOT_OF_ITS_OWN = ["unshare", "--user", "--map-root-user"]
UNMAPPED = ["unshare", "--user"]
BOTH = [*ROOT_OF_ITS_OWN, *OWN_PIDS[1:]]
OVERFLOW = int(Path("/proc/sys/kernel/overflowuid").read_text())


def allowed(uid: int, words: Sequence[str]) -> bool:
    """Whether the kernel lets this user make such namespaces."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    command = [*becoming(uid), *words, "true"]
    return subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False).returncode == 0


def _runs(python: Path) -> bool:
    """Whether somebody without any rights can run this interpreter, with all that the tests import."""
    said = run_as(VICTIM, ["-c", "import kvtierd.cli, kvtier"], inside=ROOT_OF_ITS_OWN, python=python)
    return said.returncode == 0


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """An interpreter that users can run in a user namespace of their own. This run's own may lie in a folder
    of root's, where capabilities of another namespace are of no use."""
    if _runs(Path(sys.executable)):
        yield Path(sys.executable)
        return
    folder = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    folder.chmod(0o755)
    name = f"python3.{sys.version_info.minor}"
    packages = folder / "lib" / name / "site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(f"/usr/bin/{name}")
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (packages / "tests.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    try:
        if not _runs(folder / "bin" / "python"):
            pytest.skip("no Python of this version can be run by everybody")
        yield folder / "bin" / "python"
    finally:
        shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def of_this_file(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs that the tests start are run by it."""
    monkeypatch.setattr(sys, "executable", str(python))


@pytest.fixture
def seen(daemon: Daemon, connect: As) -> Iterator[Callable[[], admin_pb2.StatusResponse]]:
    """What an operator sees."""
    operator = Caller(daemon, connect(0))
    yield operator.status
    operator.close()


Seen = Callable[[], admin_pb2.StatusResponse]
pytestmark = [
    pytest.mark.skipif(not allowed(VICTIM, BOTH), reason="the kernel lets users make no user namespaces"),
    pytest.mark.skipif(not allowed(0, OWN_PIDS), reason="the kernel lets nobody make a pid namespace"),
]


class Engine:
    """A `guest` that runs as a user, in namespaces."""

    def __init__(
        self,
        uid: int,
        words: Sequence[str],
        daemon: Daemon,
        instance: str = "engine",
        groups: Sequence[int] = (GID,),
    ) -> None:
        # Only root may make a pid namespace without a user namespace, and becomes the user inside of it.
        as_user = becoming(uid, groups=groups)
        # The socket is in /tmp, so a client has to be told whose it may be.
        owner = OVERFLOW if "--user" in words else daemon.side_socket.stat().st_uid
        wrap = [*words, *as_user] if words == OWN_PIDS else [*as_user, *words]
        self.process = subprocess.Popen(
            [*wrap, sys.executable, "-m", "tests.security.guest", str(daemon.socket), instance],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env=os.environ | {"PYTHONPATH": str(REPO), "KVTIER_CONFIG": "", "KVTIER_DAEMON_USER": str(owner)},
        )

    def do(self, *order: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(order) + "\n")
        self.process.stdin.flush()
        assert readable(self.process.stdout.fileno(), DEADLINE_S), f"no answer to {order}"
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()  # it ends when there is nothing more to read
        self.process.wait(DEADLINE_S)


Run = Callable[..., Engine]


@pytest.fixture
def run() -> Iterator[Run]:
    engines: list[Engine] = []

    def run_one(*arguments: Any) -> Engine:
        engines.append(Engine(*arguments))
        return engines[-1]

    yield run_one
    for each in engines:
        each.end()


class TestEngines:
    @pytest.mark.parametrize("words", [OWN_PIDS, BOTH], ids=["pid", "pid-and-user"])
    def test_an_engine_stores_loads_and_its_death_is_noticed(
        self, daemon: Daemon, run: Run, seen: Seen, words: list[str]
    ) -> None:
        engine = run(VICTIM, words, daemon)
        inside = engine.do("who")
        assert inside["pid"] < 10, "the control: it is in a pid namespace of its own"
        assert inside["uid"] == (0 if words == BOTH else VICTIM)
        engine.do("attach")
        assert engine.do("store", "blocks") == {"done": True}
        assert engine.do("load", "blocks") == {"loaded": BLOCKS}
        [instance] = seen().instances
        [session] = instance.sessions
        assert (instance.tenant, session.uid) == (f"uid:{VICTIM}", VICTIM)
        assert session.pid != inside["pid"]
        assert os.stat(f"/proc/{session.pid}").st_uid == VICTIM, "it is the host's number of the process"
        assert instance.mapped_bytes
        descriptors = daemon.sockets()
        os.kill(session.pid, signal.SIGKILL)
        until(lambda: not seen().instances, "the session has ended")
        until(lambda: not any(each.mapped_bytes for each in seen().workers), "nothing is mapped")
        until(lambda: daemon.sockets() < descriptors, "its connections are closed")
        outside, another = run(VICTIM, [], daemon), run(ATTACKER, words, daemon)
        for each, loaded in ((outside, BLOCKS), (another, 0)):
            each.do("attach")
            assert each.do("load", "blocks") == {"loaded": loaded}

    def test_root_of_a_user_namespace_is_nobody_special(
        self, daemon: Daemon, connect: As, run: Run, seen: Seen
    ) -> None:
        root = connect(0).ready(role=types_pb2.ROLE_RANK, instance="roots")
        guest = run(VICTIM, ROOT_OF_ITS_OWN, daemon)
        assert guest.do("who")["uid"] == 0, "the control: it takes itself for root"
        assert guest.do("seat", "roots")["epoch"] != root.epoch
        owners = {(each.instance, each.tenant) for each in seen().instances}
        assert owners == {("roots", "uid:0"), ("roots", f"uid:{VICTIM}")}
        said = kvtierctl(VICTIM, daemon.socket, "drain", inside=ROOT_OF_ITS_OWN)
        assert said.returncode == 69
        assert f"is for operators, and the caller is uid {VICTIM}" in said.stderr
        scheduler = connect(0)
        scheduler.attach(role=types_pb2.ROLE_SCHEDULER, instance="roots", groups=[])
        assert scheduler.epoch == root.epoch, "the control: the seat was free, and is root's"

    def test_a_process_cannot_say_that_it_is_another(self, daemon: Daemon, seen: Seen) -> None:
        """The daemon asks the kernel who has connected, and does not listen to what a message says of it."""
        claim = struct.pack("3i", daemon.pid, 0, 0)
        code = "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        code += f"s.connect({str(daemon.side_socket)!r})\n"
        code += f"s.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, {claim!r})])"
        said = run_as(VICTIM, ["-c", code])
        assert "PermissionError" in said.stderr, "the kernel refuses it to all but root"
        session = RawSession(daemon.socket)
        send = session.side.send

        def forged(packet: bytes, fds: Sequence[int] = ()) -> None:
            about = struct.pack("3i", 1, VICTIM, VICTIM)
            session.side.socket.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, about)])

        session.side.send = forged  # type: ignore[method-assign]
        session.token = session.side.open()
        session.side.send = send  # type: ignore[method-assign]
        session.attach()
        [instance] = seen().instances
        [told] = instance.sessions
        assert (told.pid, told.uid, instance.tenant) == (os.getpid(), 0, "uid:0")
        session.close()

    def test_a_connection_ends_with_the_process_that_made_it(self, daemon: Daemon) -> None:
        """Whoever has inherited the socket, or got the number of the process, is not that process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = "import socket, sys; from pathlib import Path\n"
        code += "from tests.integration.daemon.raw import SideSocket\n"
        code += f"side = SideSocket(Path({str(daemon.side_socket)!r}))\n"
        code += f"to = socket.socket(fileno={theirs.fileno()})\n"
        code += "token = side.open()\n"
        code += "socket.send_fds(to, [token], [side.socket.fileno()])\n"
        code += "sys.stdin.read()"
        child = subprocess.Popen(
            [*becoming(VICTIM), sys.executable, "-c", code],
            cwd="/",
            env=os.environ | {"PYTHONPATH": str(REPO)},
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        assert readable(ours.fileno(), DEADLINE_S)
        token, [descriptor], _, _ = socket.recv_fds(ours, 1_024, 1)
        inherited = socket.socket(fileno=descriptor)
        assert not readable(descriptor, 0), "the control: it is open while its process lives"
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(DEADLINE_S) == 0
        until(lambda: readable(descriptor, 0), "the daemon has closed it")
        assert inherited.recv(1, socket.MSG_PEEK) == b""
        stranger = RawSession(daemon.socket)
        stranger.token = token
        with pytest.raises(Exception, match="UNKNOWN_TOKEN"):
            stranger.attach()
        stranger.close()
        inherited.close()
        ours.close()


MEMBERS = VICTIM
"""The group whose members may reach the sockets of a daemon of the victim's."""
OPEN = """
import sys
from pathlib import Path
from tests.integration.daemon.raw import SideSocket

try:
    assert SideSocket(Path(sys.argv[1])).open()
except ConnectionError:
    sys.exit(3)
"""


class TestDaemons:
    """The daemon belongs to the victim, and is in a user namespace in which nobody else has a number."""

    @pytest.fixture
    def inside(self, start: Start, socket_dir: Path, shm_dir: Path) -> Start:
        """Starts a daemon in such a namespace."""
        for folder in (socket_dir / "run", shm_dir):
            os.chown(folder, VICTIM, VICTIM)

        def start_inside(words: Sequence[str] = ROOT_OF_ITS_OWN, **settings: Any) -> Daemon:
            return start(wrap=[*becoming(VICTIM, groups=()), *words], **settings)

        return start_inside

    def opened(self, daemon: Daemon, uid: int, groups: Sequence[int] = (MEMBERS,)) -> bool:
        """Whether a process of this user is let in."""
        said = run_as(uid, ["-c", OPEN, str(daemon.side_socket)], groups=groups)
        assert said.returncode in (0, 3), said.stderr
        return said.returncode == 0

    def test_users_without_a_number_are_let_in_by_a_rule_for_their_group_only(
        self, inside: Start, run: Run
    ) -> None:
        daemon = inside(server__group="root")
        assert self.opened(daemon, VICTIM, ()), "the control: the daemon's own user"
        for uid in (ATTACKER, ATTACKER + 1, 0):
            assert not self.opened(daemon, uid)
        refused = [line for line in daemon.log().splitlines() if "was refused" in line]
        assert len(refused) == 3
        assert all(
            f"uid {OVERFLOW} stands for every user of other user namespaces" in line for line in refused
        )
        daemon.stop()
        daemon = inside(server__group="root", server__tenants="group:root=members")
        engines = [run(uid, [], daemon, f"engine {uid}", (MEMBERS,)) for uid in (ATTACKER, ATTACKER + 1)]
        for each in engines:
            each.do("attach")
        assert engines[0].do("store", "blocks") == {"done": True}
        assert engines[1].do("load", "blocks") == {"loaded": BLOCKS}, "the operator lets them share"
        said = run_as(
            ATTACKER, ["-m", "kvtierd.ctl", "drain", f"--socket={daemon.socket}"], groups=(MEMBERS,)
        )
        assert said.returncode == 69
        assert f"is for operators, and the caller is uid {OVERFLOW}" in said.stderr

    def test_a_daemon_that_has_no_number_itself_takes_nobody_for_itself(self, inside: Start) -> None:
        """Everybody would be the daemon's own user, and an operator."""
        daemon = inside(UNMAPPED, server__group=None)
        for uid in (VICTIM, 0):
            assert not self.opened(daemon, uid)
        assert daemon.log().count("run kvtierd as another one") == 2
