"""A live daemon says what half and twice of its pool would hit: what it says of its own size is what it has
hit, and what it says of others is what the simulator says of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from kvtierd.core.blocks.blocks import HISTORY_PART, REMEMBERED_BYTES
from kvtierd.simulate.host import SimulatedHost, hashes_of

from tests.integration.daemon.commands import kvtierctl, reload
from tests.integration.daemon.traced import FRAGMENT, POOL, Connect, engine, prompts, request
from tests.support.process import Daemon

Start = Callable[..., Daemon]
POINT = 0.01


def shadow_of(daemon: Daemon) -> dict[str, float]:
    answer = kvtierctl(daemon, "status", "--json")
    assert answer.returncode == 0, answer.stderr
    found: dict[str, float] = json.loads(answer.stdout)["shadow"]
    return found


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_the_estimate_is_what_was_hit(start: Start, connect: Connect, tmp_path: Path, policy: str) -> None:
    file = tmp_path / "kvtierd.toml"
    pool = '[pool]\nsize = "66MiB"\nextent_size = "1MiB"\npolicy = '
    file.write_text(f'{pool}"{policy}"\n')
    daemon = start(config=file)
    daemon.wait_whole()
    assert not shadow_of(daemon)["known"]
    assert not any(name.startswith("kvtier_shadow_hit_rate") for name in daemon.metrics())
    capacity = POOL.extents * POOL.slots_per_extent(FRAGMENT)
    history = POOL.capacity_bytes // HISTORY_PART // REMEMBERED_BYTES
    others = {
        "half": SimulatedHost(capacity // 2, ranks=policy == "reuse", history_blocks=history // 2),
        "twice": SimulatedHost(2 * capacity, ranks=policy == "reuse", history_blocks=2 * history),
    }
    hits = dict.fromkeys(["actual", *others], 0)
    blocks = 0
    one = engine(connect)
    for prompt in prompts():
        blocks += len(prompt)
        hits["actual"] += request(one, prompt)
        for name, simulated in others.items():
            hits[name] += simulated.request(hashes_of(prompt))
    rates = {name: count / blocks for name, count in hits.items()}
    shadow = shadow_of(daemon)
    assert shadow["known"]
    assert shadow["share"] == 1, "the pool is small"
    assert shadow["actual"] == pytest.approx(rates["actual"], abs=0.1 * POINT)
    assert shadow["now"] == pytest.approx(rates["actual"], abs=POINT)
    for name in others:
        assert shadow[name] == pytest.approx(rates[name], abs=2 * POINT), name
    metrics = daemon.metrics()
    for name in ("half", "now", "twice", "actual"):
        assert metrics[f"kvtier_shadow_hit_rate.{name}"] == pytest.approx(shadow[name], abs=0.1 * POINT)
    file.write_text(pool + ('"reuse"\n' if policy == "lru" else '"lru"\n'))
    assert reload(daemon)[0] == 0
    assert not shadow_of(daemon)["known"], "it begins anew with the other policy"
