"""A disk's reads and writes against fio, at the same record size, depth, threads and bytes, in one run.

    python -m tests.benchmarks.disk [--json] [--directory DIR] [--sizes 64k,1m] [--patterns scattered]

They take turns on one preallocated file: fio (libaio, direct, at the worker's priority); the disk's worker
process, driven by jobs as the front drives it, records, checksums and all; and, if asked for, `slab_io`, the
native input and output by itself. Slots are moved in their order, as blocks are stored together, or
`scattered`, in random order. `_ratio` is the worker's bytes per second over fio's, both medians; `_ratio_low`
and `_ratio_high` are the least and the greatest of one turn. `_cpu_s_per_gb` is the time of a core that the
worker takes, `_waited` the part of the time in which a thread of it waited for a core: much of that, and the
machine is too busy to compare.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.benchmarks.disk_turns import (
    SLAB_BYTES,
    THREADS,
    Bench,
    Turn,
    by_fio,
    by_slab_io,
    by_worker,
    new_turn,
    slab_on,
)
from tests.benchmarks.rig import Load

SIZES = {"64k": 64 << 10, "256k": 256 << 10, "1m": 1 << 20, "4m": 4 << 20}
PATTERNS = ("in_order", "scattered")
REPETITIONS = 5
TURN_S = 0.3
"""About how long one measurement takes; how many bytes that are is found out first."""
TURN_BYTES_MIN = 64 << 20
MOVERS: dict[str, Callable[[Bench, Turn, str], float]] = {
    "fio": by_fio,
    "slab_io": by_slab_io,
    "worker": by_worker,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the disk to measure")
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"of {', '.join(SIZES)}")
    parser.add_argument("--patterns", default="in_order", help=f"of {', '.join(PATTERNS)}")
    parser.add_argument("--movers", default="fio,worker", help=f"of {', '.join(MOVERS)}; fio always")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--turn-s", type=float, default=TURN_S, help="about how long one measurement takes")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    if not shutil.which("fio"):
        print("disk: skipped, fio is not installed (Debian: apt install fio)", file=sys.stderr)
    elif shutil.disk_usage(arguments.directory).free < 2 * SLAB_BYTES:
        print(f"disk: skipped, no room for {SLAB_BYTES >> 20} MiB in {arguments.directory}", file=sys.stderr)
    else:
        folder = Path(tempfile.mkdtemp(prefix="kvt-bench-", dir=arguments.directory))
        try:
            with slab_on(folder) as bench:
                for name in arguments.sizes.split(","):
                    for pattern in arguments.patterns.split(","):
                        turn = calibrated(bench, SIZES[name], pattern == "scattered", arguments.turn_s)
                        found = measure(bench, turn, arguments.movers.split(","), arguments.repetitions)
                        label = name if pattern == "in_order" else f"{name}_{pattern}"
                        figures |= {f"disk_{key.format(label)}": value for key, value in found.items()}
        finally:
            shutil.rmtree(folder)
    if not arguments.json:
        for key, value in figures.items():
            print(f"{key:<44} {value:>12,.3f}")
    print(json.dumps(figures))
    return 0


def calibrated(bench: Bench, slot_bytes: int, scattered: bool, turn_s: float) -> Turn:
    """As much as the worker writes in that time. All of the file has been written to then: the first time is
    the slowest."""
    whole = new_turn(bench, slot_bytes, scattered)
    began_s = time.perf_counter()
    by_worker(bench, whole, "write")
    rate = whole.bytes / (time.perf_counter() - began_s)
    count = max(int(rate * turn_s), TURN_BYTES_MIN) // slot_bytes
    return dataclasses.replace(whole, slots=whole.slots[:count].copy())


def measure(bench: Bench, turn: Turn, movers: Sequence[str], repetitions: int) -> dict[str, float]:
    """Figures, with a pair of braces where size and pattern belong."""
    rates: dict[tuple[str, str], list[float]] = {}
    loads: dict[str, list[Load]] = {"write": [], "read": []}
    names = ["fio", *(name for name in MOVERS if name in movers and name != "fio")]
    for repetition in range(repetitions):
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            for what in ("write", "read"):
                before = Load.of(bench.worker.process.pid)
                rates.setdefault((name, what), []).append(MOVERS[name](bench, turn, what))
                if name == "worker":
                    loads[what].append(Load.of(bench.worker.process.pid).since(before))
    figures = {}
    for what in ("write", "read"):
        fio = rates["fio", what]
        for name in names:
            taken = rates[name, what]
            stem = f"{what}_{{}}" if name == "worker" else f"{what}_{{}}_{name}"
            figures[f"{stem}_mb_per_s"] = statistics.median(taken) / 1e6
            if name != "fio":
                pairs = [a / b for a, b in zip(taken, fio, strict=True)]
                figures[f"{stem}_ratio"] = statistics.median(taken) / statistics.median(fio)
                figures[f"{stem}_ratio_low"], figures[f"{stem}_ratio_high"] = min(pairs), max(pairs)
        if loads[what]:
            cpu_s = statistics.median(load.run_s for load in loads[what])
            figures[f"{what}_{{}}_cpu_s_per_gb"] = cpu_s / turn.bytes * 1e9
            waited = statistics.median(load.waits_s / load.taken_s for load in loads[what])
            figures[f"{what}_{{}}_waited"] = waited / THREADS
    return figures


if __name__ == "__main__":
    sys.exit(main())
