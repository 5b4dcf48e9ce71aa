"""The setting `autostart`: starts a daemon where none answers, so that a single vLLM flag is enough to try
kvtier.

The daemon outlives the engine, however that ends: it is nobody's child, so vLLM, which kills all descendants
of its engine core when it shuts down, does not reach it. The next engine finds the cache. Whatever ends every
process of a container or a systemd unit ends the daemon too. In production a supervisor should start it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import select
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvtier.connection.address import Address, resolve
from kvtier.connection.trust import require_daemon
from kvtier.errors import ConnectionLostError

from kvtier_engine import detach

START_TIMEOUT_S = 20.0
"""How long the daemon may take to listen. It needs half a second, and longer for a large pool."""
POLL_S = 0.05
TOLD_CHARS = 400
"""How much of the output of a daemon that did not start is quoted."""
HIDDEN = ("CUDA_VISIBLE_DEVICES",)
"""Variables of the engine that the daemon must not inherit: it serves every engine, and names GPUs
by UUID."""
ALREADY_RUNNING = "already running"
"""The words of a daemon that finds another one at its socket, which may need a moment more to listen."""


class AutostartError(Exception):
    """No daemon could be started; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class StartedDaemon:
    """A daemon that this process has started, and that outlives it."""

    pid: int
    log: Path


def ensure(given: str = "", environ: Mapping[str, str] = os.environ) -> StartedDaemon | None:
    """Starts a daemon at the socket that a user named, or at the default one, unless somebody listens there,
    and waits until it does. Returns None if there was one, or if another process was faster. The daemon has
    its default settings, changed by KVTIER_ variables.

    If several daemons are started at the same time, all but one end by themselves. Raises AutostartError.
    """
    address = resolve(given or None)
    if _server(address) is not None:
        return None
    if importlib.util.find_spec("kvtierd") is None:
        raise AutostartError(
            "autostart: the daemon is not installed in this environment: install kvtier's wheel with its "
            "extra `daemon` here, by the line that `make wheels` prints in a checkout of kvtier"
        )
    log = _log_file(address)
    command = [sys.executable, "-m", "kvtierd.cli", "serve", f"--server-socket={address.socket}"]
    environment = {name: value for name, value in environ.items() if name not in HIDDEN}
    try:
        began_at = log.stat().st_size if log.exists() else 0
        start = _Start(command, log, environment)
    except OSError as error:
        raise AutostartError(f"autostart: {error}") from error
    with start:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while (server := _server(address)) is None:
            said = log.read_bytes()[began_at:].decode(errors="replace").strip()
            if start.over and ALREADY_RUNNING not in said and _server(address) is None:
                raise AutostartError(f"autostart: {start.how_it_ended}: {said[-TOLD_CHARS:]} (see {log})")
            if time.monotonic() > deadline_s:
                who = "another kvtierd" if start.over else f"kvtierd (pid {start.pid})"
                raise AutostartError(
                    f"autostart: {who} does not serve after {START_TIMEOUT_S:g} s; it may still come; see "
                    f"{log}"
                )
            start.wait(POLL_S)
        return StartedDaemon(server, log) if server == start.pid else None


def ensure_and_tell(given: str, log: logging.Logger) -> None:
    """Does what `ensure` does, and logs what came of it. Without a daemon the engine runs on."""
    try:
        started = ensure(given)
    except AutostartError as error:
        log.warning("kvtier: %s", error)
        return
    if started is not None:
        log.info(
            "kvtier: started kvtierd (pid %d), which stays when this engine ends; log: %s",
            started.pid,
            started.log,
        )


def wait(given: str, timeout_s: float) -> bool:
    """Waits at most `timeout_s` seconds until somebody listens at the socket that a user named, or at the
    default one. Returns whether a daemon that we trust does."""
    address = resolve(given or None)
    deadline_s = time.monotonic() + timeout_s
    try:
        while _server(address) is None:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)
    except AutostartError:
        return False
    return True


class _Start:
    """A daemon that is starting, for as long as this process watches it. It is nobody's child (see `detach`),
    and runs on afterwards."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        """Starts the daemon. Raises OSError."""
        self.pid: int | None = None
        """The daemon's process id; None until it runs."""
        self.over = False
        """Whether it has ended, or could not be started."""
        self._status: int | None = None
        self._told = ""
        with log.open("ab") as output:
            self._starter = subprocess.Popen(
                [sys.executable, "-I", "-S", detach.__file__, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                cwd="/",
                start_new_session=True,  # what ends the engine's group does not end it
            )
        assert self._starter.stdout is not None
        self._pipe = self._starter.stdout.fileno()
        os.set_blocking(self._pipe, False)

    @property
    def how_it_ended(self) -> str:
        """How the daemon ended, for people, once it is over."""
        if self._status is None:
            return "kvtierd could not be started"
        return f"kvtierd ended with status {self._status}"

    def wait(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` seconds for news of the daemon."""
        if self.over:
            time.sleep(timeout_s)
            return
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        if not poll.poll(timeout_s * 1_000):
            return
        part = os.read(self._pipe, 1_024)
        self.over = not part
        self._told += part.decode()
        facts = {name: int(value) for name, value in map(str.split, self._told.split("\n")[:-1])}
        self.pid, self._status = facts.get("pid"), facts.get("status")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._starter.stdout is not None
        self._starter.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._starter.wait(START_TIMEOUT_S)  # it has ended at once, unless something stopped it


def _server(address: Address) -> int | None:
    """Returns the process that accepts connections there, or 0 if it is not visible from here; None if nobody
    does. Sends nothing to it. Raises AutostartError if it is somebody whom we do not trust."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as side:
        side.settimeout(1.0)
        try:
            side.connect(os.fspath(address.side_socket))
            return require_daemon(side, address.side_socket, address.daemon_user)
        except OSError:
            return None
        except ConnectionLostError as error:
            raise AutostartError(f"autostart: {error}") from None


def _log_file(address: Address) -> Path:
    """Returns the log file's path, in the socket's folder, which is made if it is missing. Raises
    AutostartError unless the folder is this user's, and nobody else can write to it."""
    folder = address.socket.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise AutostartError(f"autostart: {folder} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise AutostartError(f"autostart: {folder} is not this user's own folder; name another socket")
    return folder / "kvtierd.log"
