"""Replays above a disk: what memory and disk hit together, and what is written to the disk."""

from __future__ import annotations

import json

import pytest
from kvtierd.simulate.results import LRU, OPTIMUM, REUSE, hit_rates
from kvtierd.simulate.traces import read

from tests.unit.simulate.conftest import MakeTrace, real_trace, run


def no_progress(done: int) -> None:
    pass


@pytest.mark.parametrize("policy", [LRU, REUSE])
@pytest.mark.parametrize("seed", range(3))
def test_a_disk_with_room_for_everything_has_everything_once(
    make_trace: MakeTrace, seed: int, policy: str
) -> None:
    trace = make_trace(seed, requests=300)
    paths = list(trace.paths())
    # A prompt is promoted as far as a quarter of the pool goes.
    small = 4 * max(map(len, paths)) + 8
    found = hit_rates(trace, paths, policy, small, no_progress, disk_blocks=2 * trace.blocks)
    everything = hit_rates(trace, paths, OPTIMUM, trace.blocks, no_progress)
    assert found.hit_tokens == everything.hit_tokens
    assert found.disk_writes == trace.blocks


@pytest.mark.parametrize("policy", [LRU, REUSE])
def test_a_disk_adds_hits_and_none_beyond_the_optimum(make_trace: MakeTrace, policy: str) -> None:
    trace = make_trace(4, requests=400)
    paths = list(trace.paths())
    alone = hit_rates(trace, paths, policy, 40, no_progress)
    both = hit_rates(trace, paths, policy, 40, no_progress, disk_blocks=120)
    most = hit_rates(trace, paths, OPTIMUM, 40, no_progress, disk_blocks=120)
    assert alone.block_hit_rate < both.block_hit_rate <= most.block_hit_rate
    assert (alone.disk_blocks, alone.disk_writes) == (None, None)
    assert both.disk_blocks == 120
    assert both.disk_writes


@pytest.mark.parametrize(("policy", "percent"), [(LRU, 28.4), (REUSE, 30.4)])
def test_a_published_trace_with_a_hundredth_in_memory_and_a_tenth_on_a_disk(
    policy: str, percent: float
) -> None:
    """The target is 29 %, with no more than 1.15 times the different blocks written."""
    trace = read(real_trace("mooncake"))
    found = hit_rates(
        trace, list(trace.paths()), policy, trace.blocks // 100, no_progress, disk_blocks=trace.blocks // 10
    )
    assert 100 * found.prefix_token_hit_rate >= percent
    assert found.disk_writes is not None
    assert found.disk_writes <= 1.15 * trace.blocks


def test_the_command_says_what_is_written_to_the_disk(trace: object) -> None:
    result = run(trace, "--capacity", "20%", "--disk", "50%", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    for policy in ("lru", "reuse"):
        each = found[policy]["20%"]
        assert each["disk_blocks"] == found["trace"]["blocks"] // 2
        assert each["disk_writes"] > 0
    assert "disk_writes" not in found["optimum"]["20%"]
    table = run(trace, "--capacity", "20%", "--disk", "50%").stdout
    assert "written to disk" in table
    assert "written to disk" not in run(trace, "--capacity", "20%").stdout


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (("--policy", "arc"), "there is no policy arc with a disk below: write some of lru, reuse, optimum"),
        (("--disk", "much"), "'much' is no size"),
        (("--disk", "0"), "less than one block"),
    ],
)
def test_what_cannot_be_is_refused_by_name(trace: object, options: tuple[str, str], wrong: str) -> None:
    refused = run(trace, "--capacity", "20%", "--disk", "50%", *options)
    assert refused.exit_code == 2
    assert wrong in refused.stderr
