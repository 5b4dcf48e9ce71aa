"""Makes the picture of `kvtierctl top` in docs/ from a running daemon, in a terminal of 80 columns.

    python -m tools.draw_top SOCKET docs/top.png

It watches the daemon for 80 seconds; something should use the daemon meanwhile.
"""

import argparse
import io
import subprocess
import sys
import time
from pathlib import Path

import grpc
from kvtier.v1 import admin_pb2, admin_pb2_grpc
from kvtierd.ctl.top import WIDTH, Top
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME

INTERVAL_S = 2.0
FRAMES = 40
ZOOM = 0.85
UV = Path(sys.prefix) / "bin" / "uv"
TO_PNG = """
import sys, pathlib, resvg_py
svg, png = map(pathlib.Path, sys.argv[1:3])
family = "DejaVu Sans Mono"
png.write_bytes(resvg_py.svg_to_bytes(
    svg_string=svg.read_text(), zoom=float(sys.argv[3]), font_family=family, monospace_family=family
))
"""


def watch(socket: Path) -> Top:
    """Returns the page of `kvtierctl top` with a history."""
    top = Top(INTERVAL_S)
    with grpc.insecure_channel(f"unix:{socket.absolute()}") as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        for _ in range(FRAMES):
            top.add(admin.Status(admin_pb2.StatusRequest(), timeout=5), time.monotonic())
            time.sleep(INTERVAL_S)
    return top


def draw(top: Top, out: Path) -> None:
    """Writes the page to `out`, a PNG, by way of an SVG."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), highlight=False, markup=False, force_terminal=True
    )
    console.print(top.page())
    svg = out.with_suffix(".svg")
    console.save_svg(str(svg), title="kvtierctl top", theme=SVG_EXPORT_THEME)
    command = [str(UV), "run", "--quiet", "--no-project", "--isolated", "--python", sys.executable]
    command += ["--with", "resvg-py", "python", "-c", TO_PNG, str(svg), str(out), str(ZOOM)]
    subprocess.run(command, check=True, timeout=300)
    svg.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(prog="draw_top", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("socket", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    draw(watch(arguments.socket), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
