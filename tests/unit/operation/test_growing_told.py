"""A pool that has not all of its memory: what people, programs, service managers and metrics are told."""

import asyncio
from dataclasses import replace

import pytest
from kvtierd.cache import Snapshot
from kvtierd.ctl.status import page
from kvtierd.ctl.terminal import plain
from kvtierd.metrics import families
from kvtierd.rpc.authority import Viewer
from kvtierd.rpc.status import AboutDaemon, status_response
from kvtierd.service.manager import status_line

from tests.unit.operation.snapshots import busy_snapshot

MIB = 1 << 20
NO_ROOM = "Cannot allocate memory"


def growing(shortage: str = "") -> Snapshot:
    """4 of 16 MiB have memory."""
    snapshot = busy_snapshot()
    return replace(snapshot, pool=replace(snapshot.pool, populated_bytes=4 * MIB, shortage=shortage))


@pytest.mark.parametrize(
    ("shortage", "told"),
    [("", "25%, 4 MiB, can be used; the rest follows"), (NO_ROOM, f"no memory for the rest: {NO_ROOM}")],
)
def test_status_says_how_much_can_be_used(shortage: str, told: str) -> None:
    about = AboutDaemon("1", 1, "/s", "")
    status = asyncio.run(status_response(about, growing(shortage), Viewer("a test", None)))
    assert (status.pool.populated_bytes, status.pool.shortage) == (4 * MIB, shortage)
    assert told in " ".join(plain(page(status), 200).split())


def test_a_pool_that_has_all_of_it_needs_no_words() -> None:
    assert "usable" not in status_line(busy_snapshot())


@pytest.mark.parametrize(
    ("shortage", "told"),
    [
        ("", "; 25% of 16 MiB usable;"),
        (NO_ROOM, f"; 25% of 16 MiB usable, no memory for the rest: {NO_ROOM};"),
    ],
)
def test_service_managers_are_told_in_their_line(shortage: str, told: str) -> None:
    line = status_line(growing(shortage))
    assert told in line + ";"
    assert "of 4 MiB used" in line


@pytest.mark.parametrize(("shortage", "short"), [("", 0), (NO_ROOM, 12 * MIB)])
def test_metrics_tell_what_is_missing_and_whether_it_stays_so(shortage: str, short: int) -> None:
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families(growing(shortage), "1")
        for sample in family.samples
    }
    assert found["kvtier_pool_missing_bytes",] == 12 * MIB
    assert found["kvtier_pool_short_bytes",] == short
    assert found["kvtier_pool_bytes", "used"] + found["kvtier_pool_bytes", "free"] == 4 * MIB
