"""A prefix that fills most of its pool: what a client is told of it, how it loads all of it, and what people
see of that."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvtier import HIT, MISS, PENDING, KvtierError, Reason

from tests.integration.client.conftest import HEARTBEAT, Connect
from tests.integration.daemon.commands import explain
from tests.support.daemon import DaemonHost, until
from tests.support.plain_client import PlainClient, block_hashes


@pytest.fixture
def tight(socket_dir: Path, shm_dir: Path) -> Iterator[DaemonHost]:
    """A daemon with room for some 120 blocks."""
    host = DaemonHost(socket_dir, shm_dir / "pool", pool__size="4MiB", **HEARTBEAT)
    host.start()
    yield host
    host.stop()


PREFIX = block_hashes("large", range(120))
"""Of the 126 blocks that the pool has room for."""
CTL = [sys.executable, "-m", "kvtierd.ctl"]


def stored(plain: PlainClient) -> PlainClient:
    for first in range(0, len(PREFIX), 60):
        assert plain.store(PREFIX[first : first + 60]).done
    plain.client.touch(PREFIX)
    return plain


def test_all_of_it_is_loaded_part_by_part(tight: DaemonHost, connect_to: Connect) -> None:
    stored(connect_to(tight, "first"))
    plain = connect_to(tight, "second")
    loads = done = 0
    while done < len(PREFIX):
        plain.cache.wipe()
        with plain.lookup(PREFIX[done:], lease=True) as hit:
            assert hit.hits > 0
            assert hit.hits + hit.unleased == len(PREFIX) - done
            count = min(hit.hits, 64)
            assert plain.client.load(hit, range(count)).wait(60).done
        assert all(plain.cache.right(index, PREFIX[done + index]) for index in range(count))
        done, loads = done + count, loads + 1
    assert loads == 2


def test_what_is_not_leased_is_no_hit_and_says_why(tight: DaemonHost, connect_to: Connect) -> None:
    plain = stored(connect_to(tight, "first"))
    assert plain.lookup(PREFIX).hits == len(PREFIX), "without a lease it is only told what is there"
    hit = plain.lookup(PREFIX, lease=True)
    assert (hit.lease is not None, hit.hits < len(PREFIX)) == (True, True)
    assert hit.states == bytes([HIT] * hit.hits + [MISS])
    assert hit.error is not None
    assert hit.error.reason is Reason.LEASE_LIMIT
    tokens = 16 * hit.hits, 16 * len(PREFIX)
    assert "{} of {} readable tokens".format(*tokens) in str(hit.error)
    behind = plain.lookup(PREFIX[hit.hits :], lease=True)
    assert (behind.hits, behind.lease, behind.unleased) == (0, None, len(PREFIX) - hit.hits)
    assert behind.states == bytes([PENDING])
    with pytest.raises(KvtierError, match=r"limits\.leased_fraction_max"):
        plain.client.load(behind, [0])
    hit.release()
    until(lambda: plain.lookup(PREFIX[hit.hits :], lease=True).hits > 0, "there is room again")


def test_people_see_it(tight: DaemonHost, connect_to: Connect) -> None:
    plain = stored(connect_to(tight, "first"))
    hit = plain.lookup(PREFIX, lease=True)
    unleased = len(PREFIX) - hit.hits
    counters = tight.status().counters
    assert (counters.missed_lease_limit, counters.refused_leases) == (unleased, 1)
    metrics = tight.daemon.metrics()
    assert metrics["kvtier_lookup_misses_total.lease_limit"] == unleased
    [found] = explain(tight.daemon, PREFIX[-1])
    assert f"found {len(PREFIX)} blocks and could lease {hit.hits} of them" in found.text
    for command, expected in (
        (["status"], f"1 lookups found more than they could lease: {unleased} blocks"),
        (["top", "--frames=1"], "more than can be leased"),
    ):
        said = subprocess.run(
            [*CTL, *command, f"--socket={tight.socket}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert expected in said.stdout
    assert tight.daemon.log().count("a lookup found more than it could lease") == 1
