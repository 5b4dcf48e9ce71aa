"""Runs the checks of `make test` stage by stage, shows what they say, and ends with what was proved.

    python -m tools.check all     lint, generated code, tests
    python -m tools.check lint    the static checks only
    python -m tools.check light   tests without an engine, as on every Python and processor

Every stage runs even if an earlier one failed, within a deadline; its whole output is kept under build/logs/.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools import fault_counts

REPO = Path(__file__).resolve().parent.parent
LOGS = REPO / "build" / "logs"
BIN = Path(sys.executable).parent
END_GRACE_S = 20
WHY_LINES = 6


@dataclass(frozen=True)
class Stage:
    """One command, and the sentence that is true when it succeeds."""

    name: str
    command: list[str]
    proves: str
    deadline_s: int = 300
    is_pytest: bool = False
    least: dict[str, int] = field(default_factory=dict)
    """What its tests must have counted (`fault_counts`), or it has proved too little."""

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return LOGS / f"{self.name}.log"

    @property
    def junit(self) -> Path:
        """Where pytest writes its results, if it is a pytest stage."""
        return LOGS / f"{self.name}.xml"


@dataclass
class Outcome:
    """What a stage did."""

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
    least: dict[str, int] | None = None,
    folder: str = "tests",
    without: str = "",
) -> Stage:
    """A stage that runs the tests of `folder`, except those of the folder `without`, that `marks` selects;
    none selected is a failure. Each test has its own timeout: `deadline_s` is for a run that does not end,
    and three times what the stage takes on two cores of its own, as a machine may be shared."""
    command = [str(BIN / "pytest"), "-m", marks, f"--junit-xml={LOGS / name}.xml", "--color=yes", folder]
    command += [f"--ignore={without}"] * bool(without)
    return Stage(name, command, proves, deadline_s, is_pytest=True, least=least or {})


CAMPAIGNS = "tests/faults"
"""The fault suite's short form, with the counts that it must reach: three minutes at most. All other tests
that are marked `faults` belong to its long form, too."""
LINT = [
    Stage("ruff", [str(BIN / "ruff"), "check", "."], "The code follows the style rules (ruff)."),
    Stage("mypy", [str(BIN / "mypy")], "Every type fits (mypy --strict over all packages)."),
    Stage(
        "class-names",
        [sys.executable, "tools/class_names.py"],
        "No two classes of the product share a name.",
    ),
    Stage(
        "imports",
        ["env", "PYTHONPATH=tools", str(BIN / "lint-imports"), "--no-logo"],  # our contract type is in tools/
        "Packages import only what the architecture allows.",
    ),
]
FAKE_GPU = [
    pytest_stage(
        "tests-fake-gpu",
        "fake_gpu and not faults and not vllm and not gpu",
        "Copies from and to a GPU keep the same contract as those of the CPU (driver: a double of our own).",
        deadline_s=1_200,
    ),
    pytest_stage(
        "tests-fake-gpu-faults",
        "fake_gpu and faults and not vllm and not gpu",
        "Driver calls that fail or hang, and processes that are killed, cost no more than one GPU's worker.",
        deadline_s=1_200,
    ),
    pytest_stage(
        "tests-vllm-fake-gpu",
        "vllm and fake_gpu and not gpu",
        "So does one whose KV cache lies on a GPU, exported or mirrored (driver: a double of our own).",
        deadline_s=900,
    ),
]
REST = [
    Stage(
        "generated",
        [sys.executable, "tools/generate.py", "--check"],
        "The committed generated code is what the protos and the native module generate now.",
    ),
    Stage(
        "light-client",
        [sys.executable, "tools/light_client.py"],
        "The wheel builds, and the light client works with the oldest libraries that it names.",
        deadline_s=600,
    ),
    pytest_stage(
        "tests",
        "not vllm and not gpu and not fake_gpu and not deploy",
        "The unit, contract, simulation and integration tests pass, those of single faults among them.",
        deadline_s=3_000,
        without=CAMPAIGNS,
    ),
    pytest_stage(
        "tests-faults",
        "not vllm and not gpu and not fake_gpu and not deploy",
        "Killing, stopping and corrupting real processes and files ends as the failure table says.",
        deadline_s=900,
        least=fault_counts.IN_MAKE_TEST,
        folder=CAMPAIGNS,
    ),
    pytest_stage(
        "tests-vllm",
        "vllm and not fake_gpu and not gpu",
        "A real vLLM stores, loses and restores its KV cache through kvtierd.",
        deadline_s=2_400,
    ),
    *FAKE_GPU,
]
DEPLOY = [
    pytest_stage(
        "tests-deploy",
        "deploy",
        "An operator's way: packages, units, manifests, metrics and commands of the documentation work.",
        deadline_s=3_600,
        folder="tests/deploy",  # others want what this machine need not have: an engine, for example
    ),
]
WORKLOAD = [
    replace(stage, command=[*stage.command, "--capture=no"])  # it tells how far it has come
    for stage in (
        pytest_stage(
            "tests-workload",
            "vllm",
            "Random requests to engines that share a daemon in trouble are answered as without a cache.",
            deadline_s=3 * 3_600,
            folder="tests/vllm/test_workload.py",
        ),
    )
]
AUTOSTART = [
    pytest_stage(
        "tests-autostart",
        "vllm",
        "A daemon that an engine has started outlives it, whichever of its processes ends, and however.",
        deadline_s=1_800,
        folder="tests/vllm/test_api_server.py",
    ),
]
AUDITS = [
    pytest_stage(
        "tests-audits",
        "vllm",
        "Thousands of audits of sound engines raise no alarm; blocks of other models do, with the first hit.",
        deadline_s=3_600,
        folder="tests/vllm/test_audits.py",
    ),
]
LIGHT = [stage for stage in REST if stage.name in ("light-client", "tests", "tests-faults")]
"""What needs no engine, and no tools of one Python only."""
FORMS = {
    "all": LINT + REST,
    "light": LIGHT,
    "lint": LINT,
    "deploy": DEPLOY,
    "vllm": [stage for stage in REST if stage.name in ("tests-vllm", "tests-vllm-fake-gpu")],
    "autostart": AUTOSTART,
    "audits": AUDITS,
    "workload": WORKLOAD,
    "fake-gpu": [
        replace(stage, deadline_s=1_800, least=fault_counts.FAKE_GPU)
        if stage.name == "tests-fake-gpu-faults"
        else stage
        for stage in FAKE_GPU
    ],
}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends everything in the stage's process group, politely first."""
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
"""Processes of stages, by their names."""


