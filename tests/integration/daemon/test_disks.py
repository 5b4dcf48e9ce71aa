"""The disk tier behind a real daemon: real files, real workers, and clients that compare every byte."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from kvtier.v1 import admin_pb2, admin_pb2_grpc

from tests.integration.daemon.conftest import Start
from tests.integration.daemon.tier import Connect, Tier, batch, load_all, settled, written
from tests.integration.daemon.tier import connect as connect
from tests.integration.daemon.tier import tier as tier
from tests.support.plain_client import BLOCKS, PlainClient
from tests.support.process import DEADLINE_S, Daemon, until

pytestmark = pytest.mark.faults

BATCHES = 12
"""Of 64 blocks: three times what the pool holds."""
EVERYTHING = BATCHES * BLOCKS
PAUSE_S = 0.3
"""A few ticks, in which the daemon sees how fast blocks come."""


def store_all(plain: PlainClient, name: str, batches: int = BATCHES) -> None:
    for number in range(batches):
        outcome = plain.store(batch(name, number))
        assert outcome.done, outcome


def disk(daemon: Daemon, number: int = 0) -> admin_pb2.DiskStatus:
    return daemon.status().disks[number]


def write_all(daemon: Daemon, plain: PlainClient, name: str, batches: int = BATCHES) -> None:
    """Stores batch after batch, each when the disks have the one before; with write-through only."""
    before = sum(each.written_blocks for each in daemon.status().disks)
    for number in range(batches):
        assert plain.store(batch(name, number)).done
        written(daemon, before + (number + 1) * BLOCKS)


def worker_pid(daemon: Daemon, device: str = "disk-0") -> int:
    [pid] = [worker.pid for worker in daemon.status().workers if worker.device == device]
    return int(pid)


def kvtierctl(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = popen_ctl(daemon, *arguments)
    said, complained = process.communicate(timeout=DEADLINE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, said, complained)


def popen_ctl(daemon: Daemon, name: str, *rest: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "kvtierd.ctl", name, f"--socket={daemon.socket}", *rest]
    environment = os.environ | {"KVTIER_CONFIG": ""}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


class TestWriting:
    def test_what_the_pool_has_no_room_for_comes_back_from_the_disk(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        daemon, plain = start(**tier.settings()), connect()
        assert f"{tier.paths[0]}, 32 MiB, cold: there was no slab yet" in daemon.greeting
        for number in range(BATCHES):
            assert plain.store(batch("w", number)).done
            time.sleep(PAUSE_S)
            settled(daemon)
        status = daemon.status()
        assert status.counters.evicted_blocks > EVERYTHING / 2
        assert status.disks[0].written_blocks > EVERYTHING / 4
        unwritten = status.counters.evicted_unwritten_blocks
        back = 0
        for number in range(BATCHES):
            plain.load(batch("w", number))  # has them read
            settled(daemon)
            back += plain.load(batch("w", number))
        assert back > EVERYTHING / 4
        assert back == EVERYTHING or unwritten, "nothing is missing but what was never written"
        status = daemon.status()
        assert status.counters.promoted_blocks > EVERYTHING / 8
        assert status.disks[0].corrupt_blocks == status.counters.integrity_failures == 0
        metrics = daemon.metrics()
        assert metrics[f"kvtier_disk_state.{tier.paths[0]}.live"] == 1
        assert metrics["kvtier_promoted_blocks_total"] == status.counters.promoted_blocks

    def test_write_through_has_everything_on_disk_at_once(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        daemon, plain = start(**tier.settings(write_mode="through")), connect()
        write_all(daemon, plain, "t")
        assert daemon.status().counters.evicted_unwritten_blocks == 0
        for number in range(BATCHES):
            load_all(plain, batch("t", number))
        assert disk(daemon).blocks == EVERYTHING

    def test_on_reuse_writes_only_what_somebody_has_asked_for_again(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        daemon, plain = start(**tier.settings(write_mode="on-reuse")), connect()
        store_all(plain, "r", batches=3)
        assert plain.load(batch("r", 1)) == BLOCKS
        written(daemon, BLOCKS)
        store_all(plain, "more")
        settled(daemon)
        assert disk(daemon).blocks == BLOCKS
        load_all(plain, batch("r", 1))
        assert plain.load(batch("r", 0)) == 0, "nobody had asked for it"

    def test_two_disks_share_the_blocks(self, start: Start, tier: Tier, connect: Connect) -> None:
        daemon, plain = start(**tier.settings(2, write_mode="through")), connect()
        write_all(daemon, plain, "2", batches=3)
        share = [each.blocks for each in daemon.status().disks]
        assert sum(share) == 3 * BLOCKS
        assert min(share) > BLOCKS / 2
        store_all(plain, "more")
        for number in range(3):
            load_all(plain, batch("2", number))
        assert all(each.read_blocks for each in daemon.status().disks)


class TestPromotion:
    def test_many_wait_and_each_block_is_read_once(self, start: Start, tier: Tier, connect: Connect) -> None:
        daemon, plain = start(**tier.settings(write_mode="through")), connect()
        hashes = batch("p", 0)
        assert plain.store(hashes).done
        written(daemon, BLOCKS)
        store_all(plain, "more")
        settled(daemon)
        before = disk(daemon).read_blocks
        tier.fail(hang=True)  # until all of them have asked
        others = [connect(f"other-{number}") for number in range(3)]
        assert [client.lookup(hashes).hits for client in (plain, *others)] == [0] * 4
        assert disk(daemon).reading_bytes > 0
        tier.fail()
        for client in (plain, *others):
            load_all(client, hashes)
        assert disk(daemon).read_blocks - before == BLOCKS

    def test_explain_says_that_a_block_is_on_a_disk(self, start: Start, tier: Tier, connect: Connect) -> None:
        daemon, plain = start(**tier.settings(write_mode="through")), connect()
        [value, *_] = hashes = batch("e", 0)
        assert plain.store(hashes).done
        written(daemon, BLOCKS)
        store_all(plain, "more")
        said = kvtierctl(daemon, "explain", value.hex())
        assert said.returncode == 0, said.stderr
        assert "on a disk or in the store only" in said.stdout

    def test_a_drain_for_restart_waits_for_what_is_being_read(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        daemon, plain = start(**tier.settings(write_mode="through")), connect()
        hashes = batch("d", 0)
        assert plain.store(hashes).done
        written(daemon, BLOCKS)
        store_all(plain, "more")
        settled(daemon)
        tier.fail(hang=True)
        assert plain.lookup(hashes).hits == 0
        drain = popen_ctl(daemon, "drain", "--for-restart")
        assert drain.stdout is not None
        assert drain.stdout.readline() == "waiting for blocks that a disk is reading\n"
        tier.fail()
        said, _ = drain.communicate(timeout=DEADLINE_S)
        assert drain.returncode == 0, said
        assert daemon.wait() == 0
        tier.fail()
        start(**tier.settings(write_mode="through"))
        load_all(connect("heir"), hashes)


class TestRestart:
    def test_after_a_kill_the_disk_is_warm(self, start: Start, tier: Tier, connect: Connect) -> None:
        daemon, plain = start(**tier.settings(write_mode="through")), connect()
        write_all(daemon, plain, "k")
        daemon.kill()
        daemon = start(**tier.settings(write_mode="through"))
        assert f"warm: {EVERYTHING} blocks, 12 MiB found" in daemon.greeting
        found = disk(daemon)
        assert (found.state, found.recovered_blocks, found.cold_reason) == ("live", EVERYTHING, "")
        for number in range(BATCHES):
            load_all(plain.ready(), batch("k", number))

    def test_a_new_pool_is_filled_from_the_disk_alone(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        daemon, plain = start(**tier.settings(write_mode="through")), connect()
        write_all(daemon, plain, "c", batches=3)
        assert daemon.stop() == 0
        daemon.pool.unlink()
        daemon = start(**tier.settings(write_mode="through"))
        assert daemon.status().pool.start == "cold"
        assert daemon.status().blocks.ready == 0
        for number in range(3):
            load_all(plain.ready(), batch("c", number))

    def test_another_size_is_a_cold_start_that_says_why(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        daemon, plain = start(**tier.settings(write_mode="through")), connect()
        assert plain.store(batch("s", 0)).done
        written(daemon, BLOCKS)
        assert daemon.stop() == 0
        daemon.pool.unlink()
        daemon = start(**tier.settings() | {"disk__size": "18MiB"})
        assert "disk.size changed" in disk(daemon).cold_reason
        assert tier.slab.stat().st_size == 18 << 20
        assert plain.ready().load(batch("s", 0)) == 0


class TestFailing:
    def test_a_killed_worker_costs_misses_until_another_is_there(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        daemon, plain = start(**tier.settings(write_mode="through")), connect()
        daemon.may_complain = True
        write_all(daemon, plain, "x")
        pid = worker_pid(daemon)
        os.kill(pid, signal.SIGSTOP)
        assert plain.lookup(batch("x", 0)).hits == 0
        os.kill(pid, signal.SIGKILL)
        for number in range(BATCHES):
            load_all(plain, batch("x", number))
        assert worker_pid(daemon) != pid
        assert disk(daemon).corrupt_blocks == 0

    def test_a_disk_that_hangs_costs_its_worker_and_nobody_waits(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        # More than a busy machine may keep a sound worker waiting.
        settings = tier.settings(write_mode="through", deadline_s=4, slow_deadline_s=3)
        daemon, plain = start(**settings), connect()
        daemon.may_complain = True
        write_all(daemon, plain, "h", batches=3)
        store_all(plain, "more")
        settled(daemon)
        pid = worker_pid(daemon)
        tier.fail(hang=True)
        assert plain.load(batch("h", 0)) == 0
        until(lambda: disk(daemon).state != "live", "the worker is lost")
        assert plain.store(batch("host", 0)).done, "the host goes on"
        assert plain.load(batch("host", 0)) == BLOCKS
        tier.fail()
        load_all(plain, batch("h", 0))
        assert worker_pid(daemon) != pid

    def test_a_hanging_disk_of_a_killed_daemon_does_not_keep_the_next_one_waiting(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        """Whatever its deadline is: the worker has the pool's lock, and nobody hears what it would finish."""
        settings = tier.settings(write_mode="through", deadline_s=3_600, slow_deadline_s=3_600)
        daemon, plain = start(**settings), connect()
        daemon.may_complain = True
        write_all(daemon, plain, "h")
        tier.fail(hang=True)
        assert plain.store(batch("more", 0)).done
        until(lambda: disk(daemon).writing_bytes > 0, "the disk's worker is in the middle of a write")
        plain.close()
        daemon.kill()
        another = start(**settings)  # which waits pool.lock_timeout_s at most
        another.may_complain = True
        tier.fail()
        again = connect()
        load_all(again, batch("h", 0))

    def test_a_slow_disk_is_a_miss_and_what_it_has_read_is_a_hit_later(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        settings = tier.settings(write_mode="through", slow_deadline_s=0.2, errors_max=1000)
        daemon, plain = start(**settings), connect()
        daemon.may_complain = True
        write_all(daemon, plain, "slow", batches=1)
        store_all(plain, "more")
        settled(daemon)
        hashes, before = batch("slow", 0), disk(daemon).errors
        tier.fail(hang=True)
        assert plain.lookup(hashes).hits == 0
        until(lambda: disk(daemon).errors > before, "it was too slow")
        assert plain.lookup(hashes).hits == 0
        tier.fail()
        load_all(plain, hashes)

    def test_a_disk_that_takes_long_to_start_keeps_nobody_waiting(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        settings = tier.settings(write_mode="through", start_deadline_s=0)
        with tier.slab.open("wb") as file:
            tier.slab.chmod(0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            daemon, plain = start(**settings), connect()
            assert "starting: it joins as soon as it is ready" in daemon.greeting
            assert plain.store(batch("host", 0)).done
        until(lambda: disk(daemon).state == "live", "the disk has joined")
        write_all(daemon, plain, "disk", batches=1)

    def test_a_directory_that_goes_away_is_named_and_joins_later(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        daemon, plain = start(**tier.settings(write_mode="through")), connect()
        daemon.may_complain = True
        tier.paths[0].rename(tier.paths[0].with_name("away"))
        os.kill(worker_pid(daemon), signal.SIGKILL)
        until(lambda: "does not exist" in disk(daemon).why, "it is missed")
        assert disk(daemon).state == "off"
        assert plain.store(batch("host", 0)).done
        assert plain.load(batch("host", 0)) == BLOCKS
        tier.paths[0].with_name("away").rename(tier.paths[0])
        until(lambda: disk(daemon).state == "live", "the disk has joined")
        assert plain.store(batch("disk", 0)).done
        written(daemon, BLOCKS)
        complaints = [line for line in daemon.complaints() if "does not exist" in line]
        assert len(complaints) == 1, complaints

    def test_a_disk_that_cannot_read_is_a_miss_then_left_alone_then_tried_again(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        settings = tier.settings(write_mode="through", errors_max=2, probe_after_s=0.5)
        daemon, plain = start(**settings), connect()
        daemon.may_complain = True
        write_all(daemon, plain, "io")
        tier.fail(read={"errno": "EIO"})
        until(
            lambda: (
                plain.load(batch("io", 0)) + plain.load(batch("io", 1)) >= 0
                and disk(daemon).state == "failing"
            ),
            "the disk is left alone",
        )
        assert disk(daemon).errors >= 2
        assert "EIO" in disk(daemon).why
        assert daemon.metrics()[f"kvtier_disk_state.{tier.paths[0]}.failing"] == 1
        assert "failing: " in kvtierctl(daemon, "status").stdout
        tier.fail()
        until(lambda: disk(daemon).state == "live", "the disk is back")
        for number in range(2, BATCHES):
            load_all(plain, batch("io", number))

    def test_a_full_disk_loses_nothing_on_the_host(self, start: Start, tier: Tier, connect: Connect) -> None:
        daemon, plain = start(**tier.settings(write_mode="through", errors_max=1000)), connect()
        daemon.may_complain = True
        tier.fail(write={"errno": "ENOSPC"})
        store_all(plain, "f", batches=2)
        settled(daemon)
        until(lambda: disk(daemon).errors, "it was noticed")
        assert disk(daemon).blocks == 0
        assert [plain.load(batch("f", number)) for number in range(2)] == [BLOCKS] * 2


class TestScrub:
    def test_without_disks_it_is_refused(self, start: Start) -> None:
        said = kvtierctl(start(), "scrub")
        assert said.returncode == 69
        assert "disk.paths" in said.stderr

    def test_a_sound_disk_is_looked_at_wholly(self, start: Start, tier: Tier, connect: Connect) -> None:
        daemon, plain = start(**tier.settings(2, write_mode="through")), connect()
        write_all(daemon, plain, "s", batches=3)
        said = kvtierctl(daemon, "scrub", "--json")
        assert said.returncode == 0, said.stderr
        found = json.loads(said.stdout)
        assert sum(each["scrub_blocks"] for each in found) == 3 * BLOCKS
        assert sum(each["scrubbed_blocks"] for each in found) == 3 * BLOCKS
        with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
            again = admin_pb2_grpc.AdminStub(channel).Scrub(admin_pb2.ScrubRequest(), timeout=DEADLINE_S)
        assert list(again.paths) == list(map(str, tier.paths))

    def test_a_flipped_byte_is_found_and_never_served(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        daemon, plain = start(**tier.settings(write_mode="through")), connect()
        daemon.may_complain = True
        hashes = batch("rot", 0)
        plain.store(hashes)
        written(daemon, BLOCKS)
        store_all(plain, "more", batches=BATCHES // 2)
        settled(daemon)
        flip(tier.slab, plain, hashes[5])
        said = kvtierctl(daemon, "scrub")
        assert said.returncode == 1, said.stdout + said.stderr
        assert "1 block CORRUPT" in said.stdout
        found = disk(daemon)
        assert (found.corrupt_blocks, found.corrupt_slots) == (1, 1)
        load_all(plain, hashes[:5])
        assert plain.load(hashes) == 5, "the corrupt one is gone, what follows is not asked for"
        assert kvtierctl(daemon, "scrub").returncode == 0, "it is found once"
        daemon.kill()
        daemon = start(**tier.settings(write_mode="through"))
        daemon.may_complain = True
        assert disk(daemon).corrupt_slots == 1, "its place is never used again"

    def test_a_flipped_byte_is_found_when_it_is_read(
        self, start: Start, tier: Tier, connect: Connect
    ) -> None:
        daemon, plain = start(**tier.settings(write_mode="through")), connect()
        daemon.may_complain = True
        hashes = batch("rot", 0)
        plain.store(hashes)
        written(daemon, BLOCKS)
        store_all(plain, "more")
        settled(daemon)
        flip(tier.slab, plain, hashes[0])
        until(lambda: plain.load(hashes) >= 0 and disk(daemon).corrupt_blocks == 1, "it was found")
        assert plain.load(hashes) == 0
        metrics = daemon.metrics()
        assert metrics["kvtier_integrity_failures_total.read.disk"] == 1


def flip(slab: Path, plain: PlainClient, value: bytes) -> None:
    """Changes one bit of this block where it lies in the file."""
    plain.cache.fill(0, value)
    first = plain.cache.planes[:, 0].tobytes()[:64]
    with slab.open("r+b") as file:
        data = file.read()
        offset = data.index(first)
        assert data.count(first) == 1
        file.seek(offset)
        file.write(bytes([data[offset] ^ 1]))
        file.flush()
        os.fsync(file.fileno())
