"""What an engine of one host stores, an engine of another host loads, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvtier.v1 import admin_pb2

from tests.integration.stores.conftest import Connect, NewHost
from tests.support.daemon import DaemonHost, until
from tests.support.plain_client import PlainClient, block_hashes

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
HASHES = block_hashes("shared", range(24))


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A folder that both hosts see."""
    return tmp_path.joinpath("shared").as_uri()


def below(host: DaemonHost) -> admin_pb2.DiskStatus:
    [store] = host.status().disks
    return store


def put(host: DaemonHost, blocks: int) -> None:
    """Waits until a host has put so many blocks into the store, and knows that it has."""
    until(
        lambda: below(host).blocks >= blocks and not below(host).writing_bytes,
        "the blocks are in the store",
    )


def loads(plain: PlainClient, hashes: list[bytes]) -> None:
    """All of these come up, and every byte is right."""
    until(lambda: plain.lookup(hashes).hits == len(hashes), "they come up")
    assert plain.load(hashes) == len(hashes)


def test_blocks_of_one_host_are_loaded_on_another(new_host: NewHost, connect_to: Connect, url: str) -> None:
    one, two = new_host(store__url=url), new_host(store__url=url)
    writer, reader = connect_to(one), connect_to(two)
    assert reader.lookup(HASHES).hits == 0
    assert writer.store(HASHES).done
    put(one, len(HASHES))
    until(lambda: below(two).blocks == len(HASHES), "the other host knows of them")
    loads(reader, HASHES)
    assert two.status().counters.promoted_blocks == len(HASHES)


def test_a_host_that_starts_later_finds_what_there_is(
    new_host: NewHost, connect_to: Connect, url: str
) -> None:
    one = new_host(store__url=url)
    assert connect_to(one).store(HASHES).done
    put(one, len(HASHES))
    one.stop()
    loads(connect_to(new_host(store__url=url)), HASHES)
