"""Stages of checks: what each runs, how it is ended, and what its results say.

A stage is one command in a process group of its own. Its whole output is kept under build/logs/. When it
ends, by itself or otherwise, nothing that it has started goes on running, whatever session that is in.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tools import fault_counts, leftovers
from tools.passed import VARIABLE, Passed, committed_tree

REPO = Path(__file__).resolve().parent.parent
LOGS = REPO / "build" / "logs"
BIN = Path(sys.executable).parent
END_GRACE_S = 20
WHY_LINES = 6
COLOR = f"--color={'yes' if sys.stdout.isatty() else 'no'}"
"""An argument of pytest, which cannot see whether a person reads its output, because that goes through a
pipe."""


@dataclass(frozen=True)
class Stage:
    """One command, and the sentence that is true when it succeeds."""

    name: str
    command: list[str]
    proves: str
    deadline_s: int = 300
    is_pytest: bool = False
    least: dict[str, int] = field(default_factory=dict)
    """What its tests must have counted (`fault_counts`); with less, it has proved too little."""
    environment: dict[str, str] = field(default_factory=dict)
    """Additional variables for its processes, such as those that lengthen its tests."""

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return LOGS / f"{self.name}.log"

    @property
    def junit(self) -> Path:
        """Where pytest writes its results, if it is a pytest stage."""
        return LOGS / f"{self.name}.xml"


@dataclass(frozen=True)
class Beside:
    """Stages that run side by side, because each keeps one core busy: one lane for each."""

    lanes: tuple[tuple[Stage, ...], ...]


@dataclass
class Outcome:
    """The result of a stage."""

    stage: Stage
    passed: bool
    seconds: float
    remarks: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def pytest_stage(
    name: str,
    marks: str,
    proves: str,
    deadline_s: int,
    *,
    folders: Sequence[str] = ("tests",),
    without: Sequence[str] = (),
    workers: int = 0,
    least: dict[str, int] | None = None,
    environment: dict[str, str] | None = None,
) -> Stage:
    """Returns a stage that runs the tests of `folders`, except those under `without`, that `marks` selects;
    it fails if none is selected. With `workers`, so many processes share its files
    (tests/support/sharing.py).

    Each test has its own timeout. `deadline_s` is for a run that does not end: three times what the stage
    takes on two cores of its own, because a machine may be shared.
    """
    command = [str(BIN / "pytest"), "-m", marks, f"--junit-xml={LOGS / name}.xml", COLOR, *folders]
    command += [f"--ignore={each}" for each in without]
    command += [f"--numprocesses={workers}", "--dist=loadfile"] * bool(workers)
    return Stage(name, command, proves, deadline_s, True, least or {}, environment or {})


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends everything in the stage's process group, first with SIGINT, then with SIGKILL."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            continue


_running: dict[str, subprocess.Popen[bytes]] = {}
"""The running stages' processes, by name."""
_stopping = threading.Event()
"""Set when everything is to end: no further stage begins."""


