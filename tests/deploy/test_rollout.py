"""A rollout: process tree and mount namespace are replaced on the folders of the node; the cache is warm.

The image is the real one; container.sh stands for the container runtime. Engines are in pid namespaces of
their own, as in pods without hostPID.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvtier.v1 import admin_pb2, admin_pb2_grpc
from kvtierd.ctl.caller import admin_at

from tests.deploy.image import Image, build_image, unmount_images
from tests.deploy.installation import REPO
from tests.security.people import being
from tests.support.plain_client import BLOCKS, PlainClient, block_hashes
from tests.support.process import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]
DEADLINE_S = 120.0
NAMESPACES = ("--mount", "--pid", "--fork", "--ipc", "--uts", "--kill-child")
HERE = Path(__file__).parent
COUNT = 4 * BLOCKS
DAEMON_UID = 10_001


@pytest.fixture(scope="session")
def image(as_root: None) -> Iterator[Image]:
    yield build_image()
    unmount_images()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Node:
    """The folders of a host, and the pods that run on it one after another."""

    def __init__(self, image: Image, shm: Path) -> None:
        self._image = image
        self._home = Path(tempfile.mkdtemp(prefix="kvtier-node-"))
        self._home.chmod(0o755)  # the daemon's user goes through it, as in a host's own folders
        self.pool, self.sockets, self.config = shm / "node", self._home / "run", self._home / "config"
        for folder in (self.pool, self.sockets, self.config):
            folder.mkdir()
        (self.config / "kvtierd.toml").write_text('[pool]\nsize = "66MiB"\nextent_size = "1MiB"\n')
        self.health_port = free_port()
        self.pods: list[subprocess.Popen[bytes]] = []
        self._log = (self._home / "log").open("w+")

    @property
    def socket(self) -> Path:
        return self.sockets / "kvtierd.sock"

    def _container(self, user: str, command: list[str]) -> list[str]:
        script = [str(HERE / "container.sh"), self._image.root, self.pool, self.sockets, self.config, user]
        return ["unshare", *NAMESPACES, *map(str, script), *command]

    def prepare(self, pool: Path | None = None) -> tuple[int, str]:
        """Runs the script of the init container: exit status and what it said."""
        manifest = REPO / "deploy" / "kubernetes" / "base" / "daemonset.yaml"
        [init] = yaml.safe_load(manifest.read_text())["spec"]["template"]["spec"]["initContainers"]
        before, self.pool = self.pool, pool or self.pool
        command = self._container("0", init["command"])
        self.pool = before
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        return done.returncode, done.stdout + done.stderr

    def start(self) -> subprocess.Popen[bytes]:
        """A new pod; returns when it is ready, as a kubelet sees it."""
        about = self._image
        environment = about.environment | {
            "KVTIER_METRICS_LISTEN": "127.0.0.1:0",  # the network is this machine's own here
            "KVTIER_SERVER_HEALTH_LISTEN": f"127.0.0.1:{self.health_port}",
        }
        given = [f"{name}={value}" for name, value in environment.items()]
        command = ["env", "-i", *given, *about.command, "--config", "/etc/kvtier/kvtierd.toml"]
        self.pods.append(
            subprocess.Popen(
                self._container(about.user.split(":")[0], command), stdout=self._log, stderr=self._log
            )
        )
        deadline_s = time.monotonic() + DEADLINE_S
        while not self.healthy():
            assert self.pods[-1].poll() is None, self.log()
            assert time.monotonic() < deadline_s, self.log()
            time.sleep(0.05)
        return self.pods[-1]

    def healthy(self, service: str = "") -> bool:
        """What a gRPC probe of a kubelet says."""
        with grpc.insecure_channel(f"127.0.0.1:{self.health_port}") as channel:
            try:
                request = health_pb2.HealthCheckRequest(service=service)
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    @contextmanager
    def admin(self) -> Iterator[admin_pb2_grpc.AdminStub]:
        """The calls of an operator: the daemon's own user, because there is no other in a pod."""
        with being(DAEMON_UID), admin_at(self.socket) as admin:
            yield admin

    def status(self) -> admin_pb2.StatusResponse:
        with self.admin() as admin:
            return admin.Status(admin_pb2.StatusRequest(), timeout=DEADLINE_S)

    def pid1(self, pod: subprocess.Popen[bytes]) -> int:
        """The daemon of a pod, as this machine sees it."""
        return int(Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()[0])

    def end(self, pod: subprocess.Popen[bytes], number: int) -> int:
        """A signal to the pod's pid 1; when this returns nothing of the pod is left. Its exit status."""
        os.kill(self.pid1(pod), number)
        return pod.wait(DEADLINE_S)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        for pod in self.pods:
            if pod.poll() is None:
                self.end(pod, signal.SIGKILL)
        self._log.close()
        shutil.rmtree(self._home)


@pytest.fixture
def node(image: Image, shm_dir: Path) -> Iterator[Node]:
    node = Node(image, shm_dir)
    status, said = node.prepare()
    assert status == 0, said
    yield node
    node.close()


def engine(node: Node, verb: str, name: str, count: int = COUNT) -> int:
    """Blocks that an engine in a pod of its own has stored, or hit with every byte right."""
    command = ["unshare", *NAMESPACES, "--mount-proc", sys.executable, "-m", "tests.deploy.blocks"]
    command += [str(node.socket), verb, name, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=REPO)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{node.log()}"
    return int(done.stdout.split()[-1])


