"""Examples in docstrings are programs: each runs as it stands, on a real daemon, and prints what it says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.integration.client.conftest import MakeGpu
from tests.support.daemon import DaemonHost
from tests.support.fake_cuda import make_fake_cuda
from tests.support.process import DEADLINE_S

__all__ = ["make_fake_cuda"]

CLIENTS = Path(__file__).parents[3] / "clients"
ON_A_GPU = "kvtier/cuda/__init__.py"
WITH_TORCH = "kvtier/torch.py"
IN_A_SHELL = {"kvtier_vllm/hashes.py"}
"""A command line, not Python; tests/vllm runs it."""


def examples() -> dict[str, str]:
    """Every indented block of a docstring, by the file that it is in."""
    found: dict[str, list[str]] = {}
    for path in sorted(CLIENTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                blocks = re.findall(r"\n\n((?:    .*\n|\n)*    .*(?:\n|$))", text)
                found.setdefault(str(path.relative_to(CLIENTS)), []).extend(map(textwrap.dedent, blocks))
    return {name: "\n".join(blocks) for name, blocks in found.items() if blocks}


def printed(example: str) -> list[str]:
    """What the example says that it prints: the comment behind a `print`, or the one below it."""
    return re.findall(r"print\(.*\)(?:\n?\s+# (.+))", example)


def run(example: str, host: DaemonHost) -> list[str]:
    environment = os.environ | {"KVTIER_SOCKET": str(host.socket)}
    ended = subprocess.run(
        [sys.executable, "-c", example],
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,
        check=False,
        env=environment,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    return ended.stdout.splitlines()


def test_these_are_all_examples() -> None:
    assert set(examples()) - IN_A_SHELL == {
        "kvtier/__init__.py",
        "kvtier/swap.py",
        WITH_TORCH,
        ON_A_GPU,
    }
    for name in ("kvtier/__init__.py", "kvtier/swap.py", WITH_TORCH, ON_A_GPU):
        assert examples()[name].count("print(") == len(printed(examples()[name])) > 0, name


@pytest.mark.parametrize("name", ["kvtier/__init__.py", "kvtier/swap.py", WITH_TORCH])
def test_an_example_runs_as_it_stands(name: str, shared_host: DaemonHost) -> None:
    if name == WITH_TORCH:
        pytest.importorskip("torch")
    example = examples()[name]
    assert run(example, shared_host) == printed(example)


@pytest.mark.fake_gpu
def test_the_example_on_a_gpu_runs_as_it_stands(make_gpu: MakeGpu, idle_host: DaemonHost) -> None:
    make_gpu()
    idle_host.start()
    example = examples()[ON_A_GPU]
    assert run(example, idle_host) == printed(example)
