"""One frame of `kvtierctl top`: what happened between two pictures, in 80 columns."""

import copy

import pytest
from kvtier.v1 import admin_pb2
from kvtierd.ctl.top import WIDTH, Picture, frame, number, shortened
from kvtierd.rpc.status import AboutDaemon, status_response

from tests.unit.operation.snapshots import busy_snapshot


@pytest.fixture
def status() -> admin_pb2.StatusResponse:
    about = AboutDaemon("1.2", 4242, "/run/k.sock", "http://127.0.0.1:9470/metrics")
    return status_response(about, busy_snapshot())


def later(status: admin_pb2.StatusResponse, **grown: int) -> Picture:
    """Two seconds later."""
    after = copy.deepcopy(status)
    for name, by in grown.items():
        setattr(after.counters, name, getattr(after.counters, name) + by)
    after.disks[0].read_bytes += 4 << 20
    return Picture(after, 12.0)


def shown(before: Picture | None, now: Picture) -> str:
    lines = list(frame(before, now, 2))
    assert max(map(len, lines)) <= WIDTH
    return "\n".join(lines)


def test_rates_are_of_the_time_between_two_pictures(status: admin_pb2.StatusResponse) -> None:
    now = later(
        status,
        lookups=20,
        lookup_hashes=2000,
        lookup_hits=1500,
        missed_absent=20,
        missed_beyond=480,
        stored_blocks=100,
        stored_bytes=64 << 20,
        loaded_bytes=6 << 30,
        evicted_blocks=7,
    )
    text = shown(Picture(status, 10.0), now)
    for part in (
        "kvtierd 1.2  serving  up 1 h 2 min  (every 2 s)",
        "Hits   ███████████████░░░░░  75% of 1000 hashes/s in 10 lookups/s",
        "Missed beyond 240/s  absent 10/s\n",
        "Store     32 MiB/s      50 blocks/s",
        "Load       3 GiB/s",
        "3.5/s evicted",
        "2 MiB/s",
        "CORRUPT 51 blocks failed their check",
        "engine-0",
        "failing",
    ):
        assert part in text, text


def test_the_first_frame_is_of_all_the_time_since_the_start(status: admin_pb2.StatusResponse) -> None:
    text = shown(None, Picture(status, 10.0))
    assert "(since its start)" in text
    assert "Hits   █████░░░░░░░░░░░░░░░  25%" in text


def test_after_a_restart_it_begins_anew(status: admin_pb2.StatusResponse) -> None:
    now = later(status)
    now.status.boot_nonce = 5
    now.status.counters.lookups = 1
    assert "(since its start)" in shown(Picture(status, 10.0), now)


def test_long_names_are_cut_and_many_engines_are_counted(status: admin_pb2.StatusResponse) -> None:
    for index in range(20):
        engine = status.instances.add()
        engine.instance = f"a-very-long-name-of-an-engine-in-some-cluster-{index}"
        engine.model = "an/organisation/with-a-model-of-a-long-name"
        engine.mapped_bytes = index << 30
    status.disks[0].path = "/mnt/somewhere/deep/down/in/the/tree/of/directories/nvme0"
    text = shown(None, Picture(status, 10.0))
    assert "and 13 more" in text
    assert "…ne-in-some-cluster-19" in text


def test_an_empty_daemon_has_a_frame_too() -> None:
    assert "no engine is attached" in shown(None, Picture(admin_pb2.StatusResponse(), 0.0))


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
