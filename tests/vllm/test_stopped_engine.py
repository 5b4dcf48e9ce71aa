"""A real engine that is stopped by SIGSTOP in the middle of its work, for longer than its session lasts: it
is forgotten, others are served, and when it is continued it finishes its work, attaches by itself,
and hits."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.faults.campaigns.content import compare, hashes_of
from tests.faults.campaigns.engine import PlainEngine
from tests.support.daemon import DaemonHost, until
from tests.vllm.engine import Engine, EngineOptions
from tests.vllm.rig import BLOCK, Rig, full_blocks, kv_transfer_config, prompt, same

ROUNDS = 2
REQUESTS = 4
PROMPT_TOKENS = 600
OUTPUT_TOKENS = 40
DEADLINE_S = 60.0
WITNESS_BLOCKS = 64

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.long,  # a session's silence has to pass each time
]


@pytest.fixture
def host(socket_dir: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonHost]:
    """A daemon that is soon impatient, with slow copies, so that a stop meets some."""
    monkeypatch.setenv("KVTIER_TEST_WORKER_FAULT", "slow-copy:5")
    host = DaemonHost(
        socket_dir,
        shm_dir / "pool",
        pool__size="258MiB",
        limits__lease_ttl_s=1,
        server__session_silence_s=4,
        server__heartbeat_interval_s=0.2,
    )
    host.start()
    yield host
    host.stop()


def nothing_left(host: DaemonHost) -> bool:
    left = host.status()
    return (left.leases, left.transfers_active, left.blocks.writing) == (0, 0, 0)


def present(host: DaemonHost) -> int:
    return len(host.status().instances)


def test_a_stopped_engine_is_forgotten_and_comes_back_by_itself(
    model: Path,
    host: DaemonHost,
    plain: Engine,
    tmp_path: Path,
    proved: Callable[[str], None],
    count: Counter[str],
) -> None:
    options = EngineOptions(
        model, kv_transfer_config=kv_transfer_config(host.socket), max_num_batched_tokens=256
    )
    witness = PlainEngine(host.socket, "witness", num_blocks=WITNESS_BLOCKS)
    engine = Engine.start(options, tmp_path / "log")
    try:
        serve(Rig(host, engine), witness, plain, count)
        stopped_for_ever(Rig(host, engine), count)
    finally:
        engine.kill()
        witness.close()
    proved(
        f"{count['engine_stops']} times a vLLM was stopped for longer than its session lasts, and came back"
    )


def in_another_epoch(rig: Rig, epoch: int) -> bool:
    return bool(rig.look("client.status.epoch") != epoch)


def load(witness: PlainEngine, hashes: list[bytes], count: Counter[str]) -> None:
    into = list(range(len(hashes)))

    def loaded() -> bool:
        """On a busy machine a witness takes the daemon for silent, and loses its short leases."""
        found = witness.client.lookup(hashes, lease=True, timeout_s=DEADLINE_S)
        if not found.answered or found.lease is None:
            return False
        assert found.hits == len(hashes)
        witness.wipe(into)
        return witness.client.load(found, into).wait(DEADLINE_S).done

    until(loaded, "the witness has its blocks back")
    compare(witness.read(into), hashes, count)


def serve(rig: Rig, witness: PlainEngine, plain: Engine, count: Counter[str]) -> None:
    engine, host = rig.engine, rig.host
    rig.patient()
    rig.wait_ready()
    witness.wait_ready()
    own = hashes_of("witness", WITNESS_BLOCKS)
    witness.fill(list(range(WITNESS_BLOCKS)), own)
    assert witness.client.store(own, range(WITNESS_BLOCKS)).wait(DEADLINE_S).done
    known = prompt(12 * BLOCK + 1, seed=700)
    hit = rig.compute_and_hit(known)
    for number in range(ROUNDS):
        rig.forget()
        epoch = rig.look("client.status.epoch")
        prompts = [prompt(PROMPT_TOKENS, seed=710 + number * REQUESTS + n) for n in range(REQUESTS)]
        requests = [
            engine.call("add", prompt=tokens, max_tokens=OUTPUT_TOKENS, logprobs=1)["request"]
            for tokens in [*prompts, known]  # the last one is to be loaded
        ]
        engine.call("step", count=4 + number)
        os.killpg(engine.pid, signal.SIGSTOP)
        count["engine_stops"] += 1
        deadline_s = time.monotonic() + DEADLINE_S
        while present(host) > 1:
            load(witness, own, count)
            assert time.monotonic() < deadline_s, "the stopped engine is still attached"
        # The witness knows that its load is done before the daemon has counted it.
        until(partial(nothing_left, host), "no lease, no transfer, no half block")
        os.killpg(engine.pid, signal.SIGCONT)

        answers = engine.call("finish", requests=requests, engine_timeout_s=60)["results"]
        assert [len(answer["tokens"]) for answer in answers] == [OUTPUT_TOKENS] * len(requests)
        rig.wait_ready()
        until(partial(in_another_epoch, rig, epoch), "it has attached again")
        rig.wait_ready()
        rig.wait_stored()
        rig.forget()
        restored = rig.generate(known)
        assert restored.num_cached_tokens == full_blocks(len(known))
        assert same(restored, hit)
        for tokens in prompts:
            plain.generate([tokens], max_tokens=1)
            assert rig.generate(tokens).tokens == plain.generate([tokens], max_tokens=16)[0].tokens
    load(witness, own, count)
    assert host.status().counters.integrity_failures == 0


def stopped_for_ever(rig: Rig, count: Counter[str]) -> None:
    """Killed while it is stopped, with transfers under way."""
    rig.engine.call("add", prompt=prompt(PROMPT_TOKENS, seed=790), max_tokens=OUTPUT_TOKENS, logprobs=1)
    rig.engine.call("step", count=4)
    os.killpg(rig.engine.pid, signal.SIGSTOP)
    rig.engine.kill()
    count["engine_kills"] += 1
    until(lambda: present(rig.host) == 1, "it is forgotten")
