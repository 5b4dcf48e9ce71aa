"""A daemon whose pool goes by what it learns: it hits what the simulator says, and has not forgotten it after
a restart."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kvtier.v1 import types_pb2
from kvtierd.core.blocks.blocks import HISTORY_PART, REMEMBERED_BYTES
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.simulate.host import SimulatedHost, hashes_of
from kvtierd.simulate.traces import I64, read

from tests.integration.daemon.commands import reload
from tests.integration.daemon.raw import RawSession
from tests.support.process import Daemon

Start = Callable[..., Daemon]
Connect = Callable[..., RawSession]
FRAGMENT = 32 << 10
POOL = PoolGeometry(extents=64, extent_bytes=1 << 20, first_extent_offset=2 << 20)
REQUESTS = 2_000
"""Of a published trace, where it is at hand (KVTIER_TRACES); else of one that is made up."""
PROMPT_BLOCKS_MAX = 256


def prompts() -> list[I64]:
    """As blocks that are known by their numbers."""
    folder = os.environ.get("KVTIER_TRACES")
    path = Path(folder or "traces") / "mooncake_conversation.npz"
    if path.exists():
        trace = read(path)
        return [trace.path(number)[:PROMPT_BLOCKS_MAX] for number in range(REQUESTS)]
    random = np.random.default_rng(3)
    found = []
    fresh = 0
    lengths = [4] * 60
    for _ in range(600):
        if random.random() < 0.5:
            fresh += 1
            found.append(np.arange(20) + (1 << 32) + 100 * fresh)
        else:
            session = min(int(random.zipf(1.4)), 60) - 1
            lengths[session] = min(lengths[session] + 2, PROMPT_BLOCKS_MAX)
            found.append(np.arange(lengths[session]) + 1_000 * session)
    return found


def request(one: RawSession, prompt: I64) -> int:
    """Asks for a prompt, and stores what was missing. Returns how many of its first blocks were there."""
    hashes = hashes_of(prompt).tobytes()
    hits = one.lookup(hashes).answers[0].hits
    store = one.store_request(hashes, list(range(len(prompt))))
    store.chains.add(blocks=len(prompt))
    one.attached.call(store=store)
    assert one.wait(store.signals.ticket).state == types_pb2.TRANSFER_STATE_DONE
    return hits


def engine(connect: Connect) -> RawSession:
    return connect(fragments=(FRAGMENT,), num_blocks=PROMPT_BLOCKS_MAX).ready()


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_the_daemon_hits_what_the_simulator_says(start: Start, connect: Connect, policy: str) -> None:
    daemon = start(pool__policy=policy, pool__size="66MiB", pool__extent_size="1MiB")
    daemon.wait_whole()
    capacity = POOL.extents * POOL.slots_per_extent(FRAGMENT)
    history = POOL.capacity_bytes // HISTORY_PART // REMEMBERED_BYTES
    simulated = SimulatedHost(capacity, ranks=policy == "reuse", history_blocks=history)
    one = engine(connect)
    for number, prompt in enumerate(prompts()):
        assert request(one, prompt) == simulated.request(hashes_of(prompt)), f"request {number}"
    metrics = daemon.metrics()
    evicted = sum(value for name, value in metrics.items() if name.startswith("kvtier_evicted_blocks_total"))
    assert evicted > capacity
    assert simulated.inserts == capacity + evicted


def test_what_was_learnt_outlives_the_daemon_and_a_change_of_policy(
    start: Start, connect: Connect, tmp_path: Path, shm_dir: Path
) -> None:
    """It would take a hundred prompts to learn anything anew."""
    file = tmp_path / "kvtierd.toml"
    by_reuse, by_recency = '[pool]\npolicy = "reuse"\n', '[pool]\npolicy = "lru"\n'
    file.write_text(by_reuse)
    daemon = start(config=file)
    one = engine(connect)
    for prompt in prompts()[:400]:
        request(one, prompt)
    assert not (shm_dir / "pool.learnt").exists()
    assert daemon.stop() == 0
    learnt = (shm_dir / "pool.learnt").read_bytes()
    assert sum(np.frombuffer(learnt[8:], np.float32)) > 100
    daemon = start(config=file)
    assert "going on with what was learnt" in daemon.log()
    file.write_text(by_recency)
    assert reload(daemon) == (0, 'pool.policy: "reuse" -> "lru"\n')
    file.write_text(by_reuse)
    assert reload(daemon) == (0, 'pool.policy: "lru" -> "reuse"\n')
    assert daemon.log().count("going on with what was learnt") == 2
    assert daemon.stop() == 0
    assert (shm_dir / "pool.learnt").read_bytes() == learnt
