"""What `kvtierctl simulate` draws: hit rate against capacity, a line for each policy, as a picture or in a
page.

matplotlib draws it (the extra `plots`), and is imported only here.
"""

import html
import importlib.util
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtierd.ctl.simulation import Results, about, heads, rows
from kvtierd.simulate.results import OPTIMUM, POLICIES
from kvtierd.simulate.traces import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")
WIDTH_IN, HEIGHT_IN, DOTS_PER_INCH = 8.0, 4.8, 144
CANNOT_DRAW = "--plot and --html need matplotlib: install it where kvtierctl is (the extra `plots`)"


def can_draw() -> bool:
    """Whether matplotlib is installed. The functions below need it."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, trace: Trace, results: Results) -> None:
    """Writes a picture; its suffix says of which kind. Raises OSError."""
    _figure(trace, results).savefig(path, dpi=DOTS_PER_INCH)


def write_page(path: Path, trace: Trace, results: Results, rate: float | None) -> None:
    """Writes a page of HTML that needs nothing else: the picture, and all figures. Raises OSError."""
    picture = io.StringIO()
    _figure(trace, results).savefig(picture, format="svg")
    path.write_text(_page(trace, results, picture.getvalue(), rate))


def knee(points: Sequence[tuple[float, float]]) -> int | None:
    """Which of these points (capacity, rate), in ascending order of capacity, lies highest above the straight
    line from the first to the last, with capacity on a logarithmic scale: beyond it, more room gains less.
    None if none lies above it."""
    if len(points) < 3:
        return None
    (first_x, first_y), (last_x, last_y) = ((math.log(x), y) for x, y in (points[0], points[-1]))
    if last_x <= first_x or last_y <= first_y:
        return None
    above = [
        (y - first_y) / (last_y - first_y) - (math.log(x) - first_x) / (last_x - first_x) for x, y in points
    ]
    best = max(range(len(points)), key=above.__getitem__)
    return best if above[best] > 0.02 else None


def _figure(trace: Trace, results: Results) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, PercentFormatter

    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    axes = figure.add_subplot()
    for name, by_size in results.items():
        points = sorted((each.capacity_blocks, each.prefix_token_hit_rate) for each in by_size.values())
        sizes, rates = [size for size, _ in points], [rate for _, rate in points]
        style: dict[str, Any] = {"color": "0.5", "linestyle": "--"} if name == OPTIMUM else {}
        [line] = axes.plot(sizes, rates, marker="o", markersize=3.5, label=name, **style)
        at = None if name == OPTIMUM else knee([(float(size), rate) for size, rate in points])
        if at is not None:
            axes.plot(
                sizes[at], rates[at], marker="o", markersize=10, fillstyle="none", color=line.get_color()
            )
    axes.set_xscale("log")
    written = {each.capacity_blocks: size for by_size in results.values() for size, each in by_size.items()}
    axes.set_xticks(list(written), labels=list(written.values()), rotation=45 if len(written) > 8 else 0)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity")
    axes.set_ylabel("tokens hit")
    axes.set_title(f"{trace.name}\n{about(trace)}", fontsize="medium")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(title="a circle: more gains less", fontsize="small", title_fontsize="small")
    return figure


def _page(trace: Trace, results: Results, picture: str, rate: float | None) -> str:
    policies = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(POLICIES[name])}</dd>" for name in results
    )
    return _PAGE.format(
        name=html.escape(trace.name),
        about=html.escape(about(trace)),
        picture=picture[picture.index("<svg") :],
        head=_row("th", heads(results, rate)),
        rows="\n".join(_row("td", row) for row in rows(results, rate)),
        policies=policies,
    )


def _row(kind: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{name}: what other sizes would have hit</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }}
svg {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: 0.15em 0.8em; text-align: right; border-bottom: 1px solid #ddd; }}
td:first-child, th:first-child, td:nth-child(2), th:nth-child(2) {{ text-align: left; }}
dt {{ font-weight: bold; }}
</style>
</head>
<body>
<h1>What other sizes would have hit</h1>
<p>{name}: {about}.</p>
{picture}
<p>A hit is a block that was there when its request arrived, with all blocks before it. A circle marks the
capacity from which on more gains less.</p>
<table>
<thead>{head}</thead>
<tbody>
{rows}
</tbody>
</table>
<h2>Policies</h2>
<dl>{policies}</dl>
</body>
</html>
"""