def test_the_init_container_makes_the_folders_the_daemons_own_and_touches_nothing_in_them(node: Node) -> None:
    (node.pool / "pool").write_text("the cache")
    assert node.prepare() == (0, "")
    assert (node.pool / "pool").read_text() == "the cache"
    assert (node.pool.stat().st_uid, node.pool.stat().st_mode & 0o777) == (10001, 0o700)
    assert (node.sockets.stat().st_uid, node.sockets.stat().st_mode & 0o777) == (10001, 0o750)


def test_it_refuses_a_pool_that_is_not_in_memory(node: Node, tmp_path: Path) -> None:
    status, said = node.prepare(tmp_path)
    assert status == 1
    assert "no memory file system" in said


def test_the_daemon_in_it_has_no_rights_and_writes_nowhere_else(node: Node) -> None:
    pid = node.pid1(node.start())
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["10001"] * 4
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    mounts = Path(f"/proc/{pid}/mounts").read_text().splitlines()
    [root] = [line for line in mounts if line.split()[1] == "/"]
    assert "ro" in root.split()[3].split(",")


def test_a_rollout_keeps_the_cache(node: Node, proved: Callable[[str], None]) -> None:
    first = node.start()
    assert engine(node, "store", "rollout") == COUNT
    before = node.status()
    assert node.end(first, signal.SIGTERM) == 0, node.log()
    second = node.start()
    for kind in ("pid", "mnt"):
        assert os.readlink(f"/proc/{node.pid1(second)}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
    after = node.status()
    assert after.boot_nonce != before.boot_nonce
    assert (after.pool.start, after.pool.recovered_blocks, after.pool.quarantined_slots) == ("warm", COUNT, 0)
    assert engine(node, "load", "rollout") == COUNT
    proved(f"A pod that is replaced finds its {COUNT} blocks, every byte of them.")


def test_killed_pods_leave_the_cache_warm_and_no_slot_behind(
    node: Node, proved: Callable[[str], None]
) -> None:
    pod = node.start()
    assert engine(node, "store", "killed") == COUNT
    half_done = 0
    for number in range(3):
        # Killed while an engine stores: some of its slots are being written just then.
        command = [sys.executable, "-m", "tests.support.plain_client", str(node.socket), f"busy-{number}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO) as busy:
            assert busy.stdout is not None
            while not busy.stdout.readline().startswith("STARTED"):
                pass
            node.end(pod, signal.SIGKILL)
            busy.kill()
        pod = node.start()
        status = node.status()
        half_done += status.pool.discarded_slots
        assert status.pool.start == "warm"
        assert status.pool.quarantined_slots == 0, "their pod has ended, whatever its pid namespace was"
        assert engine(node, "load", "killed") == COUNT
    proved("Three pods killed while they stored: warm each time, and no slot out of use.")


def test_engines_in_other_pods_are_seen_to_die(node: Node) -> None:
    node.start()
    command = ["unshare", *NAMESPACES, "--mount-proc", sys.executable, "-m", "tests.support.plain_client"]
    with subprocess.Popen([*command, str(node.socket), "elsewhere"], stdout=subprocess.PIPE, cwd=REPO) as pod:
        assert pod.stdout is not None
        pod.stdout.readline()
        [instance] = node.status().instances
        assert [session.pid for session in instance.sessions] == [0], "it has no number in the daemon's pod"
        os.kill(node.pid1(pod), signal.SIGKILL)
    until(lambda: not node.status().instances, "the daemon has let go of the dead engine")


def test_an_engine_that_stays_attaches_again_to_the_new_pod(node: Node) -> None:
    pod = node.start()
    hashes = block_hashes("stays", range(BLOCKS))
    with PlainClient(node.socket, "stays").ready() as plain:
        assert plain.store(hashes).done
        for number in (signal.SIGTERM, signal.SIGKILL):
            node.end(pod, number)
            pod = node.start()
            assert plain.ready().load(hashes) == BLOCKS


def test_probes_say_not_ready_while_it_drains_and_alive_all_the_time(node: Node) -> None:
    node.start()
    assert node.healthy()
    assert node.healthy("live")
    with node.admin() as admin:
        assert [each.state for each in admin.Drain(admin_pb2.DrainRequest(), timeout=60)][-1] == "drained"
        assert (node.healthy(), node.healthy("live")) == (False, True)
        admin.Resume(admin_pb2.ResumeRequest(), timeout=60)
    assert node.healthy()


def test_over_tcp_there_is_nothing_but_health(node: Node) -> None:
    node.start()
    with grpc.insecure_channel(f"127.0.0.1:{node.health_port}") as channel:
        with pytest.raises(grpc.RpcError) as error:
            admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=60)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_kvtierctl_works_in_the_pod(node: Node) -> None:
    pod = node.start()
    about = node._image
    given = [f"{name}={value}" for name, value in about.environment.items()]
    command = ["nsenter", f"--target={node.pid1(pod)}", "--mount", "--pid", "--root", "--wdns=/", "env", "-i"]
    done = subprocess.run(
        [*command, *given, "kvtierctl", "status", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pool"]["path"] == "/pool/pool"
