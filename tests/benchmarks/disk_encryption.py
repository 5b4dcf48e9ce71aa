"""What encryption costs: a disk's worker on a plain and on an encrypted slab, in turns, on the same disk.

    python -m tests.benchmarks disk_encryption [--json] [--directory DIR] [--sizes 64k,1m]

`_mb_per_s` is what the worker moves, `_cpu_s_per_gib` the time of a core that it takes for that, both
medians; `_ratio` is encrypted over plain, of each pair of turns. `_waited` is the part of the time in which
a thread of a worker waited for a core: much of that, and the machine is too busy to compare rates. `load` is
the machine's load average at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks.disk import SIZES
from tests.benchmarks.disk_turns import SLAB_BYTES, THREADS, Bench, Turn, by_worker, new_turn, slab_on
from tests.benchmarks.rig import Load

KINDS = ("plain", "encrypted")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the disk to measure")
    parser.add_argument("--sizes", default="64k,1m", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--turn-mib", type=int, default=256, help="what is moved in one measurement")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    if shutil.disk_usage(arguments.directory).free < 3 * SLAB_BYTES:
        print(f"disk_encryption: skipped, no room in {arguments.directory}", file=sys.stderr)
    else:
        folder = Path(tempfile.mkdtemp(prefix="kvt-bench-", dir=arguments.directory))
        try:
            with ExitStack() as stack:
                benches = {}
                for kind in KINDS:
                    (folder / kind).mkdir()
                    keys = make_keys(folder / "keys") if kind == "encrypted" else None
                    benches[kind] = stack.enter_context(slab_on(folder / kind, keys))
                for name in arguments.sizes.split(","):
                    turns = {kind: turn_of(benches[kind], SIZES[name], arguments.turn_mib) for kind in KINDS}
                    figures |= measure(benches, turns, name, arguments.repetitions)
        finally:
            shutil.rmtree(folder)
        figures["disk_encryption_load"] = os.getloadavg()[0]
    if not arguments.json:
        for key, value in figures.items():
            print(f"{key:<56} {value:>12,.3f}")
    print(json.dumps(figures))
    return 0


def make_keys(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    key = folder / "default"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o400)
    return folder


def turn_of(bench: Bench, slot_bytes: int, mib: int) -> Turn:
    """As much of the slab, which has been written to once: the first time is the slowest."""
    whole = new_turn(bench, slot_bytes, False)
    turn = dataclasses.replace(whole, slots=whole.slots[: (mib << 20) // slot_bytes].copy())
    by_worker(bench, turn, "write")
    return turn


def measure(
    benches: dict[str, Bench], turns: dict[str, Turn], name: str, repetitions: int
) -> dict[str, float]:
    rates: dict[tuple[str, str], list[float]] = {}
    cpu_s: dict[tuple[str, str], list[float]] = {}
    waited: dict[tuple[str, str], list[float]] = {}
    for repetition in range(repetitions):
        for kind in KINDS if repetition % 2 else KINDS[::-1]:
            bench, turn = benches[kind], turns[kind]
            for what in ("write", "read"):
                before, began_s = Load.of(bench.worker.process.pid), time.perf_counter()
                rates.setdefault((kind, what), []).append(by_worker(bench, turn, what))
                took_s = time.perf_counter() - began_s
                load = Load.of(bench.worker.process.pid).since(before)
                cpu_s.setdefault((kind, what), []).append(load.run_s / turn.bytes * (1 << 30))
                waited.setdefault((kind, what), []).append(load.waits_s / took_s / THREADS)
    figures = {}
    for what in ("write", "read"):
        for kind in KINDS:
            stem = f"disk_encryption_{what}_{name}_{kind}"
            figures[f"{stem}_mb_per_s"] = statistics.median(rates[kind, what]) / 1e6
            figures[f"{stem}_cpu_s_per_gib"] = statistics.median(cpu_s[kind, what])
            figures[f"{stem}_waited"] = statistics.median(waited[kind, what])
        pairs = zip(rates["encrypted", what], rates["plain", what], strict=True)
        figures[f"disk_encryption_{what}_{name}_ratio"] = statistics.median(a / b for a, b in pairs)
    return figures


if __name__ == "__main__":
    sys.exit(main())
