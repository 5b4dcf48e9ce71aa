"""The fault suite: `python -m tools.faults short|long`. The last line is one JSON object: what was counted.

Exit status 0 only if every test passed, every count is as high as it must be (`fault_counts`), and there was
no wrong byte.
"""

from __future__ import annotations

import json
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tools import check, fault_counts

DEADLINES_S = {"short": 1_800, "long": 4 * 3_600}
LEAST = {"short": fault_counts.SHORT, "long": fault_counts.LONG}
STAGES = (
    (
        "",
        "faults and not vllm and not fake_gpu and not gpu",
        "Killing, stopping and corrupting real processes and files ends as the failure table says.",
    ),
    (
        "-engines",
        "faults and (vllm or fake_gpu) and not gpu",
        "So it does under a real vLLM, and with KV caches on a GPU (driver: a double of our own).",
    ),
)
"""Side by side, each in a process of its own: name, marks, and what is true when it succeeds."""
TEST_TIMEOUT_S = 3_600
"""For a test that sets none; campaigns set their own."""


def table(counts: Counter[str], least: dict[str, int]) -> None:
    """What was counted, and what was wanted."""
    print()
    for name in sorted({*counts, *least}):
        wanted = f"   at least {least[name]:,}" if name in least else ""
        wanted = "   none allowed" if name in fault_counts.NEVER else wanted
        print(f"  {name.replace('_', ' '):<20} {counts[name]:>12,}{wanted}")


def durations(stage: check.Stage) -> None:
    """Which campaign took how long."""
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


def main() -> int:
    """Runs the suite; returns 0 if it proves what it is to prove."""
    form = sys.argv[1] if len(sys.argv) == 2 else ""
    if form not in LEAST:
        print("usage: faults.py short|long", file=sys.stderr)
        return 2
    check.LOGS.mkdir(parents=True, exist_ok=True)
    stages = [
        check.pytest_stage(f"faults-{form}{suffix}", marks, proves, DEADLINES_S[form])
        for suffix, marks, proves in STAGES
    ]
    for stage in stages:
        stage.command.insert(1, f"--timeout={TEST_TIMEOUT_S}")
    os.environ["KVTIER_FAULTS_LONG"] = "1" if form == "long" else "0"
    first, *others = stages
    with ThreadPoolExecutor(len(stages)) as threads:
        beside = [threads.submit(check.run, stage, quiet=True) for stage in others]
        try:
            outcomes = [check.run(first), *(future.result() for future in beside)]
        except KeyboardInterrupt:
            for stage in others:
                check.end(stage)
            print("\nInterrupted; nothing was left running.", file=sys.stderr)
            return 130
    counts = sum((outcome.counts for outcome in outcomes), Counter())
    for missing in fault_counts.shortfalls(counts, LEAST[form]):
        outcomes[0].passed = False
        outcomes[0].remarks.append(f"not enough: {missing}")
    check.summary(outcomes)
    for stage in stages:
        durations(stage)
    table(counts, LEAST[form])
    passed = all(outcome.passed for outcome in outcomes)
    figures = {"form": form, "passed": passed, "seconds": round(max(one.seconds for one in outcomes))}
    print(json.dumps(figures | dict(sorted(counts.items()))), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
