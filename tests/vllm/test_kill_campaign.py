"""kill -9 of real engines in the middle of their work: what each had stored is right, and is let go."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemon import DaemonHost, until
from tests.support.length import rounds
from tests.vllm.engine import Engine, EngineOptions
from tests.vllm.rig import Rig, kv_transfer_config, prompt, same

KILLS = rounds(1, 10)
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
RELEASE_S = 1.0
SLACK = 10
"""On a busy machine; still far from the silence after which a session ends anyway."""
PROMPTS = 4
TOKENS = 600
HELD = ("kvtier_sessions", "kvtier_leases", "kvtier_client_mapped_bytes", "kvtier_transfers_active")

pytestmark = [pytest.mark.vllm, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(120 * KILLS + 300)]


def held(host: DaemonHost) -> dict[str, float]:
    """What the metrics say that clients hold."""
    return {name: value for name, value in host.metrics().items() if name.startswith(HELD) and value}


@pytest.fixture
def host(socket_dir: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonHost]:
    """A daemon that nobody else uses."""
    # Slow, so that a kill meets a part being copied.
    monkeypatch.setenv("KVTIER_TEST_WORKER_FAULT", "slow-copy:5")
    host = DaemonHost(socket_dir, shm_dir / "pool", pool__size="258MiB")
    host.start()
    yield host
    host.stop()


def test_engines_killed_while_they_store_leave_whole_blocks_and_nothing_else(
    model: Path,
    host: DaemonHost,
    plain: Engine,
    tmp_path: Path,
    proved: Callable[[str], None],
    count: Counter[str],
) -> None:
    print(f"KVTIER_SEED={SEED}, {KILLS} kills")
    chance = random.Random(SEED)
    config = kv_transfer_config(host.socket)
    options = EngineOptions(model, kv_transfer_config=config, max_num_batched_tokens=256)
    assert not held(host)
    slowest_s = 0.0
    prompts = []
    for number in range(KILLS):
        mine = [prompt(TOKENS, seed=300 + number * PROMPTS + index) for index in range(PROMPTS)]
        prompts += mine
        engine = Engine.start(options, tmp_path / f"victim-{number}.log")
        try:
            rig = Rig(host, engine)
            rig.wait_ready()
            stored = host.status().counters.stored_blocks
            # Long outputs: it still stores when a busy machine lets us look.
            engine.send("generate", prompts=mine, max_tokens=1_400, logprobs=1, engine_timeout_s=60)
            until(
                lambda stored=stored: (
                    host.status().counters.stored_blocks > stored and host.status().transfers_active > 0
                ),
                "the engine stores",
            )
            time.sleep(chance.random() * 0.05)
        finally:
            engine.kill()
        count["engine_kills"] += 1
        killed_s = time.monotonic()
        while left := held(host):
            assert time.monotonic() - killed_s < RELEASE_S * SLACK, left
            time.sleep(0.01)
        slowest_s = max(slowest_s, time.monotonic() - killed_s)
        assert host.status().state == "serving"
    hits = 0
    with Engine.start(options, tmp_path / "heir.log") as heir:
        rig = Rig(host, heir)
        rig.patient()
        rig.wait_ready()
        for tokens in prompts:
            restored = heir.generate([tokens], max_tokens=16)[0]
            plain.generate([tokens], max_tokens=1)
            expected = plain.generate([tokens], max_tokens=16)[0]
            assert restored.tokens == expected.tokens
            hits += restored.num_cached_tokens
            if restored.num_cached_tokens == expected.num_cached_tokens:
                assert same(restored, expected)
    assert hits > 0
    assert host.status().counters.integrity_failures == 0
    proved(
        f"{KILLS} vLLM engines were killed with -9 while they stored: session, leases and mapping were gone"
        f" from the metrics within {slowest_s:.2f} s, {hits} of their tokens were restored by another engine,"
        f" whose output was that of one that computed them (KVTIER_SEED={SEED})"
    )
