"""How `kvtierctl` prints for people: in colour and within the width of a terminal, or one plain line for each
fact if the output goes to a file or another program."""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

import click
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.control import Control
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from kvtierd.cli import interrupts

Item = TypeVar("Item")
LABEL_WIDTH = 10
FILE_WIDTH = 100_000
"""The width of a page that does not go to a terminal, so that no line is broken or cut."""
BARS = " ▁▂▃▄▅▆▇█"
"""The characters of a bar, from no height to the full height, in eighths."""
STATE_STYLES = {
    "serving": "green", "ready": "green", "live": "green",
    "draining": "yellow", "starting": "yellow", "ending": "yellow", "incomplete": "yellow",
    "refusing": "yellow",
    "off": "red", "failing": "red", "lost": "red", "quarantined": "red",
}  # fmt: skip
_ENTER = f"{Control.alt_screen(True)}{Control.show_cursor(False)}"
_LEAVE = f"{Control.alt_screen(False)}{Control.show_cursor(True)}"


def console(width: int | None = None) -> Console:
    """A console on standard output that prints strings as they are, so that brackets in names are not
    markup."""
    return Console(highlight=False, markup=False, emoji=False, width=width)


def show(page: RenderableType) -> None:
    """Prints a page. NO_COLOR and the other conventions that rich knows are followed."""
    terminal = console()
    if terminal.is_terminal:
        terminal.print(page)
    else:
        click.echo(plain(page))


def plain(page: RenderableType, width: int = FILE_WIDTH) -> str:
    """A page as text, without colours, without spaces at the ends of lines, and without a last newline."""
    printer = Console(
        highlight=False, markup=False, emoji=False, width=width, color_system=None, force_terminal=False
    )
    with printer.capture() as captured:
        printer.print(page)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def state(name: str) -> Text:
    """A state in the colour of how well it is."""
    return Text(name, STATE_STYLES.get(name, ""))


def facts(title: RenderableType, rows: Iterable[tuple[str, RenderableType]]) -> Group:
    """A title, and below it facts with a label each. A label in capitals is an alarm."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(min_width=LABEL_WIDTH)
    grid.add_column()
    for label, value in rows:
        style = "bold red" if label.isupper() else ""
        grid.add_row(Text(label, style or "dim"), value, style=style)
    return Group(title, indented(grid))


def table(columns: Mapping[str, Callable[[Item], RenderableType]], items: Iterable[Item]) -> Table:
    """A table with a line for each item: for each head, `columns` has what to show of an item. Columns of
    numbers are aligned to the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    rows = [[show(item) for show in columns.values()] for item in items]
    for number, head in enumerate(columns):
        numeric = rows and all(_is_number(row[number]) for row in rows)
        made.add_column(head, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def _is_number(cell: RenderableType) -> bool:
    return isinstance(cell, str) and (cell[:1].isdigit() or cell == "-")


def indented(page: RenderableType) -> Padding:
    """The page, two columns to the right."""
    return Padding(page, (0, 0, 0, 2), expand=False)


def bar(share: float, width: int = 20) -> Text:
    """How much of something is used, as a bar."""
    full = min(width, round(share * width))
    return Text.assemble(("█" * full, "cyan"), ("░" * (width - full), "dim"))


@dataclass(frozen=True, slots=True)
class Graph:
    """The history of a value as a chart that is as wide as its place, with the latest value on the right.

    `most` is the value that has the full height; None for the largest that is shown. A value of None is a
    gap.
    """

    values: Sequence[float | None]
    rows: int
    style: str
    most: float | None = None

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        shown = list(self.values)[-options.max_width :]
        most = self.most or max((value for value in shown if value is not None), default=0) or 1
        eighths = [_eighths(value, most, 8 * self.rows) for value in shown]
        gap = " " * (options.max_width - len(shown))
        for row in reversed(range(self.rows)):
            line = "".join(BARS[min(8, max(0, each - 8 * row))] for each in eighths)
            yield Segment(gap + line, Style.parse(self.style))
            yield Segment.line()


def _eighths(value: float | None, most: float, full: int) -> int:
    """The height of a column. A value above zero shows at least one eighth of a character."""
    return min(full, max(1, round(value / most * full))) if value else 0


@contextmanager
def whole_screen(terminal: Console) -> Iterator[None]:
    """In this context, `terminal.update_screen(page)` replaces the page that is shown.

    Afterwards the terminal shows what it showed before, even if a signal ends or stops the process.
    """

    def suspend(number: int, _: FrameType | None) -> None:
        _write(_LEAVE)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # the process stands still here until it is continued
        signal.signal(number, suspend)
        _write(_ENTER)

    interrupts.instead("", 0, _LEAVE)
    signal.signal(signal.SIGTSTP, suspend)
    try:
        with terminal.screen(hide_cursor=True):
            yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def _write(text: str) -> None:
    os.write(sys.stdout.fileno(), text.encode())
