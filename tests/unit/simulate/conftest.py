"""Traces made up for the purpose: a few prompts that are asked again and again, and grow."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from kvtierd.ctl.commands import main
from kvtierd.simulate.traces import Trace

MakeTrace = Callable[..., Trace]
REAL = {"mooncake": "mooncake_conversation.npz", "mooncake-lines": "mooncake_conversation.jsonl.gz"}
REAL |= {"claude": "claude_code_dev.npz"}


def grown(seed: int, requests: int = 60, sessions: int = 8, step_max: int = 4) -> Trace:
    """Sessions that take turns at random; each request has the prompt before it and a few blocks more, and
    some begin anew. The last block of some is partial."""
    random = np.random.default_rng(seed)
    parent: list[int] = []
    ends = [-1] * sessions
    leaf, tokens = [], []
    for _ in range(requests):
        session = int(random.integers(sessions))
        if random.random() < 0.1:
            ends[session] = -1
        elif random.random() < 0.2:
            ends[session] = ends[int(random.integers(sessions))]  # a branch of another's
        for _ in range(int(random.integers(0 if ends[session] >= 0 else 1, step_max))):
            parent.append(ends[session])
            ends[session] = len(parent) - 1
        leaf.append(ends[session])
        depth, block = 0, ends[session]
        while block >= 0:
            depth, block = depth + 1, parent[block]
        tokens.append(depth * 4 - int(random.integers(4)))
    arrival_s = np.cumsum(random.exponential(1.0, requests))
    return Trace("grown", 4, np.array(parent), np.array(leaf), np.array(tokens), (arrival_s - arrival_s[0]))


@pytest.fixture
def make_trace() -> MakeTrace:
    return grown


def real_trace(name: str) -> Path:
    """The file of a published trace; without one the test is left out, and says so."""
    folder = os.environ.get("KVTIER_TRACES")
    path = Path(folder or "traces") / REAL[name]
    if not path.exists():
        pytest.skip(f"{path.name} is not here: KVTIER_TRACES names the folder of published traces")
    return path


@pytest.fixture
def trace(tmp_path: Path, make_trace: MakeTrace) -> Path:
    made = make_trace(4, requests=100)
    path = tmp_path / "trace.npz"
    arrays: dict[str, Any] = {
        "parent": made.parent,
        "leaf": made.leaf,
        "intok": made.tokens,
        "ts": made.arrival_s,
    }
    np.savez(path, block=made.block_tokens, **arrays)
    return path


def run(*arguments: object) -> Result:
    """`kvtierctl simulate` with these arguments."""
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)])
