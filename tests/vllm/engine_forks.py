"""Engines as forks of a process that has loaded vLLM already, which is three quarters of an engine's start.

`use` makes `Engine.launch` take them, in this process, for engines that are one process and differ from
others by arguments and by variables of ours only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tests.support import forks
from tests.vllm import engine
from tests.vllm.engine import EngineOptions, EngineProcess

READ_LATE = ("KVTIER_", "FAKE_CUDA_")
"""How variables begin that are read when an engine is made, or later."""
SEVERAL = {"distributed_executor_backend", "tensor_parallel_size"}
"""Arguments of engines of several processes."""


def use() -> None:
    """From now on, in this process."""
    if forks.use("tests.vllm.loaded_vllm"):
        engine.launcher = launch


def launch(options: EngineOptions, log: Path, environment: Mapping[str, str]) -> EngineProcess:
    """Starts an engine, as a fork if that can be. `environment`: all of its variables."""
    # The loader, and the libraries that vLLM loads, read their variables once. Processes of an engine are
    # started by the program that it is.
    own = {name for name, value in options.environment.items() if os.environ.get(name) != value}
    if options.extra.keys() & SEVERAL or not all(name.startswith(READ_LATE) for name in own):
        return engine.execute(options, log, environment)
    return forks.Fork(
        _main, [json.dumps(options.llm_arguments())], environment, log, session=True, stdin=True
    )


def _main() -> None:
    from tests.vllm import engine_runner

    engine_runner.main()
