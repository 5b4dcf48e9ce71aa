"""Hit rates: of the daemon's core beside a plain model of its order, and of the optimum beside every possible
choice."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import numpy as np
import pytest
from kvtierd.simulate import optimum
from kvtierd.simulate.host import SimulatedHost, hashes_of
from kvtierd.simulate.results import LRU, OPTIMUM, REUSE, hit_rates
from kvtierd.simulate.traces import Trace, read

from tests.unit.simulate.conftest import MakeTrace, real_trace


def tail_first(trace: Trace, capacity: int) -> list[int]:
    """Hits of each request under plain LRU that touches a prompt from its end to its beginning."""
    order: OrderedDict[int, None] = OrderedDict()
    found = []
    for path in trace.paths():
        chain = path.tolist()
        hits = next((number for number, block in enumerate(chain) if block not in order), len(chain))
        found.append(hits)
        for block in chain[:capacity][::-1]:
            order.pop(block, None)
            order[block] = None
        while len(order) > capacity:
            order.popitem(last=False)
    return found


def best(chains: list[list[int]], capacity: int) -> int:
    """The most hits that any choice of what to keep can have."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for chain in chains:
        coming: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            found = next((number for number, block in enumerate(chain) if block not in kept), len(chain))
            there = sorted(kept | set(chain))
            for size in range(min(capacity, len(there)) + 1):
                for choice in itertools.combinations(there, size):
                    state = frozenset(choice)
                    coming[state] = max(coming.get(state, 0), hits + found)
        states = coming
    return max(states.values())


def no_progress(done: int) -> None:
    pass


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("capacity", [1, 3, 10, 40, 1_000])
def test_the_core_hits_what_tail_first_lru_hits(make_trace: MakeTrace, seed: int, capacity: int) -> None:
    trace = make_trace(seed, requests=200)
    host = SimulatedHost(capacity)
    found = []
    for path, arrival_s in zip(trace.paths(), trace.arrival_s.tolist(), strict=True):
        host.now_s = arrival_s
        found.append(host.request(hashes_of(path)))
    assert found == tail_first(trace, capacity)


@pytest.mark.parametrize("seed", range(25))
def test_no_choice_hits_more_than_the_optimum(make_trace: MakeTrace, seed: int) -> None:
    trace = make_trace(seed, requests=7, sessions=3, step_max=3)
    paths = list(trace.paths())
    for capacity in range(1, 5):
        found, _ = optimum.hits(paths, trace.blocks, capacity)
        assert sum(found) == best([path.tolist() for path in paths], capacity)


@pytest.mark.parametrize("seed", range(5))
def test_the_optimum_is_never_less_than_what_the_core_hits(make_trace: MakeTrace, seed: int) -> None:
    trace = make_trace(seed, requests=150)
    paths = list(trace.paths())
    for capacity in (2, 8, 30):
        of_core = hit_rates(trace, paths, LRU, capacity, no_progress)
        most = hit_rates(trace, paths, OPTIMUM, capacity, no_progress)
        assert most.block_hit_rate >= of_core.block_hit_rate
        assert most.inserts <= of_core.inserts


def test_what_is_learnt_beats_recency_where_much_comes_once() -> None:
    """Sessions that come back beside prompts that do not, with room for a fifth of the former."""
    random = np.random.default_rng(7)
    parent: list[int] = []
    ends = [-1] * 40
    leaf, tokens = [], []
    for number in range(4_000):
        block, new = (-1, 12) if number % 2 else (ends[int(random.integers(40))], 2)
        chosen = ends.index(block) if block in ends and not number % 2 else None
        for _ in range(new):
            parent.append(block)
            block = len(parent) - 1
        if chosen is not None:
            ends[chosen] = block if random.random() > 0.05 else -1
        leaf.append(block)
        tokens.append(4)
    trace = Trace(
        "mixed", 4, np.array(parent), np.array(leaf), np.array(tokens), np.arange(4_000, dtype=np.float64)
    )
    paths = list(trace.paths())
    learnt, recent, most = (hit_rates(trace, paths, name, 400, no_progress) for name in (REUSE, LRU, OPTIMUM))
    assert recent.block_hit_rate * 1.1 < learnt.block_hit_rate <= most.block_hit_rate
    assert learnt.inserts < recent.inserts / 2


def test_with_room_for_everything_all_hit_what_was_there_before(make_trace: MakeTrace) -> None:
    trace = make_trace(1)
    paths = list(trace.paths())
    ways = [hit_rates(trace, paths, name, trace.blocks, no_progress) for name in (LRU, REUSE, OPTIMUM)]
    assert ways[0].hit_tokens == ways[1].hit_tokens == ways[2].hit_tokens > 0
    assert ways[0].inserts == ways[1].inserts == trace.blocks


def test_progress_adds_up_to_all_requests(make_trace: MakeTrace) -> None:
    trace = make_trace(2, requests=130)
    for name in (LRU, OPTIMUM):
        told: list[int] = []
        hit_rates(trace, list(trace.paths()), name, 4, told.append)
        assert sum(told) == 130


def test_a_prompt_longer_than_a_lookup_and_a_store_may_be() -> None:
    host = SimulatedHost(100_000)
    chain = hashes_of(np.arange(70_000))
    assert host.request(chain) == 0
    assert host.request(chain) == 70_000
    assert host.inserts == 70_000


@pytest.mark.parametrize(
    ("name", "percent", "policy", "digits"),
    [
        ("mooncake", 1, LRU, "5.35"),
        ("mooncake", 10, LRU, "28.44"),
        ("mooncake", 1, OPTIMUM, "25.12"),
        ("claude", 1, LRU, "31.78"),
        ("claude", 1, OPTIMUM, "56.18"),
        ("mooncake", 2, "round-robin", "7.69"),
        ("mooncake", 10, "round-robin", "25.30"),
        ("claude", 2, "fifo", "53.16"),
        ("claude", 2, "arc", "59.76"),
        ("claude", 2, "s3fifo", "55.39"),
    ],
)
def test_published_traces_give_the_published_digits(
    name: str, percent: int, policy: str, digits: str
) -> None:
    trace = read(real_trace(name))
    capacity = trace.blocks * percent // 100
    found = hit_rates(trace, list(trace.paths()), policy, capacity, no_progress)
    assert f"{found.prefix_token_hit_rate:.2%}" == f"{digits}%"
    if (name, percent, policy) == ("mooncake", 10, LRU):
        assert f"{found.prefix_token_hit_rate:.5f}" == "0.28439"


@pytest.mark.parametrize(
    ("name", "percent", "at_least"),
    [
        ("mooncake", 0.5, 0.075),
        ("mooncake", 1, 0.103),
        ("mooncake", 2, 0.142),
        ("mooncake", 5, 0.225),
        ("mooncake", 10, 0.295),
        ("mooncake", 25, 0.360),
        ("claude", 0.25, 0.155),
        ("claude", 0.5, 0.27),
        ("claude", 1, 0.43),
        ("claude", 2, 0.63),
    ],
)
@pytest.mark.long
def test_what_is_learnt_of_published_traces(name: str, percent: float, at_least: float) -> None:
    trace = read(real_trace(name))
    paths = list(trace.paths())
    capacity = int(trace.blocks * percent / 100)
    learnt, recent = (hit_rates(trace, paths, each, capacity, no_progress) for each in (REUSE, LRU))
    assert learnt.prefix_token_hit_rate >= at_least
    assert learnt.prefix_token_hit_rate >= recent.prefix_token_hit_rate - 0.002
    if (name, percent) == ("mooncake", 1):
        assert learnt.inserts <= 0.45 * recent.inserts
