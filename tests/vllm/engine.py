"""Real vLLM engines as child processes, for tests and the demo.

Every call has a deadline, and nothing outlives its owner:

    with Engine.start(EngineOptions(model=...), log=path) as engine:
        result = engine.generate([prompt])[0]

Each engine is one process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) in a process group of its own; it also ends
itself when its controller dies.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

from tests.support.logs import keep_log

REPOSITORY = Path(__file__).resolve().parents[2]

# Two seconds on a quiet machine with byte-compiled packages; minutes where everything is cold and the cores
# are shared.
START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 120.0
# What a call may take beyond the deadline that was handed to the engine, before the engine counts as hung.
GRACE_S = 30.0
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables of every engine."""


class EngineError(Exception):
    """The engine refused a command, died, or did not answer in time. Ends with the tail of its log."""


@dataclass(frozen=True)
class EngineOptions:
    """What distinguishes one engine from another. All else is fixed, so that runs compare bit for bit."""

    model: Path
    """Directory of the model."""
    kv_transfer_config: dict[str, Any] | None = None
    """As vLLM's `--kv-transfer-config`; None for an engine without a connector."""
    max_model_len: int = 2048
    """Tokens of prompt and output together."""
    block_size: int = 32
    """Tokens of one KV block."""
    num_blocks: int = 256
    """KV blocks of the engine, the null block included."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step; below the prompt's length the prefill is chunked."""
    dtype: str = "bfloat16"
    """dtype of weights and KV cache."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables on top of the usual ones."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM`; win over the above."""

    def llm_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`."""
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "seed": 0,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "block_size": self.block_size,
            "num_gpu_blocks_override": self.num_blocks,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }
        if self.kv_transfer_config is not None:
            arguments["kv_transfer_config"] = self.kv_transfer_config
        return arguments | self.extra


@dataclass(frozen=True)
class Generated:
    """What one request came to."""

    tokens: list[int]
    logprobs: list[dict[str, float]]
    """Per output token: log probability by token id (as text)."""
    num_cached_tokens: int
    """Prompt tokens not computed: found in the engine's own cache or loaded."""
    ttft_s: float
    """Seconds from submission to the first token."""
    total_s: float
    finish_reason: str | None


class EngineProcess(Protocol):
    """What is needed of `subprocess.Popen`."""

    stdin: IO[str] | None
    stdout: IO[str] | None

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def execute(options: EngineOptions, log: Path, environment: Mapping[str, str]) -> EngineProcess:
    """Starts an engine's process. `environment`: all of its variables."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.engine_runner", json.dumps(options.llm_arguments())],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,
        )


launcher = execute
"""How engines of this process are started (see `engine_forks`)."""


class Engine:
    """Controls one engine process. Not thread safe: one command at a time."""

    def __init__(self, process: EngineProcess, log: Path) -> None:
        self._process = process
        self._log = log
        keep_log(self, f"log of the engine with pid {process.pid}", Engine._read_log)
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # A thread reads the answers so that waiting for one can have a deadline; it ends with the pipe.
        threading.Thread(target=self._read_answers, daemon=True).start()

    @classmethod
    def start(cls, options: EngineOptions, log: Path, timeout_s: float = START_TIMEOUT_S) -> Engine:
        """Starts an engine and waits until it can serve. `log` receives what it prints (appended).

        Raises EngineError, with nothing left running, if it fails or takes longer than `timeout_s`.
        """
        engine = cls.launch(options, log)
        engine.wait_ready(timeout_s)
        return engine

    @classmethod
    def launch(cls, options: EngineOptions, log: Path) -> Engine:
        """Starts the process without waiting: several engines can load at once. Call `wait_ready` next."""
        environment = os.environ | ENVIRONMENT | options.environment
        return cls(launcher(options, log, environment), log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> Path:
        """What it prints."""
        return self._log

    def _read_log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits for a launched engine. Raises EngineError, with nothing left running, if it fails."""
        try:
            self.receive(timeout_s)
        except EngineError:
            self.kill()
            raise

    def call(self, op: str, timeout_s: float = CALL_TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
        """Sends one command of `engine_runner` and returns its answer.

        Raises EngineError if it is refused (the engine lives on), or if the engine died or did not answer
        within `timeout_s` (it is killed: the state of a hung engine is unknown).
        """
        self.send(op, **arguments)
        return self.receive(timeout_s)

    def send(self, op: str, **arguments: Any) -> None:
        """Sends one command without waiting, e.g. to kill the engine in the middle of it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise EngineError(self._story("the engine is not running")) from error

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 32,
        logprobs: int = 5,
        timeout_s: float = CALL_TIMEOUT_S,
        salt: str | None = None,
        lora: tuple[str, int, str] | None = None,
    ) -> list[Generated]:
        """Runs the prompts (token ids) together, greedily, to exactly `max_tokens` each. `lora`: an adapter's
        name, number and folder."""
        # Two deadlines: the engine gives up first, and says what it was doing; then we give up on it.
        command = {
            "prompts": prompts,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "salt": salt,
            "lora": lora,
        }
        answer = self.call("generate", timeout_s + GRACE_S, engine_timeout_s=timeout_s, **command)
        return [Generated(**result) for result in answer["results"]]

    def reset_prefix_cache(self) -> None:
        """Makes the engine forget what its KV blocks hold. Raises EngineError while requests hold blocks."""
        if not self.call("reset_prefix_cache")["ok"]:
            raise EngineError("reset_prefix_cache: requests still hold KV blocks")

    def overwrite_cache(self, value: int = 0x3F, blocks: list[int] | None = None) -> None:
        """Fills the KV blocks (all but the null block, or the named ones) with the byte `value`."""
        self.call("overwrite_cache", value=value, blocks=blocks)

    def drain(self, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """Steps the engine until no request is left, not even one that only waits for a transfer."""
        return self.call("drain", timeout_s + GRACE_S, engine_timeout_s=timeout_s)

    def kill(self) -> None:
        """kill -9 of the whole process group, and waits for its end. Safe to call at any time and again."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of it ended before
        self._process.wait(timeout=30)
        self._close_pipes()

    def stop(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Asks the engine to shut down as vLLM does, then makes sure that nothing of it is left."""
        try:
            if self.alive:
                self.call("quit", timeout_s)
                self._process.wait(timeout=timeout_s)
        except (EngineError, subprocess.TimeoutExpired):
            pass  # killed below
        finally:
            self.kill()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def receive(self, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """The answer to what was sent before it; raises as `call`."""
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.kill()
            raise EngineError(self._story(f"no answer within {timeout_s} s; killed")) from None
        if line is None:
            self.kill()
            raise EngineError(self._story(f"the engine died (exit status {self._process.returncode})"))
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(self._story(answer["error"]))
        return answer

    def _story(self, what: str) -> str:
        try:
            tail = self._log.read_text(errors="replace")[-4000:]
        except OSError:
            tail = ""
        return f"{what}\n--- end of {self._log} ---\n{tail}"

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass  # unsent input of a dead engine
