"""One name for the socket, from the daemon's start to what a user pastes into an engine's command line."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvtier import Client, Namespace, Role
from kvtier_vllm.config import ConnectorConfig

from tests.support.process import DEADLINE_S, readable, until

NAMESPACE = Namespace(model="tests/names", kv_dtype="uint8", hash_scheme="tests:name", hash_bytes=32)


@pytest.fixture
def greeting(socket_dir: Path, shm_dir: Path) -> Iterator[str]:
    """Of a daemon that was started in `socket_dir` with a relative path, before the subcommand."""
    command = [sys.executable, "-m", "kvtierd.cli", "--socket=run/k.sock", "serve", "--metrics-listen=off"]
    command += [f"--pool-path={shm_dir / 'pool'}", "--pool-size=66Mi"]
    environment = os.environ | {"KVTIER_CONFIG": "", "KVTIER_SOCKET": "/of/clients/here.sock"}
    with (socket_dir / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=socket_dir, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert process.stdout is not None
    try:
        said = ""
        while "vLLM" not in said:
            assert readable(process.stdout.fileno(), DEADLINE_S)
            part = os.read(process.stdout.fileno(), 1 << 16).decode()
            assert part, (socket_dir / "log").read_text()
            said += part
        yield said
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
        process.stdout.close()


def test_daemon_operator_and_engine_meet(
    greeting: str, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [line] = [line for line in greeting.splitlines() if line.strip().startswith("vLLM")]
    _, option, value = shlex.split(line)
    assert option == "--kv-transfer-config"
    pasted = ConnectorConfig.parse(json.loads(value)["kv_connector_extra_config"])
    assert pasted.socket == f"{socket_dir}/run/k.sock"
    monkeypatch.chdir("/")
    with Client(
        instance="pasted", namespace=NAMESPACE, role=Role.SCHEDULER, world_size=1, socket=pasted.socket
    ) as client:
        until(lambda: client.epoch is not None, "the client has found the daemon")
    monkeypatch.setenv("KVTIER_SOCKET", pasted.socket)
    for arguments in (["status"], ["--socket", pasted.socket, "status"], ["status", "--socket=run/k.sock"]):
        command = [sys.executable, "-m", "kvtierd.ctl", *arguments]
        done = subprocess.run(
            command, cwd=socket_dir, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, done.stderr
