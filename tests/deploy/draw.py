"""Draws the dashboard's panels with matplotlib, from its JSON and the answers of a real Prometheus.

    uv run --with matplotlib python tests/deploy/draw.py deploy/grafana/kvtier.json ANSWERS.json OUT.png

    uv run --with matplotlib python tests/deploy/draw.py TEXT OUT.png

ANSWERS: by panel id, a list of {"label", "values": [[time, value], ...]}. It is no Grafana: places, sizes,
titles, units and stacking are the panels' own, and nothing else.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

COLUMNS = 24
CELL_INCHES = (0.75, 0.42)
COLORS = ("#7EB26D", "#EAB839", "#6ED0E0", "#EF843C", "#E24D42", "#1F78C1", "#BA43A9", "#705DA0", "#508642")
SCALES = {
    "bytes": (1024, ("B", "KiB", "MiB", "GiB", "TiB")),
    "Bps": (1000, ("B/s", "kB/s", "MB/s", "GB/s")),
    "none": (1000, ("", "k", "M")),
    "cps": (1000, ("/s", "k/s", "M/s")),
}


def text(value: float, unit: str) -> str:
    """A value as a person reads it."""
    if unit == "percentunit":
        return f"{value:.0%}" if value >= 0.1 or value == 0 else f"{value:.1%}"
    if unit == "s":
        for factor, name in ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= factor:
                return f"{value / factor:.3g} {name}"
        return "0"
    base, names = SCALES[unit]
    for name in names[:-1]:
        if abs(value) < base:
            return f"{value:.3g} {name}".strip()
        value /= base
    return f"{value:.3g} {names[-1]}".strip()


def draw(dashboard: dict[str, Any], answers: dict[str, list[dict[str, Any]]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = dashboard["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    width, height = COLUMNS * CELL_INCHES[0], rows * CELL_INCHES[1]
    plt.rcParams |= {"font.size": 7, "text.color": "#d8d9da", "axes.labelcolor": "#d8d9da"}
    plt.rcParams |= {"xtick.color": "#8e8e8e", "ytick.color": "#8e8e8e"}
    figure = plt.figure(figsize=(width, height), facecolor="#111217")
    for panel in panels:
        place = panel["gridPos"]
        left, top = place["x"] / COLUMNS, 1 - place["y"] / rows
        if panel["type"] == "row":
            figure.text(left + 0.004, top - 0.7 / rows, panel["title"], weight="bold", size=9)
            continue
        series = answers[str(panel["id"])]
        defaults = panel["fieldConfig"]["defaults"]
        unit = defaults["unit"]
        if panel["type"] == "stat":
            last = series[0]["values"][-1][1] if series else math.nan
            figure.text(left + 0.004, top - 0.7 / rows, panel["title"])
            figure.text(left + 0.004, top - 2.6 / rows, text(last, unit), size=20, color=COLORS[0])
            continue
        inside = [
            left + 0.035,
            top - (place["h"] - 1.9) / rows,
            place["w"] / COLUMNS - 0.045,
            (place["h"] - 3.1) / rows,
        ]
        axes = figure.add_axes((inside[0], inside[1], inside[2], inside[3]), facecolor="#181b1f")
        figure.text(left + 0.004, top - 0.75 / rows, panel["title"])
        start = min((each["values"][0][0] for each in series), default=0.0)
        stacked = defaults["custom"]["stacking"]["mode"] == "normal"
        if stacked:
            times = sorted({time for each in series for time, _ in each["values"]})
            known = [dict(map(tuple, each["values"])) for each in series]
            heights = [[finite(values.get(time, 0.0)) for time in times] for values in known]
            axes.stackplot(
                [t - start for t in times],
                heights,
                colors=COLORS,
                alpha=0.7,
                labels=[e["label"] for e in series],
            )
        for index, each in enumerate(() if stacked else series):
            points = [(time - start, value) for time, value in each["values"] if math.isfinite(value)]
            color = COLORS[index % len(COLORS)]
            axes.plot(
                [p[0] for p in points], [p[1] for p in points], color=color, linewidth=1, label=each["label"]
            )
        _, highest = axes.get_ylim()
        highest = defaults["max"] * 1.05 if "max" in defaults else highest
        if not stacked and all(value == 0 for each in series for _, value in each["values"]):
            highest = 1.0
        axes.set_ylim(bottom=-0.02 * highest, top=highest)  # so that a line of zeros is seen
        axes.yaxis.set_major_formatter(lambda value, _, unit=unit: text(value, unit))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s")
        axes.grid(color="#2c3235", linewidth=0.5)
        for spine in axes.spines.values():
            spine.set_color("#2c3235")
        if series:
            longest = max(len(each["label"]) for each in series) + 4
            axes.legend(
                loc="upper left",
                bbox_to_anchor=(-0.08, -0.16),
                ncols=max(1, min(4, 70 // longest)),
                frameon=False,
                fontsize=6,
                handlelength=1,
                columnspacing=1,
            )
    figure.savefig(out, dpi=80, facecolor=figure.get_facecolor())


def draw_text(text: str, out: Path) -> None:
    """A terminal with this text in it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = text.rstrip().splitlines()
    figure = plt.figure(figsize=(80 * 0.1 + 0.3, len(lines) * 0.22 + 0.3), facecolor="#111217")
    figure.text(
        0.02, 0.97, "\n".join(lines), family="DejaVu Sans Mono", size=11.8, color="#d8d9da", va="top",
        linespacing=1.3,
    )  # fmt: skip
    figure.savefig(out, dpi=100, facecolor=figure.get_facecolor())


def finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


if __name__ == "__main__":
    *sources, out_file = map(Path, sys.argv[1:])
    if len(sources) == 1:
        draw_text(sources[0].read_text(), out_file)
        sys.exit()
    dashboard_file, answers_file = sources
    draw(json.loads(dashboard_file.read_text()), json.loads(answers_file.read_text()), out_file)
