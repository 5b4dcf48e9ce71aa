"""A simulated fleet does what the daemon's own core does on one host, and what a slow simulation of single
blocks does on several."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from kvtierd.simulate.host import SimulatedHost
from kvtierd.simulate.results import LRU, hit_rates, replayed
from kvtierd.simulate.traces import NO_PARENT, Trace, read

from tests.unit.simulate.conftest import MakeTrace, real_trace
from tools.capacity import model
from tools.capacity.segments import Segments, fleet_requests, segments
from tools.capacity.simulation import Counts, PutMode, Router, Setting, simulate

SLOWLY_S = 60.0
"""Between two requests, so that everybody knows of what was put in the meantime."""


def no_progress(done: int) -> None:
    pass


def one_host(trace: Trace, setting: Setting) -> Counts:
    return simulate(fleet_requests(segments(trace), 1, common_fraction=0.0), setting, keep_hits=True)


def slow(trace: Trace) -> Trace:
    return replace(trace, arrival_s=np.arange(trace.requests, dtype=np.float64) * SLOWLY_S)


@pytest.mark.parametrize("seed", range(5))
def test_segments_are_the_paths_of_the_trace(make_trace: MakeTrace, seed: int) -> None:
    trace = make_trace(seed, requests=200)
    parts = segments(trace)
    asked = np.zeros(trace.blocks, np.int64)
    for path in trace.paths():
        asked[path] += 1
    for request, path in enumerate(trace.paths()):
        of_path = parts.of_block[path].tolist()
        assert list(dict.fromkeys(of_path)) == parts.paths[request]
        assert len(path) == sum(parts.blocks[parts.paths[request]])
        assert (asked[path] == parts.asked[of_path]).all()
    assert len(parts.blocks) < trace.blocks


@pytest.mark.parametrize("capacity", [3, 9, 30, 80])
@pytest.mark.parametrize("seed", range(4))
def test_one_host_hits_what_the_daemons_core_hits(make_trace: MakeTrace, seed: int, capacity: int) -> None:
    """Request by request."""
    trace = make_trace(seed, requests=300)
    core = list(replayed(SimulatedHost(capacity), trace, list(trace.paths()), no_progress))
    assert one_host(trace, Setting(1, capacity, mode=PutMode.NEVER)).hits == core


@pytest.mark.parametrize("percent", [1, 10])
def test_one_host_hits_what_the_daemons_core_hits_of_a_published_trace(percent: int) -> None:
    trace = read(real_trace("mooncake"))
    capacity = trace.blocks * percent // 100
    core = hit_rates(trace, list(trace.paths()), LRU, capacity, no_progress)
    counts = one_host(trace, Setting(1, capacity, mode=PutMode.NEVER))
    assert counts.host_hit_tokens == core.hit_tokens
    assert sum(counts.hits) == pytest.approx(core.block_hit_rate * counts.asked_blocks)


def test_a_store_that_everything_is_put_into_hits_all_that_there_is_to_hit() -> None:
    trace = read(real_trace("mooncake"))
    counts = one_host(trace, Setting(1, trace.blocks // 100, mode=PutMode.THROUGH))
    assert f"{(counts.host_hit_tokens + counts.store_hit_tokens) / counts.tokens:.2%}" == "37.36%"
    assert counts.put_blocks == trace.blocks


class SlowFleet:
    """Hosts and a store, block by block. What was put is known to all with the next request."""

    def __init__(self, hosts: int, capacity: int, mode: PutMode) -> None:
        self._pools: list[OrderedDict[int, bool]] = [OrderedDict() for _ in range(hosts)]
        self._capacity = capacity
        self._mode = mode
        self._stored: set[int] = set()
        self.put = self.read = 0

    def request(self, number: int, path: list[int]) -> int:
        pool = self._pools[number]
        hits, new = 0, set()
        for block in path:
            if block in pool:
                if self._mode is PutMode.ON_REUSE and not pool[block]:
                    new.add(block)
                    pool[block] = True
            elif block in self._stored:
                self.read += 1
                pool[block] = True
            else:
                break
            hits += 1
        if self._mode is PutMode.THROUGH:
            new |= {block for block in path if block not in pool}
        for block in reversed(path):
            pool.setdefault(block, False)
            pool.move_to_end(block)
        while len(pool) > self._capacity:
            pool.popitem(last=False)
        self.put += len(new - self._stored)
        self._stored |= new
        return hits


@pytest.mark.parametrize("mode", [PutMode.ON_REUSE, PutMode.THROUGH])
@pytest.mark.parametrize(("hosts", "capacity"), [(1, 12), (3, 12), (5, 40)])
@pytest.mark.parametrize("seed", range(4))
def test_several_hosts_hit_put_and_read_what_a_slow_simulation_does(
    make_trace: MakeTrace, seed: int, hosts: int, capacity: int, mode: PutMode
) -> None:
    trace = slow(make_trace(seed, requests=400))
    setting = Setting(hosts, capacity, Router.ROUND_ROBIN, mode)
    fast = one_host(trace, setting)
    reference = SlowFleet(hosts, capacity, mode)
    hits = [reference.request(n % hosts, path.tolist()) for n, path in enumerate(trace.paths())]
    assert fast.hits == hits
    assert fast.put_blocks == reference.put > 0
    assert fast.read_blocks == reference.read > 0


def test_what_others_put_is_known_after_a_look_and_not_before(make_trace: MakeTrace) -> None:
    trace = make_trace(1)
    path = max(trace.paths(), key=len)
    asked = Trace(
        "twice",
        4,
        np.array([NO_PARENT, *range(len(path) - 1)]),
        np.full(4, len(path) - 1),
        np.full(4, 4 * len(path)),
        np.array([0.0, 4.0, 8.0, 18.0]),
    )
    setting = Setting(4, 100, Router.ROUND_ROBIN, PutMode.THROUGH, look_every_s=6.0)
    counts = one_host(asked, setting)
    # The second host asks before the first look; then it has put the blocks as well.
    assert counts.hits == [0, 0, len(path), len(path)]
    assert counts.put_blocks == 2 * len(path)
    assert counts.put_again_blocks == len(path)
    forgetful = one_host(asked, replace(setting, remembered_blocks=-1.0))
    assert forgetful.hits == [0, 0, 0, 0]


def test_copies_share_what_is_common_and_nothing_else(make_trace: MakeTrace) -> None:
    parts = segments(slow(make_trace(2, requests=400)))
    room = Setting(1, 1 << 20, mode=PutMode.NEVER)

    def hits(fraction: float) -> int:
        return simulate(fleet_requests(parts, 6, common_fraction=fraction), room).host_hit_tokens

    asked = fleet_requests(parts, 6, common_fraction=0.3)
    assert 0 < asked.common_fraction <= 0.4
    assert len(asked.request) == 6 * parts.trace.requests
    for path in parts.paths:
        common = asked.common[path].tolist()
        assert common == sorted(common, reverse=True), "what is common begins a prompt"
    half = fleet_requests(parts, 6, common_fraction=0.3, kept=0.5)
    assert 0.3 < len(half.request) / len(asked.request) < 0.7
    assert hits(0.3) > hits(0.0)


@pytest.fixture
def busy(make_trace: MakeTrace) -> Segments:
    """About one request in each four seconds."""
    trace = make_trace(5, requests=2_000)
    return segments(replace(trace, arrival_s=np.multiply(trace.arrival_s, 4.0)))


@pytest.mark.parametrize("hosts", [2, 20])
@pytest.mark.parametrize("per_pack", [0.25, 40.0])
def test_the_formulas_say_what_the_simulation_counts(busy: Segments, hosts: int, per_pack: float) -> None:
    """Of small packs and of large blocks."""
    requests = fleet_requests(busy, hosts, common_fraction=0.2)
    block_tokens = 4
    setting = Setting(hosts, 60, Router.ROUND_ROBIN, PutMode.THROUGH, blocks_per_pack=per_pack)
    counts = simulate(requests, setting)
    bytes_per_token = int(model.PACK_BYTES / per_pack / block_tokens)
    said = model.load(
        model.Fleet(
            hosts=hosts,
            requests_per_s=counts.requests / requests.seconds,
            prompt_tokens=counts.asked_blocks * block_tokens / counts.requests,
            put_fraction=counts.put_blocks / counts.asked_blocks,
            read_fraction=counts.read_blocks / counts.asked_blocks,
            putting_fraction=counts.putting_requests / counts.requests,
            bytes_per_token=bytes_per_token,
            block_tokens=1,
        )
    )
    assert said.keeps_up
    assert said.puts == pytest.approx(counts.puts / requests.seconds, rel=0.15)
    assert said.head_reads == pytest.approx(counts.head_reads / requests.seconds, rel=0.15)
    assert said.lists == pytest.approx(counts.lists / requests.seconds, rel=0.15)
    assert said.known_after_s == pytest.approx(counts.known_after_s, rel=0.25)
