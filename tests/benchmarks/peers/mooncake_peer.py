"""Mooncake Store over TCP: a master, and a client of its that owns the memory, as on a host of its cluster.

It is made for clusters with RDMA; on one host without it is out of its element, and its figures say so. Its
transfer engine listens on every interface, so all of it runs in a network namespace that has only a loopback
interface. Two libraries that it needs come from Debian's packages, which are unpacked and not installed.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.lmcache_peer import UV
from tests.benchmarks.peers.driver import (
    DEADLINE_S,
    Peer,
    PeerAbsent,
    PeerEngine,
    PeerRefused,
    PeerServer,
    PeerShape,
    PlaceForServers,
    Prompt,
    planes_of,
)

REPO = Path(__file__).resolve().parents[3]
HOME = REPO / "build" / "mooncake"
PACKAGE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
DEBIAN_PACKAGES = ("libibverbs1", "librdmacm1", "libnl-3-200", "libnl-route-3-200")
INSTALL_DEADLINE_S, START_DEADLINE_S = 300, 30.0
PORT, HTTP_PORT, OWNER_PORT = 50_951, 50_953, 50_952
"""In a network namespace of its own they are free."""
BUFFERS_AT_ONCE = 512
"""Buffers in one call: with some thousands its queue for TCP runs over, and the call never ends."""
_NO_SUCH_KEY = -704
_LOOPBACK_UP = "import tests.benchmarks.peers.mooncake_peer as here; here.hold_namespace()"

MOONCAKE = Peer(
    "mooncake",
    "Mooncake Store, TCP",
    "Its master and one client that owns the memory, protocol tcp; engines put and get without a copy more.",
    "tests.benchmarks.peers.mooncake_peer:MooncakeEngine",
    environment=lambda: environment(),
    server="mooncake",
)


def environment() -> dict[str, str]:
    """Of its programs, and of engines that import it."""
    libraries = HOME / "libraries"
    found = sorted({str(path.parent) for path in libraries.rglob("*.so.*")})
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(found),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HOME / "site"), os.environ.get("PYTHONPATH")])),
        "GLOG_minloglevel": "2",
    }


def install() -> None:
    """Makes it importable with `environment()`; a second call finds what the first one did. Raises
    PeerAbsent."""
    stamp = HOME / "stamp"
    wanted = "\n".join([sys.version, PACKAGE, *DEBIAN_PACKAGES])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(HOME, ignore_errors=True)
    (HOME / "packages").mkdir(parents=True)
    command = [str(UV), "pip", "install", "--quiet", "--no-deps", f"--python={sys.executable}"]
    _succeed("it cannot be installed", [*command, f"--target={HOME / 'site'}", PACKAGE])
    missing = _missing_libraries()
    if missing:
        if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
            raise PeerAbsent(f"it needs {', '.join(missing)}, and there is no apt-get to fetch them with")
        _succeed("its libraries cannot be fetched", ["apt-get", "download", *DEBIAN_PACKAGES])
        for package in (HOME / "packages").glob("*.deb"):
            command = ["dpkg-deb", "--extract", str(package), str(HOME / "libraries")]
            _succeed("its libraries cannot be unpacked", command)
    for program in ("mooncake_master", "mooncake_client"):
        (HOME / "site" / "mooncake" / program).chmod(0o755)
    _succeed("it cannot be imported", [sys.executable, "-c", "import mooncake.store"])
    stamp.write_text(wanted)


def _missing_libraries() -> list[str]:
    said = subprocess.run(
        ["ldd", HOME / "site" / "mooncake" / "store.so"], capture_output=True, text=True, check=False
    ).stdout
    return sorted(set(re.findall(r"(\S+) => not found", said)))


def _succeed(otherwise: str, command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=HOME / "packages",
            env=os.environ | environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerAbsent(f"{otherwise}: {error}") from error
    if done.returncode:
        said = done.stdout.strip().splitlines() or [f"exit status {done.returncode}"]
        raise PeerAbsent(f"{otherwise}: {said[-1].strip()}")


def hold_namespace() -> None:
    """Runs in the first process of the namespace: brings the loopback interface up, says so, and waits for
    the end of stdin."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14s", b"lo", 0x1, b"")  # IFF_UP
        fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS
    print("up", flush=True)
    sys.stdin.read()


