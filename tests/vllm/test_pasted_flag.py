"""What `kvtierd serve` prints for vLLM, pasted into a shell that knows nothing of that daemon."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.support.process import Daemon
from tests.vllm.mini_engine import TOKENS, MiniEngine, engine_config, output_of
from tests.vllm.mini_rig import BLOCKS, all_came_back, wait_ready, wait_stored
from tests.vllm.rig import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

STORY = prompt(4 * TOKENS + 1, seed=5)


def test_an_engine_with_the_printed_flag_uses_that_daemon(
    model: Path,
    socket_dir: Path,
    shm_dir: Path,
    patience: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    run = socket_dir / "it's here"
    run.mkdir(mode=0o700)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.delenv("KVTIER_SOCKET", raising=False)
    daemon = Daemon(run, shm_dir / "pool")
    try:
        [line] = [line for line in daemon.greeting.splitlines() if line.strip().startswith("vLLM")]
        arguments = shlex.split(line.strip().removeprefix("vLLM"))
        parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(arguments).kv_transfer_config
        assert parsed.kv_connector_extra_config == {"socket": str(daemon.socket)}
        config = json.loads(arguments[1])
        config["kv_connector_extra_config"] |= patience | {"audit_rate": 0, "on_reset": "keep"}
        engine = MiniEngine(engine_config(model, config), BLOCKS)
        wait_ready(engine)
        engine.add("story", STORY)
        engine.run()
        wait_stored(engine)
        assert engine.finished["story"] == output_of(STORY, 8)
        assert daemon.status().counters.stored_blocks >= 4
        all_came_back(engine)
        engine.close()
    finally:
        assert daemon.stop() == 0
