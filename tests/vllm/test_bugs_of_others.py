"""What went wrong in other caches of this kind, where no other test of ours would have caught it. All of them
are listed in docs/known-bugs.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.mini_engine import TOKENS, MiniEngine, output_of
from tests.vllm.mini_rig import all_came_back, compute, held_blocks, wait_stored
from tests.vllm.mini_rig import host as host
from tests.vllm.mini_rig import make as make
from tests.vllm.rig import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
__all__ = ["host", "make"]


def test_the_last_sampled_tokens_slot_is_never_stored(make: Callable[..., MiniEngine]) -> None:
    """No forward pass has written it, though the block that it fills has a hash."""
    engine, story = make(), prompt(3 * TOKENS - 8)
    assert compute(engine, "story", story, max_tokens=8) == 0
    whole = story + output_of(story, 8)
    assert len(whole) == 3 * TOKENS
    assert held_blocks(engine, [*whole, 1]) == 2
    all_came_back(engine)


def test_the_block_that_is_full_when_a_request_ends_is_stored(make: Callable[..., MiniEngine]) -> None:
    engine, story = make(), prompt(3 * TOKENS - 8)
    compute(engine, "story", story, max_tokens=9)
    assert held_blocks(engine, [*story, *output_of(story, 8), 1]) == 3
    all_came_back(engine)


def test_requests_of_one_prefix_load_it_beside_each_other(make: Callable[..., MiniEngine]) -> None:
    """Not one after the other: each waits for its own load and for nobody's else."""
    # However long the answers take, the one step below hears all of them.
    engine, story = make(lookup_budget_ms=60_000.0), prompt(6 * TOKENS + 5)
    compute(engine, "story", story)
    engine.forget()
    names = [f"r{index}" for index in range(4)]
    for name in names:
        engine.add(name, story)
    engine.step()
    assert set(engine.states().values()) == {"WAITING_FOR_REMOTE_KVS"}
    engine.run()
    wait_stored(engine)
    assert [engine.cached[name] for name in names] == [6 * TOKENS] * 4
    assert engine.connector._scheduler.totals()["loads"] == 4
    all_came_back(engine)


def test_the_pool_takes_what_was_asked_for_and_no_power_of_two(host: Any) -> None:
    assert host.daemon.pool.stat().st_size == 6 << 20
