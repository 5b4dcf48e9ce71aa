"""`autostart`: where no daemon answers, one is started, so that a single vLLM flag is enough to try kvtier.

The daemon outlives the engine, as every other does: the next engine finds the cache. In production something
that supervises it should start it.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtier.address import Address, resolve

START_TIMEOUT_S = 20.0
"""For the daemon to listen; it needs half a second, and longer for a large pool."""
POLL_S = 0.05
TOLD_CHARS = 400
"""Of what a daemon that would not start has said."""
HIDDEN = ("CUDA_VISIBLE_DEVICES",)
"""Variables that are the engine's own: the daemon is every engine's, and names GPUs by their UUIDs."""


class AutostartError(Exception):
    """No daemon could be started; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Started:
    """A daemon that this process has started. It belongs to nobody."""

    pid: int
    log: Path


def ensure(given: str = "", environ: Mapping[str, str] = os.environ) -> Started | None:
    """Starts a daemon at the socket that a user named, or at the default one, unless somebody listens there;
    returns when it does. None: there was one. Its settings are the defaults, and KVTIER_ variables.

    Of several processes that start one at a time, all but one end by themselves. Raises AutostartError.
    """
    address = resolve(given or None)
    if _listens(address):
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
        with log.open("ab") as output:
            began_at = output.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd="/",
                start_new_session=True,  # what ends the engine's group does not end it
            )
    except OSError as error:
        raise AutostartError(f"autostart: {error}") from error
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not _listens(address):
        if process.poll() is not None and not _listens(address):
            said = log.read_bytes()[began_at:].decode(errors="replace").strip()[-TOLD_CHARS:]
            raise AutostartError(
                f"autostart: kvtierd ended with status {process.returncode}: {said} (see {log})"
            )
        if time.monotonic() > deadline_s:
            raise AutostartError(
                f"autostart: kvtierd (pid {process.pid}) does not serve after {START_TIMEOUT_S:g} s; it may "
                f"still come; see {log}"
            )
        time.sleep(POLL_S)
    return Started(process.pid, log) if process.poll() is None else None


def _listens(address: Address) -> bool:
    """Whether somebody accepts connections there; nothing is said to them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as side:
        side.settimeout(1.0)
        try:
            side.connect(os.fspath(address.side_socket))
        except OSError:
            return False
    return True


def _log_file(address: Address) -> Path:
    """Beside the socket, in a folder that nobody else can write to, made if it is missing."""
    folder = address.socket.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise AutostartError(f"autostart: {folder} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise AutostartError(f"autostart: {folder} is not this user's own folder; name another socket")
    return folder / "kvtierd.log"
