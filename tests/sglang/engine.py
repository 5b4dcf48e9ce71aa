"""A real SGLang in a process group of its own, and what tests ask of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SGLANG = ROOT / "build" / "sglang"
"""Where `tools/setup.sh sglang` puts SGLang, beside the environment's own packages."""
START_TIMEOUT_S, CALL_TIMEOUT_S = 300.0, 120.0
PAGE = 16
INJECTED = "ENGINE_TEST_INJECTED"
"""The environment variable that tells an engine's processes what is to go wrong in them."""
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "enable_cache_report": True,
    "max_total_tokens": 4096,
    "context_length": 2048,
    "max_running_requests": 8,
    "page_size": PAGE,
    "random_seed": 0,
    "log_level": "warning",
}
"""What a CPU needs, and what keeps an engine small."""


@dataclass(frozen=True)
class Answer:
    """What became of one request."""

    tokens: list[int]
    logprobs: list[dict[str, float]] = field(repr=False)
    """For each token, the likeliest ones."""
    reason: str
    """"length", or "abort"."""
    message: str
    computed_before: int
    """Tokens that the engine's own cache had."""
    restored: int
    """Tokens that came from kvtier."""
    ttft_s: float
    """From the request to its first token, as its client sees it."""
    hinted: list[Any] | None = None
    """What was told about the KV hints of the request, and of those that ran beside it."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Answer:
        if "error" in answer:
            raise EngineError(answer["error"])
        cached = answer["cached"] or {}
        return cls(
            answer["tokens"],
            answer["logprobs"],
            answer["reason"],
            answer["message"],
            cached.get("device") or 0,
            cached.get("host") or 0,
            answer["ttft_s"],
            answer["hinted"],
        )


class EngineError(Exception):
    """The engine has answered with an error, or has ended."""


def with_linker(socket: Path, **settings: Any) -> dict[str, Any]:
    """SGLang's arguments, as a user gives them."""
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "KvtierLinker",
            "linker_module_path": "kvtier_sglang.linker",
            "linker_extra_config": {"socket": str(socket), **settings},
        },
    }


class Engine:
    """Requests may be under way side by side."""

    def __init__(
        self, model: Path, log: Path, *, injected: Mapping[str, int] | None = None, **arguments: Any
    ) -> None:
        """Starts it, and does not wait for it. `injected`: see engine_process.inject."""
        self._log = log
        settings = {"model_path": str(model), **SETTINGS, **arguments}
        paths = [ROOT / "clients", ROOT / "tests" / "sglang" / "stand_ins", SGLANG]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            INJECTED: json.dumps(injected or {}),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a start without byte code takes minutes
        if settings.get("tp_size", 1) > 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
                str(rank % (os.cpu_count() or 1)) for rank in range(settings["tp_size"])
            )
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, ROOT / "tests" / "sglang" / "engine_process.py", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                text=True,
                start_new_session=True,
            )
        self._next = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._over = False
        self._reader = threading.Thread(target=self._read, name="sglang answers", daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_ready(self) -> None:
        self.answer_of(-1, START_TIMEOUT_S)

    def send(self, op: str, **arguments: Any) -> int:
        """Sends a request. Returns its number."""
        assert self._process.stdin is not None
        self._next += 1
        self._process.stdin.write(json.dumps({"id": self._next, "op": op, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._next

    def ask(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        name: str = "",
        salt: str = "",
        abort_after_s: float | None = None,
        hints: dict[str, Any] | None = None,
    ) -> int:
        """Begins a request. Returns its number."""
        return self.send(
            "generate",
            prompt=prompt,
            max_tokens=max_tokens,
            name=name or f"request-{self._next + 1}",
            salt=salt,
            abort_after_s=abort_after_s,
            hints=hints,
        )

    def generate(self, prompt: list[int], max_tokens: int = 8, **options: Any) -> Answer:
        """One request, alone."""
        return Answer.of(self.answer_of(self.ask(prompt, max_tokens, **options)))

    def flush(self) -> bool:
        """Has the engine forget all KV it has, which it does only when nothing is under way."""
        return bool(self.call("flush")["success"])

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        answer = self.answer_of(self.send(op, **arguments))
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def answer_of(self, number: int, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """Waits for the answer to a request."""
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._answers or self._over, timeout_s):
                raise EngineError(f"no answer after {timeout_s} s:\n{self.log[-4_000:]}")
            if number not in self._answers:
                raise EngineError(f"the engine has ended:\n{self.log[-4_000:]}")
            return self._answers.pop(number)

    def wait_any(self, numbers: set[int]) -> set[int]:
        """Waits until some of these requests are answered. Returns these."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or numbers & self._answers.keys(), CALL_TIMEOUT_S)
            found = numbers & self._answers.keys()
        if not found:
            raise EngineError(f"no answer:\n{self.log[-4_000:]}")
        return found

    def kill(self) -> None:
        """Kills all its processes."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._changed:
                self._answers[answer["id"]] = answer
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def __enter__(self) -> Engine:
        self.wait_ready()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
