"""Runs the correctness suite on the real driver and records what it said, test by test.

Most of a test's time is processes that start and load libraries, so shards run at the same time, each a
pytest of its own; what looks at the whole GPU's memory comes after them, alone.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gpu.isolate import run_group
from tests.gpu.record import DONE, FAILED, LATE, SKIPPED, Row, StepRecord

ENGINES = "tests/gpu/test_engines.py"
CONTRACT = "tests/gpu/contract"
EACH_BLOCK = "stored_is_loaded"
SHARDS: dict[str, list[str]] = {
    "engines, driver": [ENGINES, "-k", "driver"],
    "engines, chunks and mirror": [ENGINES, "-k", "chunks or mirror"],
    **{
        f"engines, {kind}, {half}": [ENGINES, "-k", f"{kind} and {which}"]
        for kind in ("torch-caching", "torch-expandable", "torch-pool")
        for half, which in (("layouts", EACH_BLOCK), ("the rest", f"not {EACH_BLOCK}"))
    },
    "driver": ["tests/gpu/test_driver.py"],
    "contract, copies": [f"{CONTRACT}/test_copies.py", "-k", "auto"],
    "contract, copies by loop": [f"{CONTRACT}/test_copies.py", "-k", "loop"],
    "contract, copies by rows": [f"{CONTRACT}/test_copies.py", "-k", "rows"],
    "deaths": ["tests/gpu/test_deaths.py"],
    "contract, gates": [f"{CONTRACT}/test_gates.py"],
    "contract, faults": [f"{CONTRACT}/test_faults.py"],
}
ALONE = {"memory given back": ["tests/gpu/test_memory_back.py"]}
ALONE_S = 70.0
"""Kept back for what runs alone."""
MESSAGE_CHARACTERS = 600
NO_TESTS = 5
"""Exit status of pytest that collected nothing."""


def run_suite(*, deadline_s: float, environment: Mapping[str, str], log: Path) -> StepRecord:
    """Every test marked `gpu`, within a deadline: a row for each shard, and one for each test that did not
    pass."""
    record = StepRecord("suite", "-", "Correctness on the real driver, every byte checked")
    begin = time.monotonic()
    end = begin + deadline_s
    with tempfile.TemporaryDirectory(prefix="kvt-", dir="/tmp") as folder:
        together_s = max(10.0, deadline_s - ALONE_S)
        with ThreadPoolExecutor(len(SHARDS)) as threads:
            running = [
                threads.submit(_shard, name, what, together_s, environment, Path(folder) / f"{index}.log")
                for index, (name, what) in enumerate(SHARDS.items())
            ]
            rows = [row for shard in running for row in shard.result()]
        for name, what in ALONE.items():
            left_s = max(5.0, end - time.monotonic())
            rows += _shard(name, what, left_s, environment, Path(folder) / f"{name}.log")
        with log.open("a") as output:
            for part in sorted(Path(folder).glob("*.log")):
                output.write(part.read_text())
    record.seconds = round(time.monotonic() - begin, 1)
    record.rows = sorted(rows, key=lambda row: "shard" not in row)
    shards = [row for row in rows if "shard" in row]
    failed = [row["shard"] for row in shards if row["state"] != DONE]
    record.state = FAILED if failed else DONE
    record.why = f"not passed: {', '.join(failed)}; see the rows" if failed else ""
    if not failed and not any(row["passed"] for row in shards):
        record.state, record.why = SKIPPED, "every test was skipped; see the rows"
    return record


def _shard(
    name: str, what: list[str], deadline_s: float, environment: Mapping[str, str], log: Path
) -> list[Row]:
    """One pytest: a row of its own, and one for each test that did not pass."""
    junit = log.with_suffix(".xml")
    # Names what the run makes in /dev/shm, so that shards do not take each other's for leaks.
    run_id = os.urandom(4).hex()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--no-header", f"--junit-xml={junit}"]
    command += ["-p", "no:cacheprovider", *what]
    begin = time.monotonic()
    status, tail = run_group(command, {**environment, "KVTIER_TEST_RUN": run_id}, deadline_s, log)
    if status is None:
        for left in Path("/dev/shm").glob(f"kvtier-test-{run_id}-*"):
            shutil.rmtree(left, ignore_errors=True)
    found, passed = _read(junit) if junit.exists() else ([], 0)
    skipped = sum(row["result"] == "skipped" for row in found)
    row: Row = {"shard": name, "state": DONE if status in (0, NO_TESTS) else FAILED}
    row |= {"passed": passed, "failed": len(found) - skipped, "skipped": skipped}
    row |= {"seconds": round(time.monotonic() - begin, 1), "said": ""}
    if status is None:
        row |= {"state": LATE, "said": f"killed after {deadline_s:.0f} s; {tail[-MESSAGE_CHARACTERS:]}"}
    elif not junit.exists():
        row |= {"state": FAILED, "said": f"pytest ended with {status}; {tail[-MESSAGE_CHARACTERS:]}"}
    return [row, *found]


def _read(junit: Path) -> tuple[list[Row], int]:
    """The tests that did not pass, and how many did."""
    rows: list[Row] = []
    cases = list(ElementTree.parse(junit).iter("testcase"))
    for case in cases:
        results = {kind: case.find(kind) for kind in ("failure", "error", "skipped")}
        for kind, result in results.items():
            if result is not None:
                said = (result.get("message") or "") + (
                    "" if kind == "skipped" else f"\n{result.text or ''}"[-300:]
                )
                test = f"{case.get('classname')}::{case.get('name')}"
                rows.append({"test": test, "result": kind, "message": said[:MESSAGE_CHARACTERS]})
                break
    return rows, len(cases) - len(rows)
