"""Draws docs/figures/first_token.svg from the numbers in docs/figures/first_token.json: `make figures`.

The numbers are copied from docs/evidence.md, which says how they were measured; the JSON file repeats the
conditions. The drawing carries a digest of that file, and a test compares the two. This needs matplotlib,
which only `make figures` installs.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
DATA = FIGURES / "first_token.json"
DRAWING = FIGURES / "first_token.svg"
COLORS = {
    "no cache": "#9aa5b1",
    "vLLM's own cache": "#2563a8",
    "kvtier": "#d9730d",
    "LMCache's server": "#6b46c1",
}


def digest(data: bytes) -> str:
    """Returns the digest by which the drawing names the file that it was made of."""
    return f"sha256:{hashlib.sha256(data).hexdigest()[:16]}"


def draw(data: bytes, out: Path) -> None:
    """Draws one panel for each trace, with one bar for each cache. The same data give the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    content = json.loads(data)
    pyplot.rcParams |= {"svg.hashsalt": "kvtier", "font.size": 10, "font.family": "DejaVu Sans"}
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
    figure.savefig(out, metadata={"Date": None, "Description": f"{DATA.name} {digest(data)}"})


if __name__ == "__main__":
    draw(DATA.read_bytes(), DRAWING)
