"""What importing the client loads: no torch, no CUDA, no daemon, no engine, and no thread."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, threading
import {module}
{module}.Client
names = {{name.partition(".")[0] for name in sys.modules}}
cuda = [name for name in sys.modules if "cuda" in name]
print(json.dumps([sorted(names), cuda, threading.active_count()]))
"""
HEAVY = {"torch", "kvtierd", "kvtier_vllm", "vllm", "prometheus_client", "click", "uvloop"}


@pytest.mark.parametrize("module", ["kvtier", "kvtier.aio"])
def test_importing_the_client_loads_nothing_heavy(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded, cuda, threads = json.loads(done.stdout)
    assert not HEAVY & set(loaded)
    assert {"grpc", "google", "numpy", "kvtier_kernels"} <= set(loaded)
    assert cuda == []
    assert threads == 1
