"""The index page: what a client need not ask the daemon for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import grpc
import pytest
from kvtier import Namespace
from kvtier.v1 import admin_pb2, admin_pb2_grpc

from tests.integration.client.conftest import Connect
from tests.support.daemon import DaemonHost, until
from tests.support.plain_client import BLOCKS, PlainClient, block_hashes

pytestmark = pytest.mark.faults
HASHES = block_hashes("sequence", range(20))
OTHER = block_hashes("other", range(20))


def indexed(plain: PlainClient) -> PlainClient:
    """Once it has the page, and the page is complete."""
    until(lambda: plain.client.known_run(OTHER) is not None, "the index page is there")
    return plain


def engines(host: DaemonHost) -> list[str]:
    return [instance.instance for instance in host.status().instances]


def test_what_is_stored_is_known_and_the_rest_is_not(shared_host: DaemonHost, connect_to: Connect) -> None:
    plain = indexed(connect_to(shared_host))
    assert plain.client.known_run(HASHES) == 0
    assert plain.store(HASHES[:12]).done
    assert plain.client.known_run(HASHES) == 12
    assert plain.client.known_run(HASHES, 4) == 8
    assert plain.client.known_run(HASHES, 4, 6) == 2
    assert plain.client.known_run([OTHER[0], *HASHES]) == 0
    spared = plain.client.status.counters.lookups_local
    assert spared > 0
    assert plain.client.knows_any([*OTHER, HASHES[11]])
    assert plain.client.knows_any([*OTHER, HASHES[12]]) is False
    assert plain.client.status.counters.lookups_local == spared, "it is no lookup"


def test_the_daemon_counts_what_it_was_not_asked(shared_host: DaemonHost, connect_to: Connect) -> None:
    plain = indexed(connect_to(shared_host))
    told = plain.client.status.counters.lookups_local
    before = shared_host.status().counters
    for _ in range(5):
        assert plain.client.known_run(OTHER, 0, 7) == 0
    until(
        lambda: shared_host.status().counters.index_lookups >= before.index_lookups + 5,
        "a heartbeat tells it",
    )
    after = shared_host.status().counters
    assert after.lookup_hashes - before.lookup_hashes >= 5 * 7
    assert after.lookups - before.lookups >= after.index_lookups - before.index_lookups
    assert plain.client.status.counters.lookups_local == told + 5


def test_engines_of_one_namespace_know_each_others_blocks_and_no_others(
    shared_host: DaemonHost, connect_to: Connect, namespace: Namespace
) -> None:
    one, two = connect_to(shared_host), connect_to(shared_host, "two")
    stranger = connect_to(shared_host, "three", dataclasses.replace(namespace, salt="another"))
    assert one.store(HASHES).done
    for plain in (one, two, stranger):
        indexed(plain)
    assert two.client.known_run(HASHES) == 20
    assert stranger.client.known_run(HASHES) == 0
    assert one.close()
    late = indexed(connect_to(shared_host, "four"))
    assert late.client.known_run(HASHES) == two.client.known_run(HASHES) == 20


def test_a_space_that_nobody_used_for_a_while_is_known_anew(
    shared_host: DaemonHost, connect_to: Connect, namespace: Namespace
) -> None:
    first = indexed(connect_to(shared_host))
    assert first.store(HASHES).done
    assert first.close()
    until(lambda: f"{namespace.tenant}/one" not in engines(shared_host), "nobody uses it")
    again = indexed(connect_to(shared_host, "again"))
    assert again.client.known_run(HASHES) == 20


def test_after_kill_nine_the_page_is_the_new_daemons(host: DaemonHost, connect_to: Connect) -> None:
    plain = indexed(connect_to(host))
    assert plain.store(HASHES).done
    host.kill9()
    until(lambda: plain.client.known_run(HASHES) is None, "nothing is known without a daemon")
    assert plain.client.knows_any(HASHES) is None
    host.start()
    plain.ready()
    indexed(plain)
    assert plain.client.known_run(HASHES) == 20
    assert plain.load(HASHES) == 20


def test_what_is_evicted_is_known_no_longer(socket_dir: Path, shm_dir: Path, connect_to: Connect) -> None:
    small = DaemonHost(socket_dir, shm_dir / "pool", pool__size="4MiB", pool__extent_size="1MiB")
    small.start()
    plain = indexed(connect_to(small))
    assert plain.store(HASHES).done
    stored = [HASHES]
    for number in range(8):
        stored.append(block_hashes(f"filler {number}", range(BLOCKS)))
        assert plain.store(stored[-1]).done
    assert plain.client.known_run(HASHES) == 0
    for hashes in stored:
        for value in hashes:
            assert plain.known_run([value]) == plain.lookup([value]).hits
    small.stop()


def test_while_somebody_records_nothing_is_known_without_asking(
    shared_host: DaemonHost, connect_to: Connect
) -> None:
    """Otherwise requests that miss would be missing in the recording."""
    plain = indexed(connect_to(shared_host))
    with grpc.insecure_channel(f"unix:{shared_host.socket}") as channel:
        call = admin_pb2_grpc.AdminStub(channel).Record(admin_pb2.RecordRequest(), timeout=60)
        next(call)
        assert plain.client.known_run(OTHER) is None
        call.cancel()
        until(lambda: plain.client.known_run(OTHER) == 0, "it can be relied on again")
