"""A real vLLM API server, started as a user starts one: its processes, its HTTP interface, and its end.

Every call has a deadline. The server's processes are in a process group of their own, which `kill` ends; a
daemon that the server has started is not in it, and is the caller's to end.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.support.process import DEADLINE_S, until

START_TIMEOUT_S = 300.0
BLOCK = 32
COMMANDS = {
    "vllm serve": (str(Path(sys.executable).parent / "vllm"), "serve"),
    "python -m": (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"),
}
"""The two ways to start a server, by name; the model follows."""


@dataclass(frozen=True)
class ServerOptions:
    """What distinguishes one server from another."""

    model: Path
    """Directory of the model."""
    kv_transfer_config: dict[str, Any]
    """As vLLM's `--kv-transfer-config`."""
    command: str = "vllm serve"
    """One of COMMANDS."""
    max_model_len: int = 2048
    num_blocks: int = 256
    """KV blocks of the engine, of BLOCK tokens each."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables on top of the usual ones."""


class ApiServer:
    """One server. Not thread safe."""

    def __init__(self, options: ServerOptions, log: Path) -> None:
        """Starts it without waiting. `log` receives what it prints (appended)."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._sockets = tempfile.mkdtemp(prefix="kvt-", dir="/tmp")  # of vLLM's processes, which leave theirs
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    *COMMANDS[options.command],
                    str(options.model),
                    "--host=127.0.0.1",
                    f"--port={port}",
                    "--served-model-name=tiny",
                    "--skip-tokenizer-init",
                    "--enforce-eager",
                    "--dtype=bfloat16",
                    f"--max-model-len={options.max_model_len}",
                    f"--block-size={BLOCK}",
                    f"--num-gpu-blocks-override={options.num_blocks}",
                    "--enable-prompt-tokens-details",
                    f"--kv-transfer-config={json.dumps(options.kv_transfer_config)}",
                ],
                env=os.environ
                | {
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_NO_USAGE_STATS": "1",
                    "VLLM_LOGGING_LEVEL": "INFO",
                    "VLLM_SERVER_DEV_MODE": "1",
                    "VLLM_RPC_BASE_PATH": self._sockets,
                    "HF_HUB_OFFLINE": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                }
                | options.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the API server, the first of its processes."""
        return self._process.pid

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until it serves. AssertionError, with nothing left running, if it ends or takes too long."""
        deadline_s = time.monotonic() + timeout_s
        while not self._healthy():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline_s:
                self.kill()
                raise AssertionError(f"the server did not start:\n{self.log()[-4000:]}")
            time.sleep(0.1)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=DEADLINE_S):
                return True
        except (OSError, urllib.error.URLError):
            return False

    def log(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    def complete(self, tokens: list[int], max_tokens: int = 8) -> dict[str, Any]:
        """The answer to one greedy request, with the ids of the tokens."""
        body = {
            "model": "tiny",
            "prompt": tokens,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def cached(self, tokens: list[int]) -> int:
        """Tokens of the prompt that were not computed."""
        return int(self.complete(tokens)["usage"]["prompt_tokens_details"]["cached_tokens"])

    def processes(self) -> dict[str, psutil.Process]:
        """Those that make up the server, by name: "server", "engine core", "worker"."""
        names = {"VLLM::EngineCore": "engine core", "VLLM::Worker": "worker"}
        found = {"server": psutil.Process(self.pid)}
        for process in found["server"].children(recursive=True):
            command = " ".join(process.cmdline())
            found |= {name: process for title, name in names.items() if command.startswith(title)}
        return found

    def end(self, number: int, name: str = "server") -> None:
        """Sends a signal to one of its processes, and waits until all of them have ended: by themselves or,
        where the API server was killed and can end nobody, with some help."""
        self.processes()[name].send_signal(number)
        self._process.wait(DEADLINE_S)
        self.kill()

    def kill(self) -> None:
        """Ends what is left of its process group. Safe to call at any time and again."""
        for process in self._members():
            if process.name().startswith("VLLM::") or process.pid == self.pid:
                process.kill()
        self._process.wait(DEADLINE_S)
        try:
            # Python's helpers tidy up /dev/shm, and end, when nobody is left who could.
            until(lambda: not self._members(), "its helpers have ended")
        finally:
            for process in self._members():
                process.kill()
            shutil.rmtree(self._sockets, ignore_errors=True)

    def _members(self) -> list[psutil.Process]:
        """Of its process group, but zombies, which nobody may be there to collect."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found

    def __enter__(self) -> ApiServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
