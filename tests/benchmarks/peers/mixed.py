"""Stores, loads and lookups at once, each by an engine of its own."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.peers.driver import MODELS, Peer
from tests.benchmarks.peers.lookups import percentiles
from tests.benchmarks.peers.running import Running

SECONDS = 8.0
BLOCKS = 16
"""8 MiB of the smallest model in one transfer."""
HOT = 8
"""Prompts that are loaded again and again."""
SEED = 90_000


def measure(running: Running, seconds: float) -> list[dict[str, Any]]:
    """One peer after another, for so long each: memcpy takes no part."""
    rows: list[dict[str, Any]] = []
    running.each(0, "mixed load", lambda peer: rows.append(_one(running, peer, seconds)))
    return rows


def _one(running: Running, peer: Peer, seconds: float) -> dict[str, Any]:
    tasks = ("store", "load", "lookup")
    engines = {task: running.register(peer, MODELS[0], BLOCKS * 4, f"mixed-{task}") for task in tasks}
    seeds = list(range(SEED, SEED + HOT))
    for seed in seeds:
        engines["load"].call("store", seed=seed, blocks=BLOCKS)
    for task in tasks:
        mine = [SEED + 1_000] if task == "store" else seeds
        blocks = BLOCKS
        engines[task].send("pump", what=task, seeds=mine, blocks=blocks, seconds=seconds)
    answers = {task: engines[task].receive() for task in tasks}
    engines["load"].call("clear")
    row: dict[str, Any] = {"peer": peer.name, "wrong_blocks": answers["load"]["wrong"]}
    for task in ("store", "load"):
        busy_s = sum(answers[task]["us"]) / 1e6
        row[f"{task}_gb_per_s"] = answers[task]["bytes"] / busy_s / 1e9 if busy_s else 0.0
        row[f"{task}_p99_ms"] = percentiles(answers[task]["us"])["p99_us"] / 1e3
    row["lookup_p50_us"] = percentiles(answers["lookup"]["us"])["p50_us"]
    row["lookup_p99_us"] = percentiles(answers["lookup"]["us"])["p99_us"]
    running.progress(
        f"mixed, {peer.title}: store {row['store_gb_per_s']:.1f} GB/s, load {row['load_gb_per_s']:.1f} GB/s,"
        f" lookup p99 {row['lookup_p99_us'] / 1e3:.1f} ms"
    )
    return row
