"""Which plots a record gives; one that it has no rows for is left out."""

from __future__ import annotations

from collections.abc import Callable

from tests.gpu import plots
from tests.gpu.record import FAKE_STATEMENT, Record
from tests.gpu.targets import BOTH, D2H, H2D, usual_batches

WAY_NAMES = {H2D: "to the device", D2H: "to the host", BOTH: "both ways"}


def _note(record: Record) -> str:
    return FAKE_STATEMENT if record.fake else ""


def ceilings(record: Record) -> dict[str, float]:
    """The dashed lines: the ceiling of each way."""
    rows = [row for row in record.rows("ceiling") if "gb_per_s" in row]
    return {
        f"ceiling {WAY_NAMES[way]}": max(row["gb_per_s"] for row in rows if row["way"] == way)
        for way in (H2D, D2H)
        if any(row["way"] == way for row in rows)
    }


def copies(record: Record) -> str | None:
    """Gigabytes per second by fragment size."""
    series: dict[str, list[tuple[float, float]]] = {}
    for way in (H2D, D2H):
        for row in usual_batches(record, way, least=1_024 if not record.fake else 1):
            name = f"{WAY_NAMES[way]}, {row['fragments']} in a batch"
            series.setdefault(name, []).append((row["fragment_bytes"], row["gb_per_s"]))
    if not series:
        return None
    return plots.lines(
        "Batched copies by fragment size",
        "bytes of a fragment",
        "GB/s",
        series,
        levels=ceilings(record),
        note=_note(record),
    )


def steps_under_copies(record: Record) -> str | None:
    """The engine's p99 by who copies, over idle."""
    groups: dict[str, dict[str, float]] = {}
    for row in (*record.rows("interference"), *record.rows("beside_kvtierd")):
        if "x_p99" in row and not row["overlap_hint"] and row["fragment_bytes"] >= 512 << 10:
            short = (
                row["copies"]
                .replace(" by ", "\n")
                .replace("a process beside", "process")
                .replace("the engine itself", "engine")
            )
            groups.setdefault(f"{short}\n{row['way']}", {})[row["workload"]] = row["x_p99"]
    if not groups:
        return None
    return plots.bars(
        "An engine's step p99 while others copy, over idle", "× idle", groups, level=1.02, note=_note(record)
    )


def by_thread_blocks(record: Record) -> str | None:
    """Gigabytes per second of a copy kernel."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in record.rows("thread_blocks"):
        name = f"{WAY_NAMES[row['way']]}, {row['fragment_bytes'] >> 10} KiB"
        series.setdefault(name, []).append((row["thread_blocks"], row["gb_per_s"]))
    if not series:
        return None
    return plots.lines(
        "Copy kernels by thread blocks",
        "thread blocks",
        "GB/s",
        series,
        levels=ceilings(record),
        note=_note(record),
    )


def by_chunk(record: Record) -> str | None:
    """Share of the ceiling by chunk size, 512 KiB fragments (or what there is)."""
    rows = record.rows("pipeline")
    wanted = 512 << 10 if any(row["fragment_bytes"] == 512 << 10 for row in rows) else None
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if wanted in (None, row["fragment_bytes"]):
            name = f"{WAY_NAMES[row['way']]}, {row['flights']} in flight"
            series.setdefault(name, []).append((row["chunk_bytes"], row["ratio"]))
    if not series:
        return None
    return plots.lines(
        "A lane's chunks", "bytes of a chunk", "× ceiling", series, levels={"97 %": 0.97}, note=_note(record)
    )


PLOTS: dict[str, Callable[[Record], str | None]] = {
    "copies": copies,
    "interference": steps_under_copies,
    "thread-blocks": by_thread_blocks,
    "chunks": by_chunk,
}
"""Name of the file, without its ending."""
