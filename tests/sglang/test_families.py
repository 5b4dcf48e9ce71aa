"""Models whose caches are not those of a Llama: windows, and latent vectors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.sglang.engine import PAGE, Engine, with_linker
from tests.support.daemon import DaemonHost, until
from tests.vllm import tiny_models

pytestmark = [pytest.mark.sglang, pytest.mark.long, pytest.mark.timeout(900)]
PROMPT = [(5 * i * i + 3 * i) % 1000 for i in range(700)]
WHOLE = (len(PROMPT) - 1) // PAGE * PAGE
YARN = {
    "type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 2048,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
"""How DeepSeek's own models rotate, and the only way that SGLang knows for them on a CPU."""


def family(name: str) -> tiny_models.Family:
    known = tiny_models.FAMILIES[name]
    return replace(known, config=known.config | {"rope_scaling": YARN}) if name == "deepseek2" else known


@pytest.mark.parametrize(("name", "ranks"), [("gemma3", 1), ("deepseek2", 2)])
def test_another_engine_restores_what_one_has_computed(
    host: DaemonHost, tmp_path: Path, name: str, ranks: int
) -> None:
    """Latent vectors are the same on every rank: one stores, and all load."""
    model = tiny_models.write(tmp_path / name, family(name))
    arguments = with_linker(host.socket) | {"tp_size": ranks}
    with Engine(model, tmp_path / "first.log", **arguments) as first:
        cold, local = first.generate(PROMPT), first.generate(PROMPT)
        assert cold.restored == 0
        assert local.computed_before == WHOLE
        assert "kvtier is off" not in first.log
        until(lambda: host.status().blocks.ready >= WHOLE // PAGE, "the pages are stored")
        if name == "deepseek2":
            assert host.metrics()["kvtier_store_blocks_total.host"] < ranks * WHOLE // PAGE
    with Engine(model, tmp_path / "second.log", **arguments) as second:
        restored = second.generate(PROMPT)
        assert (restored.computed_before, restored.restored) == (0, WHOLE)
        assert (restored.tokens, restored.logprobs) == (local.tokens, local.logprobs)
