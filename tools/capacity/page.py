"""The tables of docs/capacity.md: `python -m tools.capacity.page`. A test compares them with the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.capacity import model
from tools.capacity.__main__ import fleet_of, parsed

ROWS = Path(__file__).resolve().parents[2] / "docs" / "figures" / "capacity.json"
CHAT, AGENTS = "--prompt-tokens 12000", "--prompt-tokens 115000"
BY_PREFIX = f"{CHAT} --put 9.5% --read 5.4% --putting 15%"
MLA = f"{CHAT} --put 13.8% --read 1.9% --putting 23% --bytes-per-token 70KiB --ranks 1"
FLEETS = {
    "10 hosts, chat, round robin": f"--hosts 10 --requests 8.5 {CHAT} --put 1.8% --read 4.7% --putting 3%",
    "40 hosts, chat, by prefix": f"--hosts 40 --requests 34 {BY_PREFIX}",
    "40 hosts, agents, round robin": f"--hosts 40 --requests 4.5 {AGENTS} --put 3% --read 48% --putting 27%",
    "40 hosts, agents, by prefix": f"--hosts 40 --requests 4.5 {AGENTS} --put 3.3% --read 2.1% --putting 80%",
    "100 hosts, chat, by prefix, MLA": f"--hosts 100 --requests 85 {MLA}",
    "1,000 hosts, chat, by prefix": f"--hosts 1000 --requests 850 {BY_PREFIX}",
}
"""What typical fleets are asked for; put, read and putting are what the simulation of ten hosts has found.
Blocks are of 16 tokens, and of 8 ranks unless it says otherwise."""
COMMON = "--ranks 8 --store-size 16TiB --cell 10"


def fleets() -> list[str]:
    """A table of typical fleets, in cells of ten hosts."""
    table = [
        "| fleet | puts/s | listings/s | heads/s | GB/s in, out | known after | TB kept | requests, kept "
        "| hosts saved |",
        "| -- | -- | -- | -- | -- | -- | -- | -- | -- |",
    ]
    for name, arguments in FLEETS.items():
        load = model.load(fleet_of(parsed(f"{COMMON} {arguments}".split())))
        out = load.read_bytes + load.head_bytes
        table.append(
            f"| {name} | {load.puts:,.0f} | {load.lists:,.0f} | {load.head_reads:,.0f} "
            f"| {load.put_bytes / 1e9:,.1f}, {out / 1e9:,.1f} | {load.known_after_s:,.0f} s "
            f"| {load.kept_bytes / 1e12:,.0f} | {_money(load.month_requests_cost)}, "
            f"{_money(load.month_kept_cost)} | {load.hosts_saved:,.1f}: {_money(load.month_saved)} |"
        )
    return table


def _money(value: float) -> str:
    return f"{value / 1_000:,.1f} k"


def simulated(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table of what was simulated. In brackets is what the formulas say."""
    table = [
        "| workload, router, mode | hosts | host hits | store hits | put | read | puts/s | listings/s "
        "| heads/s | known after |",
        "| -- | -- | -- | -- | -- | -- | -- | -- | -- | -- |",
    ]
    for row in rows:
        if row["hosts"] == 1 and row["router"] != "prefix":
            continue  # one host has no choice
        if row["hosts"] not in (1, 10, 100, 1_000):
            continue  # only for the picture
        counted, said = row["counted"], row["said"]
        mla = ", MLA" if row["bytes_per_token"] == 70 * model.KIB else ""
        known = "never" if said["known_after_s"] is None else f"{said['known_after_s']:.0f} s"
        after = f"{counted['known_after_s']:,.0f} s" if row["hosts"] > 1 else "–"
        pairs = " | ".join(
            f"{_number(counted[name])} ({_number(said[name])})" for name in ("puts", "lists", "head_reads")
        )
        table.append(
            f"| {row['workload']}, {row['router']}, {row['mode']}{mla} | {row['hosts']:,} "
            f"| {row['host_hits']:.1%} | {row['store_hits']:.1%} | {row['put']:.1%} | {row['read']:.1%} "
            f"| {pairs} | {after}{f' ({known})' if row['hosts'] > 1 else ''} |"
        )
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


if __name__ == "__main__":
    print("\n".join([*fleets(), "", *simulated(json.loads(ROWS.read_text()))]))
