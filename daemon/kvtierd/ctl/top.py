"""The page that `kvtierctl top` shows: what happens now, and its history."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.v1 import admin_pb2
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvtierd.config.settings import human_size
from kvtierd.ctl.lists import ENGINE, WORKER, copy_workers
from kvtierd.ctl.terminal import Graph, state, table
from kvtierd.ctl.text import duration, shortened, sizes_line, usable_bytes

WIDTH = 80
"""The width of a page that does not go to a terminal."""
WIDE = 150
"""The width from which all tiles stand in one row, and tables beside each other."""
HEIGHT = 24
TALL = 40
"""The height from which charts have four lines instead of two."""
ENGINES_MAX = 8
HISTORY_MAX = 500
REASONS = {
    "absent": "not there",
    "pending": "on their way",
    "beyond": "behind the first miss",
    "recompute": "faster to compute",
    "lease_limit": "more than can be leased",
    "draining": "daemon drains",
    "not_ready": "ranks missing",
}
"""Why hashes were no hits: the reasons of `kvtier_lookup_misses_total`, in words."""
ENGINE_NUMBERS_WIDTH, WORKER_NUMBERS_WIDTH, DISK_NUMBERS_WIDTH = 46, 50, 62
"""The width of each table without its columns of names, which get the rest."""


@dataclass(frozen=True, slots=True)
class Period:
    """What happened between two statuses of one daemon."""

    status: admin_pb2.StatusResponse
    before: admin_pb2.StatusResponse
    """The status at the beginning; an empty one if the period began with the daemon."""
    passed_s: float

    def rate(self, counter: str) -> float:
        """How much a counter has grown per second."""
        grown = int(getattr(self.status.counters, counter)) - int(getattr(self.before.counters, counter))
        return max(0, grown) / self.passed_s

    def per_second(self, counter: str, unit: str = "") -> str:
        """Writes the rate of a counter: 12 blocks/s."""
        return f"{number(self.rate(counter))}{unit}/s"

    @property
    def hit_rate(self) -> float | None:
        """The share of hashes that were hits; None if nothing was looked up."""
        asked = self.rate("lookup_hashes")
        return self.rate("lookup_hits") / asked if asked else None

    @property
    def pool_share(self) -> float:
        """The share of the pool that holds blocks."""
        pool = self.status.pool
        return pool.used_bytes / usable_bytes(pool) if pool.capacity_bytes else 0.0


class Top:
    """Takes one status after another, and makes a page of them."""

    def __init__(self, interval_s: float) -> None:
        self._over = f"every {interval_s:g} s"
        self._history: deque[Period] = deque(maxlen=HISTORY_MAX)
        self._latest: tuple[admin_pb2.StatusResponse, float] | None = None
        self._shown = Period(admin_pb2.StatusResponse(), admin_pb2.StatusResponse(), 1.0)

    def add(self, status: admin_pb2.StatusResponse, now_s: float) -> None:
        """Takes a status that was made at `now_s`, in monotonic seconds. The history begins anew with another
        daemon, whose counters begin anew as well."""
        if self._latest is not None and self._latest[0].boot_nonce == status.boot_nonce:
            before, before_s = self._latest
            self._shown = Period(status, before, max(1e-3, now_s - before_s))
            self._history.append(self._shown)
        else:
            self._history.clear()
            self._shown = Period(status, admin_pb2.StatusResponse(), max(1e-3, status.uptime_s))
        self._latest = status, now_s

    def page(self, width: int = WIDTH, height: int = HEIGHT) -> RenderableType:
        """The page for a terminal of this size. Until there is a history, it shows averages since the daemon
        started."""
        period, status, wide = self._shown, self._shown.status, width >= WIDE
        over = self._over if self._history else "since its start"
        parts: list[RenderableType] = [
            Text.assemble(
                (f"kvtierd {status.version}", "bold"), "  ", state(status.state),
                f"  up {duration(status.uptime_s)}  ({over})",
            ),
            self._tiles(width, 4 if height >= TALL else 2),
            *_lines(period),
            Text(""),
        ]  # fmt: skip
        room = width // 2 - 2 if wide else width
        columns = Table.grid(expand=True, padding=(0, 2, 0, 0))
        columns.add_column(ratio=1)
        engines, others = _engines(status, room), _workers_and_disks(period, room)
        if wide:
            columns.add_column(ratio=1)
            columns.add_row(engines, others)
        else:
            columns.add_row(Group(engines, Text(""), others))
        return Group(*parts, columns)

    def _tiles(self, width: int, chart_rows: int) -> Table:
        in_row = len(TILES) if width >= WIDE else max(1, width // 26)
        grid = Table.grid(expand=True)
        for _ in range(in_row):
            grid.add_column(ratio=1)
        tiles = [self._tile(each, width // in_row - 4, chart_rows) for each in TILES]
        for first in range(0, len(tiles), in_row):
            grid.add_row(*tiles[first : first + in_row])
        return grid

    def _tile(self, tile: "Tile", chart_width: int, chart_rows: int) -> Panel:
        now = tile.value(self._shown)
        values = [tile.value(each) for each in self._history][-chart_width:]
        most = max((value for value in values if value is not None), default=None)
        return Panel(
            Group(
                Graph(values, chart_rows, tile.style, tile.most),
                *(Text(line, no_wrap=True, overflow="ellipsis") for line in tile.details(self._shown)),
            ),
            title=Text.assemble(
                (tile.name, tile.style), " ", ("-" if now is None else tile.text(now), "bold")
            ),
            title_align="left",
            subtitle=None if most is None else Text(f"max {tile.text(most)}", "dim"),
            subtitle_align="right",
            border_style="bright_black",
        )


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure of a daemon: its name, its value now, its history, and two lines about it."""

    name: str
    style: str
    value: Callable[[Period], float | None]
    text: Callable[[float], str]
    details: Callable[[Period], tuple[str, str]]
    most: float | None = None
    """The value that has the full height of the chart; None: the largest that is shown."""


