"""The page of `kvtierctl top`: what happened between two statuses, the history, at 80 and at 200 columns."""

import asyncio
import copy

import pytest
from kvtier.v1 import admin_pb2
from kvtierd.ctl.terminal import Graph, plain
from kvtierd.ctl.text import shortened
from kvtierd.ctl.top import WIDTH, Top, number
from kvtierd.rpc.authority import Viewer
from kvtierd.rpc.status import AboutDaemon, status_response

from tests.unit.operation.snapshots import busy_snapshot


@pytest.fixture
def status() -> admin_pb2.StatusResponse:
    about = AboutDaemon("1.2", 4242, "/run/k.sock", "http://127.0.0.1:9470/metrics")
    return asyncio.run(status_response(about, busy_snapshot(), Viewer("a test", None)))


def later(status: admin_pb2.StatusResponse, **grown: int) -> admin_pb2.StatusResponse:
    """The next status."""
    after = copy.deepcopy(status)
    for name, by in grown.items():
        setattr(after.counters, name, getattr(after.counters, name) + by)
    after.disks[0].read_bytes += 4 << 20
    return after


def shown(*statuses: admin_pb2.StatusResponse, width: int = WIDTH, height: int = 24) -> str:
    """The page after these statuses, which are two seconds apart."""
    top = Top(2)
    for number_of_it, each in enumerate(statuses):
        top.add(each, 10.0 + 2 * number_of_it)
    text = plain(top.page(width, height), width)
    assert max(map(len, text.splitlines())) <= width
    return text


BUSY = {
    "lookups": 20,
    "lookup_hashes": 2000,
    "lookup_hits": 1500,
    "missed_absent": 20,
    "missed_beyond": 480,
    "stored_blocks": 100,
    "stored_bytes": 64 << 20,
    "loaded_bytes": 6 << 30,
    "evicted_blocks": 7,
    "throttled_blocks": 6,
}


@pytest.mark.parametrize("width", [80, 120, 200])
def test_rates_are_of_the_time_between_two_statuses(status: admin_pb2.StatusResponse, width: int) -> None:
    text = shown(status, later(status, **BUSY), width=width)
    for part in (
        "kvtierd 1.2  serving  up 1 h 2 min  (every 2 s)",
        "Hits 75% ",
        "1000 hashes/s",
        "10 lookups/s",
        "Missed 240/s behind the first miss  10/s not there\n",
        "Pool sizes half 12.5%, now 25.0%, twice 37.5% by a sample; hit 26.2%\n",
        "NO ROOM 3.0/s blocks were not stored",
        "Stored 32 MiB/s",
        "50 blocks/s",
        "Loaded 3 GiB/s",
        "Evicted 3.5/s",
        "Pool 50%",
        "8 MiB of 16 MiB",
        "Transfers 4",
        "2 leases, 17 blocks",
        "2 MiB/s",
        "CORRUPT 51 blocks failed their check",
        "engine-0",
        "failing",
    ):
        assert part in text, text


def test_the_first_page_is_of_all_the_time_since_the_start(status: admin_pb2.StatusResponse) -> None:
    text = shown(status)
    assert "(since its start)" in text
    assert "Hits 25%" in text
    assert "max" not in text, "there is no history yet"


def test_of_other_sizes_it_says_nothing_before_enough_was_seen(status: admin_pb2.StatusResponse) -> None:
    status.shadow.known = False
    assert "Pool sizes not known yet\n" in shown(status)
    status.ClearField("shadow")
    assert "Pool sizes" not in shown(status), "a daemon of an earlier version"


def test_after_a_restart_it_begins_anew(status: admin_pb2.StatusResponse) -> None:
    now = later(status)
    now.boot_nonce = 5
    now.counters.lookups = 1
    assert "(since its start)" in shown(status, later(status), now)


def test_every_tile_has_the_history_of_its_figure(status: admin_pb2.StatusResponse) -> None:
    half = later(status, loaded_bytes=8 << 20)
    full = later(half, loaded_bytes=16 << 20)
    lines = shown(status, half, full, later(full)).splitlines()
    top, upper, lower = (line[27:54] for line in lines[1:4])
    assert top.startswith("╭─ Loaded 0 B/s")
    assert upper == f"│ {' ' * 21}█  │"
    assert lower == f"│ {' ' * 20}██  │"
    assert "max 8 MiB/s" in lines[6]


def test_charts_are_higher_on_a_tall_terminal(status: admin_pb2.StatusResponse) -> None:
    low, high = (shown(status, later(status), height=height) for height in (24, 60))
    assert len(high.splitlines()) - len(low.splitlines()) == 4


def test_long_names_are_cut_and_many_engines_are_counted(status: admin_pb2.StatusResponse) -> None:
    for index in range(20):
        engine = status.instances.add()
        engine.instance = f"a-very-long-name-of-an-engine-in-some-cluster-{index}"
        engine.model = "an/organisation/with-a-model-of-a-long-name"
        engine.mapped_bytes = (1000 + index) << 20
        engine.leased_blocks = 123_456
    status.disks[0].path = "/mnt/somewhere/deep/down/in/the/tree/of/directories/nvme0"
    status.disks[0].errors = 123_456
    text = shown(status)
    assert "and 13 more" in text
    assert "…ine-in-some-cluster-19" in text
    assert "…directories/nvme0" in text
    assert "…" not in "".join(text.split("…")[-1].splitlines()[1:]), "no number is cut"
    wide = shown(status, width=200)
    assert "-of-an-engine-in-some-cluster-19  ending" in wide
    assert len(wide.splitlines()) < len(text.splitlines()), "no line of a table is broken"


def test_an_empty_daemon_has_a_page_too() -> None:
    assert "no engine is attached" in shown(admin_pb2.StatusResponse())


@pytest.mark.parametrize(
    ("values", "rows", "most", "chart"),
    [
        ((0, 1, 4, 8), 1, None, ["  ▁▄█"]),
        ((0, 0.001, 1), 1, None, ["   ▁█"]),
        ((4, None, 8), 2, None, ["    █", "  █ █"]),
        ((0.5, 0.5), 1, 1.0, ["   ▄▄"]),
        (range(100), 1, 99, ["█████"]),
        ((), 1, None, [""]),
        ((0, 0), 1, None, [""]),
    ],
)
def test_a_chart_ends_on_the_right_and_shows_the_least_of_anything(
    values: tuple[float | None, ...], rows: int, most: float | None, chart: list[str]
) -> None:
    assert plain(Graph(values, rows, "green", most), 5).split("\n") == chart


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.02, "<0.1"),
        (0.25, "0.2"),
        (9.94, "9.9"),
        (12.4, "12"),
        (9_999, "9999"),
        (45_600, "45.6k"),
        (2.1e6, "2.1M"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_names_keep_their_ends() -> None:
    assert (shortened("engine-0", 8), shortened("engine-10", 8)) == ("engine-0", "…gine-10")
