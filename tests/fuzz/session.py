"""Sessions of the fuzzer, in processes of their own."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.marks import BEGIN, ENDED
from tests.fuzz.target import CORPUS, load

AVAILABLE = importlib.util.find_spec("atheris") is not None
REPO = Path(__file__).resolve().parents[2]
INPUT_DEADLINE_S = 20
"""No input may take longer, whatever it says. It is generous, because machines may be shared."""
MEMORY_MIB = 3_000
STARTUP_S = 240
TOLD_CHARACTERS = 6_000


@dataclass(frozen=True)
class Outcome:
    """What one session did."""

    name: str
    seed: int
    runs: int
    coverage: int
    """Edges of Python code that were reached."""
    gained: int
    """How many of these the corpora did not reach."""
    inputs: int
    """Inputs in the corpus at its end."""
    ended: bool
    """Whether it ended by itself, with nothing found."""
    crash: bytes | None
    """The input that broke something."""
    output: str

    @property
    def passed(self) -> bool:
        return self.runs > 0 and self.coverage > 0 and self.ended and self.crash is None

    def __str__(self) -> str:
        if self.passed:
            return (
                f"{self.name}: {self.runs:,} runs broke nothing (seed {self.seed}); they reached "
                f"{self.coverage:,} edges of the code, {self.gained} of them new, with {self.inputs} inputs"
            )
        text = f"{self.name}: broken with seed {self.seed}\n{self.output[-TOLD_CHARACTERS:]}\n"
        if self.crash is None:
            return text
        encoded = base64.b64encode(self.crash).decode()
        file = f"tests/fuzz/crashes/{self.name}/NAME"
        return (
            f"{text}Keep the input, which then is a test, and run it:\n"
            f"  mkdir -p tests/fuzz/crashes/{self.name}\n"
            f"  echo {encoded} | base64 -d > {file}\n"
            f"  .venv/bin/python -m tests.fuzz run {self.name} {file}"
        )


def grown(name: str) -> Path:
    """The folder of the inputs that long sessions have found."""
    folder = REPO / "build" / "fuzz" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fuzz(
    names: Sequence[str], corpus_of: Callable[[str], Path], *, seconds: int, seed: int | None = None
) -> list[Outcome]:
    """Fuzzes each target for so many seconds, one after the other. New inputs go to the folder that
    `corpus_of` says; those that are committed are read."""
    seed = secrets.randbits(31) | 1 if seed is None else seed
    with tempfile.TemporaryDirectory(prefix="kvtier-fuzz-") as made:
        crashes = {name: Path(made, name) for name in names}
        jobs = []
        for name, folder in crashes.items():
            folder.mkdir()
            options = [f"-max_total_time={seconds}", f"-seed={seed}", f"-artifact_prefix={folder}/"]
            jobs.append((name, options, [corpus_of(name), CORPUS / name]))
        outputs = _libfuzzer(jobs, len(names) * seconds, Path(made))
        return [_outcome(name, seed, outputs.get(name, ""), crashes[name]) for name in names]


def _outcome(name: str, seed: int, output: str, crashes: Path) -> Outcome:
    found = sorted(crashes.iterdir())
    crash = found[0].read_bytes() if found else None
    runs = re.findall(r"^stat::number_of_executed_units: (\d+)", output, re.M)
    began = re.findall(r"INITED cov: (\d+)", output)
    reached = re.findall(r"cov: (\d+).*?corp: (\d+)", output)
    coverage, inputs = map(int, reached[-1]) if reached else (0, 0)
    before = int(began[-1]) if began else coverage
    ended = f"{ENDED}0" in output
    return Outcome(
        name, seed, int(runs[-1]) if runs else 0, coverage, coverage - before, inputs, ended, crash, output
    )


def _libfuzzer(
    jobs: Sequence[tuple[str, list[str], list[Path]]], seconds: int, temporary: Path
) -> dict[str, str]:
    """Runs libFuzzer for each target with these options and folders. Returns what it printed for each.
    Targets may leave files in `temporary`, as libFuzzer ends them at once."""
    arguments = []
    for name, options, folders in jobs:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        limits = [f"-timeout={INPUT_DEADLINE_S}", f"-rss_limit_mb={MEMORY_MIB}"]
        limits += [f"-max_len={load(name).bytes_max}", "-len_control=0"]
        arguments.append((name, [*limits, "-print_final_stats=1", *options, *map(str, folders)]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.child", json.dumps(arguments)],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO), "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=seconds + STARTUP_S,
        check=False,
        text=True,
        errors="replace",
    )
    parts = done.stdout.split(BEGIN)[1:]
    assert parts, done.stdout[-TOLD_CHARACTERS:]
    return dict(part.split("\n", 1) for part in parts)
