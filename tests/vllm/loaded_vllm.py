"""Importing this module loads what every engine loads before it knows its model: three quarters of a start.

`engine_forks` has it imported once, in a process that only forks. It starts no thread, so a fork of it is as
good as a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import os

from tests.vllm import cpu_platform
from tests.vllm.engine import ENVIRONMENT

LAZY = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.models.llama",
    "tests.vllm.engine_runner",
)
"""What an engine imports when it is made."""

os.environ.update(ENVIRONMENT)  # vLLM reads some of them when it is imported
cpu_platform.ensure()
for _name in ("vllm", "vllm.entrypoints.llm", *LAZY):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
