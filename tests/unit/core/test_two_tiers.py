"""A host that goes by reuse, above a disk: what the host has no use for goes through it to the disk, which
goes by what the host has learnt."""

from __future__ import annotations

import numpy as np
import pytest
from kvtier_kernels import BlockTable as NativeTable
from kvtierd.core.actions import DiskJobKind
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.stimuli import (
    CoreDisks,
    Drain,
    PoolPolicy,
    Reconfigure,
    RetentionRequest,
    SubmittedChain,
    WriteMode,
)

from tests.unit.core.disk import DiskHost
from tests.unit.core.host import Instance, keys

FULL = 56
"""4 KiB slots in the pool."""
LARGE = PoolGeometry(extents=64, extent_bytes=1 << 16, first_extent_offset=2 << 20)
"""A slab for sixteen times what the pool holds."""
MOST = 8
"""Blocks that may be on the host only to go to a disk: an eighth."""
ACCEPTED, UNWANTED = 0, 4


def requested(host: DiskHost, one: Instance, first: int, blocks: int = 8) -> list[int]:
    """One prompt that is asked for and stored; what the disk is given to write, it writes. Returns what
    became of its blocks."""
    numbers = range(first, first + blocks)
    one.lookup(*numbers)
    running = one.store(*numbers, chains=(SubmittedChain(blocks),))
    running.finish()
    host.disk.finish_all()
    results: list[int] = running.results
    return results