def run(stage: Stage, *, quiet: bool = False) -> Outcome:
    """Runs one stage, copying its output to its log and, unless `quiet`, to the terminal."""
    beside = f" (beside the others; its output goes to {stage.log.relative_to(REPO)} only)" if quiet else ""
    print(f"\n=== {stage.name}{beside}", flush=True)
    run_id = uuid.uuid4().hex[:8]
    environment = os.environ | {"KVTIER_REQUIRE_VLLM": "1", leftovers.RUN_VARIABLE: run_id}
    environment |= stage.environment
    started = time.monotonic()
    late = False
    passed = Passed(LOGS, REPO, bool(os.environ.get(VARIABLE)))
    about = (stage.name, stage.command, stage.environment)
    if when := passed.when(*about):
        print(f"it passed on this tree at {when}, and is not repeated ({VARIABLE})", flush=True)
        return Outcome(stage, True, 0.0, [f"it passed on this tree at {when}, and was not repeated"])
    passed.forget(stage.name)
    stage.junit.unlink(missing_ok=True)
    tree = committed_tree(REPO)
    # The stage has a session of its own, so that Ctrl-C reaches only this program, which then ends the stage.
    terminal = subprocess.DEVNULL if quiet else None
    tee = subprocess.Popen(["tee", stage.log], stdin=subprocess.PIPE, stdout=terminal, start_new_session=True)
    process = subprocess.Popen(
        stage.command,
        cwd=REPO,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=tee.stdin,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert tee.stdin is not None
    tee.stdin.close()
    _running[stage.name] = process
    try:
        if _stopping.is_set():
            end_group(process)
        process.wait(stage.deadline_s)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        end_group(process)
        leftovers.end_processes(run_id)
        leftovers.remove_files(run_id)
        del _running[stage.name]
        try:
            tee.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:  # another process still holds the pipe
            tee.kill()
    outcome = Outcome(stage, process.returncode == 0 and not late, time.monotonic() - started)
    if late:
        outcome.remarks.append(f"it was still running after {stage.deadline_s} s and was ended")
    if stage.is_pytest:
        read_junit(outcome)
    if outcome.passed:
        passed.note(*about, tree)
    return outcome


def read_junit(outcome: Outcome) -> None:
    """Adds what pytest counted and skipped, and what the tests themselves say they proved."""
    if not outcome.stage.junit.exists():
        outcome.passed = False
        outcome.remarks.append("pytest ended without writing its results")
        return
    cases = list(ElementTree.parse(outcome.stage.junit).iter("testcase"))
    skipped = [case for case in cases if case.find("skipped") is not None]
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    if not cases:
        outcome.passed = False
        outcome.remarks.append("no test was selected, so nothing was proved")
    else:
        counts = f"{len(cases) - len(skipped) - len(bad)} tests passed"
        counts += f", {len(bad)} failed" * bool(bad) + f", {len(skipped)} skipped" * bool(skipped)
        outcome.remarks.append(counts)
    for case in bad:
        outcome.remarks.append(f"failed: {case.get('classname')}::{case.get('name')}")
        outcome.remarks += [f"    {line}" for line in why_failed(case)]
    for case in skipped:
        reason = case.find("skipped")
        assert reason is not None
        outcome.remarks.append(f"skipped: {case.get('name')}: {reason.get('message')}")
    outcome.remarks += [f"proved: {sentence}" for sentence in proved(cases)]
    outcome.counts = fault_counts.counted(cases)
    if outcome.counts:
        outcome.remarks.append(f"counted: {fault_counts.text(outcome.counts)}")
    for missing in fault_counts.shortfalls(outcome.counts, outcome.stage.least):
        outcome.passed = False
        outcome.remarks.append(f"not enough: {missing}")


def why_failed(case: ElementTree.Element) -> Iterator[str]:
    """Yields the first lines of a test's failures, which must do if only this summary is at hand."""
    for kind in ("failure", "error"):
        for failure in case.iter(kind):
            yield from failure.get("message", "").splitlines()[:WHY_LINES]


def proved(cases: list[ElementTree.Element]) -> Iterator[str]:
    """Yields the sentences that passing tests recorded through the `proved` fixture."""
    for case in cases:
        if case.find("failure") is None and case.find("error") is None:
            for entry in case.iter("property"):
                if entry.get("name") == "proved":
                    yield entry.get("value", "")


def summary(outcomes: list[Outcome], seconds: float) -> None:
    """Prints, in plain sentences, what holds and what does not, and how long all of it took."""
    print("\n" + "=" * 100)
    for outcome in outcomes:
        if outcome.passed:
            print(f"  ok    {outcome.stage.proves} ({outcome.seconds:.0f} s)")
        else:
            print(f"  FAIL  {outcome.stage.name}: see {outcome.stage.log.relative_to(REPO)}")
        for remark in outcome.remarks:
            print(f"          {remark}")
    failed = [outcome.stage.name for outcome in outcomes if not outcome.passed]
    print(f"\nLogs: {LOGS.relative_to(REPO)}/")
    if failed:
        print(f"Not proved: {', '.join(failed)}.")
    else:
        print(f"Everything above holds ({seconds:.0f} s).")


def run_beside(lanes: Sequence[Sequence[Stage]]) -> list[Outcome]:
    """Runs the lanes side by side, and each lane's stages one after another. The terminal shows the first
    lane. Raises KeyboardInterrupt with nothing left running."""

    def run_lane(lane: Sequence[Stage], quiet: bool) -> list[Outcome]:
        return [run(stage, quiet=quiet) for stage in lane if not _stopping.is_set()]

    if not lanes:
        return []
    with ThreadPoolExecutor(len(lanes)) as threads:
        others = [threads.submit(run_lane, lane, True) for lane in lanes[1:]]
        try:
            shown = run_lane(lanes[0], False)
            return [*shown, *(outcome for other in others for outcome in other.result())]
        except KeyboardInterrupt:
            _stopping.set()
            for process in list(_running.values()):
                end_group(process)
            raise


def run_all(steps: Sequence[Stage | Beside]) -> int:
    """Runs the steps one after another, even if one has failed, and prints what was proved. Returns the exit
    status."""
    LOGS.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for step in steps:
        outcomes += [run(step)] if isinstance(step, Stage) else run_beside(step.lanes)
    summary(outcomes, time.monotonic() - started)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def to_the_end(main: Callable[[], int]) -> int:
    """Calls `main`. Ctrl-C, SIGTERM and SIGHUP end it by a KeyboardInterrupt, which ends the stage that runs
    and everything that it has started. Returns the exit status."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)  # once is enough, and the stage needs time to end
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        return main()
    except KeyboardInterrupt:
        print("\nInterrupted; nothing was left running.", file=sys.stderr)
        return 130
