"""What the daemon has evicted is stored again as soon as somebody computes it, and what it has is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.support.daemon import DaemonHost, until
from tests.vllm.mini_engine import TOKENS, MiniEngine
from tests.vllm.mini_rig import client, compute, hashes_of, held_blocks
from tests.vllm.mini_rig import host as host
from tests.vllm.mini_rig import make as make
from tests.vllm.rig import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
__all__ = ["host", "make"]

STORY_BLOCKS = 6
STORY = prompt(STORY_BLOCKS * TOKENS + 1, seed=700)
OTHER_BLOCKS = 20


@pytest.mark.parametrize("gone_max", [1, 256])
def test_a_prefix_that_was_evicted_is_stored_again_when_it_is_computed_again(
    make: Callable[..., MiniEngine], host: DaemonHost, monkeypatch: pytest.MonkeyPatch, gone_max: int
) -> None:
    monkeypatch.setattr("kvtier_vllm.scheduler.storing.GONE_MAX", gone_max)
    engine = make(lookup_budget_ms=1_000)
    compute(engine, "story", STORY)
    hashes = hashes_of(engine, STORY)
    until(lambda: client(engine).known_run(hashes) == STORY_BLOCKS, "the daemon has it")
    submitted = client(engine).status.counters.stores
    engine.forget()
    compute(engine, "again", STORY, kv_transfer_params={"kvtier": {"load": False}})
    assert client(engine).status.counters.stores == submitted, "what is there is not stored again"
    numbers = itertools.count()

    def displaced() -> bool:
        number = next(numbers)
        compute(engine, f"other {number}", prompt(OTHER_BLOCKS * TOKENS, seed=701 + number))
        return bool(client(engine).known_run(hashes) == 0)

    until(displaced, "the daemon has evicted it")
    engine.forget()
    assert compute(engine, "once more", STORY) == 0
    assert held_blocks(engine, STORY) == STORY_BLOCKS
