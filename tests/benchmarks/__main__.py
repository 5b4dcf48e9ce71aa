"""`make bench`: runs every benchmark, one after another, and sets the figures beside DESIGN's targets.

    python -m tests.benchmarks            all of them
    python -m tests.benchmarks rpc        some of them
    python -m tests.benchmarks --json     only the last line: one JSON object with every figure

Figures are medians of interleaved repetitions; a `_ratio` compares with one large memcpy in the same run.
Absolute times of a shared machine say little: compare within one run. For each benchmark, `…_load` is the
load average at its end, and `…_steal_percent` the part of all cores' time that the host gave to others.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.peers.machine import Busy

REPO = Path(__file__).resolve().parents[2]
DEADLINE_S = 900
BENCHMARKS = {
    "kernels": "gather and scatter against one large memcpy; the index at 4 M entries",
    "metadata": "the core: blocks stored and committed, and looked up, per second on one core",
    "start": "cold and warm starts by exec: until it serves, until the first hit, until the pool is whole",
    "idle": "what a daemon with idle engines takes of a core, workers included",
    "restart": "from kill -9 to warm, against slots and GiB: the records alone, and a real daemon",
    "restart_disk": "a disk's records read back and believed at start, against slots",
    "disk": "a disk's worker against fio, at the same record size and depth",
    "disk_encryption": "a disk's worker on an encrypted slab against a plain one",
    "disk_lookups": "lookups while a disk writes at full rate, against the same without a disk",
    "store": "a store's worker against the store's own client, on an S3 server or a folder in memory",
    "dead_store": "the host's own figures with a store that is dead from the start, against no store",
    "rpc": "lookups: in the index page, over gRPC unary and stream, and behind a large lookup",
    "connector": "what vLLM's scheduler waits for the connector, per step",
    "overhead": "a real vLLM that never hits: processor time of a step with kvtier, against without",
    "engine": "time to first token of a real vLLM: without a cache, with its own, kvtier, or LMCache below",
    "sglang_engine": "time to first token of a real SGLang, if installed: without a cache, radix, kvtier",
    "neighbours": "a tenant's calls alone, and beside another user that does its worst",
    "held_by_others": "whether the time of a lookup tells of blocks that another tenant has",
    "transfers": "store to commit and load, end to end, through a real daemon",
    "store_behind_loads": "a store alone, and beside another engine that loads without a pause",
}


@dataclass(frozen=True)
class Target:
    """What DESIGN asks of a figure."""

    figure: str
    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )

    def text(self) -> str:
        return f"≥ {self.at_least:,g}" if self.at_least is not None else f"≤ {self.at_most:,g}"


TARGETS = {
    target.figure: target
    for target in (
        Target("gather_16k_ratio", at_least=1.0),
        Target("gather_64k_ratio", at_least=1.0),
        Target("scatter_16k_ratio", at_least=1.0),
        Target("scatter_64k_ratio", at_least=1.0),
        Target("index_bytes_per_entry", at_most=100),
        Target("metadata_store_commit_blocks_per_s", at_least=500_000),
        Target("metadata_lookup_blocks_per_s", at_least=2_000_000),
        Target("lookup_local_miss_p50_us", at_most=20),
        Target("lookup_local_1024_p50_us", at_most=100),
        Target("lookup_grpc_stream_1024_p50_us", at_most=500),
        Target("lookup_one_behind_8192_p99_us", at_most=2_000),
        Target("lookup_leased_1_ratio", at_most=1.15),
        Target("start_cold_16gib_serving_s", at_most=1.0),
        Target("start_warm_1m_first_hit_s", at_most=1.0),
        Target("idle_64_percent", at_most=1.0),
        Target("restart_1m_s", at_most=1.0),
        Target("restart_disk_1m_s", at_most=1.0),
        *(
            Target(f"disk_{what}_{size}_ratio", at_least=0.95)
            for what in ("write", "read")
            for size in ("64k", "256k", "1m", "4m")
        ),
        *(
            Target(f"store_{what}_{size}_ratio", at_least=0.9)
            for what in ("put", "get")
            for size in ("1m", "2m")
        ),
        *(
            Target(f"dead_store_{what}_ratio", at_most=1.1)
            for what in ("store", "load", "lookup", "leased_lookup", "miss")
        ),
        Target("connector_step_64_waiting_ms", at_most=2.0),
        Target("connector_step_64_misses_ms", at_most=1.0),
        Target("miss_step_cpu_ratio", at_most=1.05),
        Target("store_beside_loads_p50_ratio", at_most=3.0),
    )
}


def run(name: str, quiet: bool) -> dict[str, float]:
    """Runs one benchmark in a process of its own; its tables are shown, its figures returned."""
    if not quiet:
        print(f"\n=== {name}: {BENCHMARKS[name]}", flush=True)
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", "--json"]
    before = Busy.now()
    result = subprocess.run(
        command, cwd=REPO, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False
    )
    if result.returncode:
        raise SystemExit(f"benchmark {name} failed with exit status {result.returncode}")
    figures = json.loads(result.stdout.splitlines()[-1])
    busy = Busy.now().since(before)
    figures |= {f"{name}_load": busy["load_1m"], f"{name}_steal_percent": 100 * busy["steal_part"]}
    if not quiet:
        show(figures)
    return {key: float(value) for key, value in figures.items()}


def show(figures: dict[str, float]) -> None:
    """Prints figures, with the target where there is one."""
    for key, value in figures.items():
        target = TARGETS.get(key)
        verdict = f"  target {target.text()}: {'met' if target.met(value) else 'MISSED'}" if target else ""
        print(f"  {key:<44} {value:>16,.3f}{verdict}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    figures: dict[str, float] = {}
    for name in arguments.names or BENCHMARKS:
        figures |= run(name, arguments.json)
    if not arguments.json:
        print(f"\n{platform.platform()}, Python {platform.python_version()}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
