"""Engines of several processes: tensor parallelism, where each worker holds a shard of every block; and a
front, an engine core and a worker that are three processes, as `vllm serve` starts them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import DaemonHost, until
from tests.vllm.conftest import QUICK
from tests.vllm.engine import Engine, EngineOptions, Generated
from tests.vllm.rig import (
    BLOCK,
    PATIENT_S,
    Rig,
    flip_a_byte_of_every_block,
    full_blocks,
    kv_transfer_config,
    prompt,
    same,
    start_rig,
)
from tests.vllm.tiny_models import FAMILIES, why_not_cached, write

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

RANKS = 2
OUTPUT_TOKENS = 16


def start_parallel(model: Path, host: DaemonHost, folder: Path, split: str = "tensor", **more: Any) -> Rig:
    """Two workers, each a process of its own, beside the scheduler's. `split`: what parallelism it is;
    `more`: arguments of vLLM's."""
    options = EngineOptions(
        model,
        kv_transfer_config=kv_transfer_config(host.socket, lookup_budget_ms=1000),
        max_num_batched_tokens=256,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        extra=more | {f"{split}_parallel_size": RANKS, "distributed_executor_backend": "mp"},
    )
    return start_rig(host, options, folder / "log")


@pytest.fixture(scope="module")
def parallel(
    model: Path, session_host: DaemonHost, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    rig = start_parallel(model, session_host, tmp_path_factory.mktemp("parallel"))
    with rig.engine:
        yield rig


def restored_by(rig: Rig, tokens: list[int]) -> Generated:
    """What the engine says when it has lost its cache. Its processes spin while they wait for each other: on
    two cores the daemon may be silent for a second meanwhile, which is a miss, and tried again."""
    for _ in range(5):
        rig.wait_ready()
        rig.engine.drain()
        result = regained(rig.engine, tokens, tries=1)
        if result.num_cached_tokens:
            break
    return result


def regained(engine: Engine, tokens: list[int], tries: int = 20) -> Generated:
    """Likewise of an engine that nobody can look into: it may learn that its daemon is there a moment after
    the daemon knows all of its processes."""
    for _ in range(tries):
        engine.reset_prefix_cache()
        engine.overwrite_cache()
        result = engine.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]
        if result.num_cached_tokens:
            break
        time.sleep(0.2)
    return result


def test_every_rank_restores_its_shard_bit_for_bit(parallel: Rig) -> None:
    for length in (BLOCK + 1, 10 * BLOCK, 777):
        tokens = prompt(length, seed=length)
        hit = parallel.compute_and_hit(tokens)
        restored = restored_by(parallel, tokens)
        assert restored.num_cached_tokens == full_blocks(length)
        assert same(restored, hit)


def test_wrong_bytes_of_a_shard_would_show(parallel: Rig) -> None:
    tokens = prompt(6 * BLOCK + 1, seed=4)
    hit = parallel.compute_and_hit(tokens)
    assert flip_a_byte_of_every_block(parallel.host.daemon.pool) >= 6 * RANKS
    spoilt = restored_by(parallel, tokens)
    assert spoilt.num_cached_tokens == hit.num_cached_tokens
    assert not same(spoilt, hit)
    flip_a_byte_of_every_block(parallel.host.daemon.pool)
    assert same(restored_by(parallel, tokens), hit)


def test_all_ranks_find_a_daemon_that_was_killed_again(parallel: Rig) -> None:
    tokens = prompt(12 * BLOCK + 1, seed=6)
    hit = parallel.compute_and_hit(tokens)
    parallel.forget()
    requests = [
        parallel.engine.call("add", prompt=prompt(300, seed=70 + n), max_tokens=30, logprobs=1)["request"]
        for n in range(3)
    ]
    parallel.engine.call("step", count=3)
    parallel.host.kill9()
    parallel.engine.call("step", count=5)
    parallel.host.start()
    answers = parallel.engine.call("finish", requests=requests, engine_timeout_s=120)["results"]
    assert [len(answer["tokens"]) for answer in answers] == [30] * 3
    parallel.wait_ready()
    parallel.wait_stored()
    restored = restored_by(parallel, tokens)
    assert restored.num_cached_tokens == 12 * BLOCK
    assert same(restored, hit)


@pytest.mark.long
def test_every_rank_says_what_its_weights_are(model: Path, host: DaemonHost, tmp_path: Path) -> None:
    """As `--worker-extension-cls kvtier_vllm.updates.Worker` has it said; one rank's word is not enough."""
    tokens = prompt(6 * BLOCK + 1, seed=8)
    rig = start_parallel(model, host, tmp_path, worker_extension_cls="kvtier_vllm.updates.Worker")
    with rig.engine:
        rig.compute_and_hit(tokens)
        namespaces = [rig.look("client.status.namespace_digest")]
        for name in ("step 1", "step 2"):
            rpc = f"llm.collective_rpc('kvtier_weights_changed', args=({name!r},))"
            assert rig.look(rpc) == [True] * RANKS
            rig.engine.reset_prefix_cache()
            rig.generate(prompt(BLOCK, seed=9), max_tokens=2)  # the ranks learn what the scheduler knows
            rig.wait_ready()
            namespaces.append(rig.look("client.status.namespace_digest"))
            assert f"this engine's weights are {name!r} now, and shared" in rig.engine.log.read_text()
            hit = rig.compute_and_hit(tokens)  # which fails if the first is not computed
            restored = restored_by(rig, tokens)
            assert restored.num_cached_tokens == 6 * BLOCK
            assert same(restored, hit)
        assert len(set(namespaces)) == 3


