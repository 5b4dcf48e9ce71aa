"""The matrix is ready to run as it is: on the fake driver every step runs, and the record and the report
appear."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.calls import CALLS
from tests.gpu.plan import MATRIX, PROBE
from tests.gpu.record import DONE, FAKE_STATEMENT, SKIPPED, load

REPO = Path(__file__).resolve().parents[2]
DEADLINE_S = 240
"""Of one run."""
pytestmark = pytest.mark.timeout(3 * DEADLINE_S)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one run of everything has left its results."""
    folder = tmp_path_factory.mktemp("gpu-matrix")
    command = [sys.executable, "tests/gpu/run.py", "--fake", "--build=never", f"--out={folder}"]
    done = subprocess.run(
        command, cwd=REPO, env=os.environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    log = folder / "log.txt"
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{log.read_text() if log.exists() else ''}"
    return folder


@pytest.mark.fake_gpu
@pytest.mark.slow
def test_every_step_runs_on_the_fake_driver(out: Path) -> None:
    record = load(out / "results.json")
    assert [step.name for step in record.steps] == [step.name for step in (PROBE, *MATRIX)]
    for step in record.steps:
        if step.name == "thread_blocks":  # kernels need a GPU
            assert (step.state, step.rows) == (SKIPPED, [])
            assert "needs torch, triton" in step.why
        else:
            assert (step.state, step.why) == (DONE, "")
            assert step.rows


@pytest.mark.fake_gpu
@pytest.mark.slow
@pytest.mark.long
def test_the_calls_of_the_first_hour_leave_one_report(tmp_path: Path) -> None:
    """Each with results of its own; the suite needs a GPU."""
    for call in (1, 3, 4):
        command = [sys.executable, "tests/gpu/run.py", "--fake", "--build=never", f"--call={call}"]
        done = subprocess.run(
            [*command, f"--out={tmp_path}"],
            cwd=REPO,
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        record = load(tmp_path / f"call-{call}" / "results.json")
        assert [step.name for step in record.steps] == [PROBE.name, *CALLS[call].steps]
    report = (tmp_path / "report.md").read_text()
    assert report.count("Run of ") == 3
    for step in MATRIX:
        assert f"## {step.number} {step.title}" in report
    assert "## What would change the design" in report


@pytest.mark.fake_gpu
@pytest.mark.slow
def test_every_number_says_that_it_is_of_the_fake_driver(out: Path) -> None:
    assert json.loads((out / "results.json").read_text())["statement"] == FAKE_STATEMENT
    assert FAKE_STATEMENT in (out / "report.md").read_text()
    plots = sorted(out.glob("*.svg"))
    assert len(plots) >= 3
    for plot in plots:
        assert FAKE_STATEMENT in plot.read_text()


@pytest.mark.fake_gpu
@pytest.mark.slow
def test_what_the_steps_find_on_the_fake_driver_is_true(out: Path) -> None:
    """Its numbers say nothing, but what they count does."""
    record = load(out / "results.json")
    probes = {row["what"]: row["works"] for row in record.rows("probe")}
    assert probes["CUDA IPC, legacy handle"]
    assert probes["doorbell: a stream writes registered host memory"]
    kills = [row for row in record.rows("worker_kill") if "changed_words" in row]
    assert [row["changed_words"] for row in kills] == [0] * len(kills)
    assert any(row["was_moving"] for row in kills)
    assert {row["left_mib"] for row in record.rows("exporter_kill")} == {0.0}
    assert all(
        "error" in row and row["held_mib"] >= row["memory_mib"] for row in record.rows("exporter_kill")
    )
    assert all(row["wrong_blocks"] == 0 for row in record.rows("end_to_end", what="load"))
    assert all(row["checked_mib"] > 0 for row in record.rows("batches") if "checked_mib" in row)
