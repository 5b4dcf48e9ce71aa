"""Decode context parallelism at vLLM's scheduler: every rank holds its own tokens of every block, and has
them back, byte by byte. What is not certain is refused."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvtier_vllm import connector, groups
from kvtier_vllm.groups import UnsupportedLayout, context_ranks, groups_of, replicated_groups
from kvtier_vllm.worker.layout import describe
from vllm.v1.kv_cache_interface import AttentionSpec

from tests.support.daemon import DaemonHost, until
from tests.vllm.context_engine import ContextEngine, all_came_back, context_config
from tests.vllm.context_engine import host as host
from tests.vllm.hybrid_engine import FULL, STATE, WINDOW, Kind, kv_cache_config
from tests.vllm.mini_engine import LAYERS, PAGE_BYTES, TOKENS, WrongKV, _kv_cache_config, output_of
from tests.vllm.mini_rig import client, compute, wait_ready, wait_stored
from tests.vllm.rig import flip_a_byte_of_every_block, kv_transfer_config, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BLOCKS = 48
Make = Callable[..., ContextEngine]

spread_is_told = pytest.mark.skipif(
    not hasattr(AttentionSpec, "dcp_sharded"),
    reason="this vLLM does not say which KV caches are spread over ranks, and is refused then",
)


@pytest.fixture
def make(
    host: DaemonHost, model: Path, patience: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Makes engines, attached to the daemon, each in a namespace of its own unless `salt` says otherwise."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr(connector, "ATTACH_WAIT_S", 0.0)  # a rank alone is never ready
    made: list[ContextEngine] = []

    def engine(
        ranks: int = 2,
        spread: int = 2,
        interleave: int = 1,
        *,
        salt: str | None = None,
        attached: bool = True,
        blocks: int = BLOCKS,
        changes: dict[str, Any] | None = None,
        **extra: object,
    ) -> ContextEngine:
        options = patience | {"salt": salt or f"engine {id(made)}/{len(made)}", "lookup_budget_ms": 1_000}
        transfer = kv_transfer_config(host.socket, **options | extra)
        fields = {"cp_kv_cache_interleave_size": interleave, **(changes or {})}
        config = context_config(model, transfer, ranks=ranks, spread=spread, **fields)
        made.append(ContextEngine(config, blocks))
        if attached:
            wait_ready(made[-1])
        return made[-1]

    yield engine
    for one in made:
        one.close()


@spread_is_told
@pytest.mark.parametrize(
    ("ranks", "spread", "interleave"),
    [(2, 2, 1), (2, 2, 4), (2, 2, TOKENS), (4, 2, 1), (4, 4, 2)],
)
def test_every_rank_has_its_tokens_back(
    make: Make, host: DaemonHost, ranks: int, spread: int, interleave: int
) -> None:
    engine = make(ranks, spread, interleave)
    tokens = prompt(3 * engine.block_tokens + 5)
    before = host.status().counters
    assert compute(engine, "computed", tokens, max_tokens=2) == 0
    after = host.status().counters
    assert after.stored_blocks - before.stored_blocks == 3
    assert after.stored_bytes - before.stored_bytes == 3 * ranks * LAYERS * PAGE_BYTES
    engine.forget()
    assert compute(engine, "loaded", tokens, max_tokens=2) == 3 * engine.block_tokens
    all_came_back(engine)


@spread_is_told
def test_wrong_bytes_of_any_rank_would_show(make: Make, host: DaemonHost) -> None:
    engine = make()
    tokens = prompt(3 * engine.block_tokens + 5, seed=1)
    compute(engine, "computed", tokens)
    engine.forget()
    assert flip_a_byte_of_every_block(host.daemon.pool) >= 3 * len(engine.ranks)
    engine.add("spoilt", tokens)
    with pytest.raises(WrongKV, match="spoilt, rank 0"):
        engine.run()
    flip_a_byte_of_every_block(host.daemon.pool)


@spread_is_told
def test_a_rank_that_had_the_bytes_of_another_would_show(make: Make) -> None:
    engine = make()
    compute(engine, "computed", prompt(2 * engine.block_tokens + 5, seed=2))
    for mine, others in zip(*engine._of_rank, strict=True):
        mine[:], others[:] = others.copy(), mine.copy()
    engine.add("swapped", prompt(2 * engine.block_tokens + 5, seed=2))
    with pytest.raises(WrongKV, match="swapped, rank 0"):
        engine.run()


@spread_is_told
def test_tokens_that_lie_elsewhere_are_other_blocks(make: Make) -> None:
    tokens = prompt(4 * TOKENS * 2 + 5, seed=3)
    assert compute(make(salt="places"), "first", tokens) == 0
    for ranks, spread, interleave in ((2, 2, 2), (2, 1, 1), (4, 2, 1), (4, 4, 1)):
        assert compute(make(ranks, spread, interleave, salt="places"), "other", tokens) == 0
    assert compute(make(salt="places"), "same", tokens) == 4 * TOKENS * 2


@spread_is_told
def test_what_one_rank_does_not_get_is_computed_by_all(make: Make) -> None:
    engine = make()
    tokens = prompt(3 * engine.block_tokens + 5, seed=4)
    compute(engine, "computed", tokens)
    engine.forget()
    worker = engine.ranks[1]._worker
    worker._sharing.let_load = lambda *_: None
    worker._config = dataclasses.replace(worker._config, load_start_deadline_s=0.3)  # of no store before
    compute(engine, "failed", tokens)
    assert engine.connector._scheduler._loads.failed == 1
    all_came_back(engine)


@spread_is_told
def test_preempted_requests_and_shared_prefixes_lose_no_byte(make: Make) -> None:
    engine = make(blocks=20)
    span = engine.block_tokens
    expected = {}
    for index in range(24):
        tokens = prompt((index % 3 + 1) * span + 3, seed=index % 4) + prompt(index, seed=9)
        name, count = f"r{index}", 10 + 5 * (index % 8)
        expected[name] = output_of(tokens, count)
        engine.add(name, tokens, count)
        if index % 8 == 7:
            engine.run()
            wait_stored(engine)
            engine.forget()
    all_came_back(engine)
    assert engine.finished == expected
    assert engine.preemptions
    assert client(engine).status.counters.loads


@spread_is_told
def test_events_tell_of_blocks_as_long_as_vllms(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import KVEventsConfig

    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    wanted = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = make(changes={"kv_events_config": wanted})
    tokens = prompt(2 * engine.block_tokens + 5, seed=5)
    compute(engine, "story", tokens, max_tokens=2)
    stored = [event for event in engine.kv_events if type(event).__name__ == "BlockStored"]
    ours = [event for event in stored if getattr(event, "ownership", None) == "kvtier"]
    assert {event.block_size for event in stored} == {engine.block_tokens}
    told = [[block for event in events for block in event.block_hashes] for events in (stored, ours)]
    assert set(told[0]) == set(told[1])
    assert [token for event in ours for token in event.token_ids] == tokens[: 2 * engine.block_tokens]


# --- what is refused


def contexts(ranks: int = 2, **fields: Any) -> Any:
    """As much of a VllmConfig as is looked at."""
    parallel = {"decode_context_parallel_size": ranks, "world_size": 2, "tensor_parallel_size": 2}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel), **{"speculative_config": None} | fields
    )


@spread_is_told
@pytest.mark.parametrize(
    ("kinds", "named"),
    [
        ((FULL, FULL), "2 KV cache groups"),
        ((FULL, WINDOW), "2 KV cache groups"),
        ((WINDOW,), "SlidingWindowSpec"),
        ((Kind(chunk_tokens=64),), "ChunkedLocalAttentionSpec"),
        ((STATE,), "MambaSpec"),
    ],
)
def test_other_kv_caches_are_refused_by_name(kinds: tuple[Kind, ...], named: str) -> None:
    found = kv_cache_config(kinds, 4)
    assert context_ranks(found, contexts(1)) == 1
    with pytest.raises(UnsupportedLayout, match=f"decode_context_parallel_size=2 with .*{named}"):
        groups_of(found, contexts())


@spread_is_told
def test_a_cache_that_every_rank_has_whole_is_refused() -> None:
    whole = _kv_cache_config(4)
    object.__setattr__(whole.kv_cache_groups[0].kv_cache_spec, "dcp_sharded", False)
    with pytest.raises(UnsupportedLayout, match="with a FullAttentionSpec is not supported"):
        groups_of(whole, contexts())


@spread_is_told
def test_a_draft_that_is_fed_hidden_states_is_refused() -> None:
    fed = SimpleNamespace(use_eagle=lambda: True)
    with pytest.raises(UnsupportedLayout, match="draft model"):
        groups_of(_kv_cache_config(4), contexts(speculative_config=fed))


def test_a_vllm_that_does_not_say_what_is_spread_is_refused() -> None:
    silent = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=TOKENS))
    with pytest.raises(UnsupportedLayout, match="does not say"):
        context_ranks(SimpleNamespace(kv_cache_groups=[silent]), contexts())


def test_an_engine_that_is_refused_serves_on(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(groups, "_is_full_attention", lambda _: False)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    engine = make(attached=False)
    engine.add("alone", prompt(100))
    engine.run()
    assert engine.finished["alone"] == output_of(prompt(100), 8)
    said = {record.getMessage() for record in caplog.records if "kvtier is off" in record.getMessage()}
    assert len(said) == 1
    assert "decode_context_parallel_size=2" in said.pop()


@spread_is_told
def test_ranks_that_place_tokens_otherwise_than_their_scheduler_says_share_nothing(
    make: Make, host: DaemonHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where vLLM's workers settle cp_kv_cache_interleave_size for a NIXL connector beside ours, of which
    the scheduler's process does not learn."""
    from tests.vllm import context_engine

    def settled(config: Any, rank: int) -> Any:
        own = of_rank(config, rank)
        own.parallel_config.cp_kv_cache_interleave_size = TOKENS
        return own

    of_rank = context_engine.of_rank
    monkeypatch.setattr(context_engine, "of_rank", settled)
    before = host.status().counters.stored_blocks
    engine = make(attached=False)
    engine.add("alone", prompt(100))
    engine.run()
    links = [engine.connector._scheduler.link, *(rank._worker.link for rank in engine.ranks)]
    until(
        lambda: any("namespace" in link.client.status.last_error for link in links if link.client),
        "the daemon refuses it, and says why",
    )
    assert engine.finished["alone"] == output_of(prompt(100), 8)
    assert host.status().counters.stored_blocks == before


