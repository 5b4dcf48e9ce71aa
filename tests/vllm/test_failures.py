"""What goes wrong around an engine costs it misses: never a request, a wrong token, or a block of its
memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.daemon import until
from tests.vllm.engine import Engine, Generated
from tests.vllm.rig import BLOCK, Rig, prompt, same

pytestmark = [pytest.mark.vllm, pytest.mark.faults, pytest.mark.timeout(400)]

ALL_FREE = {"requests": {}, "free_blocks": 255}
TRIES = 20
"""To catch a copy that takes 0.3 s before it is over: a busy machine may be late."""
UNTOUCHED = (
    "all(bool((layer.view(__import__('torch').int8)[1:] == 0x3f).all())"
    " for layer in core.model_executor.driver_worker.model_runner.kv_caches)"
)


def answer(plain: Engine, tokens: list[int]) -> Generated:
    """What an engine without a connector says."""
    return plain.generate([tokens], max_tokens=16)[0]


def step_until(rig: Rig, expression: str) -> None:
    """Steps the engine until an expression holds (see `Rig.look`)."""

    def holds() -> bool:
        rig.engine.call("step")
        return bool(rig.look(expression))

    until(holds, expression)


def stored_and_forgotten(rig: Rig, tokens: list[int]) -> tuple[Generated, Generated]:
    """The answers when it is computed, and when its blocks are there."""
    cold, hit = rig.both(tokens)
    rig.forget()
    return cold, hit


def test_without_its_daemon_an_engine_serves_on_and_hits_again_when_it_is_back(
    rig: Rig, plain: Engine
) -> None:
    tokens = prompt(9 * BLOCK + 1, seed=20)
    computed, hit = stored_and_forgotten(rig, tokens)
    rig.host.kill9()
    alone = rig.generate(tokens)
    assert alone.num_cached_tokens == 0
    assert same(alone, computed)
    assert same(rig.generate(prompt(300, seed=21)), answer(plain, prompt(300, seed=21)))
    rig.forget()
    rig.host.start()
    rig.wait_ready()
    restored = rig.generate(tokens)
    assert restored.num_cached_tokens == 9 * BLOCK
    assert same(restored, hit)


@pytest.mark.parametrize("workers", [False, True], ids=["front", "front and workers"])
def test_a_frozen_daemon_costs_misses_only(rig: Rig, workers: bool) -> None:
    tokens = prompt(9 * BLOCK + 1, seed=22 + 8 * workers)
    computed, hit = stored_and_forgotten(rig, tokens)
    rig.patient(False)
    rig.host.freeze(workers=workers)
    assert same(rig.generate(tokens), computed)
    rig.wait_away()
    rig.forget()
    second = rig.generate(tokens)
    assert second.num_cached_tokens == 0
    assert same(second, computed)
    rig.host.thaw()
    rig.patient()
    rig.wait_ready()
    rig.forget()
    third = rig.generate(tokens)
    assert third.num_cached_tokens == 9 * BLOCK
    assert same(third, hit)


def test_what_was_stored_just_before_the_daemon_froze_frees_the_engines_blocks(rig: Rig) -> None:
    rig.patient(False)
    rig.host.freeze(workers=True)
    rig.generate(prompt(9 * BLOCK + 1, seed=23))
    assert rig.engine.drain() == ALL_FREE


def test_a_load_that_fails_is_computed(rig: Rig, with_fault: Callable[[str], None]) -> None:
    tokens = prompt(9 * BLOCK + 1, seed=24)
    computed, _ = stored_and_forgotten(rig, tokens)
    with_fault("die-in-copy")
    assert same(rig.generate(tokens), computed)
    assert rig.engine.drain() == ALL_FREE


def test_a_load_whose_worker_hangs_waits_for_its_end_and_is_computed(
    rig: Rig, with_fault: Callable[[str], None]
) -> None:
    tokens = prompt(9 * BLOCK + 1, seed=25)
    computed, _ = stored_and_forgotten(rig, tokens)
    with_fault("hang-in-copy")
    assert same(rig.generate(tokens), computed)
    assert rig.engine.drain() == ALL_FREE


def test_a_load_that_does_not_start_in_time_is_computed(rig: Rig) -> None:
    tokens = prompt(9 * BLOCK + 1, seed=26)
    computed, _ = stored_and_forgotten(rig, tokens)
    rig.patient(False)
    rig.host.freeze_workers()
    assert same(rig.generate(tokens), computed)
    rig.host.thaw()
    assert rig.engine.drain() == ALL_FREE


def test_an_engine_finds_its_way_back_after_a_worker_died(rig: Rig) -> None:
    tokens = prompt(9 * BLOCK + 1, seed=27)
    _, hit = stored_and_forgotten(rig, tokens)
    before = rig.look("rank.status.counters.registrations")
    rig.host.kill_worker()
    until(
        lambda: rig.look("rank.status.counters.registrations") > before,
        "memory is registered again",
    )
    rig.wait_ready()
    restored = rig.generate(tokens)
    assert restored.num_cached_tokens == 9 * BLOCK
    assert same(restored, hit)


@pytest.mark.parametrize("started", [False, True], ids=["before it started", "while it runs"])
def test_an_aborted_load_writes_nothing_afterwards(
    rig: Rig, with_fault: Callable[[str], None], started: bool
) -> None:
    tokens = prompt(9 * BLOCK + 1, seed=28 + 8 * started)
    _, hit = stored_and_forgotten(rig, tokens)
    with_fault("slow-copy:300")
    rig.forget()
    wanted = "STARTED" if started else "ARMED"
    loading = f"[part.state().name for load in worker._loads for part in load.left] == ['{wanted}']"

    def caught() -> str | None:
        """A request whose load is so far, and cannot go on."""
        if not started:
            rig.host.freeze_workers()
        request: str = rig.engine.call("add", prompt=tokens, max_tokens=4, logprobs=1)["request"]
        while rig.engine.call("step")["requests"]:
            if not rig.look(loading):
                continue
            rig.host.freeze_workers()
            if rig.look(loading):
                return request
            rig.host.thaw()  # the copy ended first
        rig.engine.call("finish", requests=[request], engine_timeout_s=60)
        rig.forget()
        return None

    request = next(filter(None, (caught() for _ in range(TRIES))), None)
    assert request is not None, "every load was over before it was seen"
    held = rig.engine.call("abort", requests=[request])["free_blocks"]
    assert held < 255
    if started:
        rig.host.thaw()
    assert rig.engine.drain() == ALL_FREE
    rig.engine.reset_prefix_cache()
    rig.engine.overwrite_cache(0x3F)
    rig.host.thaw()
    until(lambda: rig.host.status().instances[0].transfers_active == 0, "no transfer is left")
    assert rig.engine.call("evaluate", expression=UNTOUCHED)["value"]
    rig.wait_ready()
    assert same(rig.generate(tokens), hit)


def test_a_request_aborted_while_it_is_stored_keeps_its_blocks_until_the_copy_ends(
    rig: Rig, with_fault: Callable[[str], None]
) -> None:
    with_fault("slow-copy:300")
    rig.forget()
    tokens = prompt(7 * BLOCK + 1, seed=29)
    request = rig.engine.call("add", prompt=tokens, max_tokens=1_000, logprobs=1)["request"]
    storing = "'STARTED' in [store.part.state().name for store in worker._stores]"
    step_until(rig, storing)
    rig.host.freeze_workers()
    while not rig.look(storing):  # the copy ended first: the next one
        rig.host.thaw()
        step_until(rig, storing)
        rig.host.freeze_workers()
    reading = rig.look("len({b for store in worker._stores for b in store.part.block_ids})")
    assert rig.engine.call("abort", requests=[request])["free_blocks"] == ALL_FREE["free_blocks"] - reading
    rig.host.thaw()
    assert rig.engine.drain() == ALL_FREE
    rig.wait_stored()
    rig.forget()
    assert rig.generate(tokens).num_cached_tokens == 7 * BLOCK
