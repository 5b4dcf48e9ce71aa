"""`autostart`: an engine that finds no daemon starts one, which outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
from kvtier.v1 import admin_pb2, admin_pb2_grpc
from kvtier_engine import autostart, detach

from tests.support.daemon import until
from tests.support.plain_client import PlainClient, block_hashes

pytestmark = pytest.mark.faults
HASHES = block_hashes("sequence", range(8))


def daemons(socket: Path) -> list[psutil.Process]:
    """Daemons that were started at this socket, without their copy workers, and without `detach`, which has
    their command in its own and may take a moment to see that nobody waits for it any more."""
    wanted = f"--server-socket={socket}"
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if wanted in (command := process.info["cmdline"] or [])
        and "serve" in command
        and detach.__file__ not in command
    ]


@pytest.fixture
def socket(socket_dir: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a daemon is to be; whatever is there at the end is ended."""
    for name, value in {
        "KVTIER_POOL_PATH": str(shm_dir / "pool"),
        "KVTIER_POOL_SIZE": "66MiB",
        "KVTIER_METRICS_LISTEN": "127.0.0.1:0",
        "KVTIER_CONFIG": "",
    }.items():
        monkeypatch.setenv(name, value)
    path = socket_dir / "own" / "kvtierd.sock"
    yield path
    for process in daemons(path):
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_a_daemon_is_started_once_and_is_there_for_everybody(socket: Path) -> None:
    started = autostart.ensure(str(socket))
    assert started is not None
    assert [process.pid for process in daemons(socket)] == [started.pid]
    assert "serve" in started.log.read_text() or started.log.stat().st_size
    assert os.getsid(started.pid) == started.pid, "in a session of its own"
    assert autostart.ensure(str(socket)) is None
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        status = admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=60)
    assert status.pid == started.pid
    with PlainClient(socket, "one").ready() as plain:
        assert plain.store(HASHES).done
        assert plain.load(HASHES) == len(HASHES)


def test_of_many_that_start_one_at_once_one_stays(socket: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: autostart.ensure(str(socket)), range(4)))
    until(lambda: len(daemons(socket)) == 1, "all others have ended")
    [daemon] = daemons(socket)
    assert [started.pid for started in results if started is not None] == [daemon.pid]


STARTER = (
    "import sys, time; from kvtier_engine import autostart; "
    "print(autostart.ensure(sys.argv[1]).pid, flush=True); time.sleep(600)"
)


def test_it_is_nobodys_child_when_the_one_that_started_it_is_killed_with_all_descendants(
    socket: Path,
) -> None:
    """As vLLM's `kill_process_tree` does with the engine core."""
    command = [sys.executable, "-c", STARTER, str(socket)]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert engine.stdout is not None
    pid = int(engine.stdout.readline())
    tree = psutil.Process(engine.pid).children(recursive=True)
    for process in tree:
        process.kill()
    os.killpg(engine.pid, signal.SIGKILL)
    engine.wait(60)
    engine.stdout.close()
    assert pid not in [process.pid for process in tree]
    assert [process.pid for process in daemons(socket)] == [pid]
    with PlainClient(socket, "one").ready() as plain:
        assert plain.store(HASHES).done


SUBREAPER = """
import ctypes, os, subprocess, sys
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
import psutil
engine = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdout=subprocess.PIPE, text=True)
pid = int(engine.stdout.readline())
for process in [*psutil.Process(engine.pid).children(recursive=True), engine]:
    process.kill()
engine.wait(60)
print(pid, flush=True)
"""


def test_below_a_subreaper_it_is_no_descendant_of_the_engine_either(socket: Path) -> None:
    """An API server that is process 1 of a container adopts the daemon, and kills its engine core's
    descendants only."""
    server = subprocess.run(
        [sys.executable, "-c", SUBREAPER, STARTER, str(socket)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert [process.pid for process in daemons(socket)] == [int(server.stdout)]


def test_nothing_stays_of_what_started_it(socket: Path) -> None:
    before = {process.pid for process in psutil.process_iter()}
    started = autostart.ensure(str(socket))
    assert started is not None

    def helpers() -> list[psutil.Process]:
        found = psutil.process_iter(["cmdline"])
        return [
            process
            for process in found
            if process.pid not in before and "detach.py" in " ".join(process.info["cmdline"] or [])
        ]

    until(lambda: not helpers(), "what watched its start has ended")
    assert psutil.Process(started.pid).is_running()


def test_what_keeps_it_from_starting_is_said(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_POOL_SIZE", "many")
    with pytest.raises(autostart.AutostartError, match=r"(?s)ended with status 78: .*many.*kvtierd\.log"):
        autostart.ensure(str(socket))


def test_a_folder_of_others_is_not_written_to(socket: Path) -> None:
    socket.parent.mkdir(mode=0o777)
    socket.parent.chmod(0o777)
    with pytest.raises(autostart.AutostartError, match="is not this user's own folder"):
        autostart.ensure(str(socket))


def test_without_the_daemons_package_it_says_what_to_install(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(autostart.AutostartError, match=r"with its extra `daemon` here.*`make wheels`"):
        autostart.ensure(str(socket))
