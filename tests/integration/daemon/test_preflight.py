"""`kvtierctl doctor` and `kvtierd serve` where something is wrong: they agree, and nothing is made."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.daemon.conftest import Start
from tests.support.process import DEADLINE_S, Daemon

pytestmark = pytest.mark.faults
MIB = 1 << 20


class Host:
    """A place for one daemon, as its environment describes it."""

    def __init__(self, run: Path, pool: Path, **settings: object) -> None:
        self.run = run
        self.pool = pool
        given = {"server_socket": run / "k.sock", "pool_path": pool, "pool_size": "34MiB"}
        given |= {"metrics_listen": "off", "pool_lock_timeout_s": 0} | settings
        variables = {f"KVTIER_{name}".upper(): str(value) for name, value in given.items()}
        self._environ = os.environ | {"KVTIER_CONFIG": ""} | variables

    def doctor(self, wrap: Sequence[str] = ()) -> list[dict[str, Any]]:
        """What it finds; its status says whether that is a failure."""
        done = self._call(wrap, "kvtierd.ctl", "doctor", "--json")
        found: list[dict[str, Any]] = json.loads(done.stdout)
        assert done.returncode == any(each["verdict"] == "failure" for each in found)
        return found

    def serve(self, wrap: Sequence[str] = ()) -> tuple[int, str]:
        """A start that is refused."""
        done = self._call(wrap, "kvtierd.cli", "serve")
        return done.returncode, done.stderr

    def _call(self, wrap: Sequence[str], *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*wrap, sys.executable, "-m", *command],
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def refused(self, wrap: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
        """The failures, by name, of which both say the same, word for word; nothing has been made."""
        failures = [each for each in self.doctor(wrap) if each["verdict"] == "failure"]
        status, said = self.serve(wrap)
        assert status in (69, 78), said
        told = re.findall(r"^(?:kvtierd:)?\s+(\S+) = '(.*?)' \(from .*?\): (.*)$", said, re.MULTILINE)
        assert [tuple(map(without_room, each)) for each in told] == [
            (each["field"], each["value"], without_room(f"{each['found']}; {each['remedy']}"))
            for each in failures
        ], said
        assert "Traceback" not in said
        assert list(self.run.iterdir()) == []
        return {each["name"]: each for each in failures}


def without_room(text: str) -> str:
    """Without how much a file system has free: others write to it meanwhile."""
    return re.sub(r"[\d.]+ (?:[KMGT]iB|bytes) of", "… of", text)


def mounted(where: Path, options: str, before: str = "true") -> list[str]:
    """Words before a command: it runs with a tmpfs of its own, which ends with it; `before` is run there
    first, while it can be written."""
    unshare = shutil.which("unshare")
    assert unshare, "unshare (util-linux) is needed"
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    script = (
        f"mount -t tmpfs -o size=64m,mode=0700 kvtier-test {shlex.quote(str(where))} && {before} && "
        f'mount -o remount,{options} {shlex.quote(str(where))} && exec "$@"'
    )
    return [unshare, "--mount", *root, "sh", "-c", script, "sh"]


def test_everything_that_is_wrong_is_told_at_once(socket_dir: Path, shm_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "disk").mkdir()
    (tmp_path / "again").symlink_to(tmp_path / "disk")
    (shm_dir / "open").mkdir()
    (shm_dir / "open").chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host = Host(
            socket_dir,
            shm_dir / "open" / "pool",
            metrics_listen=f"127.0.0.1:{taken.getsockname()[1]}",
            server_group="no-such-group",
            disk_paths=":".join(str(tmp_path / name) for name in ("missing", "file", "disk", "again")),
            disk_size="8TiB",
        )
        found = host.refused()
    assert found.keys() == {
        "socket group",
        "pool folder",
        f"disk {tmp_path / 'missing'}",
        f"disk {tmp_path / 'file'}",
        f"disk {tmp_path / 'again'}",
        "disk room",
        "metrics port",
    }
    assert list((shm_dir / "open").iterdir()) == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["again", "disk", "file"]
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_place_that_is_mounted_read_only(socket_dir: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    host = Host(socket_dir, place / "pool", disk_paths=place, disk_size="8MiB")
    found = host.refused(mounted(place, "ro"))
    assert found.keys() == {"pool folder", f"disk {place}"}
    assert all("read-only" in each["found"] for each in found.values())


def test_a_disk_that_was_written_before_and_is_read_only_now_is_a_fault_of_the_disk(
    socket_dir: Path, shm_dir: Path, tmp_path: Path
) -> None:
    """As the kernel remounts one that fails: the daemon starts without it."""
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    slab = place / "kvtier.slab"
    made = f"printf KVTIERP1 > {shlex.quote(str(slab))} && chmod 600 {shlex.quote(str(slab))}"
    host = Host(socket_dir, shm_dir / "pool", disk_paths=place, disk_size="8MiB")
    found = {each["name"]: each for each in host.doctor(mounted(place, "ro", before=made))}
    assert found[f"disk {place}"]["verdict"] == "warning"
    assert "starts without it" in found[f"disk {place}"]["found"]


def test_a_pool_that_a_daemon_uses_is_named_with_its_pid_and_its_socket(
    daemon: Daemon, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    metrics = daemon.metrics_url.removeprefix("http://").removesuffix("/metrics")
    found = Host(tmp_path, daemon.pool, metrics_listen=metrics).refused()
    assert found.keys() == {"pool file", "metrics port"}
    for each in found.values():
        assert f"pid {daemon.pid} (kvtierd, which serves at {daemon.socket})" in each["found"]


def test_what_the_daemon_that_runs_uses_is_well_for_doctor(daemon: Daemon) -> None:
    metrics = daemon.metrics_url.removeprefix("http://").removesuffix("/metrics")
    host = Host(daemon.socket.parent, daemon.pool, metrics_listen=metrics, server_socket=daemon.socket)
    found = {each["name"]: each for each in host.doctor()}
    assert [each for each in found.values() if each["verdict"] == "failure"] == []
    smaller = found["pool file"]
    assert (smaller["verdict"], smaller["field"]) == ("warning", "pool.size"), smaller
    assert "the next start is cold" in smaller["found"]
    assert str(daemon.pool) in smaller["found"]
    status, said = host.serve()
    assert status == 69
    assert f"already running: pid {daemon.pid} owns {daemon.socket}" in said


def test_a_second_daemon_of_a_host_serves_its_metrics_elsewhere(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVTIER_METRICS_LISTEN", raising=False)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # taken already, which is as well
            stack.enter_context(socket.create_server(("127.0.0.1", 9470)))
        daemon = start(metrics__listen=None)
    assert re.fullmatch(r"http://127.0.0.1:(?!9470/)\d+/metrics", daemon.metrics_url)
    assert daemon.metrics()["kvtier_snapshot_fresh"] == 1
    [warning] = [line for line in map(json.loads, daemon.log().splitlines()) if line["level"] == "warning"]
    assert "port 9470 is in use" in warning["message"]
    assert "--metrics-listen" in warning["remedy"]


def test_what_is_not_well_but_will_do_is_logged(
    start: Start, socket_dir: Path, shm_dir: Path, tmp_path: Path
) -> None:
    disks = [tmp_path / "a", shm_dir / "b"]
    for disk in disks:
        disk.mkdir()
        disk.chmod(0o777)
    paths = ":".join(map(str, disks))
    host = Host(socket_dir, shm_dir / "pool", disk_paths=paths, disk_size="8MiB")
    warnings = [each for each in host.doctor() if each["verdict"] == "warning"]
    daemon = start(disk__paths=paths, disk__size="8MiB", pool__size="34MiB")
    lines = [json.loads(line) for line in daemon.log().splitlines()]
    logged = [line for line in lines if line["logger"] == "kvtierd.preflight"]
    assert len(warnings) >= 3
    assert [(line["message"], line["remedy"], line["disk.paths"]) for line in logged] == [
        (f"{each['name']}: {each['found']}", each["remedy"], each["value"]) for each in warnings
    ]
