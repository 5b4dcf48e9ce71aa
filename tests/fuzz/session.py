"""One session of the fuzzer: a process of its own, because libFuzzer ends its process."""

from __future__ import annotations

import base64
import importlib.util
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.target import CORPUS, CRASHES, load

AVAILABLE = importlib.util.find_spec("atheris") is not None
REPO = Path(__file__).resolve().parents[2]
INPUT_DEADLINE_S = 20
"""No input may take longer, whatever it says. It is generous, because machines may be shared."""
MEMORY_MIB = 3_000
STARTUP_S = 120
TOLD_CHARACTERS = 6_000
_KEPT_FILES_MAX = 150


@dataclass(frozen=True)
class Outcome:
    """What one session did."""

    name: str
    seed: int
    runs: int
    coverage: int
    """Edges of Python code that were reached."""
    inputs: int
    """Inputs in the corpus at its end."""
    crash: bytes | None
    """The input that broke something."""
    output: str

    @property
    def passed(self) -> bool:
        return self.runs > 0 and self.crash is None and "ERROR" not in self.output

    def __str__(self) -> str:
        if self.passed:
            return (
                f"{self.name}: {self.runs} runs broke nothing (seed {self.seed}); {self.coverage} edges, "
                f"{self.inputs} inputs"
            )
        text = f"{self.name}: broken with seed {self.seed}\n{self.output[-TOLD_CHARACTERS:]}\n"
        if self.crash is None:
            return text
        encoded = base64.b64encode(self.crash).decode()
        file = f"tests/fuzz/crashes/{self.name}/NAME"
        return (
            f"{text}Keep the input, which then is a test, and run it:\n"
            f"  echo {encoded} | base64 -d > {file}\n"
            f"  .venv/bin/python -m tests.fuzz run {self.name} {file}"
        )


def grown(name: str) -> Path:
    """The folder of the inputs that long sessions have found."""
    folder = REPO / "build" / "fuzz" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fuzz(name: str, corpus: Path, *, seconds: int, runs: int = -1, seed: int | None = None) -> Outcome:
    """Fuzzes for so many seconds, or so many runs beyond the corpora if that comes first. New inputs go to
    `corpus`; those that are committed are read."""
    seed = secrets.randbits(31) | 1 if seed is None else seed
    options = [f"-max_total_time={seconds}", f"-runs={runs}", f"-seed={seed}"]
    with tempfile.TemporaryDirectory(prefix="kvtier-fuzz-") as folder:
        output = _libfuzzer(name, [*options, f"-artifact_prefix={folder}/"], [corpus, CORPUS / name], seconds)
        found = sorted(Path(folder).iterdir())
        crash = found[0].read_bytes() if found else None
    runs_done = re.findall(r"^stat::number_of_executed_units: (\d+)", output, re.M)
    reached = re.findall(r"cov: (\d+).*?corp: (\d+)", output)
    coverage, inputs = map(int, reached[-1]) if reached else (0, 0)
    return Outcome(name, seed, int(runs_done[-1]) if runs_done else 0, coverage, inputs, crash, output)


def keep(name: str) -> str:
    """Makes the corpus that is committed anew: the smallest inputs that together reach what it and all those
    that were found reach. Says what changed."""
    committed = CORPUS / name
    before = len(list(committed.glob("*")))
    with tempfile.TemporaryDirectory(prefix="kvtier-fuzz-") as made:
        output = _libfuzzer(name, ["-merge=1"], [Path(made), committed, grown(name)], 1_200)
        # libFuzzer takes the inputs by size, so the first ones that are left out would be the largest.
        inputs = sorted(Path(made).iterdir(), key=lambda path: path.stat().st_size)
        if not inputs:
            return f"{name}: nothing could be merged\n{output[-TOLD_CHARACTERS:]}"
        shutil.rmtree(committed, ignore_errors=True)
        committed.mkdir(parents=True)
        for path in inputs[:_KEPT_FILES_MAX]:
            shutil.copy(path, committed / path.name[:12])
    size = sum(path.stat().st_size for path in committed.iterdir())
    return f"{name}: {before} inputs before, {len(list(committed.iterdir()))} now, {size} bytes"


def _libfuzzer(name: str, options: list[str], folders: list[Path], seconds: int) -> str:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "tests.fuzz.child", name),
        *(f"-timeout={INPUT_DEADLINE_S}", f"-rss_limit_mb={MEMORY_MIB}", f"-max_len={load(name).bytes_max}"),
        *("-print_final_stats=1", "-detect_leaks=0", "-len_control=0", *options, *map(str, folders)),
    ]
    done = subprocess.run(
        command,
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=seconds + STARTUP_S,
        check=False,
        text=True,
        errors="replace",
    )
    return done.stdout + (f"\nERROR: it ended with status {done.returncode}" if done.returncode else "")


def crash_folder(name: str) -> Path:
    """Where inputs that broke something once are kept."""
    return CRASHES / name
