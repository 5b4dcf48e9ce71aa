"""Runs `probe.py`, and whatever else may hang, in processes of their own, and waits no longer than a
deadline."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROBE = Path(__file__).with_name("probe.py")
DEADLINE_S = 5.0
"""The time for all answers together. A disk that wakes up takes seconds, and one that hangs takes for
ever."""

Facts = dict[str, Any]


def ask(questions: Sequence[Sequence[str]]) -> list[Facts | None]:
    """The answers to questions, in order; None for one that is not answered within DEADLINE_S.

    A process that hangs in the kernel is left behind. SIGKILL ends it as soon as the kernel lets go of it.
    """
    # Each process has a group of its own, so that a Ctrl-C reaches only us.
    running = [_start([sys.executable, "-I", "-S", str(PROBE), *question]) for question in questions]
    deadline_s = time.monotonic() + DEADLINE_S
    return [_answer(process, deadline_s) for process in running]


def ask_module(module: str, *arguments: str, timeout_s: float) -> Facts | None:
    """What a program of ours prints, as `ask`."""
    process = _start([sys.executable, "-P", "-m", module, *arguments])
    return _answer(process, time.monotonic() + timeout_s)


def _start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )


def _answer(process: "subprocess.Popen[bytes]", deadline_s: float) -> Facts | None:
    try:
        said, complained = process.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return None
    if process.returncode != 0:
        last = complained.decode(errors="replace").strip().splitlines()[-1:]
        return {"error": f"its check ended with {process.returncode}: {''.join(last)}"}
    try:
        facts: Facts = json.loads(said.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": "its check ended without a result"}
    return facts
