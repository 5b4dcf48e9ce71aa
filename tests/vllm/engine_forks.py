"""Engines as forks of a process that has loaded vLLM already, which is three quarters of an engine's start.

`use` makes `Engine.launch` take them, in this process, for engines that are one process and differ from
others by arguments and by variables of ours only. They are as separate as others: each has its own process
group, and ends as they do. What they share with each other is the seed of `hash()`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from tests.vllm import engine
from tests.vllm.engine import EngineOptions, EngineProcess

READ_LATE = ("KVTIER_", "FAKE_CUDA_")
"""How variables begin that are read when an engine is made, or later."""
SEVERAL = {"distributed_executor_backend", "tensor_parallel_size"}
"""Arguments of engines of several processes."""
TITLE = "tests.vllm.engine_runner (forked)"
_context = multiprocessing.get_context("forkserver")


def use() -> None:
    """From now on, in this process."""
    _context.set_forkserver_preload(["tests.vllm.loaded_vllm"])
    engine.launcher = launch


def launch(options: EngineOptions, log: Path, environment: Mapping[str, str]) -> EngineProcess:
    """Starts an engine, as a fork if that can be. `environment`: all of its variables."""
    # The loader, and the libraries that vLLM loads, read their variables once. Processes of an engine are
    # started by the program that it is.
    own = {name for name, value in options.environment.items() if os.environ.get(name) != value}
    if options.extra.keys() & SEVERAL or not all(name.startswith(READ_LATE) for name in own):
        return engine.execute(options, log, environment)
    return ForkedEngine(options, log, environment)


class ForkedEngine:
    """What `subprocess.Popen` offers, of a fork."""

    def __init__(self, options: EngineOptions, log: Path, environment: Mapping[str, str]) -> None:
        commands, stdin = _context.Pipe(duplex=False)
        stdout, answers = _context.Pipe(duplex=False)
        arguments = json.dumps(options.llm_arguments())
        with commands, answers, stdin, stdout:
            self._process = _context.Process(
                target=_run, args=(arguments, dict(environment), commands, answers, str(log)), daemon=True
            )
            self._process.start()
            self.stdin: IO[str] | None = os.fdopen(os.dup(stdin.fileno()), "w")
            self.stdout: IO[str] | None = os.fdopen(os.dup(stdout.fileno()))

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit status, minus a signal's number; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("engine", timeout or 0.0)
        return self._process.exitcode


def _run(
    arguments: str, environment: dict[str, str], commands: Connection, answers: Connection, log: str
) -> None:
    """In the fork: becomes what `python -m tests.vllm.engine_runner` is."""
    from setproctitle import setproctitle  # comes with vLLM

    os.setsid()
    setproctitle(TITLE)  # or whoever lists processes would take it for the one that forks
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for number, descriptor in enumerate((commands.fileno(), answers.fileno(), output)):
        os.dup2(descriptor, number)
    commands.close()
    answers.close()
    os.close(output)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv[1:] = [arguments]
    os.environ.clear()
    os.environ.update(environment)
    from tests.vllm import engine_runner

    engine_runner.main()
