"""A host with a disk and a store: its memory, its disk and what hosts share, one below the other."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvtier.v1 import admin_pb2

from tests.integration.daemon.commands import kvtierctl
from tests.integration.stores.conftest import Connect
from tests.support.daemon import DaemonHost, until
from tests.support.hosts import NewHost
from tests.support.plain_client import PlainClient, block_hashes

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
HASHES = block_hashes("shared", range(24))
OTHERS = [block_hashes(f"other/{number}", range(64)) for number in range(6)]
"""More than the pool has room for."""
NewWithDisk = Callable[..., DaemonHost]


@pytest.fixture
def new_with_disk(new_host: NewHost, tmp_path: Path) -> NewWithDisk:
    """Starts a host with a disk of its own and a store that all see."""

    def make(name: str, **settings: Any) -> DaemonHost:
        path = tmp_path / name
        path.mkdir()
        usual: dict[str, Any] = {
            "pool__size": "6MiB",
            "pool__extent_size": "1MiB",
            "disk__paths": path,
            "disk__size": "34MiB",
            "disk__extent_size": "1MiB",
            "disk__write_mode": "through",
            "store__url": tmp_path.joinpath("shared").as_uri(),
        }
        return new_host(**{**usual, **settings})

    return make


def parts(host: DaemonHost) -> tuple[admin_pb2.DiskStatus, admin_pb2.DiskStatus]:
    """The disk and the store, as the host sees them."""
    disk, store = host.status().disks
    return disk, store


def quiet(host: DaemonHost) -> None:
    """Returns when nothing is on its way to or from what is below."""
    until(lambda: not any(each.writing_bytes or each.reading_bytes for each in parts(host)), "all is quiet")


def evict(plain: PlainClient, host: DaemonHost) -> None:
    """Has the pool filled with other blocks, so that none of HASHES is left there."""
    for hashes in OTHERS:
        assert plain.store(hashes).done
        quiet(host)


def loads(plain: PlainClient, hashes: list[bytes]) -> None:
    """All of these come up, and every byte is right."""
    until(lambda: plain.lookup(hashes).hits == len(hashes), "they come up")
    assert plain.load(hashes) == len(hashes)


def test_blocks_come_from_the_disk_first_and_other_hosts_find_them_in_the_store(
    new_with_disk: NewWithDisk, connect_to: Connect
) -> None:
    one, two = new_with_disk("a"), new_with_disk("b")
    writer, reader = connect_to(one), connect_to(two)
    assert writer.store(HASHES).done
    quiet(one)
    assert [each.written_blocks for each in parts(one)] == [len(HASHES), len(HASHES)]
    until(lambda: parts(two)[1].blocks == len(HASHES), "the other host knows of them")
    loads(reader, HASHES)
    assert [each.read_blocks for each in parts(two)] == [0, len(HASHES)]
    quiet(two)
    assert parts(two)[0].written_blocks == len(HASHES), "the disk gets them as soon as they have come up"

    evict(writer, one)
    loads(writer, HASHES)
    assert [each.read_blocks for each in parts(one)] == [len(HASHES), 0]

    evict(reader, two)
    loads(reader, HASHES)
    disk, store = parts(two)
    assert (disk.read_blocks, store.read_blocks) == (len(HASHES), len(HASHES))


def test_with_a_new_pool_the_disk_is_warm_and_the_store_is_found_again(
    new_with_disk: NewWithDisk, connect_to: Connect
) -> None:
    host = new_with_disk("a")
    plain = connect_to(host)
    assert plain.store(HASHES).done
    quiet(host)
    host.kill9()
    host.pool.unlink()
    host.start()
    plain.ready()
    loads(plain, HASHES)
    assert parts(host)[0].read_blocks == len(HASHES)
    until(lambda: parts(host)[1].blocks == len(HASHES), "the store's worker has found them again")


def test_a_store_that_is_dead_from_the_start_changes_nothing_above(
    new_with_disk: NewWithDisk, connect_to: Connect
) -> None:
    options = (
        "endpoint=http://127.0.0.1:1,allow_http=true,region=x,aws_access_key_id=a,aws_secret_access_key=b"
    )
    host = new_with_disk("a", store__url="s3://nobody/there", store__options=options, store__deadline_s="0.5")
    plain = connect_to(host)
    assert plain.store(HASHES).done
    until(lambda: parts(host)[0].written_blocks == len(HASHES), "the disk has them")
    for hashes in OTHERS:
        assert plain.store(hashes).done
        until(lambda: not parts(host)[0].writing_bytes, "the disk has them")
    loads(plain, HASHES)
    disk, store = parts(host)
    assert (disk.state, disk.errors, disk.read_blocks) == ("live", 0, len(HASHES))
    assert store.blocks == 0


@pytest.mark.parametrize("gone", [0, 1], ids=["disk", "store"])
def test_what_one_worker_takes_with_it_the_other_still_has(
    new_with_disk: NewWithDisk, connect_to: Connect, gone: int
) -> None:
    host = new_with_disk("a")
    plain = connect_to(host)
    assert plain.store(HASHES).done
    quiet(host)
    evict(plain, host)
    [pid] = [worker.pid for worker in host.status().workers if worker.device == f"disk-{gone}"]
    os.kill(pid, signal.SIGKILL)
    loads(plain, HASHES)
    until(lambda: all(each.state == "live" for each in parts(host)), "its successor is there")
    assert parts(host)[gone].errors <= 1
    evict(plain, host)
    loads(plain, HASHES)


def test_a_scrub_is_of_disks_alone(new_with_disk: NewWithDisk, connect_to: Connect) -> None:
    host = new_with_disk("a")
    plain = connect_to(host)
    assert plain.store(HASHES).done
    quiet(host)
    said = kvtierctl(host.daemon, "scrub", "--json")
    assert said.returncode == 0, said.stderr
    [found] = json.loads(said.stdout)
    assert found["scrubbed_blocks"] == len(HASHES)
    assert parts(host)[1].scrub_blocks == 0
