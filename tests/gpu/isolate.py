"""Runs one step in a process group of its own, so that a wedged driver call costs that step and no other."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.gpu.plan import Step
from tests.gpu.record import DONE, FAILED, LATE, SKIPPED, StepRecord, read_rows

REPO = Path(__file__).resolve().parents[2]
END_GRACE_S = 5.0
TAIL_LINES = 12


def run_step(
    step: Step, *, fake: bool, left_s: float, at_most_s: float, environment: Mapping[str, str], log: Path
) -> StepRecord:
    """Runs it within `at_most_s` and `left_s`; never raises for what the step did.

    Its output is appended to `log`. When this returns, no process of the step is left.
    """
    record = StepRecord(step.name, step.number, step.title)
    missing = sorted(name for name in step.needs if importlib.util.find_spec(name) is None)
    if fake and step.needs and not step.stands_in:
        record.why = f"needs {', '.join(sorted(step.needs))} on a real GPU; not run on the fake driver"
        return record
    if missing and not fake:
        record.why = f"needs {', '.join(missing)}, which is not installed here"
        return record
    if left_s < step.worth_s:
        record.why = f"{left_s:.0f} s of the budget were left; it takes at least {step.worth_s:.0f} s"
        return record
    seconds = min(at_most_s, left_s)
    with tempfile.TemporaryDirectory(prefix="kvt-", dir="/tmp") as folder:
        rows = Path(folder) / "rows.jsonl"
        command = [
            sys.executable,
            "-m",
            "tests.gpu.steps",
            step.name,
            f"--rows={rows}",
            f"--seconds={seconds:.1f}",
        ]
        command += ["--fake"] if fake else []
        started = time.monotonic()
        status, tail = run_group(command, environment, seconds, log)
        record.seconds = round(time.monotonic() - started, 2)
        record.rows = read_rows(rows)
    if status is None:
        record.state, record.why = LATE, f"killed after {seconds:.0f} s\n{tail}"
    elif status == os.EX_UNAVAILABLE:
        record.state, record.why = SKIPPED, tail.strip().splitlines()[-1] if tail.strip() else ""
    elif status:
        record.state, record.why = FAILED, f"exit status {status}\n{tail}"
    else:
        record.state = DONE
    return record


def run_group(
    command: list[str], environment: Mapping[str, str], deadline_s: float, log: Path
) -> tuple[int | None, str]:
    """Runs a command in a process group of its own and ends whatever is left of the group.

    Returns its exit status, None if it was ended at the deadline, and the last lines of what it said.
    """
    with log.open("a+") as output:
        output.write(f"\n=== {' '.join(command[1:])}\n")
        output.flush()
        begin = output.tell()
        process = subprocess.Popen(
            command,
            cwd=REPO,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None
        try:
            status = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(process)
        output.seek(begin)
        return status, "\n".join(output.read().splitlines()[-TAIL_LINES:])


def end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to what is left of a group whose leader `process` is; a process stuck in the driver is given up
    after a while, so that the run goes on."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    try:
        process.wait(END_GRACE_S)
    except subprocess.TimeoutExpired:
        pass
