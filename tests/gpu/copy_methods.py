"""The table of copy methods that a record gives (kvtierd.workers.copy.gpu.methods)."""

from __future__ import annotations

import json
from typing import Any

from tests.gpu.record import Record
from tests.gpu.targets import D2H, H2D

FASTER = 1.2
"""A method must be so many times as fast as batches to be named."""
DIRECTIONS = {H2D: "to_device", D2H: "to_host"}


def table(record: Record) -> dict[str, Any] | None:
    """Returns the table for the GPU of this record, or None if batches are the fastest for all sizes, or
    nothing was measured."""
    gpus = record.hardware["gpus"]
    if record.fake or not gpus:
        return None
    found = {name: entries for way, name in DIRECTIONS.items() if (entries := _entries(record, way))}
    return {"format": 1, "products": {gpus[0]["name"]: found}} if found else None


def text(content: dict[str, Any]) -> str:
    """The file, as it is to be committed."""
    return json.dumps(content, indent=1) + "\n"


def _entries(record: Record, way: str) -> list[dict[str, Any]]:
    """The smallest sizes, as long as another method beats batches."""
    rows = [row for row in record.rows("shapes", way=way, run_blocks=1) if row["planes"] > 1]
    entries: list[dict[str, Any]] = []
    for size in sorted({row["fragment_bytes"] for row in rows}):
        rates = {row["shape"]: float(row["gb_per_s"]) for row in rows if row["fragment_bytes"] == size}
        best = max(rates, key=lambda shape: rates[shape])
        if best == "batch" or rates[best] < FASTER * rates.get("batch", 0.0):
            break
        entries.append({"most_bytes": size, "method": best})
    return entries