def number(value: float) -> str:
    """Writes a number in few characters: 0, <0.1, 0.3, 12, 45.6k, 2.1M."""
    if 0 < value < 0.1:
        return "<0.1"
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= factor:
            return f"{value / (1e3 if unit == 'k' else factor):.3g}{unit}"
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def per_second(value: float) -> str:
    """Writes a rate: 12/s."""
    return f"{number(value)}/s"


def bytes_per_second(value: float) -> str:
    """Writes a rate of bytes: 3 GiB/s."""
    return f"{human_size(value)}/s"


TILES = (
    Tile(
        "Hits", "green", lambda period: period.hit_rate, "{:.0%}".format,
        lambda period: (
            period.per_second("lookup_hashes", " hashes"), period.per_second("lookups", " lookups")
        ),
        most=1.0,
    ),
    Tile(
        "Loaded", "cyan", lambda period: period.rate("loaded_bytes"), bytes_per_second,
        lambda period: (
            period.per_second("loaded_blocks", " blocks"),
            f"{period.per_second('promoted_blocks')} from disks" if period.status.disks else "no disks",
        ),
    ),
    Tile(
        "Stored", "blue", lambda period: period.rate("stored_bytes"), bytes_per_second,
        lambda period: (
            period.per_second("stored_blocks", " blocks"),
            f"{period.per_second('deduplicated_blocks')} there already",
        ),
    ),
    Tile(
        "Pool", "magenta", lambda period: period.pool_share, "{:.0%}".format,
        lambda period: (
            f"{human_size(period.status.pool.used_bytes)} of {human_size(usable_bytes(period.status.pool))}",
            f"{period.status.blocks.ready:,} blocks",
        ),
        most=1.0,
    ),
    Tile(
        "Evicted", "yellow", lambda period: period.rate("evicted_blocks"), per_second,
        lambda period: (
            f"{period.status.counters.evicted_blocks:,} since the start",
            f"{period.per_second('evicted_unwritten_blocks')} not on a disk" if period.status.disks else "",
        ),
    ),
    Tile(
        "Transfers", "white", lambda period: period.status.transfers_active, "{:,.0f}".format,
        lambda period: (
            f"{per_second(period.rate('failed_transfers') + period.rate('cancelled_transfers'))} fail",
            f"{period.status.leases:,} leases, {period.status.leased_blocks:,} blocks",
        ),
    ),
)  # fmt: skip


