"""An engine's process, as the benchmark controls it: the other end of `engine_child`."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.benchmarks.peers.driver import Peer, PeerRefused, PeerShape

REPO = Path(__file__).resolve().parents[3]
CALL_TIMEOUT_S = 180.0
LOG_TAIL_CHARACTERS = 1_500


class EngineProcessError(Exception):
    """The process failed, died, or did not answer in time; ends with the tail of its log."""


class PeerProcess:
    """One engine of a peer, in a process group of its own; killed at the end of its `with`."""

    def __init__(self, peer: Peer, log: Path, prefix: Sequence[str] = ()) -> None:
        """Starts it. `log` receives what it prints (appended). `prefix`: see PeerServer."""
        self.peer = peer
        self._log = log
        command = [*prefix, sys.executable, "-m", "tests.benchmarks.peers.engine_child", peer.engine]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, json.dumps(dict(peer.options))],
                cwd=REPO,
                env=os.environ | peer.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def register(self, address: Mapping[str, Any], shape: PeerShape, blocks: int, instance: str) -> float:
        """Connects, anew if it was connected; seconds that it took."""
        seconds: float = self.call(
            "register", address=dict(address), shape=asdict(shape), blocks=blocks, instance=instance
        )
        return seconds

    def call(self, op: str, timeout_s: float = CALL_TIMEOUT_S, **arguments: Any) -> Any:
        """Runs one command of EngineCommands, and returns its answer.

        Raises PeerRefused if the peer refuses, EngineProcessError for everything else.
        """
        self.send(op, **arguments)
        return self.receive(timeout_s)

    def send(self, op: str, **arguments: Any) -> None:
        """Sends a command without waiting: engines can work at once."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise EngineProcessError(self._story("the engine is gone")) from error

    def receive(self, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The answer to what was sent; raises as `call`."""
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.kill()
            raise EngineProcessError(self._story(f"no answer within {timeout_s:.0f} s; killed")) from None
        if line is None:
            raise EngineProcessError(self._story("the engine died"))
        answer = json.loads(line)
        if "refused" in answer:
            raise PeerRefused(answer["refused"])
        if "failed" in answer:
            raise EngineProcessError(self._story(answer["failed"]))
        return answer["answer"]

    def kill(self) -> None:
        """SIGKILL to the whole group, which is gone when this returns. Safe to call again."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of it ended before
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass  # what was not sent

    def stop(self) -> None:
        """Lets it disconnect as an engine does that ends, then makes sure that it is gone."""
        try:
            if self._process.stdin is not None and self._process.poll() is None:
                self._process.stdin.close()
                self._process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            pass  # killed below
        self.kill()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._answers.put(line)
        except ValueError:
            pass  # closed by `kill`
        self._answers.put(None)

    def _story(self, what: str) -> str:
        tail = self._log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
        return f"{self.peer.title}: {what}\n--- end of {self._log} ---\n{tail}"
