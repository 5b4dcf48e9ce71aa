"""Plots as plain SVG: lines over a logarithmic axis, and bars. Text in `currentColor`, so that they read on
any page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 40, 56
COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280", "#718096", "#d69e2e", "#319795")
TICKS = 5

Points = Sequence[tuple[float, float]]


def lines(
    title: str,
    x_name: str,
    y_name: str,
    series: Mapping[str, Points],
    *,
    levels: Mapping[str, float] | None = None,
    note: str = "",
) -> str:
    """One line per series over a logarithmic x axis; `levels` are dashed horizontal lines. At least one
    point."""
    levels = levels or {}
    xs = sorted({x for points in series.values() for x, _ in points})
    top = _nice(max([y for points in series.values() for _, y in points] + list(levels.values())))
    low, high = math.log2(xs[0]), math.log2(xs[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - low) / (high - low) if high > low else 0.5
        return LEFT + across * (WIDTH - LEFT - RIGHT), _height(y, top)

    parts = _frame(title, x_name, y_name, top, note)
    for x in xs:
        parts.append(_text(place(x, 0)[0], HEIGHT - BOTTOM + 16, _short(x), "middle", 10))
    for index, (name, points) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in sorted(points)))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
            for x, y in (place(*p) for p in points)
        ]
        parts.append(_key(index, name, colour))
    for index, (name, level) in enumerate(levels.items()):
        y = _height(level, top)
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="currentColor" '
            f'stroke-dasharray="5 4" opacity="0.6"/>'
        )
        parts.append(_text(LEFT + 4 + 140 * index, y - 3, name, "start", 9))
    return _svg(parts)


def bars(
    title: str, y_name: str, groups: Mapping[str, Mapping[str, float]], *, level: float, note: str = ""
) -> str:
    """Groups of bars side by side; `level` is a dashed line. At least one bar."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    top = _nice(max([value for group in groups.values() for value in group.values()] + [level]))
    parts = _frame(title, "", y_name, top, note)
    room = (WIDTH - LEFT - RIGHT) / len(groups)
    thick = room * 0.8 / len(names)
    for place, (label, group) in enumerate(groups.items()):
        for index, name in enumerate(names):
            if name in group:
                x, y = LEFT + place * room + room * 0.1 + index * thick, _height(group[name], top)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{thick * 0.92:.1f}" '
                    f'height="{HEIGHT - BOTTOM - y:.1f}" fill="{COLOURS[index % len(COLOURS)]}"/>'
                )
        for row, line in enumerate(label.split("\n")):
            parts.append(
                _text(LEFT + (place + 0.5) * room, HEIGHT - BOTTOM + 14 + 11 * row, line, "middle", 9)
            )
    y = _height(level, top)
    parts.append(
        f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="currentColor" '
        f'stroke-dasharray="5 4" opacity="0.6"/>'
    )
    parts += [_key(index, name, COLOURS[index % len(COLOURS)]) for index, name in enumerate(names)]
    return _svg(parts)


def _frame(title: str, x_name: str, y_name: str, top: float, note: str) -> list[str]:
    parts = [_text(LEFT, 20, title, "start", 14), _text(14, TOP - 8, y_name, "start", 11)]
    if note:
        parts.append(_text(WIDTH - 8, 20, note, "end", 11))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_name, "middle", 11))
    for tick in range(TICKS + 1):
        value = top * tick / TICKS
        y = _height(value, top)
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="currentColor" '
            f'opacity="0.15"/>'
        )
        parts.append(_text(LEFT - 8, y + 4, f"{value:g}", "end", 10))
    return parts


def _height(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - min(1.0, value / top) * (HEIGHT - TOP - BOTTOM)


def _nice(value: float) -> float:
    """The next 1, 2, 2.5 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value)


def _short(n: float) -> str:
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if n >= size:
            return f"{n / size:g}{unit}"
    return f"{n:g}"


def _key(index: int, name: str, colour: str) -> str:
    y = TOP + 16 * index
    box = f'<rect x="{WIDTH - RIGHT + 14}" y="{y - 8}" width="10" height="10" fill="{colour}"/>'
    return box + _text(WIDTH - RIGHT + 30, y + 1, name, "start", 10)


def _text(x: float, y: float, text: str, anchor: str, size: int) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="currentColor">'
        f"{escape(text)}</text>"
    )


def _svg(parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, *parts, "</svg>", ""])