def _lines(period: Period) -> list[Text]:
    """Why lookups missed, and what somebody should look at."""
    missed = {reason: period.rate(f"missed_{reason}") for reason in REASONS}
    most_first = sorted((each for each in missed.items() if each[1]), key=lambda each: -each[1])
    reasons = "  ".join(f"{per_second(rate)} {REASONS[reason]}" for reason, rate in most_first)
    lines = [Text.assemble(("Missed ", "bold"), reasons or "-")]
    if period.status.HasField("shadow"):
        lines.append(Text.assemble(("Pool sizes ", "bold"), sizes_line(period.status.shadow)))
    counters, refused = period.status.counters, period.rate("throttled_blocks")
    if refused:
        text = f"{per_second(refused)} blocks were not stored, because everything in the pool is held"
        lines.append(Text.assemble(("NO ROOM ", "bold yellow"), text))
    if counters.integrity_failures:
        text = f"{counters.integrity_failures:,} blocks failed their check and were not served"
        lines.append(Text.assemble(("CORRUPT ", "bold red"), text))
    if counters.audit_mismatches:
        text = f"{counters.audit_mismatches:,} found blocks that their engine does not compute"
        lines.append(Text.assemble(("AUDITS ", "bold red"), text))
    return lines


def _engines(status: admin_pb2.StatusResponse, width: int) -> RenderableType:
    if not status.instances:
        return Text("no engine is attached")
    largest = sorted(status.instances, key=lambda each: -each.mapped_bytes)[:ENGINES_MAX]
    names = max(20, width - ENGINE_NUMBERS_WIDTH)
    columns: dict[str, Callable[[admin_pb2.InstanceStatus], RenderableType]] = {
        "ENGINE": lambda each: shortened(each.instance, names - names // 3),
        "STATE": ENGINE["STATE"],
        "MODEL": lambda each: shortened(each.model or "-", names // 3),
        **{head: ENGINE[head] for head in ("MAPPED", "LEASED", "TRANSFERS")},
    }
    rest = len(status.instances) - len(largest)
    made = table(columns, largest)
    return Group(made, Text(f"and {rest} more")) if rest else made


def _workers_and_disks(period: Period, width: int) -> Group:
    name_width = max(10, width - WORKER_NUMBERS_WIDTH)
    columns: dict[str, Callable[[admin_pb2.WorkerStatus], RenderableType]] = {
        "WORKER": lambda each: shortened(each.device, name_width),
        **{head: WORKER[head] for head in ("STATE", "PARTS", "MAPPED", "REGISTERED", "REPLACED")},
    }
    workers, parts = copy_workers(period.status), list[RenderableType]()
    if workers:
        parts += [table(columns, workers), Text("")]
    if period.status.disks:
        parts.append(_disks(period, max(10, width - DISK_NUMBERS_WIDTH)))
    return Group(*parts)


def _disks(period: Period, name_width: int) -> Table:
    """Disks, with what each has read and written in the period."""
    earlier = {disk.path: disk for disk in period.before.disks}

    def speed(disk: admin_pb2.DiskStatus, counter: str) -> str:
        before = getattr(earlier[disk.path], counter) if disk.path in earlier else 0
        return bytes_per_second(max(0, getattr(disk, counter) - before) / period.passed_s)

    columns: dict[str, Callable[[admin_pb2.DiskStatus], RenderableType]] = {
        "DISK": lambda disk: shortened(disk.path, name_width),
        "STATE": lambda disk: state(disk.state),
        "FULL": lambda disk: f"{disk.used_bytes / disk.capacity_bytes if disk.capacity_bytes else 0:.0%}",
        "READ": lambda disk: speed(disk, "read_bytes"),
        "WRITTEN": lambda disk: speed(disk, "written_bytes"),
        "QUEUED": lambda disk: human_size(disk.reading_bytes + disk.writing_bytes),
        "ERRORS": lambda disk: f"{disk.errors:,}",
    }
    return table(columns, period.status.disks)
