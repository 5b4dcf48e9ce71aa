"""What a run found: one JSON file that is complete and valid after every step, whatever happens next.

    {"format": 1, "fake": false, "started": "2026-11-21T12:00:00Z", "hardware": {…}, "source": {…},
     "conditions": {…}, "steps": [{"name": …, "number": …, "title": …, "state": "done", "why": "",
     "seconds": 1.2, "rows": [{…}, …]}, …]}

A row is flat: names with units last, values that JSON knows. What a row means is said by its step's
docstring.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
FAKE_STATEMENT = "fake driver: no statement about speed"

Row = dict[str, Any]

DONE, FAILED, LATE, SKIPPED = "done", "failed", "late", "skipped"


@dataclass
class StepRecord:
    """One step. A step that failed or was late keeps the rows that it had written by then."""

    name: str
    number: str
    title: str
    state: str = SKIPPED
    why: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)


@dataclass
class Record:
    """One run, on its way."""

    path: Path
    fake: bool
    started: str
    hardware: dict[str, Any]
    source: dict[str, Any]
    conditions: dict[str, Any]
    steps: list[StepRecord] = field(default_factory=list)

    def add(self, step: StepRecord) -> None:
        """Appends a step and puts the whole record on disk before it returns."""
        self.steps.append(step)
        self.flush()

    def flush(self) -> None:
        """Replaces the file by what is known now, atomically."""
        content = {"format": FORMAT, "statement": FAKE_STATEMENT if self.fake else ""}
        content |= {name: value for name, value in asdict(self).items() if name != "path"}
        beside = self.path.with_suffix(".tmp")
        with beside.open("w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)

    def rows(self, step: str, **wanted: object) -> list[Row]:
        """Rows of a step whose fields have these values."""
        return [
            row
            for record in self.steps
            if record.name == step
            for row in record.rows
            if all(row.get(name) == value for name, value in wanted.items())
        ]


def load(path: Path) -> Record:
    """Reads a record. Raises ValueError naming the file if it is none of ours."""
    content = json.loads(path.read_text())
    if content.get("format") != FORMAT:
        raise ValueError(f"{path}: format is {content.get('format')!r}; this program reads {FORMAT}")
    steps = [StepRecord(**step) for step in content["steps"]]
    names = ("fake", "started", "hardware", "source", "conditions")
    return Record(path=path, steps=steps, **{name: content[name] for name in names})


def append_row(path: Path, row: Row) -> None:
    """Adds one row to the file of a running step; it survives the death of the process."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[Row]:
    """The rows of a step's file; a torn last line, of a step killed while it wrote, is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