@pytest.mark.long
def test_stages_of_a_pipeline_restore_their_layers_bit_for_bit(
    model: Path, host: DaemonHost, tmp_path: Path
) -> None:
    # vLLM's CPU backend makes what its stages pass on only where a model is compiled.
    rig = start_parallel(model, host, tmp_path, "pipeline", enforce_eager=False)
    with rig.engine:
        [instance] = host.status().instances
        assert instance.world_size == RANKS
        for length in (BLOCK + 1, 777):
            tokens = prompt(length, seed=length)
            hit = rig.compute_and_hit(tokens)
            restored = restored_by(rig, tokens)
            assert restored.num_cached_tokens == full_blocks(length)
            assert same(restored, hit)
        assert flip_a_byte_of_every_block(host.daemon.pool) >= RANKS * full_blocks(777) // BLOCK
        assert not same(restored_by(rig, tokens), hit)


@pytest.mark.long
def test_latents_that_every_rank_holds_are_stored_once(host: DaemonHost, tmp_path: Path) -> None:
    family = FAMILIES["deepseek2"]
    if why := why_not_cached(family):
        pytest.skip(why)
    model = write(tmp_path / "model", family)
    rig = start_parallel(model, host, tmp_path)
    with rig.engine:
        tokens_in_block = int(rig.look("scheduler.block_size"))
        latent = family.config["kv_lora_rank"] + family.config["qk_rope_head_dim"]
        block_bytes = family.config["num_hidden_layers"] * tokens_in_block * latent * 2
        for length in (BLOCK + 1, 10 * BLOCK, 777):
            tokens = prompt(length, seed=length)
            rig.generate(tokens)
            hit = rig.generate(tokens)
            rig.wait_stored()
            counters = host.status().counters
            assert counters.stored_bytes == counters.stored_blocks * block_bytes, "and not by each rank"
            restored = restored_by(rig, tokens)
            assert restored.num_cached_tokens == hit.num_cached_tokens > 0
            assert same(restored, hit)
        assert flip_a_byte_of_every_block(host.daemon.pool)
        spoilt = restored_by(rig, tokens)
        assert spoilt.num_cached_tokens == hit.num_cached_tokens
        assert not same(spoilt, hit)


def ready(host: DaemonHost) -> bool:
    """Whether the only engine is attached, with all its processes."""
    return [instance.ready for instance in host.status().instances] == [True]


@pytest.fixture
def host(socket_dir: Path, shm_dir: Path) -> Iterator[DaemonHost]:
    """A daemon that nobody else uses."""
    # Sampling would find what a negative control spoils before it can show.
    host = DaemonHost(
        socket_dir, shm_dir / "pool", pool__size="258MiB", integrity__sample_bytes_per_s=0, **QUICK
    )
    host.start()
    yield host
    host.stop()


@pytest.mark.long
def test_a_front_an_engine_core_and_a_worker_in_three_processes(
    model: Path, host: DaemonHost, tmp_path: Path
) -> None:
    """Nothing of the connector is in reach here: what happened is seen from the daemon."""
    options = EngineOptions(
        model,
        kv_transfer_config=kv_transfer_config(
            host.socket, load_start_deadline_s=PATIENT_S, lookup_budget_ms=1000
        ),
        max_num_batched_tokens=256,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
        extra={"distributed_executor_backend": "mp"},
    )
    tokens = prompt(777, seed=8)
    with Engine.start(options, tmp_path / "log") as engine:
        until(lambda: ready(host), "the engine is attached")
        [instance] = host.status().instances
        pids = {session.pid for session in instance.sessions}
        assert len(pids) == 2
        assert engine.pid not in pids
        engine.generate([tokens])
        hit = engine.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]
        assert hit.num_cached_tokens == full_blocks(777)

        def stored() -> bool:
            """What it could not store because its daemon was silent, it stores when it has it again."""
            engine.generate([tokens], max_tokens=1)
            return host.status().counters.stored_blocks >= 777 // BLOCK

        until(stored, "all blocks are stored")
        restored = regained(engine, tokens)
        assert restored.num_cached_tokens == full_blocks(777)
        assert same(restored, hit)

        host.kill9()
        away = engine.generate([prompt(300, seed=9)])[0]
        assert away.finish_reason == "length"
        host.start()
        until(lambda: ready(host), "the engine has found the daemon again")
        restored = regained(engine, tokens)
        assert restored.num_cached_tokens == full_blocks(777)
        assert same(restored, hit)
    until(lambda: not host.status().instances, "the daemon noticed the engine's end")
