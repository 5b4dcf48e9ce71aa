"""One vLLM flag and nothing else: the engine's connector starts a daemon with default settings."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import grpc
import pytest
from kvtier.connection.address import default_socket
from kvtier.v1 import admin_pb2, admin_pb2_grpc

from tests.support.daemon import until
from tests.vllm.mini_engine import TOKENS, MiniEngine, engine_config, output_of
from tests.vllm.mini_rig import BLOCKS, all_came_back, wait_ready, wait_stored
from tests.vllm.rig import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

STORY = prompt(10 * TOKENS + 1, seed=3)


def test_an_engine_alone_starts_a_daemon_and_the_next_one_hits(
    model: Path,
    socket_dir: Path,
    shm_dir: Path,
    patience: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.delenv("KVTIER_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    monkeypatch.setenv("KVTIER_POOL_PATH", str(shm_dir / "pool"))
    monkeypatch.setenv("KVTIER_METRICS_LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("KVTIER_CONFIG", "")
    config = {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"autostart": True, "audit_rate": 0, **patience},
    }
    cached = []
    try:
        for _ in range(2):
            engine = MiniEngine(engine_config(model, config), BLOCKS)
            wait_ready(engine)
            engine.add("story", STORY)
            engine.run()
            wait_stored(engine)
            assert engine.finished["story"] == output_of(STORY, 8)
            cached.append(engine.cached["story"])
            all_came_back(engine)
            engine.close()
    finally:
        with grpc.insecure_channel(f"unix:{default_socket()}") as channel:
            pid = admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=60).pid
        os.kill(pid, signal.SIGTERM)
        until(lambda: not Path(default_socket()).exists(), "it has stopped")
    assert cached == [0, 10 * TOKENS]
