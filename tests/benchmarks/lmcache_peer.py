"""LMCache's server, which kvtier is measured beside: installed once, started empty for each workload.

The packages that it needs beyond vLLM's lie in build/lmcache, pinned; nothing else of this tree sees them.
Its chunks are as long as a block of the engines, so that both caches can hit the same tokens. It copies KV
itself, from memory that it shares with the engine ("lmcache_driven"), as kvtier does: in the mode that
LMCache would choose on a CPU by itself ("engine_driven"), requests of this vLLM never end.
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support import mooncake

REPO = Path(__file__).resolve().parents[2]
HOME = REPO / "build" / "lmcache"
UV = Path(sys.executable).with_name("uv")
PACKAGES = (
    "lmcache==0.5.6",
    "aiofile==3.12.3",
    "aiofiles==25.1.0",
    "awscrt==0.38.1",
    "caio==0.12.10",
    "cufile-python==0.2.0",
    "nvtx==0.2.17",
    "opentelemetry-exporter-prometheus==0.66b2",
    "redis==8.1.0",
    "sortedcontainers==2.4.0",
)
"""Without what they ask for: of that, vLLM's environment has what is needed on a CPU."""
USED = (
    "lmcache.integration.vllm.vllm_multi_process_adapter",
    "lmcache.v1.multiprocess.http_server",
)
"""Imported by an engine and by the server."""
CHUNK_TOKENS = 32
"""A block of the engines."""
INSTALL_DEADLINE_S, IMPORT_DEADLINE_S = 300, 240
START_DEADLINE_S, STOP_DEADLINE_S = 240.0, 30.0
POLL_S = 0.1
LOG_TAIL_CHARACTERS = 4_000


class LMCacheUnavailable(Exception):
    """LMCache cannot be installed here, or not imported; one line."""


class LMCacheError(Exception):
    """The server died or was not ready in time. Ends with the tail of its log."""


def install() -> None:
    """Makes LMCache importable with `environment()`; a second call finds what the first one did.

    Raises LMCacheUnavailable; the next call then begins anew.
    """
    stamp = HOME / "stamp"
    wanted = "\n".join([sys.version, *PACKAGES])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    partial = HOME.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [UV, "pip", "install", "--quiet", "--no-deps", f"--python={sys.executable}"]
    try:
        _succeed("it cannot be installed", [*command, f"--target={partial}", *PACKAGES], INSTALL_DEADLINE_S)
        shutil.rmtree(HOME, ignore_errors=True)
        partial.rename(HOME)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    # Not from this folder, where Mooncake's environment would pass for a package of that name (-P).
    check = [sys.executable, "-P", "-c", f"import {', '.join(USED)}"]
    _succeed("it cannot be imported beside this vLLM", check, IMPORT_DEADLINE_S)
    stamp.write_text(wanted)


def environment() -> dict[str, str]:
    """What the server and its engines find in their environment on top of the usual."""
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HOME), os.environ.get("PYTHONPATH")])),
        "LMCACHE_MP_TRANSFER_MODE": "lmcache_driven",
        # It would tell its makers about this machine.
        "LMCACHE_TRACK_USAGE": "false",
        # A line for each request, as it writes otherwise, costs it time.
        "LMCACHE_LOG_LEVEL": "WARNING",
        # It imports Mooncake where that is installed (`make test-remote`).
        **mooncake.environment(),
    }


class LMCacheServer:
    """One `lmcache server`, without a disk, in a process group of its own; ended at the end of its `with`."""

    def __init__(
        self, size_gib: float, log: Path, chunk_tokens: int = CHUNK_TOKENS, more: Sequence[str] = ()
    ) -> None:
        """Starts it, with room for `size_gib` of KV, and waits until it can serve. `log` receives what it
        prints (appended). `more`: further flags.

        Raises LMCacheError, with nothing left running, if it dies or takes longer than START_DEADLINE_S.
        """
        self._log = log
        self._port, self._http_port = _free_ports(2)
        self._command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host=127.0.0.1"]
        self._command += [f"--port={self._port}", f"--http-port={self._http_port}"]
        self._command += [f"--l1-size-gb={size_gib}", f"--chunk-size={chunk_tokens}", "--eviction-policy=LRU"]
        self._command += more
        self.start()

    @property
    def port(self) -> int:
        """Of 127.0.0.1, where engines connect."""
        return self._port

    @property
    def http_port(self) -> int:
        """Of 127.0.0.1, where it tells its status."""
        return self._http_port

    @property
    def pid(self) -> int:
        """The server's process, as long as it runs."""
        return self._process.pid

    def start(self) -> None:
        """Starts it again after `kill`, on the same ports. Raises as `__init__`."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                # Not in the repository: one of the packages brings a `tests` of its own.
                cwd=self._log.parent,
                env=os.environ | environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.kill()
            raise

    def kv_transfer_config(self) -> dict[str, Any]:
        """As a user writes it, but for the module: see there."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "tests.benchmarks.lmcache_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self._port,
            },
        }

    def stop(self) -> None:
        """SIGTERM to the whole group; what is left of it after STOP_DEADLINE_S is killed."""
        try:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(STOP_DEADLINE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass  # ended before, or is killed now
        finally:
            self.kill()

    def __enter__(self) -> LMCacheServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_DEADLINE_S
        while not self._healthy():
            if self._process.poll() is not None:
                raise LMCacheError(self._story(f"the server died (exit status {self._process.returncode})"))
            if time.monotonic() > deadline_s:
                raise LMCacheError(self._story(f"the server was not ready within {START_DEADLINE_S:.0f} s"))
            time.sleep(POLL_S)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=STOP_DEADLINE_S)
        try:
            connection.request("GET", "/healthcheck")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False  # does not listen yet
        finally:
            connection.close()

    def kill(self) -> None:
        """SIGKILL to all of it, which is gone when this returns."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of it ended before
        self._process.wait(STOP_DEADLINE_S)

    def _story(self, what: str) -> str:
        tail = self._log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
        return f"LMCache: {what}\n--- end of {self._log} ---\n{tail}"


def _succeed(otherwise: str, command: list[Any], deadline_s: float) -> None:
    """Runs a command. Raises LMCacheUnavailable with `otherwise` and the last line that it said."""
    try:
        done = subprocess.run(
            command,
            cwd=HOME.parent,
            env=os.environ | environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LMCacheUnavailable(f"{otherwise}: not done within {deadline_s:.0f} s") from None
    except OSError as error:
        raise LMCacheUnavailable(f"{otherwise}: {error}") from error
    if done.returncode != 0:
        said = done.stdout.strip().splitlines() or [f"exit status {done.returncode}"]
        raise LMCacheUnavailable(f"{otherwise}: {said[-1].strip()}")


def _free_ports(count: int) -> list[int]:
    """Of the loopback interface, none twice in this process; another process may take them before they are
    used."""
    ports: list[int] = []
    while len(ports) < count:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        if port not in _given:
            _given.add(port)
            ports.append(port)
    return ports


_given: set[int] = set()
