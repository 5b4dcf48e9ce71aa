"""One place (sockets, pool) and the daemons that run there one after another: killed, stopped, restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvtier.v1 import admin_pb2

from tests.support.process import DEADLINE_S, Daemon, until

__all__ = ["DaemonHost", "until"]


class DaemonHost:
    """Starts `kvtierd serve` on the same sockets and the same pool as often as wanted."""

    def __init__(self, run: Path, pool: Path, **settings: Any) -> None:
        """`settings` are written like `pool__size="1GiB"`. Starts nothing yet."""
        self._run = run
        self.pool = pool
        self._settings = settings
        self._daemon: Daemon | None = None
        self._frozen: list[int] = []

    @property
    def socket(self) -> Path:
        """The socket for clients."""
        return self._run / "kvtierd.sock"

    @property
    def daemon(self) -> Daemon:
        """The daemon that runs."""
        assert self._daemon is not None, "no daemon was started"
        return self._daemon

    @property
    def runs(self) -> bool:
        """Whether a daemon was started and not ended yet."""
        return self._daemon is not None

    def start(self) -> None:
        """Starts a daemon, and returns when it serves. Fails after a deadline, with the daemon's log."""
        assert self._daemon is None, "the daemon runs already"
        self._daemon = Daemon(self._run, self.pool, **self._settings)

    def kill9(self) -> None:
        """Sends SIGKILL to the front, which is gone when this returns. Its copy workers end by themselves."""
        self.thaw()
        self.daemon.kill()
        self._daemon = None

    def restart(self) -> None:
        """Kills the daemon with SIGKILL, and starts a new one on the same pool."""
        self.kill9()
        self.start()

    def begin_drain(self) -> subprocess.Popen[str]:
        """Starts `kvtierctl drain --for-restart`. When that has ended, so has the daemon (see `drained`)."""
        command = [sys.executable, "-m", "kvtierd.ctl", "drain", "--for-restart", f"--socket={self.socket}"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def drained(self, drain: subprocess.Popen[str]) -> str:
        """Waits until the drain and the daemon have ended with status 0. Returns what the drain said."""
        said, _ = drain.communicate(timeout=DEADLINE_S)
        assert drain.returncode == 0, said
        assert self.daemon.wait() == 0
        self._daemon = None
        return said

    def stop(self) -> None:
        """Sends SIGTERM to the daemon, if it runs."""
        self.thaw()
        if self._daemon is not None:
            self._daemon.stop()
            self._daemon = None

    def freeze(self, *, workers: bool = False) -> None:
        """Sends SIGSTOP to the front, and to its copy workers if asked."""
        also = [worker.pid for worker in self.status().workers] if workers else []
        self._freeze([self.daemon.pid, *also])

    def freeze_workers(self) -> None:
        """Sends SIGSTOP to the copy workers only."""
        self._freeze([worker.pid for worker in self.status().workers])

    def _freeze(self, pids: list[int]) -> None:
        self._frozen = pids
        for pid in pids:
            try:
                os.kill(pid, signal.SIGSTOP)
            except ProcessLookupError:
                pass  # a copy worker that has died since the daemon named it

    def thaw(self) -> None:
        """Sends SIGCONT to what was frozen."""
        for pid in self._frozen:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass  # a copy worker that its daemon has killed meanwhile
        self._frozen = []

    def kill_worker(self) -> int:
        """Sends SIGKILL to the live copy worker. Returns its pid."""
        [worker] = [worker for worker in self.status().workers if worker.state == "live"]
        os.kill(worker.pid, signal.SIGKILL)
        return int(worker.pid)

    def status(self) -> admin_pb2.StatusResponse:
        """Returns the answer of Admin.Status."""
        return self.daemon.status()

    def metrics(self) -> dict[str, float]:
        """Returns every sample by name, with its labels' values after a dot."""
        return self.daemon.metrics()
