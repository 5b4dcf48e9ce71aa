"""What the core says of half and twice of its pool is what pools of these sizes hit."""

from __future__ import annotations

import numpy as np
import pytest
from kvtierd.core.state import size_shadow
from kvtierd.simulate.host import SimulatedHost, hashes_of
from kvtierd.simulate.traces import I64

CAPACITY = 2_000
POINTS = {"half": 2, "now": 1, "twice": 2}


def prompts() -> list[I64]:
    """Conversations that grow, some of them often continued, and prompts that never come again."""
    random = np.random.default_rng(5)
    lengths: dict[int, int] = {}
    found = []
    for number in range(2_000):
        if random.random() < 0.3:
            found.append(np.arange(30) + (1 << 40) + 100 * number)
            continue
        which = min(int(random.zipf(1.3)), 1_000)
        lengths[which] = min(60, lengths.get(which, 8) + 2)
        found.append(np.arange(lengths[which]) + which * 1_000)
    return found


@pytest.mark.parametrize(
    ("policy", "followed", "share"),
    [("lru", 8_192, 1), ("lru", 2_048, 1 / 2), ("reuse", 8_192, 1), ("reuse", 4_000, 1 / 2)],
)
def test_it_is_what_pools_of_these_sizes_hit(
    monkeypatch: pytest.MonkeyPatch, policy: str, followed: int, share: float
) -> None:
    monkeypatch.setattr(size_shadow, "SHADOW_BLOCKS", followed)
    sizes = {"half": CAPACITY // 2, "now": CAPACITY, "twice": 2 * CAPACITY}
    hosts = {name: SimulatedHost(blocks, ranks=policy == "reuse") for name, blocks in sizes.items()}
    hits = dict.fromkeys(hosts, 0)
    asked = 0
    for prompt in prompts():
        asked += len(prompt)
        for name, host in hosts.items():
            hits[name] += host.request(hashes_of(prompt))
    shadow = hosts["now"].shadow
    assert shadow.known
    assert shadow.share == share
    assert shadow.asked == asked
    assert shadow.actual == pytest.approx(hits["now"] / asked)
    for name, points in POINTS.items():
        error = 100 * (getattr(shadow, name) - hits[name] / asked)
        assert abs(error) <= (0.01 if policy == "lru" and share == 1 else points), (name, error)
