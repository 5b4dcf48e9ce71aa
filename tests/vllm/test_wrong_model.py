"""The right bytes of the wrong model are wrong: engines that look alike and compute other values share
nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import DaemonHost
from tests.vllm.engine import Engine, EngineOptions, Generated
from tests.vllm.rig import BLOCK, Rig, full_blocks, kv_transfer_config, prompt, start_rig
from tests.vllm.separate_processes import run_in_processes
from tests.vllm.tiny_models import LONG_ROPE_TOKENS, falcon, long_rope, write

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPTS = [prompt(300 + 7 * seed, seed=seed) for seed in range(4)]
SHORT, LONG = LONG_ROPE_TOKENS, 2 * LONG_ROPE_TOKENS


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("phi") / "phi", long_rope())


@pytest.fixture
def start(session_host: DaemonHost, phi: Path, tmp_path: Path) -> Callable[..., Any]:
    """Engines of the test's own namespace that take prompts of so many tokens."""

    @contextmanager
    def engine(tokens: int, blind: bool = False, **settings: Any) -> Iterator[Rig]:
        config = kv_transfer_config(session_host.socket, salt=tmp_path.name, **settings)
        environment = {}
        if blind:
            config |= {
                "kv_connector": "BlindConnector",
                "kv_connector_module_path": "tests.vllm.blind_connector",
            }
            environment = {"KVTIER_TEST_BLIND_TO": "positions"}
        options = EngineOptions(phi, config, max_model_len=tokens, environment=environment)
        rig = start_rig(session_host, options, tmp_path / f"log {tokens}")
        with rig.engine:
            yield rig

    return engine


def right_answers(phi: Path, tokens: int, log: Path) -> list[Generated]:
    """Of an engine that has nothing to do with others."""
    with Engine.start(EngineOptions(phi, None, max_model_len=tokens), log) as engine:
        return [engine.generate([each], max_tokens=16)[0] for each in PROMPTS]


def test_engines_of_other_long_rope_factors_share_nothing(
    start: Callable[..., Any], phi: Path, tmp_path: Path, proved: Callable[[str], None]
) -> None:
    with start(SHORT) as short:
        for tokens in PROMPTS:
            short.generate(tokens)
        short.wait_stored()
    right = right_answers(phi, LONG, tmp_path / "plain")
    with start(LONG) as long:
        got = [long.generate(tokens) for tokens in PROMPTS]
        assert [one.num_cached_tokens for one in got] == [0] * len(PROMPTS)
        assert [one.tokens for one in got] == [one.tokens for one in right]
        long.wait_stored()
        long.forget()
        again = [long.generate(tokens) for tokens in PROMPTS]
        assert [one.num_cached_tokens for one in again] == [full_blocks(len(each)) for each in PROMPTS]
        assert [one.tokens for one in again] == [one.tokens for one in right]
    with start(SHORT) as short:  # its own are there still
        assert short.generate(PROMPTS[0]).num_cached_tokens == full_blocks(len(PROMPTS[0]))
    proved("A LongRoPE engine of 1,024 tokens took nothing of one of 512, and both hit their own.")


@pytest.mark.long  # `make test` has one of another model (test_audits.py)
def test_an_audit_finds_what_the_namespace_would_not_say(
    start: Callable[..., Any], phi: Path, tmp_path: Path, proved: Callable[[str], None]
) -> None:
    """With that part of the identity switched off the output is wrong, and the first hit tells."""
    with start(SHORT, blind=True) as short:
        for tokens in PROMPTS:
            short.generate(tokens)
        short.wait_stored()
    right = right_answers(phi, LONG, tmp_path / "plain")
    with start(LONG, blind=True, audit_rate=1e-9) as long:
        wrong = long.generate(PROMPTS[0])
        assert wrong.num_cached_tokens == full_blocks(len(PROMPTS[0])) - BLOCK
        assert wrong.tokens != right[0].tokens, "or this test would prove nothing"
        long.engine.drain()
        assert long.look("side._quarantined")
        after = [long.generate(tokens) for tokens in PROMPTS]
        assert [one.num_cached_tokens for one in after] == [0] * len(PROMPTS)
        assert [one.tokens for one in after] == [one.tokens for one in right]
        error = long.look("side._audits.counters.worst_mismatch")
    proved(f"An audit found blocks of other LongRoPE factors with the first hit: relative error {error:.2f}.")


@pytest.mark.long
def test_a_model_that_writes_into_its_configuration_is_cached_across_processes(
    session_host: DaemonHost, tmp_path: Path
) -> None:
    """Workers build the model, the scheduler's process does not; both must name the same weights."""
    options = EngineOptions(
        write(tmp_path / "falcon", falcon()),
        kv_transfer_config(session_host.socket, salt=tmp_path.name),
        extra={"distributed_executor_backend": "mp"},
    )
    tokens = prompt(10 * BLOCK + 5, seed=3)
    results = run_in_processes(options, tokens, tmp_path / "log")
    assert "FINGERPRINT_MISMATCH" not in (tmp_path / "log").read_text()
    assert results["restored"]["cached"] == results["hit"]["cached"] == 10 * BLOCK
    assert results["restored"]["tokens"] == results["cold"]["tokens"]
