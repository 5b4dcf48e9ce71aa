"""vLLM as users run it, with `autostart`: an API server, its engine core and its worker, a daemon that
outlives all of them, and a log that says what kvtier does.

`make test-autostart` ends servers in every way; `make test` in the two that are usual.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import grpc
import psutil
import pytest
import vllm
from kvtier.v1 import admin_pb2, admin_pb2_grpc

from tests.support.daemon import until
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.support.process import DEADLINE_S
from tests.vllm.api_server import BLOCK, COMMANDS, ApiServer, ServerOptions
from tests.vllm.rig import kv_transfer_config, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

# A few tokens are left to compute: on some processors the CPU build of vLLM 0.32 ends by an illegal
# instruction if the first step of its life has one token.
STORY_CACHED = 10 * BLOCK
STORIES = [prompt(STORY_CACHED + 9, seed=90 + index) for index in range(5)]
"""Several, because an engine on a busy machine may take its daemon for silent, and compute one."""
VLLM_LINE = re.compile(r"\((\w+) pid=\d+\) (INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[\w+\.py:\d+\] ")
EVERY_WAY = [
    (command, number, name)
    for command, (number, name) in itertools.product(
        COMMANDS,
        [
            (signal.SIGINT, "server"),
            (signal.SIGTERM, "server"),
            (signal.SIGKILL, "server"),
            (signal.SIGTERM, "engine core"),
            (signal.SIGKILL, "engine core"),
            (signal.SIGTERM, "worker"),
            (signal.SIGKILL, "worker"),
        ],
    )
]
USUAL_WAYS = [
    ("vllm serve", signal.SIGTERM, "server"),
    pytest.param("python -m", signal.SIGINT, "server", marks=pytest.mark.long),
]
WAYS = EVERY_WAY if os.environ.get("KVTIER_AUTOSTART_WAYS") == "all" else USUAL_WAYS


class Home:
    """Where a daemon is to be; nobody has started one yet."""

    def __init__(self, run: Path, pool: Path) -> None:
        self.socket = run / "own" / "kvtierd.sock"
        self.environment = {
            "KVTIER_SOCKET": str(self.socket),
            "KVTIER_POOL_PATH": str(pool),
            "KVTIER_POOL_SIZE": "66MiB",
            "KVTIER_METRICS_LISTEN": "127.0.0.1:0",
            "KVTIER_CONFIG": "",
        }

    def status(self) -> admin_pb2.StatusResponse:
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            return admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=DEADLINE_S)

    def end(self) -> None:
        """Of the daemon, if there is one."""
        if self.socket.exists():
            daemon = psutil.Process(self.status().pid)
            daemon.terminate()
            daemon.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    home = Home(run, pool / "pool")
    yield home
    home.end()
    shutil.rmtree(run)
    shutil.rmtree(pool)


class Lives:
    """Servers, one after another; the last one may still run."""

    def __init__(self, home: Home, model: Path, folder: Path) -> None:
        self._home = home
        self._model = model
        self._folder = folder
        self._server: ApiServer | None = None
        self._command = ""
        self.daemon: int | None = None
        """The process that the first of them has started."""
        self.stories_told = False
        """Whether one of them has computed the stories."""
        self._servers = 0

    def running(self, command: str) -> ApiServer:
        """One that serves, and was started like this."""
        if self._server is None or self._command != command:
            self.close()
            config = kv_transfer_config(self._home.socket, autostart=True, load_start_deadline_s=60)
            options = ServerOptions(
                self._model, config, command=command, environment=dict(self._home.environment)
            )
            self._servers += 1
            self._command = command
            self._server = ApiServer(options, self._folder / f"server-{self._servers}.log")
            self._server.wait_ready()
            until(lambda: any(each.ready for each in self._home.status().instances), "it is attached")
            if self.daemon is None:
                self.daemon = self._home.status().pid
        return self._server

    def end(self, number: int, name: str) -> None:
        """Ends the one that runs."""
        assert self._server is not None
        server, self._server = self._server, None
        server.end(number, name)

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server = None


@pytest.fixture(scope="module")
def lives(home: Home, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    lives = Lives(home, model, tmp_path_factory.mktemp("servers"))
    yield lives
    lives.close()


def kvtierctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtierd.ctl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_vllm_has_the_name_that_its_command_asks_for() -> None:
    assert metadata.version("vllm").partition("+")[0] == vllm.__version__


def test_a_running_server_is_proved_to_store_and_to_load(lives: Lives, home: Home) -> None:
    server = lives.running("vllm serve")
    done = kvtierctl("check-engine", server.url, f"--socket={home.socket}", "--timeout=60", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, found
    assert found["proven"]
    assert found["model"] == "tiny"
    assert found["prompt_tokens"] == 513
    assert found["stored_blocks"] == found["loaded_blocks"] == 512 // BLOCK
    assert found["cached_tokens"] == 512


def test_the_log_says_that_it_has_attached_and_every_line_of_ours_looks_like_vllms(
    lives: Lives, home: Home
) -> None:
    log = lives.running("vllm serve").log()
    digest = home.status().instances[0].namespace_digest
    [attached] = [line for line in log.splitlines() if "kvtier: attached" in line]
    for wanted in (f"kvtierd {home.status().version}", str(home.socket), digest, "pool of 64 MiB"):
        assert wanted in attached
    assert "This engine stores full blocks of prompts and outputs; it loads what it finds" in attached
    assert f"started kvtierd (pid {lives.daemon})" in log
    # The folder of the clone, in which the environment is, may be called kvtier too.
    lines = [line for line in log.splitlines() if "non-default args" not in line]
    ours = [line for line in lines if "kvtier" in line.replace(sys.prefix, "")]
    assert [line for line in ours if not VLLM_LINE.match(line)] == []
    assert "no daemon listens" not in log, "the worker waits for the one that is being started"


@pytest.mark.parametrize(("command", "number", "name"), WAYS)
def test_the_daemon_that_it_started_outlives_it_and_serves_the_next(
    command: str, number: int, name: str, lives: Lives, home: Home
) -> None:
    server = lives.running(command)
    stored = home.status().counters.stored_blocks
    if not lives.stories_told:
        lives.stories_told = True
        assert [server.cached(story) for story in STORIES] == [0] * len(STORIES)
        until(lambda: home.status().counters.stored_blocks >= stored + 10 * len(STORIES), "they are stored")
    else:
        hits = (server.cached(story) == STORY_CACHED for story in STORIES)
        assert any(hits), "the one before has stored them"
    lives.end(number, name)
    until(lambda: not home.status().instances, "the daemon has noticed")
    status = home.status()
    assert status.pid == lives.daemon
    assert status.state == "serving"


def test_the_daemon_is_the_one_that_the_first_server_started(lives: Lives, home: Home) -> None:
    """And it descends from none of the servers, nor from this process."""
    daemon = psutil.Process(home.status().pid)
    assert daemon.pid == lives.daemon
    assert daemon.pid not in [process.pid for process in psutil.Process().children(recursive=True)]
