"""A daemon whose pool goes by what it learns: it hits what the simulator says, and has not forgotten it after
a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kvtierd.core.blocks.blocks import HISTORY_PART, REMEMBERED_BYTES
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.simulate.host import SimulatedHost, hashes_of

from tests.integration.daemon.commands import reload
from tests.integration.daemon.replay import FRAGMENT, Connect, engine, prompts, request
from tests.support.process import Daemon

Start = Callable[..., Daemon]
POOL = PoolGeometry(extents=64, extent_bytes=1 << 20, first_extent_offset=2 << 20)


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
