"""Real engines of other model families: what is restored is bit for bit what the engine's own cache gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import DaemonHost
from tests.vllm.engine import EngineOptions
from tests.vllm.rig import Rig, flip_a_byte_of_every_block, kv_transfer_config, prompt, same, start_rig
from tests.vllm.tiny_models import FAMILIES, WINDOW_TOKENS, why_not_cached, write

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LENGTH = 777
KINDS = [
    # Its layers are those of the Llama that all other tests restore.
    pytest.param(family, marks=[pytest.mark.long] * (family == "qwen3"))
    for family in FAMILIES
]


@pytest.fixture(scope="module", params=KINDS)
def rig(
    request: pytest.FixtureRequest, session_host: DaemonHost, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    """An engine of each family, attached."""
    family: str = request.param
    if why := why_not_cached(FAMILIES[family]):
        pytest.skip(why)
    folder = tmp_path_factory.mktemp(family)
    model = write(folder / family, FAMILIES[family])
    options = EngineOptions(
        model,
        kv_transfer_config=kv_transfer_config(session_host.socket),
        max_num_batched_tokens=256,
        num_blocks=512,
    )
    rig = start_rig(session_host, options, folder / "log")
    with rig.engine:
        yield rig


def cached(rig: Rig, length: int) -> int:
    """Tokens of a prompt that a hit has. vLLM may choose other blocks than it was told to (MLA without
    AMX)."""
    tokens = int(rig.look("scheduler.block_size"))
    return (length - 1) // tokens * tokens


def test_what_an_engine_forgot_is_restored_bit_for_bit(rig: Rig) -> None:
    for length in (LENGTH, 10 * 32 + 1, 100):
        tokens = prompt(length, seed=length)
        cold, hit = rig.generate(tokens), rig.generate(tokens)
        assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, cached(rig, length))
        rig.wait_stored()
        rig.forget()
        restored = rig.generate(tokens)
        assert restored.num_cached_tokens == hit.num_cached_tokens
        assert same(restored, hit)


def test_the_part_an_engine_still_has_is_not_loaded(rig: Rig) -> None:
    tokens = prompt(LENGTH, seed=1)
    rig.generate(tokens)
    hit = rig.generate(tokens)
    rig.wait_stored()
    rig.forget()
    rig.generate(tokens[:513])
    restored = rig.generate(tokens)
    assert restored.num_cached_tokens == hit.num_cached_tokens
    assert same(restored, hit)


def test_groups_of_a_hybrid_model_are_what_they_should_be(rig: Rig) -> None:
    """Or the tests of this file would prove less than they say."""
    groups = rig.look("[[shape.kind.name, shape.window_blocks] for shape in side._groups.shapes]")
    window = ["SLIDING_WINDOW", -(-(WINDOW_TOKENS - 1) // 32)]
    if "gemma" in rig.look("core.vllm_config.model_config.model"):
        assert sorted(groups) == [["FULL_ATTENTION", 0], window, window]
        places = rig.look("[[plane.base_offset for plane in group.planes] for group in worker._groups]")
        assert places[0] == places[1] == places[2], "they lie over each other"
    else:
        assert groups == [["FULL_ATTENTION", 0]]


def test_wrong_bytes_would_show(rig: Rig) -> None:
    """The negative control: the daemon trusts its own memory while it runs."""
    tokens = prompt(LENGTH, seed=2)
    rig.generate(tokens)
    hit = rig.generate(tokens)
    rig.wait_stored()
    rig.forget()
    pool: Path = rig.host.daemon.pool
    assert flip_a_byte_of_every_block(pool)
    spoilt = rig.generate(tokens)
    assert spoilt.num_cached_tokens == hit.num_cached_tokens
    assert not same(spoilt, hit)
    flip_a_byte_of_every_block(pool)
    rig.forget()
    assert same(rig.generate(tokens), hit)
