"""A vLLM and an SGLang on one daemon: one pool, and nothing of one is ever the other's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.engine import PAGE, Engine, with_linker
from tests.support.daemon import DaemonHost, until
from tests.vllm import engine as of_vllm
from tests.vllm.rig import kv_transfer_config

pytestmark = [pytest.mark.sglang, pytest.mark.long, pytest.mark.timeout(900)]
PROMPT = [(7 * i * i + 11 * i) % 1000 for i in range(900)]
VLLM_BLOCK = 32


def test_both_restore_their_own_of_one_model(host: DaemonHost, model: Path, tmp_path: Path) -> None:
    config = kv_transfer_config(host.socket)
    options = of_vllm.EngineOptions(model, kv_transfer_config=config, block_size=VLLM_BLOCK)
    with of_vllm.Engine.start(options, tmp_path / "vllm.log") as vllm:
        [computed] = vllm.generate([PROMPT], max_tokens=8)
        assert computed.num_cached_tokens == 0
        blocks = len(PROMPT) // VLLM_BLOCK
        until(lambda: host.status().blocks.ready == blocks, "vLLM's blocks are stored")
        with Engine(model, tmp_path / "sglang.log", **with_linker(host.socket)) as sglang:
            cold = sglang.generate(PROMPT)
            assert cold.restored == 0, "nothing of vLLM's"
            until(lambda: host.status().blocks.ready == blocks + len(PROMPT) // PAGE, "SGLang's are too")
            assert sglang.flush()
            assert sglang.generate(PROMPT).restored == (len(PROMPT) - 1) // PAGE * PAGE
            instances = host.status().instances
            assert len(instances) == len({each.namespace_digest for each in instances}) == 2
    with of_vllm.Engine.start(options, tmp_path / "again.log") as vllm:
        [restored] = vllm.generate([PROMPT], max_tokens=8)
        assert restored.num_cached_tokens == (len(PROMPT) - 1) // VLLM_BLOCK * VLLM_BLOCK
        assert restored.tokens == computed.tokens
