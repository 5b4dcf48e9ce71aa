"""What of the matrix needs kernels, as far as it runs without a GPU: on CPU tensors, and in Triton's
interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.calls import CALLS
from tests.gpu.parts.child import Child
from tests.gpu.parts.workloads import DECODE, GEMM
from tests.gpu.plan import MATRIX
from tests.gpu.record import DONE, FAILED, LATE, SKIPPED, Record, StepRecord, load
from tests.gpu.report import write

REPO = Path(__file__).resolve().parents[2]
DEADLINE_S = 120
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@needs_torch
@pytest.mark.parametrize("workload", [GEMM, DECODE])
def test_an_engines_steps_run_on_the_cpu_and_are_timed(workload: str) -> None:
    with Child("tests.gpu.children.engine") as engine:
        assert "on cpu" in engine.ask("open", where="cpu", timeout_s=DEADLINE_S)["workload"]
        steps = engine.ask("measure", workload=workload, seconds=0.05)
    assert steps["steps"] >= 20
    assert 0 < steps["p50_us"] <= steps["p99_us"] <= steps["max_us"]


COPY = """
import torch
from tests.gpu.parts.kernels import copy_fragments
for n in (128, 4096, 24576, 65536):
    source = torch.randint(-(1 << 62), 1 << 62, (9 * n // 8,))
    target = torch.zeros_like(source)
    read, written = torch.randperm(9)[:6], torch.randperm(9)[:6]
    expected = target.view(9, -1).clone()
    expected[written] = source.view(9, -1)[read]
    copy_fragments(source, target, read, written, n, 4)
    assert torch.equal(target.view(9, -1), expected), n
"""


@needs_torch
@needs_triton
def test_the_copy_kernel_moves_every_fragment_and_nothing_else() -> None:
    subprocess.run(
        [sys.executable, "-c", COPY],
        cwd=REPO,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
        timeout=DEADLINE_S,
    )


def record_of(tmp_path: Path, **changed: Any) -> Record:
    facts: dict[str, Any] = {
        "hardware": {"gpus": [], "cpu": "c", "cpus": 1, "memory": "m", "numa_nodes": 1, "kernel": "k"},
        "source": {"commit": "0" * 40, "changed_files": 0, "digest": "d"},
        "conditions": {
            "packages": {},
            "python": "3",
            "thp": "",
            "thp_shmem": "",
            "huge_pages_free": "0",
            "memlock_limit_bytes": -1,
            "load_average": 0.0,
        },
    }
    return Record(tmp_path / "results.json", False, "2026-01-01T00:00:00Z", **(facts | changed))


def batch_row(way: str, fragment_bytes: int, ratio: float, **changed: object) -> dict[str, Any]:
    order = {"h2d": "any", "d2h": "stream"}[way]
    row = {"way": way, "fragment_bytes": fragment_bytes, "fragments": 1_024, "order": order}
    return row | {"overlap_hint": False, "gb_per_s": 50 * ratio, "ratio": ratio} | changed


def test_the_report_says_how_far_each_target_is(tmp_path: Path) -> None:
    record = record_of(tmp_path)
    rows = [
        batch_row("h2d", 512 << 10, 0.98),
        batch_row("h2d", 2 << 20, 0.991),
        batch_row("d2h", 2 << 20, 0.9),
    ]
    rows += [batch_row("h2d", 2 << 20, 0.1, overlap_hint=True), batch_row("h2d", 2 << 20, 0.1, fragments=64)]
    record.add(StepRecord("batches", "3", "Batches", "done", rows=rows))
    write([record.path], tmp_path)
    report = (tmp_path / "report.md").read_text()
    assert "| batched copies ≥ 512 KiB to the device, ÷ ceiling | ≥ 0.97  | 0.98 | met |" in report
    assert "| batched copies ≥ 512 KiB to the host, ÷ ceiling | ≥ 0.97  | 0.9 | missed by 0.07 |" in report
    assert "| decode step p99 under DMA, ÷ idle | ≤ 1.02  | – | not measured |" in report
    assert "<svg" in (tmp_path / "copies.svg").read_text()
    assert not (tmp_path / "interference.svg").exists()


def test_of_several_records_the_later_one_counts(tmp_path: Path) -> None:
    paths = []
    for number, ratio in enumerate((0.5, 0.99)):
        folder = tmp_path / str(number)
        folder.mkdir()
        record = record_of(folder)
        record.add(StepRecord("batches", "3", "Batches", "done", rows=[batch_row("h2d", 2 << 20, ratio)]))
        record.add(StepRecord("soak", "9", "Soak", SKIPPED, "no time"))
        paths.append(record.path)
    write(paths, tmp_path)
    assert "÷ ceiling | ≥ 0.97  | 0.99 | met |" in (tmp_path / "report.md").read_text()


def judged(tmp_path: Path, what: str, **steps: list[dict[str, Any]]) -> str:
    """What the report's table says of the rule with these words."""
    record = record_of(tmp_path)
    for name, rows in steps.items():
        record.add(StepRecord(name, "-", name, DONE, rows=rows))
    write([record.path], tmp_path)
    [line] = [
        line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith(f"| {what}")
    ]
    return line.split("|")[2].strip()


def small(p99_us: float, chunk_mib: int, flights: int) -> dict[str, Any]:
    where = {"chunk_mib": chunk_mib, "flights": flights, "fragment_kib": 512}
    return {"kind": "small copy", "way": "d2h", "beside": "both", "p99_us": p99_us} | where


def call(beside: str, p50_us: float, shape: str = "batch", kib: int = 1024) -> dict[str, Any]:
    what = {"kind": "calls", "way": "h2d", "shape": shape, "fragment_kib": kib}
    return what | {"beside": beside, "p50_us": p50_us}


def small_calls(**p50_us: float) -> list[dict[str, Any]]:
    """Beside kernels, by shape."""
    return [
        call(beside, us, shape, 4)
        for shape, beside_us in p50_us.items()
        for beside, us in (("idle", 100.0), (SPINNER, beside_us))
    ]


def shape(name: str, rate: float) -> dict[str, Any]:
    where = {"way": "h2d", "fragment_bytes": 8 << 10, "planes": 32, "run_blocks": 1}
    return {"shape": name, "gb_per_s": rate} | where


def under(hint: bool, x_p99: float) -> dict[str, Any]:
    who = {"workload": "decode", "copies": "dma by a process beside", "way": "both"}
    return who | {"overlap_hint": hint, "fragment_bytes": 512 << 10, "x_p99": x_p99}


OPEN = {"case": "two namespaces", "legacy": "ok", "chunk": "ok"}
SPINNER = "kernels of another process"
JUDGED: list[tuple[str, dict[str, list[dict[str, Any]]], str]] = [
    ("Such a handle is refused across PID namespaces", {"sharing": [OPEN]}, "no"),
    ("Such a handle is refused across PID namespaces", {"sharing": [OPEN | {"legacy": "201"}]}, "**yes**"),
    ("A descriptor is refused", {"sharing": [OPEN | {"legacy": "201"}]}, "no"),
    ("Such a handle is refused between equal", {"sharing": [OPEN]}, "not measured"),
    ("Batches wait", {"slices": [call("idle", 400), call(SPINNER, 900)]}, "no"),
    ("Batches wait", {"slices": [call("idle", 400), call(SPINNER, 1500)]}, "**yes**"),
    ("Batches wait", {"slices": [call("idle", 400)]}, "not measured"),
    ("Batches of small fragments", {"slices": small_calls(batch=2400, rows=120)}, "**yes**"),
    ("Batches of small fragments", {"slices": small_calls(batch=300, rows=2400)}, "no"),
    ("Batches wait", {"slices": small_calls(batch=2400)}, "not measured"),
    ("An engine's small copies", {"slices": [small(1100, 32, 2), small(90, 4, 1)]}, "**yes**"),
    ("Pacing is in vain", {"slices": [small(1100, 32, 2), small(90, 4, 1)]}, "no"),
    ("An engine's small copies", {"slices": [small(200, 32, 2), small(90, 4, 1)]}, "no"),
    ("Pacing is in vain", {"slices": [small(200, 32, 2), small(90, 4, 1)]}, "**yes**"),
    ("Small fragments", {"shapes": [shape("batch", 5), shape("rows", 20)]}, "**yes**"),
    ("Small fragments", {"shapes": [shape("batch", 20), shape("rows", 20)]}, "no"),
    ("The overlap flag", {"interference": [under(True, 1.3), under(False, 1.01)]}, "**yes**"),
    ("The overlap flag", {"interference": [under(True, 1.0), under(False, 1.01)]}, "no"),
    ("Something that checks bytes", {"end_to_end": [{"wrong_blocks": 1}]}, "**yes**"),
    ("Something that checks bytes", {"soak": [{}]}, "no"),
]


@pytest.mark.parametrize(("what", "steps", "so_it_is"), JUDGED)
def test_the_report_says_what_would_change_the_design(
    tmp_path: Path, what: str, steps: dict[str, list[dict[str, Any]]], so_it_is: str
) -> None:
    assert judged(tmp_path, what, **steps) == so_it_is


def test_the_four_calls_run_every_step_and_the_suite() -> None:
    assert {step for one in CALLS.values() for step in one.steps} == {step.name for step in MATRIX}
    assert [number for number, one in CALLS.items() if one.suite] == [2]


def run_fake(tmp_path: Path, *more: str, **environment: str) -> tuple[int, Record]:
    command = [sys.executable, "tests/gpu/run.py", "--fake", "--build=never", f"--out={tmp_path}", *more]
    done = subprocess.run(
        command, cwd=REPO, env=os.environ | environment, capture_output=True, timeout=DEADLINE_S, check=False
    )
    return done.returncode, load(tmp_path / "results.json")


@pytest.mark.fake_gpu
def test_a_step_that_hangs_is_killed_and_the_next_one_runs(tmp_path: Path) -> None:
    """The driver does not come back from one of its calls; what was found before it stays."""
    status, record = run_fake(
        tmp_path, "--steps=ceiling,versions", "--step-s=8", FAKE_CUDA_HANG="cuMemcpyAsync:20"
    )
    assert status == 1
    steps = {step.name: step for step in record.steps}
    assert (steps["ceiling"].state, steps["versions"].state) == (LATE, DONE)
    assert {row["pages"] for row in steps["ceiling"].rows} == {"thp"}


@pytest.mark.fake_gpu
def test_a_step_that_fails_says_why_and_keeps_its_rows(tmp_path: Path) -> None:
    status, record = run_fake(tmp_path, "--steps=ceiling", FAKE_CUDA_FAIL="cuMemHostRegister_v2:3:2")
    assert status == 1
    [step] = [step for step in record.steps if step.name == "ceiling"]
    assert step.state == FAILED
    assert "CUDA_ERROR_OUT_OF_MEMORY" in step.why
    assert {row["pages"] for row in step.rows} == {"thp"}


@pytest.mark.fake_gpu
def test_without_time_nothing_is_begun_and_the_record_says_so(tmp_path: Path) -> None:
    status, record = run_fake(tmp_path, "--steps=soak", "--budget-s=12")
    assert status == 0
    [step] = [step for step in record.steps if step.name == "soak"]
    assert step.state == SKIPPED
    assert "of the budget were left" in step.why
    json.loads((tmp_path / "results.json").read_text())
