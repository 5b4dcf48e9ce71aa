"""Restart to warm, against slots (10 k, 100 k, 1 M of 4 KiB) and bytes (1 to 8 GiB in slots of 1 MiB).

    python -m tests.benchmarks.restart [--json] [--slots N]

Records: a pool is filled by one process, killed, and opened by this one. `_s` is everything: `_pool_s`,
opening and recovering, and `_core_s`, a core that takes over what was found. `_scan_s` is the native scan
alone. Daemon (`restart_daemon_…`): kvtierd is killed with SIGKILL and started again. `_serving_s`: from the
exec until it says so; `_first_hit_s`: from the exec until a client, made when it serves, has loaded a block;
`_recovering_s`: the daemon's own word for what the pool took. `empty` is a daemon with nothing to recover.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from kvtier_kernels import BlockTable, PoolRecords
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.core.machine import Machine
from kvtierd.core.stimuli import CoreLimits
from kvtierd.memory.host_pool import HostPool

from tests.benchmarks import restart_daemon
from tests.benchmarks.restart_daemon import Shape
from tests.support.pools import whole

SLOT_BYTES = 4096
EXTENT_BYTES = 64 << 20
BATCH = 8192
REPETITIONS = 3
FILL_TIMEOUT_S = 300
SIZES = {"10k": 10_000, "100k": 100_000, "1m": 1_000_000}
SMALL = tuple(Shape(name, blocks, 1, 4 << 10, 64 << 20) for name, blocks in ({"empty": 0} | SIZES).items())
LARGE = tuple(Shape(f"{gib}gib", gib << 10, 16, 64 << 10, 64 << 20) for gib in (1, 2, 4, 8))


def pool_bytes(slots: int) -> int:
    per_extent = EXTENT_BYTES // (SLOT_BYTES + 128) - 1
    return (2 << 20) + (slots // per_extent + 1) * EXTENT_BYTES


def fill(path: Path, slots: int) -> None:
    """Store `slots` one-shard blocks, say so, and wait to be killed. Their data is never written: no restart
    reads it.
    """
    pool = whole(HostPool.open(path, pool_bytes(slots), EXTENT_BYTES, lock_timeout_s=1))
    writer = pool.register_writer(os.getpid())
    record_blocks(pool.records, pool.geometry, slots, writer, pool.boot_nonce)
    print(slots, flush=True)
    signal.pause()


def record_blocks(
    records: PoolRecords, geometry: PoolGeometry, slots: int, writer: int, boot_nonce: int
) -> None:
    """Every extent becomes one of slots of this size, and the first `slots` of them hold a block each, as far
    as the records say."""
    random = np.random.default_rng(1)
    stored = 0
    for extent in range(geometry.extents):
        records.format_extent(extent, SLOT_BYTES)
        places = geometry.slots_of(extent, SLOT_BYTES)[: slots - stored]
        for start in range(0, len(places), BATCH):
            batch = places[start : start + BATCH]
            hashes = random.integers(0, 256, (len(batch), 32), np.uint8)
            records.open(batch, writer, boot_nonce, stored, b"benchmark-space!", 0, 0, 1, hashes, SLOT_BYTES)
            records.commit(batch, np.arange(stored, stored + len(batch), dtype=np.uint64))
            stored += len(batch)
    if stored != slots:
        raise SystemExit(f"there was room for {stored} of {slots} blocks")


def measure(name: str, slots: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir="/dev/shm") as folder:
        path = Path(folder) / "pool"
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.restart",
            "--fill",
            str(path),
            "--slots",
            str(slots),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as filler:
            assert filler.stdout is not None
            try:
                stored = int(filler.stdout.readline() or 0)
            finally:
                filler.kill()
        if stored != slots:
            raise SystemExit(f"the filling process stored {stored} of {slots} blocks")
        opens, scans, cores = [], [], []
        for _ in range(REPETITIONS):
            began_s = time.perf_counter()
            with HostPool.open(path, pool_bytes(slots), EXTENT_BYTES, lock_timeout_s=5) as pool:
                opens.append(time.perf_counter() - began_s)
                if pool.start.recovered_blocks != slots:
                    raise SystemExit(f"recovered {pool.start.recovered_blocks} of {slots} blocks")
                began_s = time.perf_counter()
                pool.records.scan()
                scans.append(time.perf_counter() - began_s)
                cores.append(hand_to_core(pool, slots))
    return {
        f"restart_{name}_s": statistics.median(map(sum, zip(opens, cores, strict=True))),
        f"restart_{name}_pool_s": statistics.median(opens),
        f"restart_{name}_scan_s": statistics.median(scans),
        f"restart_{name}_core_s": statistics.median(cores),
    }


def hand_to_core(pool: HostPool, slots: int) -> float:
    """Seconds that a new core takes over what was recovered."""
    table = BlockTable(slots, len(pool.array) // PAGE_BYTES)
    machine = Machine(table, time.monotonic, CoreLimits(), pool.geometry)
    began_s = time.perf_counter()
    machine.handle(pool.recovered)
    seconds = time.perf_counter() - began_s
    if table.stats()["ready"] != slots:
        raise SystemExit(f"the core took over {table.stats()['ready']} of {slots} blocks")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.add_argument("--fill", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--slots", type=int, help="records only, this number of slots")
    arguments = parser.parse_args()
    if arguments.fill:
        fill(arguments.fill, arguments.slots)
    figures: dict[str, float] = {}
    for name, slots in {str(arguments.slots): arguments.slots}.items() if arguments.slots else SIZES.items():
        figures |= measure(name, slots)
    if not arguments.slots:
        logging.getLogger("kvtier").setLevel(logging.ERROR)  # its daemon is killed again and again
        for shapes in (SMALL, LARGE):
            rows = restart_daemon.measure(shapes)
            show(rows)
            figures |= {
                f"restart_daemon_{name}_{key}": s for name, row in rows.items() for key, s in row.items()
            }
    if not arguments.json:
        for key, value in figures.items():
            print(f"{key:<36} {value:8.4f}")
    print(json.dumps(figures))
    return 0


def show(rows: dict[str, dict[str, float]]) -> None:
    """One line for each pool, for people: on standard error, where `make bench` lets it through."""
    print(f"{'kill -9 to warm':<16} {'recovering':>12} {'serving':>12} {'first hit':>12}", file=sys.stderr)
    for name, row in rows.items():
        cells = " ".join(f"{row[key]:>10.3f} s" for key in ("recovering_s", "serving_s", "first_hit_s"))
        print(f"{name:<16} {cells}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
