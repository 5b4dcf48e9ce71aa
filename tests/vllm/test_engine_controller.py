"""The harness itself: an engine answers, refuses, dies and is killed without leaving anything behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.engine import Engine, EngineError, EngineOptions
from tools import tiny_llama

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.ensure(tmp_path_factory.mktemp("model") / "tiny", tiny_llama.PRESETS["tiny"])


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("engine") / "log"
    with Engine.start(EngineOptions(model, num_blocks=40, max_model_len=512), log) as engine:
        yield engine
    assert not engine.alive


@pytest.fixture
def starting(model: Path, tmp_path: Path) -> Iterator[Engine]:
    """An engine that has just been launched: enough to die, and quicker."""
    engine = Engine.launch(EngineOptions(model), tmp_path / "log")
    yield engine
    engine.kill()


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * i * i + 11 * i + seed) % 1000 for i in range(length)]


def test_an_engine_generates_caches_and_forgets(engine: Engine) -> None:
    cold = engine.generate([prompt(200)], max_tokens=8)[0]
    hit = engine.generate([prompt(200)], max_tokens=8)[0]
    assert (len(cold.tokens), len(cold.logprobs), cold.finish_reason) == (8, 8, "length")
    assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, 192)
    assert hit.tokens == cold.tokens
    engine.drain()
    engine.reset_prefix_cache()
    again = engine.generate([prompt(200)], max_tokens=8)[0]
    assert (again.num_cached_tokens, again.tokens, again.logprobs) == (0, cold.tokens, cold.logprobs)
    assert engine.drain() == {"requests": {}, "free_blocks": 39}


def test_the_output_depends_on_every_part_of_the_prefix(engine: Engine) -> None:
    """Otherwise no comparison of outputs could show a wrong block."""
    engine.reset_prefix_cache()
    first = engine.generate([prompt(200)], max_tokens=4)[0]
    hit = engine.generate([prompt(200)], max_tokens=4)[0]
    for index in range(0, 6, 2):
        engine.reset_prefix_cache()
        engine.overwrite_cache(0)
        fresh = engine.generate([prompt(200)], max_tokens=4)[0]
        assert fresh.logprobs == first.logprobs
        held = engine.call("evaluate", expression=_CACHED_BLOCKS)["value"]
        engine.overwrite_cache(1, blocks=[held[index]])
        assert engine.generate([prompt(200)], max_tokens=4)[0].logprobs != hit.logprobs


# Ids of the blocks that hold the cached prefix, in no particular order.
_CACHED_BLOCKS = (
    "[b.block_id for b in scheduler.kv_cache_manager.block_pool.blocks if b.block_hash is not None]"
)


def test_a_refused_command_leaves_the_engine_usable(engine: Engine) -> None:
    with pytest.raises(EngineError, match="unknown op"):
        engine.call("dance")
    assert len(engine.generate([prompt(40)], max_tokens=2)[0].tokens) == 2


def test_a_killed_engine_is_reported_dead(starting: Engine) -> None:
    os.killpg(starting.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"died|not running"):
        starting.generate([prompt(40)])
    assert not starting.alive


def test_an_engine_that_does_not_answer_is_killed(starting: Engine) -> None:
    os.killpg(starting.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match="no answer"):
        starting.call("state", timeout_s=0.2)
    assert not starting.alive


def test_an_engine_ends_when_its_controller_goes_away(starting: Engine) -> None:
    assert starting._process.stdin is not None
    starting._process.stdin.close()  # what the kernel does when a controller dies
    deadline_s = time.monotonic() + 30
    while starting.alive:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.long
def test_an_engine_that_cannot_start_says_why(model: Path, tmp_path: Path) -> None:
    options = EngineOptions(model, extra={"max_model_len": 100_000})
    with pytest.raises(EngineError, match="max_model_len"):
        Engine.start(options, tmp_path / "log")
