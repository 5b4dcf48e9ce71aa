"""`kvtierctl check-engine` says why it could not prove anything. A real daemon, a plain client as the engine
that is attached to it, and an HTTP server that answers as vLLM does; tests/vllm/test_api_server.py has a real
one."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import DaemonHost, until
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.support.plain_client import PlainClient, block_hashes
from tests.support.process import DEADLINE_S

BLOCKS = 32


class Engine:
    """What a server does, step by step; tests change some of it."""

    def __init__(self, plain: PlainClient | None = None) -> None:
        self.plain = plain
        self.hashes = block_hashes(secrets.token_hex(), range(BLOCKS))
        self.key = ""
        self.can_reset = True
        self.busy = False
        self.stores = True
        self.loads = True
        self.tells_cached: bool = True
        self.metrics = "vllm:kvtier_loaded_tokens_total 0.0\n"
        self.prompts: list[Any] = []
        self.tokenizer = "none"
        self.max_model_len = 4_096

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and JSON, or text."""
        match method, path:
            case "GET", "/v1/models":
                models = [{"id": "lora", "parent": "m"}, {"id": "m", "max_model_len": self.max_model_len}]
                return 200, {"data": models}
            case "GET", "/metrics":
                return 200, self.metrics
            case (("GET" | "POST"), "/reset_prefix_cache") if self.can_reset:
                return (405, {}) if method == "GET" else (200, {"success": not self.busy})
            case "POST", "/tokenize" if self.tokenizer == "words":
                return 200, {"tokens": [300 + index for index, _ in enumerate(body["prompt"].split())]}
            case "POST", "/tokenize" if self.tokenizer == "none":
                message = "Tokenizer not available when `skip_tokenizer_init=True`"
                return 400, {"error": {"message": message}}
            case "POST", "/v1/completions":
                return 200, {"usage": self._complete(body["prompt"])}
            case _:
                return 404, {"detail": "Not Found"}

    def _complete(self, prompt: Any) -> dict[str, Any]:
        self.prompts.append(prompt)
        cached = 0
        if self.plain is not None and self.prompts.count(prompt) == 1 and self.stores:
            assert self.plain.store(self.hashes).done
        if self.plain is not None and self.prompts.count(prompt) > 1 and self.loads:
            assert self.plain.load(self.hashes) == BLOCKS
            cached = 512
        details = {"cached_tokens": cached} if self.tells_cached else None
        return {"prompt_tokens": len(prompt), "prompt_tokens_details": details}


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """Its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._do({})

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            self._do(json.loads(data) if data else {})

        def _do(self, body: dict[str, Any]) -> None:
            status, found = engine.answer(self.command, self.path, body)
            if engine.key and self.headers["Authorization"] != f"Bearer {engine.key}":
                status, found = 401, {"error": "Unauthorized"}
            data = (found if isinstance(found, str) else json.dumps(found)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(DEADLINE_S)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonHost]:
    run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    host = DaemonHost(run, pool / "pool")
    host.start()
    yield host
    host.stop()
    shutil.rmtree(run)
    shutil.rmtree(pool)


@pytest.fixture
def plain(daemon: DaemonHost) -> Iterator[PlainClient]:
    with PlainClient(daemon.socket, "engine").ready() as plain:
        yield plain
    until(lambda: not daemon.status().instances, "the daemon has noticed")


def check(engine: Engine, socket: Path, *more: str) -> tuple[int, dict[str, Any]]:
    with serving(engine) as url:
        command = [sys.executable, "-m", "kvtierd.ctl", "check-engine", url, f"--socket={socket}", "--json"]
        done = subprocess.run(
            [*command, "--timeout=1", *more], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("tokenizer", ["none", "words", "unknown"])
def test_what_was_stored_and_loaded_is_proven(tokenizer: str, daemon: DaemonHost, plain: PlainClient) -> None:
    engine = Engine(plain)
    engine.tokenizer = tokenizer
    status, found = check(engine, daemon.socket, "--timeout=60")
    assert status == 0, found
    assert found["proven"]
    assert (found["stored_blocks"], found["loaded_blocks"], found["cached_tokens"]) == (32, 32, 512)
    assert found["model"] == "m", "the adapter is not what is asked"
    assert isinstance(engine.prompts[0], str) == (tokenizer == "unknown")
    assert tokenizer == "unknown" or len(engine.prompts[0]) == 513


def test_an_engine_that_a_reset_would_part_from_others_is_left_alone(daemon: DaemonHost) -> None:
    with PlainClient(
        daemon.socket, "trained", configuration=(("kvtier.on_reset", "leave"),)
    ).ready() as plain:
        engine = Engine(plain)
        status, found = check(engine, daemon.socket)
        assert (status, found["proven"], engine.prompts) == (1, False, [])
        assert "would end the sharing of trained" in found["why_not"]
        assert '"on_reset": "keep"' in found["advice"]
    until(lambda: not daemon.status().instances, "the daemon has noticed")


@pytest.mark.parametrize(
    ("change", "why", "advice"),
    [
        ({"can_reset": False}, "has no /reset_prefix_cache", "VLLM_SERVER_DEV_MODE=1"),
        (
            {"metrics": "vllm:num_requests_running 0.0\n"},
            "without the kvtier connector",
            "kv-transfer-config",
        ),
        ({"stores": False}, "nothing was stored within 1 s", "store_threshold"),
        ({"busy": True}, "did not forget its prefix cache within 1 s", "nothing else to do"),
        ({"loads": False}, "nothing of it was loaded", "min_load_tokens"),
        ({"key": "secret"}, "401", "--api-key"),
        ({"max_model_len": 16}, "a block has 16 tokens, and the model takes 16", "--max-model-len"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_missing_is_said(
    change: dict[str, Any], why: str, advice: str, daemon: DaemonHost, plain: PlainClient
) -> None:
    engine = Engine(plain)
    for name, value in change.items():
        setattr(engine, name, value)
    status, found = check(engine, daemon.socket)
    assert status == 1
    assert not found["proven"]
    assert why in found["why_not"]
    assert advice in found["advice"]


def test_a_key_is_sent(daemon: DaemonHost, plain: PlainClient) -> None:
    engine = Engine(plain)
    engine.key = "secret"
    assert check(engine, daemon.socket, "--api-key=secret", "--timeout=60")[0] == 0


def test_no_engine_is_attached(daemon: DaemonHost) -> None:
    status, found = check(Engine(), daemon.socket)
    assert status == 1
    assert "no engine is attached" in found["why_not"]
    assert str(daemon.socket) in found["why_not"]


def test_no_daemon_answers(tmp_path: Path) -> None:
    status, found = check(Engine(), tmp_path / "none.sock")
    assert status == 69
    assert "none.sock does not exist" in found["why_not"]


def test_of_several_engines_one_that_says_nothing_proves_nothing(
    daemon: DaemonHost, plain: PlainClient
) -> None:
    def silent() -> Engine:
        engine = Engine(plain)
        engine.tells_cached, engine.metrics = False, ""
        return engine

    assert check(silent(), daemon.socket, "--timeout=60")[0] == 0
    with PlainClient(daemon.socket, "another").ready():
        status, found = check(silent(), daemon.socket, "--timeout=60")
    assert status == 1
    assert "2 engines are attached" in found["why_not"]
    assert "--enable-prompt-tokens-details" in found["advice"]
