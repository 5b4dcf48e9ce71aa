"""The purpose of it all: KV blocks outlive the engine that computed them, and nothing of the
output changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.daemon import until
from tests.vllm.conftest import STORY_TOKENS, FirstLife, SecondLife
from tests.vllm.rig import BLOCK, Rig, flip_a_byte_of_every_block, full_blocks, prompt, same

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


def test_a_second_engine_continues_where_a_killed_one_was(
    first_life: FirstLife, second_life: SecondLife, proved: Callable[[str], None]
) -> None:
    cold, hit, restored = first_life.cold, first_life.hit, second_life.restored
    assert cold.num_cached_tokens == 0
    assert hit.num_cached_tokens == restored.num_cached_tokens == full_blocks(STORY_TOKENS)
    assert restored.tokens == hit.tokens
    assert restored.logprobs == hit.logprobs
    proved(
        f"An engine that never saw a prompt loaded {restored.num_cached_tokens} of its {STORY_TOKENS} tokens "
        "from a killed engine's store, and answered bit for bit as that one did."
    )


@pytest.mark.parametrize("length", [BLOCK + 1, 10 * BLOCK, 10 * BLOCK + 1, 777])
def test_what_an_engine_forgot_is_restored_bit_for_bit(rig: Rig, length: int) -> None:
    hit = rig.compute_and_hit(prompt(length, seed=length))
    rig.forget()
    restored = rig.generate(prompt(length, seed=length))
    assert restored.num_cached_tokens == hit.num_cached_tokens == full_blocks(length)
    assert same(restored, hit)
    again = rig.generate(prompt(length, seed=length))
    assert same(again, hit)


def test_the_part_an_engine_still_has_is_not_loaded(rig: Rig) -> None:
    tokens = prompt(20 * BLOCK + 5, seed=1)
    hit = rig.compute_and_hit(tokens)
    rig.forget()
    rig.generate(tokens[: 8 * BLOCK + 1])
    rig.wait_stored()  # the daemon has counted the load: the engine goes on before
    before = rig.host.status().counters.loaded_blocks
    restored = rig.generate(tokens)
    rig.wait_stored()
    assert rig.host.status().counters.loaded_blocks - before == 12
    assert restored.num_cached_tokens == 20 * BLOCK
    assert same(restored, hit)


def test_tokens_that_were_sampled_are_stored_too(rig: Rig) -> None:
    tokens = prompt(3 * BLOCK, seed=2)
    first = rig.generate(tokens, max_tokens=3 * BLOCK)
    rig.wait_stored()
    talk = tokens + first.tokens + prompt(5)
    hit = rig.generate(talk)
    assert hit.num_cached_tokens == 6 * BLOCK - BLOCK  # the last sampled token was never computed
    rig.wait_stored()
    rig.forget()
    restored = rig.generate(talk)
    assert restored.num_cached_tokens >= hit.num_cached_tokens
    assert restored.tokens == hit.tokens


def test_a_block_is_stored_once(rig: Rig) -> None:
    tokens = prompt(9 * BLOCK + 3, seed=3)
    rig.compute_and_hit(tokens)
    counters = rig.host.status().counters
    for _ in range(3):
        rig.generate(tokens)
    rig.forget()
    rig.generate(tokens)
    rig.wait_stored()
    after = rig.host.status().counters
    assert after.stored_blocks == counters.stored_blocks
    assert after.deduplicated_blocks == counters.deduplicated_blocks  # not even submitted


def test_layers_wait_for_nothing(rig: Rig) -> None:
    """Large models have many, and around each vLLM would call two hooks, in every step."""
    hooks = "('wait_for_layer_load', 'save_kv_layer')"
    kept, kind = "__import__('builtins').kept_hooks", "type(scheduler.connector)"
    rig.look(f"[setattr(__import__('builtins'), 'kept_hooks', [getattr({kind}, one) for one in {hooks}])]")
    rig.look(f"[setattr({kind}, one, None) for one in {hooks}]")
    try:
        tokens = prompt(3 * BLOCK + 1, seed=12)
        hit = rig.compute_and_hit(tokens)
        rig.forget()
        assert same(rig.generate(tokens), hit)
    finally:
        rig.look(f"[setattr({kind}, one, hook) for one, hook in zip({hooks}, {kept})]")


def test_wrong_bytes_would_show(rig: Rig) -> None:
    """The negative control of every test above. While the daemon runs, it trusts its own memory."""
    tokens = prompt(6 * BLOCK + 1, seed=4)
    hit = rig.compute_and_hit(tokens)
    rig.forget()
    assert flip_a_byte_of_every_block(rig.host.daemon.pool) >= 6
    spoilt = rig.generate(tokens)
    assert spoilt.num_cached_tokens == hit.num_cached_tokens
    assert not same(spoilt, hit)
    flip_a_byte_of_every_block(rig.host.daemon.pool)
    rig.forget()
    assert same(rig.generate(tokens), hit)


def test_bytes_that_went_wrong_while_the_daemon_was_away_are_computed_again(rig: Rig) -> None:
    tokens = prompt(6 * BLOCK + 1, seed=5)
    hit = rig.compute_and_hit(tokens)
    rig.forget()
    pool = rig.host.daemon.pool
    rig.host.kill9()
    until(lambda: flip_a_byte_of_every_block(pool) >= 6, "the pool has blocks")
    rig.host.start()
    rig.wait_ready()
    computed = rig.generate(tokens)
    assert computed.tokens == hit.tokens
    assert rig.host.status().counters.loaded_blocks == 0
    rig.wait_stored()
    rig.forget()
    restored = rig.generate(tokens)
    assert restored.num_cached_tokens == 6 * BLOCK
    assert restored.tokens == hit.tokens


def test_a_restarted_daemon_is_found_warm(rig: Rig) -> None:
    tokens = prompt(12 * BLOCK + 1, seed=6)
    hit = rig.compute_and_hit(tokens)
    rig.forget()
    rig.host.restart()
    rig.wait_ready()
    restored = rig.generate(tokens)
    assert restored.num_cached_tokens == 12 * BLOCK
    assert same(restored, hit)


def test_a_reset_of_the_connector_hides_what_was_stored_before(rig: Rig) -> None:
    tokens = prompt(5 * BLOCK + 1, seed=7)
    hit = rig.compute_and_hit(tokens)
    rig.engine.drain()
    assert rig.look("scheduler.reset_prefix_cache(reset_connector=True)")
    rig.generate(prompt(BLOCK))  # a step tells the worker
    rig.wait_ready()
    computed = rig.generate(tokens)
    assert computed.num_cached_tokens == 0
    assert computed.tokens == hit.tokens
    rig.wait_stored()
    rig.forget()
    assert rig.generate(tokens).num_cached_tokens == 5 * BLOCK
