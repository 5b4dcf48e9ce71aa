"""A real Mooncake Store for tests: a master, and a client of its that gives memory, over TCP on loopback.

What gives memory listens for transfers on every interface while a test runs, because its library has no
other way.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.seaweed import free_ports

LIBRARIES = Path(__file__).resolve().parents[2] / "build" / "mooncake-libraries"
"""Where tools/setup.sh unpacks libraries for RDMA, which Mooncake is linked with, if the machine has none."""
START_S = 60.0
MIB = 1 << 20
_IN_ORDER = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1", "librdmacm.so.1")


def environment() -> dict[str, str]:
    """Variables of processes that use Mooncake."""
    folders = sorted({str(path.parent) for name in _IN_ORDER for path in LIBRARIES.rglob(name)})
    before = os.environ.get("LD_LIBRARY_PATH")
    joined = os.pathsep.join([*folders, *([before] if before else [])])
    return {"LD_LIBRARY_PATH": joined} if joined else {}


@functools.cache
def why_not() -> str:
    """Why there is no Mooncake here; empty if there is. Afterwards this process can import it."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake Store is not installed: mooncake-transfer-engine-non-cuda (tools/setup.sh remote)"
    for name in _IN_ORDER:
        for path in LIBRARIES.rglob(name):
            with contextlib.suppress(OSError):  # another of its libraries is missing, which the import tells
                ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # as the driver does before it loads the library
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"Mooncake Store cannot be imported: {error} (Debian: libibverbs1 and librdmacm1)"
    return ""


class Mooncake:
    """One cluster, whose master and whose memory may each be killed, stopped and started again."""

    def __init__(self, folder: Path, *, memory_bytes: int = 512 * MIB, lease_s: float = 1.0) -> None:
        """It has room for so many bytes, and keeps what is read for so long."""
        assert not why_not()
        spec = importlib.util.find_spec("mooncake.store")
        assert spec is not None
        assert spec.origin is not None
        self._programs = Path(spec.origin).parent
        self._folder = folder
        self._memory_bytes, self._lease_s = memory_bytes, lease_s
        self._port, self._metrics_port, self._owner_port = free_ports(3)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self.start_master()
            self.start_memory()
        except BaseException:
            self.stop()
            raise

    @property
    def master(self) -> str:
        """Where the master is."""
        return f"127.0.0.1:{self._port}"

    def url(self, folder: str) -> str:
        """As `store.url`."""
        return f"mooncake://{self.master}/{folder}"

    def start_master(self) -> None:
        """A master that knows of nothing yet."""
        self._start(
            "mooncake_master",
            "-rpc_address=127.0.0.1",
            f"-rpc_port={self._port}",
            "-metrics_host=127.0.0.1",
            f"-metrics_port={self._metrics_port}",
            f"-default_kv_lease_ttl={1_000 * self._lease_s:.0f}",
            "-client_ttl=3",
            "-put_start_discard_timeout_sec=5",
        )
        self._until(lambda: self._metric("master_key_count") is not None, "the master serves")

    def start_memory(self) -> None:
        """The client that gives memory."""
        before = self._metric("master_total_capacity_bytes") or 0
        self._start(
            "mooncake_client",
            "-host=127.0.0.1",
            f"-port={self._owner_port}",
            f"-global_segment_size={self._memory_bytes // MIB} MB",
            f"-master_server_address={self.master}",
            "-metadata_server=P2PHANDSHAKE",
            "-protocol=tcp",
        )
        self._until(lambda: (self._metric("master_total_capacity_bytes") or 0) > before, "it has memory")

    def wait_for_memory(self) -> None:
        """Returns when the master knows of memory, as it does some seconds after it was started anew."""
        self._until(self._has_memory, "the client with the memory has come back")

    def wait_until_memory_has_gone(self) -> None:
        """Returns when the master knows that the client with the memory has ended."""
        self._until(lambda: not self._has_memory(), "the master misses the client with the memory")

    def _has_memory(self) -> bool:
        return bool(self._metric("master_total_capacity_bytes"))

    def remove(self, pattern: str) -> int:
        """Has the master evict what fits a regular expression. Returns how much that was."""
        code = (
            "import os, sys, mooncake.store as m; s = m.MooncakeDistributedStore();"
            f"s.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 1 << 20, 'tcp', '', '{self.master}');"
            f"print('removed', s.remove_by_regex({pattern!r}, True)); sys.stdout.flush(); os._exit(0)"
        )
        said = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | environment() | {"MC_LOG_LEVEL": "ERROR"},
            capture_output=True,
            text=True,
            timeout=START_S,
            check=True,
        ).stdout
        return int(said.rpartition("removed ")[2])

    def stop_memory(self) -> None:
        """Stops the client with the memory, and returns when none of its threads does anything more."""
        process = self.processes["mooncake_client"]
        process.send_signal(signal.SIGSTOP)
        tasks = list(Path(f"/proc/{process.pid}/task").iterdir())
        self._until(
            lambda: all(each.joinpath("stat").read_text().rpartition(") ")[2][0] == "T" for each in tasks),
            "all threads have stopped",
        )

    def go_on_with_memory(self) -> None:
        """Undoes `stop_memory`."""
        self.processes["mooncake_client"].send_signal(signal.SIGCONT)

    def kill(self, name: str) -> None:
        """`mooncake_master` or `mooncake_client`."""
        process = self.processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait(10)

    def stop(self) -> None:
        for name in list(self.processes):
            self.kill(name)

    def _start(self, program: str, *flags: str) -> None:
        path = self._programs / program
        path.chmod(0o755)  # wheels do not keep it in each installer
        with (self._folder / f"{program}.log").open("ab") as log:
            self.processes[program] = subprocess.Popen(
                [str(path), *flags],
                cwd=self._folder,
                env=os.environ | environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _metric(self, name: str) -> float | None:
        """A metric of the master's; None if it does not tell."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=5
            ) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return None
        return sum(float(line.split()[-1]) for line in lines if line.split(" ")[0].split("{")[0] == name)

    def _until(self, true: Any, what: str) -> None:
        deadline_s = time.monotonic() + START_S
        while not true():
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline_s:
                logs = "\n".join(
                    path.read_text(errors="replace")[-1_000:] for path in self._folder.glob("*.log")
                )
                raise RuntimeError(f"not so: {what}; ended: {ended}\n{logs}")
            time.sleep(0.1)
