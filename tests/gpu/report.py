"""Renders records as tables and plots, with what they would change in the design, and the distance to each of
its targets.

    python tests/gpu/report.py RECORD.json [MORE.json …] [--out DIR]

Of a step that several records have, the last one counts. Writes report.md and the plots beside the first
record.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:  # run as a script
    sys.path.insert(0, str(REPO))

from tests.gpu import figures, stop_rules  # noqa: E402
from tests.gpu.record import DONE, FAKE_STATEMENT, Record, Row, StepRecord, load  # noqa: E402
from tests.gpu.targets import TARGETS  # noqa: E402

ROWS_MAX = 400
CELL_CHARACTERS = 160


def write(paths: list[Path], out: Path) -> str:
    """Writes report.md and the plots into `out`; returns a short text for the terminal."""
    records = [load(path) for path in paths]
    merged = merge(records)
    plots = {name: drawing for name, draw in figures.PLOTS.items() if (drawing := draw(merged)) is not None}
    for name, drawing in plots.items():
        (out / f"{name}.svg").write_text(drawing)
    sections = [header(records), stop_rules.table(merged), targets(merged), steps(merged)]
    sections += [f"![{name}]({name}.svg)" for name in plots]
    sections += [section(step) for step in merged.steps]
    (out / "report.md").write_text("\n\n".join(sections) + "\n")
    told = [stop_rules.table(merged)]
    if any(target.measured(merged) is not None for target in TARGETS):
        told.append(targets(merged, all_of_them=False))
    return "\n" + "\n\n".join([*told, f"The whole report: {out / 'report.md'}"])


def merge(records: list[Record]) -> Record:
    """One record with the steps of all, the later ones in place of the earlier."""
    chosen: dict[str, StepRecord] = {}
    for record in records:
        for step in record.steps:
            if step.name not in chosen or step.rows or step.state == DONE:
                chosen[step.name] = step
    last = records[-1]
    return Record(
        last.path,
        any(record.fake for record in records),
        last.started,
        last.hardware,
        last.source,
        last.conditions,
        list(chosen.values()),
    )


def header(records: list[Record]) -> str:
    """Under which conditions the numbers hold."""
    lines = ["# GPU measurements"]
    if any(record.fake for record in records):
        lines += ["", f"**{FAKE_STATEMENT}**"]
    for record in records:
        hardware, conditions = record.hardware, record.conditions
        gpus = "; ".join(
            ", ".join(f"{name} {value}" for name, value in gpu.items()) for gpu in hardware["gpus"]
        )
        packages = ", ".join(f"{name} {value}" for name, value in conditions["packages"].items() if value)
        source = record.source
        lines += [
            "",
            f"Run of {record.started}, commit {source['commit'][:12]} "
            f"({source['changed_files']} files changed), source digest {source['digest']}.",
            "",
            f"- GPU: {gpus or 'none that nvidia-smi knows'}",
            f"- {hardware['cpu']}, {hardware['cpus']} CPUs, {hardware['memory']}, "
            f"{hardware['numa_nodes']} NUMA nodes, {hardware['kernel']}",
            f"- Python {conditions['python']}, {packages}",
            f"- transparent huge pages {conditions['thp']} (shmem {conditions['thp_shmem']}), "
            f"2 MiB pages free {conditions['huge_pages_free']}, memlock {conditions['memlock_limit_bytes']}, "
            f"load {conditions['load_average']:.2f}",
        ]
    return "\n".join(lines)


def targets(record: Record, *, all_of_them: bool = True) -> str:
    """A table of every target and what the record says to it, or of those of which it says something."""
    lines = ["| target | wanted | measured | |", "|---|---|---|---|"]
    for target in TARGETS:
        value = target.measured(record)
        if value is None and not all_of_them:
            continue
        if value is None:
            measured, verdict = "–", "not measured"
        else:
            measured, verdict = f"{value:.4g} {target.unit}".rstrip(), target.verdict(value)
            if record.fake:
                verdict = "fake driver"
        lines.append(f"| {target.what} | {target.text()} {target.unit} | {measured} | {verdict} |")
    return "\n".join(lines)


def steps(record: Record) -> str:
    """A table of what ran."""
    lines = ["| | step | state | seconds | rows | |", "|---|---|---|---|---|---|"]
    for step in record.steps:
        why = _cell(step.why.splitlines()[0] if step.why else "")
        lines.append(
            f"| {step.number} | {step.title} | {step.state} | {step.seconds:.1f} | {len(step.rows)} | {why} |"
        )
    return "\n".join(lines)


def section(step: StepRecord) -> str:
    """One step's rows, in a table for each kind of row."""
    parts = [f"## {step.number} {step.title}"]
    if step.state != DONE:
        parts.append(
            f"{step.state}: {step.why}" if len(step.why) < 200 else f"{step.state}:\n```\n{step.why}\n```"
        )
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in step.rows[:ROWS_MAX]:
        kinds.setdefault(tuple(row), []).append(row)
    for names, rows in kinds.items():
        table = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
        table += [f"| {' | '.join(_cell(row[name]) for name in names)} |" for row in rows]
        parts.append("\n".join(table))
    return "\n\n".join(parts)


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")[:CELL_CHARACTERS]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD")
    parser.add_argument("--out", type=Path, help="folder; default: that of the first record")
    arguments = parser.parse_args()
    out = arguments.out or arguments.records[0].parent
    out.mkdir(parents=True, exist_ok=True)
    print(write(arguments.records, out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
