"""Models whose caches are not those of a Llama: windows, and latent vectors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.engine import PAGE, Engine, with_linker
from tests.support.daemon import DaemonHost, until
from tests.vllm import tiny_models

pytestmark = [pytest.mark.sglang, pytest.mark.long, pytest.mark.timeout(900)]
PROMPT = [(5 * i * i + 3 * i) % 1000 for i in range(700)]
WHOLE = (len(PROMPT) - 1) // PAGE * PAGE


@pytest.mark.parametrize("name", ["gemma3", "deepseek2"])
def test_another_engine_restores_what_one_has_computed(host: DaemonHost, tmp_path: Path, name: str) -> None:
    model = tiny_models.write(tmp_path / name, tiny_models.FAMILIES[name])
    arguments = with_linker(host.socket)
    with Engine(model, tmp_path / "first.log", **arguments) as first:
        cold, local = first.generate(PROMPT), first.generate(PROMPT)
        assert cold.restored == 0
        assert local.computed_before == WHOLE
        assert "kvtier is off" not in first.log
        until(lambda: host.status().blocks.ready >= WHOLE // PAGE, "the pages are stored")
    with Engine(model, tmp_path / "second.log", **arguments) as second:
        restored = second.generate(PROMPT)
        assert (restored.computed_before, restored.restored) == (0, WHOLE)
        assert (restored.tokens, restored.logprobs) == (local.tokens, local.logprobs)
