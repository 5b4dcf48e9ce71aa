"""Runs the correctness suite on the real driver and records what it said, test by test."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

from tests.gpu.isolate import run_group
from tests.gpu.record import DONE, FAILED, LATE, SKIPPED, Row, StepRecord

PLACES = ("tests/gpu", "tests/integration/worker")
"""Where tests marked `gpu` are; the others import engines that a machine with a GPU need not have."""
MESSAGE_CHARACTERS = 600


def run_suite(*, deadline_s: float, environment: Mapping[str, str], log: Path) -> StepRecord:
    """Every test marked `gpu`, within a deadline. One row per test that did not pass, and one with the
    counts."""
    record = StepRecord("suite", "-", "Correctness on the real driver, every byte checked")
    with tempfile.TemporaryDirectory(prefix="kvt-", dir="/tmp") as folder:
        junit = Path(folder) / "suite.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--no-header", f"--junit-xml={junit}"]
        command += ["-p", "no:cacheprovider", *PLACES]
        started = time.monotonic()
        # What a test run that is killed leaves in /dev/shm is found by this name, and removed here.
        run_id = os.urandom(16).hex()
        status, tail = run_group(command, {**environment, "KVTIER_TEST_RUN": run_id}, deadline_s, log)
        record.seconds = round(time.monotonic() - started, 1)
        if status is None:
            record.state, record.why = LATE, f"killed after {deadline_s:.0f} s\n{tail}"
            _remove_leftovers(run_id)
        elif not junit.exists():
            record.state, record.why = FAILED, f"pytest ended with {status} and wrote no results\n{tail}"
        else:
            record.rows = _rows(junit)
            counts = record.rows[0]
            record.state = DONE if status == 0 else FAILED
            if status == 0 and not counts["passed"]:
                record.state, record.why = SKIPPED, "every test was skipped; see the rows"
            elif status != 0:
                record.why = f"{counts['failed']} tests failed; see the rows"
    return record


def _rows(junit: Path) -> list[Row]:
    cases = list(ElementTree.parse(junit).iter("testcase"))
    rows: list[Row] = []
    passed = 0
    for case in cases:
        results = {kind: case.find(kind) for kind in ("failure", "error", "skipped")}
        kind, result = next(((k, r) for k, r in results.items() if r is not None), ("", None))
        if result is None:
            passed += 1
            continue
        said = (result.get("message") or "") + ("" if kind == "skipped" else f"\n{result.text or ''}"[-400:])
        name = f"{case.get('classname')}::{case.get('name')}"
        rows.append({"test": name, "result": kind, "message": said[:MESSAGE_CHARACTERS]})
    skipped = sum(row["result"] == "skipped" for row in rows)
    counts = {"tests": len(cases), "passed": passed, "failed": len(rows) - skipped, "skipped": skipped}
    return [counts, *rows]


def _remove_leftovers(run_id: str) -> None:
    for entry in Path("/dev/shm").glob(f"kvtier-test-{run_id[:12]}-*"):
        shutil.rmtree(entry, ignore_errors=True)
