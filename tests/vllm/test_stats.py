"""What vLLM logs and exports of the connector is what has happened."""

from __future__ import annotations

import re
from collections import Counter as Sums
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from kvtier_vllm.stats import COUNTERS, PREFIX, Increments, KvtierPromMetrics, KvtierStats

from tests.support.daemon import DaemonHost
from tests.vllm.mini_engine import TOKENS, MiniEngine, engine_config
from tests.vllm.mini_rig import host as host
from tests.vllm.mini_rig import make as make
from tests.vllm.mini_rig import wait_stored
from tests.vllm.rig import kv_transfer_config, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
__all__ = ["host", "make"]

STORY, STORY_BLOCKS = prompt(10 * TOKENS + 1, seed=3), 10


@pytest.fixture
def registry() -> Iterator[None]:
    """Leaves the process's registry as it was."""
    before = set(prometheus_client.REGISTRY._collector_to_names)
    yield
    for collector in set(prometheus_client.REGISTRY._collector_to_names) - before:
        prometheus_client.REGISTRY.unregister(collector)


def told(engine: MiniEngine) -> Sums[str]:
    """Everything that was told so far, added up."""
    sums: Sums[str] = Sums()
    for data in engine.connector_stats:
        sums.update(data)
    return sums


def compute(engine: MiniEngine, name: str, tokens: list[int]) -> None:
    engine.add(name, tokens)
    engine.run()
    wait_stored(engine)


def test_a_store_a_load_and_a_miss_are_told_once(make: Callable[..., MiniEngine]) -> None:
    engine = make()
    compute(engine, "story", STORY)
    engine.forget()
    compute(engine, "again", STORY)
    compute(engine, "other", prompt(3 * TOKENS, seed=4))
    compute(engine, "last", prompt(3 * TOKENS, seed=5))  # its steps tell of the one before
    sums = told(engine)
    assert sums["loads"] == 1
    assert sums["loaded_tokens"] == STORY_BLOCKS * TOKENS == engine.cached["again"]
    assert 0 < sums["load_seconds"] < 300
    assert sums["stored_blocks"] >= STORY_BLOCKS
    assert sums["lookups_hit"] == 1
    assert sums["lookups"] + sums["requests_known_absent"] == 4
    assert set(sums) <= set(COUNTERS)


def test_vllm_logs_and_exports_it(
    make: Callable[..., MiniEngine], model: Any, host: DaemonHost, registry: None
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

    engine = make()
    compute(engine, "story", STORY)
    engine.forget()
    compute(engine, "again", STORY)
    compute(engine, "last", prompt(3 * TOKENS, seed=5))
    config = engine_config(model, kv_transfer_config(host.socket))
    logging, lines = KVConnectorLogging(config.kv_transfer_config), []
    prom = KVConnectorProm(config, ["model_name", "engine"], {0: ["tiny", "0"]})
    for data in engine.connector_stats:
        logging.observe(dict(data))
        prom.observe(dict(data), 0)
    logging.log(lambda text, *values: lines.append(text % values))
    [line] = lines
    assert f"loaded tokens={STORY_BLOCKS * TOKENS}" in line
    assert "mean load ms=" in line
    exported = prometheus_client.generate_latest().decode()
    labels = '{engine="0",model_name="tiny"}'
    assert f"{PREFIX}loaded_tokens_total{labels} {STORY_BLOCKS * TOKENS}.0" in exported
    assert f"{PREFIX}loads_failed_total{labels} 0.0" in exported
    for name in COUNTERS:
        assert f"# HELP {PREFIX}{name}_total" in exported
    assert not re.search(rf"^{PREFIX}\w+_created", exported, re.MULTILINE)


def test_vllm_s_own_created_series_stay(registry: None) -> None:
    from prometheus_client import Counter, Gauge, Histogram

    prometheus_client.enable_created_metrics()
    theirs = Counter("vllm:theirs", "Of vLLM.", ["engine"])
    theirs.labels("0").inc()
    config = SimpleNamespace(kv_transfer_config=None)
    kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
    KvtierPromMetrics(config, kinds, ["engine"], {0: ["0"]}).observe({"loads": 3}, 0)
    exported = prometheus_client.generate_latest().decode()
    assert "vllm:theirs_created{" in exported
    assert f'{PREFIX}loads_total{{engine="0"}} 3.0' in exported
    assert not re.search(rf"^{PREFIX}\w+_created", exported, re.MULTILINE)


def test_increments_are_of_what_has_changed() -> None:
    increments = Increments()
    assert increments.of({"loads": 2, "stores": 0}) == {"loads": 2}
    assert increments.of({"loads": 2, "stores": 0}) == {}
    assert increments.of({"loads": 5, "stores": 1}) == {"loads": 3, "stores": 1}


def test_stats_add_up() -> None:
    stats = KvtierStats({"loads": 2, "load_seconds": 0.5})
    assert not stats.is_empty()
    assert stats.aggregate(KvtierStats({"loads": 3, "stores": 1})).data == {
        "loads": 5,
        "load_seconds": 0.5,
        "stores": 1,
    }
    assert stats.reduce() == {"loads": 5, "stores": 1, "mean load ms": 100.0}
    stats.reset()
    assert stats.is_empty()
    assert stats.reduce() == {}
