"""Speculative decoding with a draft model that is fed hidden states (EAGLE): its KV lies beside the model's,
and at the end of a block depends on the token behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemon import DaemonHost
from tests.vllm.engine import EngineOptions
from tests.vllm.mini_engine import TOKENS, MiniEngine
from tests.vllm.mini_rig import all_came_back, compute
from tests.vllm.mini_rig import host as host
from tests.vllm.mini_rig import make as make
from tests.vllm.rig import BLOCK, Rig, flip_a_byte_of_every_block, kv_transfer_config, prompt, same, start_rig
from tests.vllm.tiny_models import write_eagle_head

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
__all__ = ["host", "make"]

LENGTH = 777


@pytest.fixture(scope="module")
def rig(model: Path, session_host: DaemonHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("eagle")
    head = write_eagle_head(folder / "head", model)
    options = EngineOptions(
        model,
        kv_transfer_config=kv_transfer_config(session_host.socket),
        max_num_batched_tokens=256,
        num_blocks=512,
        extra={"speculative_config": {"model": str(head), "method": "eagle", "num_speculative_tokens": 2}},
    )
    rig = start_rig(session_host, options, folder / "log")
    with rig.engine:
        yield rig


def test_a_draft_is_restored_with_its_model_bit_for_bit(rig: Rig) -> None:
    assert rig.look("side._groups.looks_ahead")
    planes = rig.look("len(worker._groups[0].planes)")
    layers = rig.look("core.vllm_config.model_config.hf_config.num_hidden_layers")
    assert planes == layers + 1, "the draft's layer is among them"
    for length in (LENGTH, 10 * BLOCK + 1, 10 * BLOCK, 3 * BLOCK + 7):
        tokens = prompt(length, seed=length)
        cold, hit = rig.generate(tokens), rig.generate(tokens)
        assert cold.num_cached_tokens == 0
        rig.wait_stored()
        rig.forget()
        restored = rig.generate(tokens)
        assert restored.num_cached_tokens == hit.num_cached_tokens > 0
        assert same(restored, hit)


def test_wrong_bytes_would_show(rig: Rig) -> None:
    tokens = prompt(LENGTH, seed=2)
    rig.generate(tokens)
    hit = rig.generate(tokens)
    rig.wait_stored()
    rig.forget()
    assert flip_a_byte_of_every_block(rig.host.daemon.pool)
    spoilt = rig.generate(tokens)
    assert spoilt.num_cached_tokens == hit.num_cached_tokens
    assert not same(spoilt, hit)
    flip_a_byte_of_every_block(rig.host.daemon.pool)
    rig.forget()
    assert same(rig.generate(tokens), hit)


def test_a_block_is_loaded_only_if_the_one_behind_it_is_the_same(make: Callable[..., MiniEngine]) -> None:
    """The scheduler's part alone, to the block."""
    import dataclasses

    engine = make()
    side = engine.connector._scheduler
    side._groups = dataclasses.replace(side._groups, looks_ahead=True)
    story = prompt(8 * TOKENS)
    assert compute(engine, "first", story[: 6 * TOKENS + 5], max_tokens=1) == 0
    for name, tokens, blocks in (
        ("the same", story[: 6 * TOKENS + 5], 5),
        ("longer", story, 5),
        ("shorter", story[: 4 * TOKENS + 1], 3),
        ("it ends with a block", story[: 4 * TOKENS], 3),
        ("another end", story[: 4 * TOKENS] + [7] * TOKENS, 3),
        ("another second block", story[:TOKENS] + [7] * TOKENS, 0),
    ):
        engine.forget()
        found = compute(engine, name, tokens, max_tokens=1, kv_transfer_params={"kvtier": {"store": False}})
        assert found == blocks * TOKENS, name
    all_came_back(engine)
