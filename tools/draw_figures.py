"""Draws pictures in docs/figures from the numbers in JSON files beside them: `make figures`.

Those of first_token.json are copied from docs/evidence.md, which says how they were measured; those of
capacity.json are what `python -m tools.capacity.simulate --published` prints. A drawing carries a digest of
its file, and a test compares the two. This needs matplotlib, which only `make figures` installs.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tools.capacity import model

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
COLORS = {
    "no cache": "#9aa5b1",
    "vLLM's own cache": "#2563a8",
    "kvtier": "#d9730d",
    "LMCache's server": "#6b46c1",
}


def digest(data: bytes) -> str:
    """Returns the digest by which the drawing names the file that it was made of."""
    return f"sha256:{hashlib.sha256(data).hexdigest()[:16]}"


def _first_token(pyplot: Any, content: Any) -> Any:
    """One panel for each trace, with one bar for each cache."""
    figure, axes = pyplot.subplots(1, len(content["traces"]), figsize=(9.5, 2.7), sharex=True, sharey=True)
    for axis, trace in zip(axes, content["traces"], strict=True):
        names = list(trace["mean_ms"])
        values = list(trace["mean_ms"].values())
        axis.barh(names, values, color=[COLORS[name] for name in names], height=0.66)
        for row, (name, value) in enumerate(zip(names, values, strict=True)):
            hits = trace["hit_percent"][name]
            axis.text(value + 8, row, f"{value} ms ({hits} % cached)", va="center", fontsize=9)
        axis.set_title(trace["name"], fontsize=10, loc="left")
        axis.set_xlim(0, 800)
        axis.set_xlabel("mean time to the first token, ms")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()  # the panels share this axis
    figure.text(0.01, 0.01, "Two CPU cores, no GPU, small model. Conditions: docs/evidence.md", fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return figure


def _capacity(pyplot: Any, rows: Any) -> Any:
    """What a store is asked for, by the number of hosts, and what it adds to the hits."""
    figure, (load, hits) = pyplot.subplots(1, 2, figsize=(11, 4.5), gridspec_kw={"width_ratios": (1, 1.1)})
    llama = [row for row in rows if row["bytes_per_token"] == 320 << 10 and row["mode"] == "on-reuse"]
    chat = [row for row in llama if (row["workload"], row["router"]) == ("chat", "prefix")]
    [ten] = [row for row in chat if row["hosts"] == 10]
    sizes = [10 ** (step / 20) for step in range(63)]
    said = [capacity_of(ten, max(1, round(hosts))) for hosts in sizes]
    follow = max(round(hosts) for hosts, each in zip(sizes, said, strict=True) if each.keeps_up)
    names = {"head_reads": "heads read", "puts": "puts", "range_reads": "ranges read", "lists": "listings"}
    colors = ("#d9730d", "#2563a8", "#52606d", "#6b46c1")
    for (kind, name), color in zip(names.items(), colors, strict=True):
        lines = [(round(hosts), getattr(each, kind)) for hosts, each in zip(sizes, said, strict=True)]
        load.plot(*zip(*(pair for pair in lines if pair[1]), strict=True), color=color, lw=1.4, label=name)
        dots = [(row["hosts"], row["counted"][kind]) for row in chat if row["counted"][kind]]
        load.plot(*zip(*dots, strict=True), "o", color=color, markersize=5)
    load.axvspan(follow, 1_500, color="#9aa5b1", alpha=0.18, linewidth=0)
    load.text(
        follow * 1.2, 0.8, "hosts cannot follow\neach other any more:\ndivide them into cells", fontsize=9
    )
    load.set(xscale="log", yscale="log", xlim=(0.8, 1_500), ylim=(0.6, 6e5))
    load.set_xticks((1, 10, 100, 1_000), ("1", "10", "100", "1,000"))
    load.set_yticks([10**power for power in range(6)], [f"{10**power:,}" for power in range(6)])
    load.minorticks_off()
    load.set_xlabel("hosts with one store (chat, routed by prefix)")
    load.set_ylabel("requests to the store, a second")
    load.set_title("Dots: simulated. Lines: the formulas.", fontsize=10, loc="left")
    load.legend(loc="upper left", fontsize=9, frameon=False)

    groups = [
        ("chat", "prefix", "chat,\nby prefix"),
        ("chat", "round-robin", "chat,\nround robin"),
        ("agents", "prefix", "agents,\nby prefix"),
        ("agents", "round-robin", "agents,\nround robin"),
    ]
    place, ticks, labels = 0.0, [], []
    for workload, router, name in groups:
        some = [
            row
            for row in llama
            if (row["workload"], row["router"]) == (workload, router) and row["hosts"] in (1, 10, 100, 1_000)
        ]
        ticks.append(place + 1.25 * (len(some) - 1) / 2)
        labels.append(name)
        for row in some:
            host, store = 100 * row["host_hits"], 100 * row["store_hits"]
            hits.bar(place, host, color="#2563a8", width=1.0)
            hits.bar(place, store, bottom=host, color="#d9730d", width=1.0)
            hits.text(place, host + store + 1.5, f"{row['hosts']:,}", ha="center", fontsize=8)
            place += 1.25
        place += 0.8
    hits.bar(0, 0, color="#2563a8", label="in the host's own memory")
    hits.bar(0, 0, color="#d9730d", label="from the store")
    hits.set_xticks(ticks, labels, fontsize=9)
    hits.set_ylim(0, 118)
    hits.set_yticks(range(0, 101, 20))
    hits.set_ylabel("hits, % of the prompts' tokens")
    hits.set_title("Above each bar: how many hosts", fontsize=10, loc="left")
    hits.legend(loc="upper left", fontsize=9, frameon=False)
    for axis in (load, hits):
        axis.spines[["top", "right"]].set_visible(False)
    figure.text(
        0.01,
        0.01,
        "512 GiB of pool a host, 320 KiB a token, on-reuse. Conditions: docs/capacity.md",
        fontsize=8,
    )
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    return figure


def capacity_of(row: Any, hosts: int) -> model.Load:
    """What the formulas say of so many hosts that put and read as those of a simulated fleet."""
    fleet = model.Fleet(
        hosts=hosts,
        requests_per_s=row["requests_per_s"] * hosts / row["hosts"],
        prompt_tokens=row["prompt_tokens"],
        put_fraction=row["put"],
        read_fraction=row["read"],
        putting_fraction=row["putting"],
        bytes_per_token=row["bytes_per_token"],
        store_size=row["store_size"],
        look_every_s=row["look_every_s"],
    )
    return model.load(fleet)


DRAWINGS = {"first_token": _first_token, "capacity": _capacity}
"""By name of the JSON file and of the drawing."""


def draw(name: str) -> None:
    """Draws one picture. The same data give the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    data = (FIGURES / f"{name}.json").read_bytes()
    pyplot.rcParams |= {"svg.hashsalt": "kvtier", "font.size": 10, "font.family": "DejaVu Sans"}
    figure = DRAWINGS[name](pyplot, json.loads(data))
    description = f"{name}.json {digest(data)}"
    figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None, "Description": description})


if __name__ == "__main__":
    for each in DRAWINGS:
        draw(each)