# --- the layout


@spread_is_told
def test_a_block_has_the_tokens_of_all_ranks_and_a_page_those_of_one() -> None:
    from kvtier_vllm.worker.kv_memory import SharedKVMemory

    found = _kv_cache_config(4)
    [shape] = groups_of(found, contexts()).shapes
    assert shape.block_tokens == 2 * TOKENS
    assert groups_of(found, contexts()).hash_tokens == groups_of(found, contexts()).unit_tokens == 2 * TOKENS
    memory = SharedKVMemory(4 * LAYERS * PAGE_BYTES)
    caches = allocate(found, memory)
    memory.close()
    [alone], [spread] = describe(caches, found, memory), describe(caches, found, memory, 2)
    assert (alone.shape.block_tokens, spread.shape.block_tokens) == (TOKENS, 2 * TOKENS)
    assert alone.planes == spread.planes


def allocate(found: Any, memory: Any) -> dict[str, Any]:
    import torch
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    with memory.allocation_context():
        return dict(allocate_kv_cache(found, torch.device("cpu"), KVCacheLayout.LBHNC))


def test_latents_of_other_tokens_are_not_alike() -> None:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MLAAttentionSpec

    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    found = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["latents"], spec)])
    assert replicated_groups(found, contexts(1)) == {0}
    assert replicated_groups(found, contexts(2)) == frozenset()