def taught(mode: WriteMode = WriteMode.BACK, turns: int = 200) -> tuple[DiskHost, Instance]:
    """Prompts that come back fill the pool; those that never do are asked for between."""
    host = DiskHost(NativeTable, slab=LARGE, mode=mode)
    host.do(Reconfigure(0, CoreDisks(mode=mode), PoolPolicy.REUSE, CoreDisks()))
    one = host.instance()
    host.disk.pause()
    for turn in range(turns):
        first = 8 * (turn // 2 % 7) if turn % 2 == 0 else 1_000 + 8 * turn
        one.lookup(*range(first, first + 8))
        one.store(*range(first, first + 8), chains=(SubmittedChain(8),)).finish()
    refused = one.store(50_000, chains=(SubmittedChain(1),))
    refused.finish()
    assert refused.results == [UNWANTED], "no disk, no use"
    host.disk.resume()
    return host, one


def on_disk(host: DiskHost) -> int:
    return int(host.disk.core.blocks.table.stats()["ready"])


def test_what_the_host_has_no_use_for_is_taken_for_the_disk() -> None:
    host, one = taught()
    host.disk.finish_all()
    before = on_disk(host)
    assert requested(host, one, 20_000, MOST) == [ACCEPTED] * MOST
    assert on_disk(host) >= before + MOST
    assert not host.counters.evicted_unwritten_blocks or on_disk(host) > before


def test_no_more_than_an_eighth_of_the_host_is_there_for_the_disk_only() -> None:
    host, one = taught()
    host.disk.finish_all()
    one.lookup(*range(20_000, 20_020))
    running = one.store(*range(20_000, 20_020), chains=(SubmittedChain(20),))
    assert running.results == [ACCEPTED] * MOST + [UNWANTED] * (20 - MOST)
    one.lookup(*range(21_000, 21_004))
    promised = one.store(*range(21_000, 21_004), chains=(SubmittedChain(4),))
    assert promised.results == [UNWANTED] * 4
    promised.finish()
    running.finish()
    host.disk.finish_all()
    assert requested(host, one, 21_000, 4) == [ACCEPTED] * 4, "written, so there is room again"


def test_what_follows_a_block_that_only_the_disk_has_is_stored() -> None:
    host, one = taught()
    host.disk.finish_all()
    requested(host, one, 20_000, 4)
    for first in range(22_000, 22_200, MOST):  # push it out of the host
        requested(host, one, first, MOST)
    assert not one.hits(20_003)
    one.lookup(*range(20_000, 20_006), host_only=True)
    from_disk = one.store(20_004, 20_005, chains=(SubmittedChain(2, keys(20_003)),))
    assert from_disk.results == [ACCEPTED] * 2


@pytest.mark.parametrize("why", ["on_reuse", "draining", "off", "budget", "host_only", "control"])
def test_nothing_is_taken_for_a_disk_that_does_not_write_it(why: str) -> None:
    host, one = taught(WriteMode.ON_REUSE if why == "on_reuse" else WriteMode.BACK)
    host.disk.finish_all()
    if why == "draining":
        host.do(Drain())
    elif why == "off":
        host.disk.lose()
    elif why == "budget":
        host.do(Reconfigure(0, CoreDisks(write_bytes_per_s=4096), PoolPolicy.REUSE, CoreDisks()))
        requested(host, one, 30_000, 4)
    one.lookup(*range(20_000, 20_004))
    if why == "draining":
        return  # stores are refused as a whole
    retention = RetentionRequest(host_only=why == "host_only")
    running = one.store(*range(20_000, 20_004), chains=(SubmittedChain(4),), retention=retention)
    assert running.results == [ACCEPTED if why == "control" else UNWANTED] * 4


def test_a_disk_keeps_what_comes_back_and_refuses_what_does_not() -> None:
    """It has room for both only at first."""
    small = PoolGeometry(extents=8, extent_bytes=1 << 16, first_extent_offset=2 << 20)
    host = DiskHost(NativeTable, slab=small, mode=WriteMode.BACK)
    host.do(Reconfigure(0, CoreDisks(mode=WriteMode.BACK), PoolPolicy.REUSE, CoreDisks()))
    one = host.instance()
    written: list[int] = []
    for turn in range(900):  # 13 prompts that come back, more than the host keeps
        first = 8 * (turn // 2 % 13) if turn % 2 == 0 else 1_000 + 8 * turn
        one.lookup(*range(first, first + 8))
        host.disk.finish_all()
        before = host.disk.status.counters.written_blocks
        requested(host, one, first)
        if turn > 600 and turn % 2:
            written.append(host.disk.status.counters.written_blocks - before)
    table = host.disk.core.blocks.table
    space = host.machine.core.names[one.owner, one.name].plans[0].space
    _, states = table.lookup(space, keys(*range(8 * 13)))
    assert np.count_nonzero(states == 2) > 0.8 * 8 * 13
    assert sum(written) < 0.2 * 8 * len(written)
    table.check()


def test_the_policy_changes_with_blocks_on_the_disk_there_and_back() -> None:
    host, one = taught()
    host.disk.finish_all()
    requested(host, one, 20_000, 4)
    there = on_disk(host)
    for policy in (PoolPolicy.LRU, PoolPolicy.REUSE, PoolPolicy.LRU):
        host.do(Reconfigure(0, CoreDisks(), policy, CoreDisks()))
        assert host.disk.core.blocks.table.ranks == (policy is PoolPolicy.REUSE)
        host.disk.core.blocks.table.check()
        host.disk.finish_all()
        requested(host, one, 40_000)
    assert on_disk(host) >= there


def test_reads_of_what_goes_first_bring_it_back() -> None:
    host, one = taught()
    host.disk.finish_all()
    requested(host, one, 20_000, 4)
    for first in range(22_000, 22_200, MOST):
        requested(host, one, first, MOST)
    told = one.lookup(*range(20_000, 20_004))
    assert not told.hits
    assert [job.kind for job in host.disk.jobs] == [DiskJobKind.READ]
    host.disk.finish_all()
    assert one.lookup(*range(20_000, 20_004), again=True).hits == 4


@pytest.mark.parametrize("why", ["worth", "budget", "control"])
def test_what_no_disk_was_to_have_is_not_counted_as_lost(why: str) -> None:
    """Its count tells operators that disks are too slow."""
    small = PoolGeometry(extents=8, extent_bytes=1 << 16, first_extent_offset=2 << 20)
    host = DiskHost(NativeTable, slab=small, mode=WriteMode.THROUGH)
    policy = CoreDisks(mode=WriteMode.THROUGH, writes_per_day=1e-6 if why == "budget" else 0.0)
    keeps = PoolPolicy.LRU if why == "budget" else PoolPolicy.REUSE
    host.do(Reconfigure(0, policy, keeps, CoreDisks()))
    one = host.instance()
    if why == "control":
        host.disk.pause()
    for turn in range(400):
        first = 8 * (turn // 2 % 7) if turn % 2 == 0 else 1_000 + 8 * turn
        requested(host, one, first)
    assert host.counters.evicted_blocks > FULL
    assert (host.counters.evicted_unwritten_blocks > 0.5 * host.counters.evicted_blocks) == (why == "control")
    if why == "budget":
        assert not host.counters.evicted_unwritten_blocks
