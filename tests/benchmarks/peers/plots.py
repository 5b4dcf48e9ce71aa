"""Draws the plots of a report: `python plots.py RESULTS_JSON FOLDER`, with nothing but matplotlib beside it.

It runs in an environment of its own, because nothing else of this tree needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COLORS = {
    "kvtier": "#d9730d",
    "lmcache_zmq": "#6b46c1",
    "lmcache_zmq_engine": "#a78bfa",
    "lmcache_grpc": "#2563a8",
    "lmcache_zmq_16": "#a21caf",
    "lmcache_grpc_16": "#38bdf8",
    "mooncake": "#2f855a",
    "memcpy": "#9aa5b1",
    "none": "#9aa5b1",
    "prefix": "#2563a8",
    "lmcache": "#6b46c1",
}
MODES = {"none": "no cache", "prefix": "vLLM's own cache", "kvtier": "kvtier", "lmcache": "LMCache's server"}


def draw(results: dict[str, Any], folder: Path) -> list[str]:
    """Draws what there are results for. Returns the names of the files."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    pyplot.rcParams |= {
        "font.size": 9,
        "font.family": "DejaVu Sans",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "legend.fontsize": 8,
    }
    titles = {peer["name"]: peer["title"] for peer in results["peers"]}
    drawn = []
    for name, has, drawing in (
        ("lookups", results.get("lookups", {}).get("sweep"), _lookups),
        ("copies", results.get("copies"), _copies),
        ("mixed", results.get("mixed"), _mixed),
        ("first_token", results.get("replay"), _first_token),
    ):
        if has:
            figure = drawing(pyplot, results, titles)
            figure.savefig(folder / f"{name}.png", dpi=130)
            pyplot.close(figure)
            drawn.append(f"{name}.png")
    return drawn


def _lookups(pyplot: Any, results: dict[str, Any], titles: dict[str, str]) -> Any:
    sweep, large = results["lookups"]["sweep"], results["lookups"].get("large", [])
    callers = results["lookups"]["callers"]
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.9))
    level = max(row["entries"] for row in sweep)
    peers = list(dict.fromkeys(row["peer"] for row in sweep))
    for peer in peers:
        rows = [row for row in sweep if row["peer"] == peer and row["entries"] == level]
        hashes = [row["hashes"] for row in rows]
        style = {"color": COLORS[peer], "marker": "o", "markersize": 4}
        axes[0].plot(hashes, [row["p50_us"] for row in rows], label=titles[peer], **style)
        axes[0].plot(hashes, [row["p99_us"] for row in rows], linestyle=":", **style)
        rows = [row for row in sweep + large if row["peer"] == peer and row["hashes"] == 1_024]
        axes[1].plot([row["entries"] for row in rows], [row["p50_us"] for row in rows], **style)
        fans = [row for row in callers if row["peer"] == peer]
        axes[2].plot([row["callers"] for row in fans], [row["lookups_per_s"] for row in fans], **style)
    axes[0].set(title=f"µs of a lookup, {level:,} entries\np50 solid, p99 dotted", xlabel="hashes")
    axes[1].set(title="µs of 1,024 hashes, p50", xlabel="entries")
    axes[2].set(title="lookups of 64 hashes per second", xlabel="callers at once, a process each")
    for axis in axes:
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.grid(alpha=0.25, which="both", linewidth=0.5)
    axes[0].set_xticks([1, 64, 1_024, 8_192], ["1", "64", "1,024", "8,192"])
    axes[0].minorticks_off()
    axes[2].set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
    axes[2].minorticks_off()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=min(5, len(peers)))
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    return figure


def _copies(pyplot: Any, results: dict[str, Any], titles: dict[str, str]) -> Any:
    copies = results["copies"]
    shapes = list(dict.fromkeys(row["title"] for row in copies))
    peers = list(dict.fromkeys(row["peer"] for row in copies))
    order = [peer for peer in titles if peer in peers]
    figure, axes = pyplot.subplots(
        1, 2, figsize=(13, 0.9 + 0.17 * (len(order) + 1.5) * len(shapes)), sharey=True
    )
    height = 0.85 / len(order)
    for axis, what in zip(axes, ("store", "load"), strict=True):
        for number, peer in enumerate(order):
            values = {row["title"]: row for row in copies if row["peer"] == peer and row["what"] == what}
            places = [at + number * height for at, shape in enumerate(shapes) if shape in values]
            bars = [values[shape]["gb_per_s"] for shape in shapes if shape in values]
            axis.barh(places, bars, height=height * 0.92, color=COLORS[peer], label=titles[peer])
            for place, bar in zip(places, bars, strict=True):
                axis.text(bar, place, f" {bar:.1f}", va="center", fontsize=6.5)
        axis.set(title=f"{what}, GB/s (about 256 MiB at a time)", xlabel="GB/s")
        axis.grid(axis="x", alpha=0.25, linewidth=0.5)
    axes[0].set_yticks([at + 0.42 - height / 2 for at in range(len(shapes))], shapes)
    axes[0].set_ylim(len(shapes) - 0.1, -0.2)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def _mixed(pyplot: Any, results: dict[str, Any], titles: dict[str, str]) -> Any:
    rows = results["mixed"]
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 0.9 + 0.42 * len(rows)), sharey=True)
    names = [titles[row["peer"]] for row in rows]
    for axis, key, title, form in (
        (axes[0], "store_gb_per_s", "stores beside, GB/s", "{:.2f}"),
        (axes[1], "load_gb_per_s", "loads beside, GB/s", "{:.2f}"),
        (axes[2], "lookup_p99_us", "lookups of 16 hashes beside, p99 in ms", "{:.1f}"),
    ):
        values = [row[key] / (1e3 if key.endswith("_us") else 1) for row in rows]
        axis.barh(names, values, color=[COLORS[row["peer"]] for row in rows], height=0.66)
        for at, value in enumerate(values):
            axis.text(value, at, " " + form.format(value), va="center", fontsize=8)
        axis.set(title=title, xlim=(0, max(values) * 1.15))
        axis.grid(axis="x", alpha=0.25, linewidth=0.5)
    axes[0].invert_yaxis()
    figure.tight_layout()
    return figure


def _first_token(pyplot: Any, results: dict[str, Any], titles: dict[str, str]) -> Any:
    replay = results["replay"]
    panels = [
        (f"{one['tokens']:,} tokens restored, median", one["rows"], "restored_ms")
        for one in replay["restored"]
    ] + [(f"trace “{one['workload']}”, mean", one["rows"], "mean_ttft_ms") for one in replay["traces"]]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 4.6))
    for axis, (title, rows, key) in zip(axes.flat, panels, strict=False):
        _bars(axis, title, rows, key)
    figure.suptitle("ms to the first token of a real vLLM on CPUs", x=0.01, ha="left", fontsize=11)
    figure.tight_layout()
    return figure


def _bars(axis: Any, title: str, rows: Iterable[dict[str, Any]], key: str) -> None:
    shown = list(rows)
    names = [MODES[row["mode"]] for row in shown]
    values = [row[key] if row[key] is not None else row["computed_ms"] for row in shown]
    axis.barh(names, values, color=[COLORS[row["mode"]] for row in shown], height=0.66)
    for at, (row, value) in enumerate(zip(shown, values, strict=True)):
        hit = f" ({row['hit_rate']:.0%} cached)" if "hit_rate" in row else ""
        axis.text(value, at, f" {value:.0f}{hit}", va="center", fontsize=8)
    axis.set(title=title, xlim=(0, max(values) * 1.3))
    axis.invert_yaxis()


if __name__ == "__main__":
    print(json.dumps(draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))))
