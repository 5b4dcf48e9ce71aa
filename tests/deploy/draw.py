"""Draws the dashboard's panels with matplotlib, from its JSON and the answers of a real Prometheus: a picture
for each of its rows.

    uv run --with matplotlib python tests/deploy/draw.py deploy/grafana/kvtier.json ANSWERS.json FOLDER

    uv run --with matplotlib python tests/deploy/draw.py TEXT OUT.png

ANSWERS: `panels`: by panel id, a list of {"label", "values": [[time, value], ...]}; `window`: when it begins
and ends; `events`: a list of [time, what]. It is no Grafana: places, sizes, titles, units and stacking are
the panels' own, and nothing else.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

COLUMNS = 24
CELL_INCHES = (10 / COLUMNS, 0.4)
"""At `DPI` a picture is 1,000 pixels wide: a page shows it as it is, and letters have the size of its own."""
DPI = 100
PLAIN, LARGE, HUGE = 8.5, 10, 20
"""Points."""
MARKS_S = (10, 30, 60, 120, 300, 600, 1_800, 3_600, 7_200, 21_600, 86_400)
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


def draw(dashboard: dict[str, Any], answers: dict[str, Any], folder: Path) -> None:
    """Writes FOLDER/dashboard-ROW.png for every row of the dashboard."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"font.size": PLAIN, "text.color": "#d8d9da", "axes.labelcolor": "#d8d9da"}
    plt.rcParams |= {"xtick.color": "#a0a0a0", "ytick.color": "#a0a0a0"}
    rows: list[list[dict[str, Any]]] = []
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            rows.append([])
        rows[-1].append(panel)
    for head, *panels in rows:
        name = head["title"].lower().replace(" ", "-")
        draw_row(plt, head["title"], panels, answers, folder / f"dashboard-{name}.png")


def draw_row(plt: Any, title: str, panels: list[dict[str, Any]], answers: dict[str, Any], out: Path) -> None:
    first = min(panel["gridPos"]["y"] for panel in panels)
    cells = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) - first + 1
    figure = plt.figure(figsize=(COLUMNS * CELL_INCHES[0], cells * CELL_INCHES[1]), facecolor="#111217")
    figure.text(0.006, 1 - 0.7 / cells, title, weight="bold", size=LARGE)
    for panel in panels:
        place = panel["gridPos"]
        left, top = place["x"] / COLUMNS, 1 - (place["y"] - first + 1) / cells
        series = answers["panels"][str(panel["id"])]
        figure.text(
            left + 0.006, top - 0.7 / cells, panel["title"], size=PLAIN + 0.5 * (panel["type"] != "stat")
        )
        if panel["type"] == "stat":
            last = series[0]["values"][-1][1] if series else math.nan
            shown = text(last, panel["fieldConfig"]["defaults"]["unit"])
            figure.text(left + 0.006, top - 2.6 / cells, shown, size=HUGE, color=COLORS[0])
            continue
        box = (left + 0.062, top - 4.9 / cells, place["w"] / COLUMNS - 0.075, 3.8 / cells)
        draw_series(figure.add_axes(box, facecolor="#181b1f"), panel, series, answers)
    figure.savefig(out, dpi=DPI, facecolor=figure.get_facecolor())
    plt.close(figure)


def step_of(highest: float, unit: str) -> float:
    """Between two marks of an axis: a round number in its unit, and no more than five of them."""
    if unit == "bytes":
        steps = [2.0**power for power in range(50)]
    else:
        steps = [10.0**power * times for power in range(-7, 14) for times in (1, 2, 2.5, 5)]
    if unit == "s":
        steps = [step for step in steps if step < 60] + list(MARKS_S[2:])
    return next(step for step in steps if highest / step <= 5)


def draw_series(
    axes: Any, panel: dict[str, Any], series: list[dict[str, Any]], answers: dict[str, Any]
) -> None:
    from matplotlib.ticker import MultipleLocator

    defaults = panel["fieldConfig"]["defaults"]
    unit = defaults["unit"]
    for spine in axes.spines.values():
        spine.set_color("#2c3235")
    if not series:
        axes.text(0.5, 0.5, "no data", ha="center", va="center", color="#a0a0a0")
        axes.set_axis_off()
        return
    start, end = answers["window"]
    stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    if stacked:
        times = sorted({time for each in series for time, _ in each["values"]})
        known = [dict(map(tuple, each["values"])) for each in series]
        heights = [[finite(values.get(time, 0.0)) for time in times] for values in known]
        labels = [each["label"] for each in series]
        axes.stackplot([t - start for t in times], heights, colors=COLORS, alpha=0.7, labels=labels)
    for index, each in enumerate(() if stacked else series):
        points = [(time - start, value) for time, value in each["values"]]  # a gap is a gap
        color = COLORS[index % len(COLORS)]
        axes.plot(*zip(*points, strict=True), color=color, linewidth=1.4, label=each["label"])
    _, highest = axes.get_ylim()
    highest = defaults["max"] * 1.05 if "max" in defaults else highest
    if not stacked and all(value == 0 for each in series for _, value in each["values"]):
        highest = 1.0
    axes.set_ylim(bottom=-0.02 * highest, top=highest)  # so that a line of zeros is seen
    axes.set_xlim(0, end - start)
    axes.yaxis.set_major_locator(MultipleLocator(step_of(highest, unit)))
    axes.yaxis.set_major_formatter(lambda value, _: text(value, unit))
    axes.xaxis.set_major_locator(MultipleLocator(next(m for m in MARKS_S if (end - start) / m <= 5)))
    axes.xaxis.set_major_formatter(lambda value, _: text(value, "s"))
    axes.tick_params(length=2)
    axes.grid(color="#2c3235", linewidth=0.5)
    for time, what in answers["events"]:
        if start < time < end:
            axes.axvline(time - start, color="#d8d9da", linewidth=0.8, linestyle=":")
            axes.annotate(what, (time - start, highest), (2, -9), textcoords="offset points", size=PLAIN)
    # Long legends, of disks and sizes, have a column each.
    longest = max(len(each["label"]) for each in series) + 4
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.2, -0.1),
        ncols=max(1, min(4, 52 // longest)),
        frameon=False,
        fontsize=PLAIN - 0.5,
        handlelength=1,
        columnspacing=1,
        labelspacing=0.2,
    )


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
    out_file.mkdir(parents=True, exist_ok=True)
    draw(json.loads(dashboard_file.read_text()), json.loads(answers_file.read_text()), out_file)
