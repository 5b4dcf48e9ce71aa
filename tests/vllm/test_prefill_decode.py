"""Prompts are computed by one engine and answered by another: API servers behind the proxy of examples/."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import DaemonHost, until
from tests.support.hosts import NewHost, below, several_hosts
from tests.support.process import DEADLINE_S
from tests.vllm.api_server import BLOCK, ApiServer, ServerOptions
from tests.vllm.rig import kv_transfer_config, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
PROXY = Path(__file__).resolve().parents[2] / "examples" / "prefill_decode.py"
TOKENS = 20 * BLOCK + 9
FULL = 20 * BLOCK


class Proxied:
    """A proxy before API servers, which it takes in turns."""

    def __init__(self, prefill: str, decode: str, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [sys.executable, str(PROXY), f"--listen=127.0.0.1:{port}"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, f"--prefill={prefill}", f"--decode={decode}"],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        until(self._answers, "the proxy answers")

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log()
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=DEADLINE_S):
                return True
        except OSError:
            return False

    def log(self) -> str:
        return self._log.read_text()

    def post(self, body: dict[str, Any]) -> bytes:
        data, kind = json.dumps({"model": "tiny", **body}).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", data, kind)
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return bytes(answer.read())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)


ATTEMPTS = 4
"""An engine computes a prompt by itself if the daemon does not answer in time, as on a machine that does much
else."""
BODY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def prompt_tokens_cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def streamed_tokens(stream: str) -> list[int]:
    """The tokens of a streamed answer. How many come in one event depends on how fast they are read."""
    *events, done = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert done == "[DONE]"
    return [token for event in events for token in json.loads(event)["choices"][0]["token_ids"]]


def connector_counts(server: ApiServer) -> str:
    """What the connector has counted, which tells why something was computed."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=DEADLINE_S) as answer:
        lines = answer.read().decode().splitlines()
    return "\n".join(line for line in lines if line.startswith("vllm:kvtier_"))


@pytest.fixture
def new_host() -> Iterator[NewHost]:
    with several_hosts() as make:
        yield make


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(host: DaemonHost, model: Path, log: Path, stack: ExitStack) -> ApiServer:
    server = ApiServer(ServerOptions(model, kv_transfer_config(host.socket)), log)
    stack.callback(server.kill)
    server.wait_ready()
    until(lambda: any(each.ready for each in host.status().instances), "the engine has attached")
    return server


@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.long), 2])
def test_what_one_engine_computes_another_answers(
    hosts: int,
    new_host: NewHost,
    stack: ExitStack,
    model: Path,
    tmp_path: Path,
    proved: Callable[[str], None],
) -> None:
    """Through the pool of one host, and through the store of two."""
    store = {} if hosts == 1 else {"store__url": tmp_path.joinpath("shared").as_uri()}
    one = new_host(pool__size="130MiB", **store)
    other = one if hosts == 1 else new_host(pool__size="130MiB", **store)
    prefill = serve(one, model, tmp_path / "prefill.log", stack)
    decode = serve(other, model, tmp_path / "decode.log", stack)
    alone = serve(new_host(pool__size="130MiB"), model, tmp_path / "alone.log", stack)
    proxy = Proxied(prefill.url, decode.url, tmp_path / "proxy.log")
    stack.callback(proxy.kill)

    for attempt in range(ATTEMPTS):
        tokens = prompt(TOKENS, seed=700 + attempt)
        if hosts == 2:  # the store's round takes longer than the proxy waits, so it is computed once before
            known = below(other).blocks
            prefill.complete(tokens, max_tokens=1)
            until(lambda known=known: below(other).blocks >= known + FULL // BLOCK, "the other host knows")
        answer = json.loads(proxy.post({"prompt": tokens, **BODY}))
        expected = alone.complete(tokens)
        assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
        if prompt_tokens_cached(answer) == FULL:
            break
    else:
        pytest.fail(f"nothing was loaded in {ATTEMPTS} attempts: {proxy.log()}\n{connector_counts(decode)}")

    tokens = prompt(TOKENS, seed=71)
    streamed = streamed_tokens(proxy.post({"prompt": tokens, **BODY, "stream": True}).decode())
    assert streamed == alone.complete(tokens)["choices"][0]["token_ids"]

    prefill.kill()
    tokens = prompt(TOKENS, seed=72)
    answer = json.loads(proxy.post({"prompt": tokens, **BODY}))
    assert prompt_tokens_cached(answer) == 0
    assert answer["choices"][0]["token_ids"] == alone.complete(tokens)["choices"][0]["token_ids"]
    assert "computed where it is answered" in proxy.log()
    proved(
        f"An engine computed a prompt, and another answered it with {FULL} of {TOKENS} tokens loaded, "
        f"{'through one pool' if hosts == 1 else 'through a store of two hosts'}; without the first one the "
        "other computed it itself."
    )