def end(stage: Stage) -> None:
    """Ends a stage that another thread runs; `run` returns there."""
    if (process := _running.get(stage.name)) is not None:
        end_group(process)


def run(stage: Stage, *, quiet: bool = False) -> Outcome:
    """Runs one stage, copying its output to its log and, unless `quiet`, to the terminal."""
    beside = f" (beside the others; its output goes to {stage.log.relative_to(REPO)} only)" if quiet else ""
    print(f"\n=== {stage.name}{beside}", flush=True)
    stage.junit.unlink(missing_ok=True)
    environment = os.environ | {"KVTIER_REQUIRE_VLLM": "1"}
    started = time.monotonic()
    late = False
    # A session of its own, so that Ctrl-C reaches this program alone, which then ends the stage.
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
        process.wait(stage.deadline_s)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        end_group(process)
        del _running[stage.name]
        try:
            tee.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:  # something that left the group still holds the pipe
            tee.kill()
    outcome = Outcome(stage, process.returncode == 0 and not late, time.monotonic() - started)
    if late:
        outcome.remarks.append(f"it was still running after {stage.deadline_s} s and was ended")
    if stage.is_pytest:
        read_junit(outcome)
    return outcome


def read_junit(outcome: Outcome) -> None:
    """Adds what pytest counted, what it skipped, and what the tests themselves say they proved."""
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
    """The first lines of what a test's failures say: where only this summary is at hand, they have to do."""
    for kind in ("failure", "error"):
        for failure in case.iter(kind):
            yield from failure.get("message", "").splitlines()[:WHY_LINES]


def proved(cases: list[ElementTree.Element]) -> Iterator[str]:
    """The sentences that passing tests recorded through the `proved` fixture."""
    for case in cases:
        if case.find("failure") is None and case.find("error") is None:
            for entry in case.iter("property"):
                if entry.get("name") == "proved":
                    yield entry.get("value", "")


def summary(outcomes: list[Outcome]) -> None:
    """Prints, in plain sentences, what holds and what does not."""
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
        print(f"Everything above holds ({sum(outcome.seconds for outcome in outcomes):.0f} s).")


def main() -> int:
    """Runs the stages the argument names; returns 0 only if every one of them passed."""
    which = sys.argv[1] if len(sys.argv) == 2 else "" if sys.argv[1:] else "all"
    if which not in FORMS:
        print(f"usage: check.py [{'|'.join(FORMS)}]", file=sys.stderr)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    stages = FORMS[which]
    if which == "fake-gpu":
        os.environ["KVTIER_GPU_KILLS"] = str(fault_counts.GPU_KILLS_PER_CASE)
    try:
        outcomes = [run(stage) for stage in stages]
    except KeyboardInterrupt:
        print("\nInterrupted; nothing was left running.", file=sys.stderr)
        return 130
    summary(outcomes)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
