"""A real engine in one process, which nobody steps once its requests are over, as RL frameworks use it: what
stores still read is in nobody's way, and what is stored then is right."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.vllm.rig import BLOCK, Rig, full_blocks, prompt, same

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ATTEMPTS = 5
HELD = "len(side._storer.holds)"
FREE = "scheduler.kv_cache_manager.block_pool.get_num_free_blocks()"
RESET = f"[{HELD}, llm.reset_prefix_cache(), {HELD}]"
"""Whether it succeeds, and how many stores held blocks before and after."""


@pytest.mark.parametrize("count", [1, 4])
def test_a_reset_succeeds_right_after_the_last_request(rig: Rig, count: int) -> None:
    """Also where several end in the same step."""
    held = 0
    for index in range(40):
        if held and index >= 8:
            break
        seeds = range(10_000 * count + 4 * index, 10_000 * count + 4 * index + count)
        # Their last blocks are full, and stored, in the last step.
        rig.engine.generate([prompt(2 * BLOCK, seed) for seed in seeds], max_tokens=1)
        before, succeeded, after = rig.look(RESET)
        assert (succeeded, after) == (True, 0)
        held += before
    assert held, "every store had ended before the reset"
    rig.engine.drain()


def test_what_a_reset_waited_for_is_stored(rig: Rig) -> None:
    tokens = prompt(6 * BLOCK + 1, seed=601)
    _, hit = rig.both(tokens)
    rig.forget()
    for _ in range(3):  # on a busy machine a store may be withdrawn for all that
        rig.generate(tokens, max_tokens=1)
        assert rig.look(RESET)[1:] == [True, 0]
    restored = rig.generate(tokens)
    assert restored.num_cached_tokens == full_blocks(len(tokens))
    assert same(restored, hit)


def test_a_reset_does_not_wait_for_a_copy_that_takes_long(
    rig: Rig, with_fault: Callable[[str], None]
) -> None:
    """The store is withdrawn before anything is written to its blocks."""
    with_fault("slow-copy:500")
    rig.forget()
    tokens, others = prompt(6 * BLOCK + 1, seed=602), [prompt(900, seed=603 + index) for index in range(8)]
    first = rig.generate(tokens, max_tokens=1)
    before, succeeded, after = rig.look(RESET)
    assert (before > 0, succeeded, after) == (True, True, 0)
    rig.engine.generate(others, max_tokens=1)  # takes every block
    rig.engine.drain()
    rig.wait_stored()
    rig.forget()
    again = rig.generate(tokens, max_tokens=1)
    assert again.num_cached_tokens < full_blocks(len(tokens)), "a store was served that had been withdrawn"
    assert again.tokens == first.tokens


def test_a_pause_that_aborts_running_requests_succeeds(rig: Rig, with_fault: Callable[[str], None]) -> None:
    """As `sleep` does. Their stores still run."""
    with_fault("slow-copy:100")
    rig.forget()
    for index in range(4):
        for seed in range(620 + 3 * index, 623 + 3 * index):
            rig.engine.call("add", prompt=prompt(4 * BLOCK, seed), max_tokens=1_000, logprobs=1)
        rig.engine.call("step", count=2 + index)
        try:
            assert rig.look("str(core.pause_scheduler('abort'))") == "None"  # raises if blocks are held
        finally:
            rig.look("str(core.resume_scheduler())")
        assert rig.look(HELD) == 0
        rig.engine.drain()
        rig.wait_ready()


@pytest.mark.parametrize(
    "way", ["llm.reset_prefix_cache()", "core.pause_scheduler('abort')", "core.sleep(1)"]
)
def test_a_request_that_is_aborted_while_it_loads_is_in_nobodys_way(
    rig: Rig, with_fault: Callable[[str], None], way: str
) -> None:
    """Its load may still write to its blocks, so nobody else has them before the workers have said that it
    does not."""
    tokens = prompt(6 * BLOCK + 1, seed=650 + len(way))
    cold, _ = rig.both(tokens)
    with_fault("slow-copy:1500")  # usually longer than all that follows takes
    rig.generate(tokens[: 2 * BLOCK + 1], max_tokens=1)  # stored before the fault, and loaded
    for _ in range(ATTEMPTS):
        rig.forget()
        free = rig.look(FREE)
        request = rig.engine.call("add", prompt=tokens, max_tokens=2, logprobs=1)["request"]
        deadline_s = time.monotonic() + 30
        while "WAITING_FOR_REMOTE_KVS" not in rig.engine.call("step")["requests"].values():
            assert time.monotonic() < deadline_s
        rig.engine.call("abort", requests=[request])
        try:
            assert rig.look(f"str({way})") in ("True", "None")
            loads = rig.look(FREE) < free
        finally:
            rig.look("str(core.wake_up())")
            rig.look("str(core.resume_scheduler())")
        rig.engine.drain()
        assert rig.look(FREE) == free
        if loads:
            break
        for _ in range(2):  # in the namespace that the engine has now, to which its ranks come with a step
            rig.generate(tokens)
            rig.wait_ready()
            rig.wait_stored()
            rig.engine.reset_prefix_cache()
    assert loads, "each load was over before the request was aborted"
    rig.wait_stored()
    rig.engine.reset_prefix_cache()
    again = rig.generate(tokens)
    assert again.tokens == cold.tokens


def test_a_reset_while_requests_run_is_refused_and_withdraws_nothing(rig: Rig) -> None:
    rig.engine.call("add", prompt=prompt(4 * BLOCK, seed=640), max_tokens=100, logprobs=1)
    rig.engine.call("step", count=3)
    rig.engine.generate([prompt(2 * BLOCK, seed=641)], max_tokens=1)
    before = rig.look("side._storer.counters.withdrawn")
    assert not rig.look("llm.reset_prefix_cache()")
    assert rig.look("side._storer.counters.withdrawn") == before
    rig.engine.drain()
