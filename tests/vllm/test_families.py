"""Real engines of other model families: what is restored is bit for bit what the engine's own cache gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import DaemonHost
from tests.vllm.engine import EngineOptions
from tests.vllm.rig import Rig, flip_a_byte_of_every_block, kv_transfer_config, prompt, same, start_rig
from tests.vllm.tiny_models import FAMILIES, write

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LENGTH = 777


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def rig(family: str, session_host: DaemonHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """An engine of the family, attached."""
    folder = tmp_path_factory.mktemp(family)
    model = write(folder / family, FAMILIES[family])
    options = EngineOptions(
        model,
        kv_transfer_config=kv_transfer_config(session_host.socket),
        max_num_batched_tokens=256,
        block_size=FAMILIES[family].block_tokens,
        num_blocks=256 * 32 // FAMILIES[family].block_tokens,
    )
    rig = start_rig(session_host, options, folder / "log")
    with rig.engine:
        yield rig


def cached(family: str, length: int) -> int:
    """Tokens of a prompt that a hit has."""
    tokens = FAMILIES[family].block_tokens
    return (length - 1) // tokens * tokens


def test_what_an_engine_forgot_is_restored_bit_for_bit(rig: Rig, family: str) -> None:
    for length in (LENGTH, 10 * 32 + 1, 100):
        tokens = prompt(length, seed=length)
        cold, hit = rig.generate(tokens), rig.generate(tokens)
        assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, cached(family, length))
        rig.wait_stored()
        rig.forget()
        restored = rig.generate(tokens)
        assert restored.num_cached_tokens == hit.num_cached_tokens
        assert same(restored, hit)


def test_the_part_an_engine_still_has_is_not_loaded(rig: Rig, family: str) -> None:
    tokens = prompt(LENGTH, seed=1)
    rig.generate(tokens)
    hit = rig.generate(tokens)
    rig.wait_stored()
    rig.forget()
    rig.generate(tokens[:513])
    restored = rig.generate(tokens)
    assert restored.num_cached_tokens == hit.num_cached_tokens
    assert same(restored, hit)


def test_wrong_bytes_would_show(rig: Rig, family: str) -> None:
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
