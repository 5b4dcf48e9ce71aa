"""The daemon goes and comes back under a real engine that is at work: no request notices, and the cache is
warm."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.vllm.engine import Engine
from tests.vllm.rig import BLOCK, Rig, full_blocks, prompt, same

pytestmark = [pytest.mark.vllm, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(400)]

REQUESTS = 4
PROMPT_TOKENS = 600
OUTPUT_TOKENS = 40
STEP_S = 20.0
"""Far above any budget of a step and what a busy machine adds to it, far below what waiting for a stopped
daemon would take."""
ALL_FREE = {"requests": {}, "free_blocks": 255}


def go_away(rig: Rig, how: str) -> None:
    """The daemon ends, while the engine goes on with what it has to do."""
    if how == "kill -9":
        rig.host.kill9()
        return
    drain = rig.host.begin_drain()
    while drain.poll() is None:
        rig.engine.call("step")
    assert "start  kvtierd serve" in rig.host.drained(drain)


@pytest.mark.parametrize("how", ["kill -9", "drain --for-restart"])
def test_an_engine_at_work_attaches_again_by_itself_and_hits(
    how: str, rig: Rig, plain: Engine, proved: Callable[[str], None], count: Counter[str]
) -> None:
    planned = how != "kill -9"
    known = prompt(12 * BLOCK + 1, seed=90 + planned)
    hit = rig.compute_and_hit(known)
    rig.forget()
    registrations = rig.look("rank.status.counters.registrations")

    prompts = [prompt(PROMPT_TOKENS, seed=400 + REQUESTS * planned + n) for n in range(REQUESTS)]
    requests = [
        rig.engine.call("add", prompt=tokens, max_tokens=OUTPUT_TOKENS, logprobs=1)["request"]
        for tokens in [*prompts, known]  # the last one is to be loaded
    ]
    rig.engine.call("step", count=4)
    go_away(rig, how)
    count["planned_restarts" if planned else "daemon_kills"] += 1
    rig.engine.call("step", count=8)
    rig.host.start()
    answers = rig.engine.call("finish", requests=requests, engine_timeout_s=60)["results"]
    assert [len(answer["tokens"]) for answer in answers] == [OUTPUT_TOKENS] * len(requests)
    assert {answer["finish_reason"] for answer in answers} == {"length"}

    rig.wait_ready()
    assert rig.look("rank.status.counters.registrations") > registrations, "its memory is registered again"
    assert rig.host.status().pool.start == "warm"
    rig.wait_stored()
    rig.forget()
    restored = rig.generate(known)
    assert restored.num_cached_tokens == full_blocks(len(known))
    assert same(restored, hit)
    for tokens in prompts:
        plain.generate([tokens], max_tokens=1)
        expected = plain.generate([tokens], max_tokens=16)[0]
        assert rig.generate(tokens).tokens == expected.tokens
    proved(
        f"{how} of kvtierd under a vLLM at work: {len(requests)} requests finished as if nothing had been;"
        f" the same engine hit {restored.num_cached_tokens} tokens that it had stored before, bit for bit"
    )


def test_no_step_waits_for_a_stopped_daemon(rig: Rig, count: Counter[str]) -> None:
    """What it was to load it computes, what it was to store stays unstored, and all its blocks come back."""
    known = prompt(12 * BLOCK + 1, seed=92)
    hit = rig.compute_and_hit(known)
    rig.forget()
    rig.patient(False)
    rig.host.freeze(workers=True)
    count["daemon_stops"] += 1
    prompts = [known, *(prompt(PROMPT_TOKENS, seed=420 + n) for n in range(REQUESTS))]
    for tokens in prompts:
        rig.engine.call("add", prompt=tokens, max_tokens=OUTPUT_TOKENS, logprobs=1)
    slowest_s, steps = 0.0, 0
    deadline_s = time.monotonic() + 60
    while rig.engine.call("state")["requests"]:
        before_s = time.monotonic()
        rig.engine.call("step")
        slowest_s, steps = max(slowest_s, time.monotonic() - before_s), steps + 1
        assert time.monotonic() < deadline_s, rig.engine.call("state")
    assert steps >= OUTPUT_TOKENS
    assert slowest_s < STEP_S
    assert rig.engine.drain() == ALL_FREE
    rig.host.thaw()
    rig.patient()
    rig.wait_ready()
    rig.forget()
    assert same(rig.generate(known), hit)
