"""Many requests, too little KV cache, slow copies, a daemon that comes late: outputs are those of an engine
without a connector."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import DaemonHost
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.vllm.conftest import QUICK
from tests.vllm.engine import Engine, EngineOptions
from tests.vllm.rig import BLOCK, Rig, kv_transfer_config, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

BLOCKS = 40
ALL_FREE = {"requests": {}, "free_blocks": BLOCKS - 1}


@pytest.fixture(scope="module")
def absent_host() -> Iterator[DaemonHost]:
    """Where a daemon will be, whose copies take their time."""
    run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    host = DaemonHost(run, pool / "pool", **QUICK)
    yield host
    host.stop()
    shutil.rmtree(run)
    shutil.rmtree(pool)


@pytest.fixture(scope="module")
def options(model: Path, absent_host: DaemonHost) -> EngineOptions:
    """Four bytes a value: there the pieces in which a prompt is computed do not change a token."""
    return EngineOptions(
        model,
        kv_transfer_config=kv_transfer_config(absent_host.socket),
        dtype="float32",
        num_blocks=BLOCKS,
        max_model_len=1024,
        max_num_batched_tokens=128,
        extra={"max_num_seqs": 8},
    )


@pytest.fixture(scope="module")
def plain(options: EngineOptions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same engine without a connector."""
    bare = dataclasses.replace(options, kv_transfer_config=None)
    with Engine.start(bare, tmp_path_factory.mktemp("plain") / "log") as engine:
        yield engine


@pytest.fixture(scope="module")
def lonely(
    options: EngineOptions, absent_host: DaemonHost, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    """An engine that was started before its daemon."""
    with Engine.start(options, tmp_path_factory.mktemp("pressed") / "log") as engine:
        yield Rig(absent_host, engine)


@pytest.fixture(scope="module")
def answer_without_daemon(lonely: Rig) -> list[int]:
    """What it said then."""
    assert not lonely.look("client.ready")
    return lonely.generate(prompt(200, seed=1)).tokens


@pytest.fixture
def rig(lonely: Rig, answer_without_daemon: list[int], monkeypatch: pytest.MonkeyPatch) -> Rig:
    """The engine, and its daemon."""
    lonely.patient()
    if not lonely.look("client.ready"):
        monkeypatch.setenv("KVTIER_TEST_WORKER_FAULT", "slow-copy:20")
        lonely.host.start()
        lonely.wait_ready()
    return lonely


def run_together(engine: Engine, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], bool]:
    """The outputs, and whether a request was preempted on the way."""
    ids = [
        engine.call("add", prompt=tokens, max_tokens=max_tokens, logprobs=1)["request"] for tokens in prompts
    ]
    preempted = False
    while states := engine.call("step")["requests"]:
        preempted |= "PREEMPTED" in states.values()
    results = engine.call("finish", requests=ids, engine_timeout_s=1)["results"]
    return [result["tokens"] for result in results], preempted


def test_an_engine_without_a_daemon_serves(plain: Engine, answer_without_daemon: list[int]) -> None:
    assert answer_without_daemon == plain.generate([prompt(200, seed=1)], max_tokens=16)[0].tokens


def test_an_engine_finds_a_daemon_that_comes_late(rig: Rig) -> None:
    tokens = prompt(6 * BLOCK + 1, seed=2)
    hit = rig.compute_and_hit(tokens)
    rig.forget()
    restored = rig.generate(tokens)
    assert restored.num_cached_tokens == 6 * BLOCK
    assert restored.tokens == hit.tokens


def test_preempted_requests_are_stored_restored_and_right(rig: Rig, plain: Engine) -> None:
    prompts = [prompt(200, seed=30 + index) for index in range(8)]
    expected, preempted = run_together(plain, prompts, max_tokens=120)
    assert preempted
    before = rig.host.status().counters
    found, preempted = run_together(rig.engine, prompts, max_tokens=120)
    assert preempted
    assert found == expected
    assert rig.engine.drain() == ALL_FREE
    rig.wait_stored()
    stored = rig.host.status().counters
    assert stored.stored_blocks > before.stored_blocks
    rig.forget()
    again, _ = run_together(rig.engine, prompts, max_tokens=120)
    assert again == expected
    # In the first run what a preempted request asks for may still be on its way; now all of it is there.
    assert rig.host.status().counters.loaded_blocks > stored.loaded_blocks


def test_requests_with_shared_prefixes_are_right(rig: Rig, plain: Engine) -> None:
    shared = [prompt(5 * BLOCK, seed=40), prompt(9 * BLOCK + 7, seed=41)]
    prompts = [shared[index % 2] + prompt(17 + 13 * index, seed=50 + index) for index in range(16)]
    prompts += [shared[0], shared[1], prompts[3]]
    expected, _ = run_together(plain, prompts, max_tokens=24)
    for _ in range(2):
        found, _ = run_together(rig.engine, prompts, max_tokens=24)
        assert found == expected
        rig.wait_stored()
        rig.forget()
    assert rig.engine.drain() == ALL_FREE
