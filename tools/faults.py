"""Runs the fault suite: `python -m tools.faults short|long`. The last line is one JSON object with the
counts.

With `daemon` or `engines` behind it, only that half is run, and the results of the other half's last run are
read; with `results`, those of both halves. The exit status is 0 only if every test passed, every count is as
high as it must be (`fault_counts`), and there was no wrong byte.
"""

from __future__ import annotations

import json
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter

from tools import fault_counts
from tools.stages import LOGS, Outcome, Stage, pytest_stage, read_junit, run_beside, summary, to_the_end

DEADLINES_S = {"short": 1_800, "long": 4 * 3_600}
LEAST = {"short": fault_counts.SHORT, "long": fault_counts.LONG}
STAGES = (
    (
        "daemon",
        "faults and not vllm and not sglang and not fake_gpu and not gpu",
        "Killing, stopping and corrupting real processes and files ends as the failure table says.",
    ),
    (
        "engines",
        "faults and (vllm or fake_gpu) and not gpu",
        "So it does under a real vLLM, and with KV caches on a GPU (driver: a double of our own).",
    ),
)
"""The halves, each in a process of its own, side by side: name, marks, and what is true when it succeeds."""
TEST_TIMEOUT_S = 3_600
"""The timeout of a test that sets none; campaigns set their own."""


def table(counts: Counter[str], least: dict[str, int]) -> None:
    """Prints what was counted, and what was wanted."""
    print()
    for name in sorted({*counts, *least}):
        wanted = f"   at least {least[name]:,}" if name in least else ""
        wanted = "   none allowed" if name in fault_counts.NEVER else wanted
        print(f"  {name.replace('_', ' '):<20} {counts[name]:>12,}{wanted}")


def durations(stage: Stage) -> None:
    """Prints how long each campaign took."""
    if not stage.junit.exists():
        return
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(stage.junit).iter("testcase"):
        campaign = case.get("classname", "").split(".Test")[0].removeprefix("tests.")
        seconds[campaign] += round(float(case.get("time", "0")))
    print()
    for campaign, taken in seconds.most_common():
        if taken:
            print(f"  {campaign:<60} {taken:>6,} s")


def last_run(stage: Stage) -> Outcome:
    """Returns what a stage did when it last came to its end."""
    outcome = Outcome(stage, True, 0.0)
    read_junit(outcome)
    if outcome.passed:
        suites = list(ElementTree.parse(stage.junit).iter("testsuite"))
        outcome.passed = not any(
            int(suite.get(kind, "0")) for suite in suites for kind in ("failures", "errors")
        )
        outcome.seconds = sum(float(suite.get("time", "0")) for suite in suites)
    return outcome


def report(form: str, outcomes: list[Outcome]) -> bool:
    """Prints what was counted, as a table and as JSON. Returns whether it proves what it should prove."""
    counts = fault_counts.total(outcome.counts for outcome in outcomes)
    for missing in fault_counts.shortfalls(counts, LEAST[form]):
        outcomes[0].passed = False
        outcomes[0].remarks.append(f"not enough: {missing}")
    summary(outcomes, max(one.seconds for one in outcomes))
    for outcome in outcomes:
        durations(outcome.stage)
    table(counts, LEAST[form])
    passed = all(outcome.passed for outcome in outcomes)
    figures = {"form": form, "passed": passed, "seconds": round(max(one.seconds for one in outcomes))}
    print(json.dumps(figures | dict(sorted(counts.items()))), flush=True)
    return passed


def main() -> int:
    """Runs the suite. Returns 0 if it proves what it should prove."""
    halves = [half for half, *_ in STAGES]
    form, only = (*sys.argv[1:], "", "")[:2]
    if form not in LEAST or only not in ("", "results", *halves) or len(sys.argv) > 3:
        print(f"usage: faults.py short|long [results|{'|'.join(halves)}]", file=sys.stderr)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    stages = {
        half: pytest_stage(f"faults-{form}-{half}", marks, proves, DEADLINES_S[form])
        for half, marks, proves in STAGES
    }
    for stage in stages.values():
        stage.command.insert(1, f"--timeout={TEST_TIMEOUT_S}")
    os.environ["KVTIER_LENGTH"] = form
    ran = run_beside([[stage] for half, stage in stages.items() if only in ("", half)])
    outcomes = ran + [last_run(stage) for half, stage in stages.items() if only not in ("", half)]
    return 0 if report(form, outcomes) else 1


if __name__ == "__main__":
    sys.exit(to_the_end(main))