class MooncakeServer(PeerServer):
    """`mooncake_master`, and `mooncake_client` with the memory, in a namespace of their own."""

    def __init__(self, place: PlaceForServers) -> None:
        self._log = place.run / "mooncake.log"
        self._pool_bytes = place.pool_bytes
        self._processes: list[subprocess.Popen[bytes]] = []
        unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
        self._namespace = subprocess.Popen(
            [*unshare, sys.executable, "-c", _LOOPBACK_UP],
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._namespace.stdout is not None
        if self._namespace.stdout.readline() != b"up\n":
            self.stop()
            raise PeerAbsent("it listens on every interface, and no network namespace could be made for it")
        try:
            self.restart()
        except BaseException:
            self.stop()
            raise

    @property
    def prefix(self) -> list[str]:
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--net", *user, f"--target={self._namespace.pid}"]

    @property
    def address(self) -> dict[str, Any]:
        return {"master": f"127.0.0.1:{PORT}", "http": f"http://127.0.0.1:{HTTP_PORT}"}

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def kill(self) -> None:
        """Both the master and the owner of the memory, as when their host's service dies."""
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
            process.wait(DEADLINE_S)
        self._processes = []

    def restart(self) -> None:
        self._start(
            "mooncake_master",
            "-rpc_address=127.0.0.1",
            f"-rpc_port={PORT}",
            "-metrics_host=127.0.0.1",
            f"-metrics_port={HTTP_PORT}",
        )
        self._start(
            "mooncake_client",
            "-host=127.0.0.1",
            f"-port={OWNER_PORT}",
            f"-global_segment_size={self._pool_bytes >> 20} MB",
            f"-master_server_address=127.0.0.1:{PORT}",
            "-metadata_server=P2PHANDSHAKE",
            "-protocol=tcp",
        )
        give_up_s = time.monotonic() + START_DEADLINE_S
        while not self._answers():
            if time.monotonic() > give_up_s or any(process.poll() is not None for process in self._processes):
                raise PeerAbsent(f"it did not start: {self._log.read_text(errors='replace')[-300:]}")
            time.sleep(0.02)

    def stop(self) -> None:
        self.kill()
        self._namespace.kill()
        self._namespace.wait(DEADLINE_S)

    def _start(self, program: str, *flags: str) -> None:
        with self._log.open("ab") as output:
            self._processes.append(
                subprocess.Popen(
                    [*self.prefix, str(HOME / "site" / "mooncake" / program), *flags],
                    cwd=self._log.parent,
                    env=os.environ | environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _answers(self) -> bool:
        """Whether the owner has mounted its memory: asked by a client of its own."""
        ask = (
            "import sys, mooncake.store as m; s = m.MooncakeDistributedStore();"
            f"r = s.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 1 << 20, 'tcp', '', '127.0.0.1:{PORT}');"
            "r = r or s.put('ready', b'1'); s.remove('ready', True); sys.stdout.flush();"
            "__import__('os')._exit(bool(r))"
        )
        done = subprocess.run(
            [*self.prefix, sys.executable, "-c", ask],
            env=os.environ | environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=START_DEADLINE_S,
            check=False,
        )
        return done.returncode == 0


class MooncakeEngine(PeerEngine):
    """A client without memory of its own for others."""

    def __init__(self) -> None:
        self._store: Any = None
        self._flat = np.empty(0, np.uint8)
        self._http = ""

    def warm(self) -> None:
        importlib.import_module("mooncake.store")

    def register(self, address: Mapping[str, Any], shape: PeerShape, blocks: int, instance: str) -> None:
        """`MooncakeDistributedStore.setup` and `register_buffer` of the whole KV cache."""
        module: Any = importlib.import_module("mooncake.store")
        self._http, self._shape, self._blocks = address["http"], shape, blocks
        self._flat = np.zeros(blocks * shape.block_bytes, np.uint8)
        self._flat[::4096] = 1
        self._store = module.MooncakeDistributedStore()
        setup = ("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address["master"])
        if status := self._store.setup(*setup):
            raise PeerRefused(f"setup: {status}")
        if status := self._store.register_buffer(self._flat.ctypes.data, len(self._flat)):
            raise PeerRefused(f"register_buffer: {status}")
        self.memory = planes_of(self._flat, shape, blocks)

    def names_of(self, prompt: Prompt) -> list[str]:
        """A key for each block."""
        return [f"{self._shape.name}/{prompt.seed}/{block}" for block in range(prompt.blocks)]

    def store(self, names: list[str], block_ids: Sequence[int]) -> None:
        """`batch_put_from_multi_buffers` with each block's fragments, or `batch_put_from` if it has one."""
        for keys, pointers, sizes in self._batches(names, block_ids):
            if self._shape.planes == 1:
                first = [each[0] for each in pointers]
                answer = self._store.batch_put_from(keys, first, [each[0] for each in sizes])
            else:
                answer = self._store.batch_put_from_multi_buffers(keys, pointers, sizes)
            if any(answer):
                raise PeerRefused(f"put: {sorted(set(answer))}")

    def lookup(self, names: list[str]) -> tuple[int, Any]:
        """`batch_is_exist`, which holds what exists for some seconds."""
        there = self._store.batch_is_exist(names)
        return next((at for at, each in enumerate(there) if each != 1), len(there)), None

    def give_back(self, found: Any) -> None:
        """It has no call for that: its hold ends by itself."""

    def load(self, names: list[str], found: Any, block_ids: Sequence[int]) -> None:
        """`batch_get_into_multi_buffers`, or `batch_get_into` for blocks of one fragment."""
        for keys, pointers, sizes in self._batches(names, block_ids):
            if self._shape.planes == 1:
                first = [each[0] for each in pointers]
                answer = self._store.batch_get_into(keys, first, [each[0] for each in sizes])
            else:
                answer = self._store.batch_get_into_multi_buffers(keys, pointers, sizes)
            if any(each != self._shape.block_bytes for each in answer):
                raise PeerRefused(f"get: {sorted(set(answer))}")

    def clear(self) -> None:
        """`remove_all`, with force."""
        self._store.remove_all(True)

    def held(self, names: list[str]) -> int:
        """`remove` of each key without force, which is refused while it is held. What is not held is gone
        then."""
        return sum(self._store.remove(name) not in (0, _NO_SUCH_KEY) for name in names)

    def stats(self) -> dict[str, float]:
        """The master's Prometheus metrics that count keys and bytes."""
        with urllib.request.urlopen(f"{self._http}/metrics", timeout=DEADLINE_S) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.split() for line in lines if line.startswith(("master_key_count", "master_allocated")))
        return {pair[0]: float(pair[1]) for pair in pairs}

    def close(self) -> None:
        """`close`."""
        if self._store is not None:
            self._store.close()
        self._store = None
        self.memory = []

    def _batches(
        self, names: list[str], block_ids: Sequence[int]
    ) -> list[tuple[list[str], list[list[int]], list[list[int]]]]:
        size, base = self._shape.fragment_bytes, self._flat.ctypes.data
        stride = self._blocks * size
        planes = range(self._shape.planes)
        at_once = max(1, BUFFERS_AT_ONCE // self._shape.planes)
        return [
            (
                names[first : first + at_once],
                [
                    [base + plane * stride + block * size for plane in planes]
                    for block in block_ids[first : first + at_once]
                ],
                [[size] * self._shape.planes] * len(names[first : first + at_once]),
            )
            for first in range(0, len(names), at_once)
        ]
