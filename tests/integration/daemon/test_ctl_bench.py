"""kvtierctl bench against a real daemon: it measures something, breaks nothing, and leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.integration.daemon.tier import Connect, Tier, batch
from tests.integration.daemon.tier import connect as connect
from tests.integration.daemon.tier import tier as tier
from tests.support.plain_client import BLOCKS
from tests.support.process import DEADLINE_S, Daemon

Start = Callable[..., Daemon]
pytestmark = pytest.mark.faults


def bench(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtierd.ctl", "bench", f"--socket={daemon.socket}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_it_measures_and_leaves_nothing_and_nobodys_blocks_are_touched(
    start: Start, connect: Connect
) -> None:
    daemon, plain = start(), connect()
    assert plain.store(batch("a", 0)).done
    before = daemon.status().blocks.ready
    said = bench(daemon, "--size=8MiB", "--block=256KiB", "--json")
    assert said.returncode == 0, said.stderr
    figures = json.loads(said.stdout)
    assert (figures["blocks"], figures["block_bytes"]) == (32, 256 << 10)
    assert figures["store_gb_per_s"] > 0
    assert figures["load_gb_per_s"] > 0
    assert (figures["wrong_blocks"], figures["left_blocks"]) == (0, 0)
    for name, hashes in (("hit_one", 1), ("hit_all", 32), ("miss_one", 1)):
        latency = figures[f"lookup_{name}"]
        assert latency["hashes"] == hashes
        assert 0 < latency["p50_us"] <= latency["p99_us"]
    status = daemon.status()
    assert status.blocks.ready == before
    assert (status.leases, status.transfers_active) == (0, 0)
    assert status.counters.cleared_blocks == 32
    assert plain.load(batch("a", 0)) == BLOCKS


def test_for_people_and_as_much_as_the_pool_allows(start: Start) -> None:
    said = bench(start())
    assert said.returncode == 0, said.stderr
    assert " blocks of 256 KiB" in said.stdout
    assert "GB/s" in said.stdout
    assert "p99" in said.stdout


def test_it_cleans_up_on_disks_too(start: Start, tier: Tier) -> None:
    daemon = start(**tier.settings(write_mode="through") | {"pool__size": "34MiB"})
    said = bench(daemon, "--size=4MiB", "--block=64KiB", "--json")
    assert said.returncode == 0, said.stderr
    status = daemon.status()
    assert (status.blocks.ready, sum(disk.blocks for disk in status.disks)) == (0, 0)


@pytest.mark.long
def test_what_does_not_fit_is_refused_with_the_limit(daemon: Daemon) -> None:
    for option, limit in (("--size=1GiB", "at most"), ("--block=0", "at least"), ("--block=1GiB", "larger")):
        said = bench(daemon, option)
        assert (said.returncode, said.stdout) == (69, "")
        assert limit in said.stderr
    said = bench(daemon, "--block=1MiB")  # an extent of the pool has its header, and no room for a whole one
    assert said.returncode == 69
    assert "extent" in said.stderr
    said = bench(daemon, "--size=much")
    assert said.returncode == 2, said.stderr
