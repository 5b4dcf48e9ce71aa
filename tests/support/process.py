"""A real kvtierd, as an operator starts it, with its own process, sockets, pool and metrics."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import grpc
from kvtier.v1 import admin_pb2, admin_pb2_grpc
from kvtierd.cli import entry
from prometheus_client.parser import text_string_to_metric_families

from tests.support import forks
from tests.support.logs import keep_log

DEADLINE_S = 60.0
"""The deadline for things that should take much less: only a broken daemon takes so long."""

WHOLE_S = 300.0
"""The deadline for a pool of tens of gigabytes to get its memory."""


def readable(descriptor: int, timeout_s: float) -> bool:
    """Returns whether there is something to read, or the other end is gone, within `timeout_s`. Unlike
    `select` it accepts large numbers: campaigns on GPUs keep a thousand pages of words open."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1_000))


class Daemon:
    """One `kvtierd serve`, which is started when this is made, and ended by `stop` or `kill`."""

    def __init__(self, run: Path, pool: Path, *, wrap: Sequence[str] = (), **settings: object) -> None:
        """`settings` are written like `pool__size="1GiB"`. `wrap` is put before the command, and has to exec
        it."""
        self.socket = run / "kvtierd.sock"
        self.side_socket = run / "kvtierd.side.sock"
        self.pool = pool
        given = {
            "server.socket": self.socket,
            "pool.path": pool,
            "pool.size": "66MiB",
            "pool.extent_size": "1MiB",
            "metrics.listen": "127.0.0.1:0",
            "log.format": "json",
            "server.drain_s": 10,
        } | {key.replace("__", "."): value for key, value in settings.items()}
        flags = [f"--{re.sub('[._]', '-', key)}={value}" for key, value in _flags(given)]
        log = run / f"log-{time.monotonic_ns()}"
        self._log = log.open("w+")
        keep_log(self, f"log of the daemon at {self.socket}", Daemon.log)
        self.process = _start(wrap, ["serve", *flags], os.environ | {"KVTIER_CONFIG": ""}, log)
        self.pid = self.process.pid
        self.greeting = ""
        self._told = 0
        self.may_complain = False
        """Whether the log may have complaints; set by tests that break something."""
        self._read_greeting()

    def _read_greeting(self) -> None:
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + DEADLINE_S
        # This does not use the buffered reader: what that holds back, select does not see.
        descriptor = self.process.stdout.fileno()
        while "vLLM" not in self.greeting:
            ready = readable(descriptor, deadline_s - time.monotonic())
            part = os.read(descriptor, 1 << 16).decode() if ready else ""
            if not part:
                self.kill()
                raise AssertionError(f"kvtierd did not start:\n{self.greeting}{self.log()}")
            self.greeting += part

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def complaints(self) -> list[str]:
        """Returns the log lines that a healthy daemon with well-behaved clients would not write. What it
        finds the host to lack before it starts is the test's choice."""
        return [line for line in self.log().splitlines() if _complains(line)]

    def new_complaints(self) -> list[str]:
        """Returns the complaints since the last call, for a daemon that several tests share."""
        complaints = self.complaints()
        new = complaints[self._told :]
        self._told = len(complaints)
        return new

    @property
    def metrics_url(self) -> str:
        return next(line.split()[1] for line in self.greeting.splitlines() if "metrics" in line)

    def metrics(self) -> dict[str, float]:
        """Returns every sample by name, with its labels' values after a dot, as of now. (A daemon whose event
        loop hangs would tell what it saw last.)"""
        found: list[dict[str, float]] = []

        def fresh() -> bool:
            found.append(self._scrape())
            return found[-1]["kvtier_snapshot_fresh"] == 1

        until(fresh, "the metrics are of now")
        return found[-1]

    def _scrape(self) -> dict[str, float]:
        with urllib.request.urlopen(self.metrics_url, timeout=DEADLINE_S) as answer:
            parsed = text_string_to_metric_families(answer.read().decode())
        return {
            ".".join([sample.name, *sample.labels.values()]): sample.value
            for family in parsed
            for sample in family.samples
        }

    def status(self) -> admin_pb2.StatusResponse:
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            return admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=DEADLINE_S)

    def wait_whole(self) -> None:
        """Waits until all of the pool has memory, so that there is room for all that is to be stored."""
        deadline_s = time.monotonic() + WHOLE_S
        while (pool := self.status().pool).populated_bytes < pool.capacity_bytes:
            assert not pool.shortage, pool.shortage
            assert time.monotonic() < deadline_s, "the pool does not become whole"
            time.sleep(0.02)

    def check_idle(self) -> bool:
        """Returns whether nobody is attached, and nothing is held or under way."""
        status = self.status()
        return not (status.instances or status.leases or status.transfers_active)

    def descriptors_of_clients(self) -> int:
        """Returns how many descriptors of clients' memory the daemon's front holds open."""
        return sum(name.startswith("/memfd:kvtier-test-client") for name in self._descriptors())

    def sockets(self) -> int:
        """Returns how many sockets and pidfds the daemon's front holds open."""
        return sum(name.startswith(("socket:", "anon_inode:[pidfd]")) for name in self._descriptors())

    def _descriptors(self) -> list[str]:
        folder = Path(f"/proc/{self.pid}/fd")
        names = []
        for descriptor in list(folder.iterdir()):
            try:
                names.append(os.readlink(descriptor))
            except FileNotFoundError:
                pass  # closed meanwhile
        return names

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Waits for the daemon's end. Returns its exit status."""
        status = self.process.wait(DEADLINE_S)
        self._close()
        return status

    def stop(self) -> int:
        """Ends the daemon with SIGTERM, if it runs. Returns its exit status."""
        if self.process.poll() is None:
            self.terminate()
        return self.wait()

    def kill(self) -> None:
        """Kills the daemon with SIGKILL."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self._close()

    def _close(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()


def _start(
    wrap: Sequence[str], arguments: list[str], environment: dict[str, str], log: Path
) -> forks.Fork | subprocess.Popen[str]:
    # A fork, unless what comes before the command wants to execute it, or the parent of this process's forks
    # has imported much else, in which each collection of garbage would take long.
    if not wrap and forks.use("tests.support.loaded_daemon", environment):
        return forks.Fork(entry.kvtierd, arguments, environment, log)
    with log.open("a") as errors:
        return subprocess.Popen(
            [*wrap, sys.executable, "-m", "kvtierd.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )


def _complains(line: str) -> bool:
    if not line.startswith("{"):
        return True
    said = json.loads(line)
    return said["level"] in ("warning", "error", "critical") and said["logger"] != "kvtierd.preflight"


def _flags(given: dict[str, object]) -> list[tuple[str, object]]:
    return [(key, value) for key, value in given.items() if value is not None]


def refused_start(run: Path, pool: Path, *more: str, wrap: Sequence[str] = ()) -> tuple[int, str]:
    """Starts a kvtierd that cannot start. Returns its exit status and what it said."""
    command = [*wrap, sys.executable, "-m", "kvtierd.cli", "serve", f"--server-socket={run / 'kvtierd.sock'}"]
    command += [f"--pool-path={pool}", "--pool-size=66MiB", "--metrics-listen=off", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return done.returncode, done.stderr


def until(condition: object, what: str) -> None:
    """Waits until `condition()` holds. Fails when that takes far too long."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, f"still not: {what}"
        time.sleep(0.01)
