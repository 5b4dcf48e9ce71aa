"""The demo's act about `autostart`: a real API server starts a daemon and is ended as a user would end it.
The daemon goes on, and the next API server gets the prompt from it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.vllm.api_server import BLOCK, ApiServer, ServerOptions

DEADLINE_S = 60.0
POLL_S = 0.1


def daemon_survives(
    stack: ExitStack,
    model: Path,
    connector: dict[str, Any],
    prompt: list[int],
    out: Path,
    say: Callable[..., None],
) -> bool:
    """Performs the act. Returns whether the daemon outlived two API servers and served to the second what the
    first had stored. `stack` gets what has to be undone; logs go to `out`. Raises AssertionError if something
    that the act needs does not start."""
    home = Path(tempfile.mkdtemp(prefix="kvtier-demo-", dir="/dev/shm"))
    stack.callback(shutil.rmtree, home, ignore_errors=True)
    socket = home / "kvtierd.sock"
    environment = {
        "KVTIER_SOCKET": str(socket),
        "KVTIER_POOL_PATH": str(home / "pool"),
        "KVTIER_POOL_SIZE": "258MiB",
        "KVTIER_CONFIG": "",
    }
    stack.callback(_end_daemon, socket)
    extra = connector["kv_connector_extra_config"] | {"autostart": True}
    config = connector | {"kv_connector_extra_config": extra}

    def serve(command: str, name: str) -> ApiServer:
        options = ServerOptions(
            model, config, command=command, max_model_len=len(prompt) + BLOCK, environment=environment
        )
        server = ApiServer(options, out / f"{name}.log")
        stack.callback(server.kill)
        server.wait_ready()
        _wait_for(socket, lambda status: any(each["ready"] for each in status.get("instances", ())))
        return server

    say("  `vllm serve` with autostart, and no daemon")
    first = serve("vllm serve", "server-1")
    started = _status(socket)["pid"]
    say(f"  it has started kvtierd, pid {started}, and computes the prompt")
    blocks = len(prompt) // BLOCK
    first.complete(prompt)
    _wait_for(socket, lambda status: status.get("blocks", {}).get("ready", 0) >= blocks)
    first.end(signal.SIGTERM)
    survived = bool(_status(socket).get("pid") == started)
    say(f"  SIGTERM to the API server, which has ended; kvtierd {started} {_fate(survived)}")
    second = serve("python -m", "server-2")
    cached = second.cached(prompt)
    say(f"  a new API server: {cached} tokens not computed")
    second.end(signal.SIGINT)
    again = bool(_status(socket).get("pid") == started)
    say(f"  SIGINT to that one, which has ended; kvtierd {started} {_fate(again)}")
    return survived and again and cached == (len(prompt) - 1) // BLOCK * BLOCK


def _fate(survived: bool) -> str:
    return "goes on" if survived else "HAS ENDED"


def _status(socket: Path) -> dict[str, Any]:
    """Returns what `kvtierctl status --json` says, or an empty dictionary if nobody answers."""
    command = [str(Path(sys.executable).parent / "kvtierctl"), "status", "--json", f"--socket={socket}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else {}


def _wait_for(socket: Path, reached: Callable[[dict[str, Any]], bool]) -> None:
    """Waits at most DEADLINE_S. If the status is not reached by then, what follows shows it."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not reached(_status(socket)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def _end_daemon(socket: Path) -> None:
    """Sends SIGTERM to the daemon, if there is one, and waits for its end."""
    if (pid := _status(socket).get("pid")) is None:
        return
    os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + DEADLINE_S
    while socket.exists() and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
