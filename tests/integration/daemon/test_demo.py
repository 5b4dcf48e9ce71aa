"""How the demo treats its daemon, and what of the host it leaves to others."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tools import demo


@pytest.fixture
def environment(
    tmp_path: Path, socket_dir: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """That of a daemon of the demo, on a host where somebody wants other things."""
    for name, value in {
        "KVTIER_METRICS_LISTEN": "off",
        "TMPDIR": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", None)
    socket = str(socket_dir / "kvtierd.sock")
    with ExitStack() as stack:
        demo.keep_to_ourselves(stack)
        yield {
            "KVTIER_CONFIG": "",
            "KVTIER_SOCKET": socket,
            "KVTIER_POOL_PATH": str(shm_dir / "pool"),
            "KVTIER_POOL_SIZE": "66MiB",
        }
    assert not Path(os.environ["TMPDIR"]).exists()
    assert not (tmp_path / "cache").exists()


def test_its_daemon_has_a_metrics_port_of_its_own_and_its_status_is_part_of_the_story(
    environment: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = demo.Daemon(environment, tmp_path / "log")
    try:
        daemon.start()
        daemon.show()
        assert daemon.metric_lines("kvtier_pool_bytes")
    finally:
        daemon.stop()
    lines = capsys.readouterr().out.splitlines()
    assert any("kvtierd" in line for line in lines)
    assert all(line.startswith("  ") for line in lines if line)


def test_why_its_daemon_ended_is_told(environment: dict[str, str], tmp_path: Path) -> None:
    daemon = demo.Daemon(environment | {"KVTIER_POOL_SIZE": "100KiB"}, tmp_path / "log")
    with pytest.raises(demo.DemoError, match=r"kvtierd ended .*pool\.size = '100KiB'.*see .*/log"):
        daemon.start()


def test_what_engines_leave_is_in_its_own_places(environment: dict[str, str]) -> None:
    assert Path(os.environ["XDG_CACHE_HOME"]).is_relative_to(demo.OUT)
    assert Path(os.environ["TMPDIR"]).is_dir()
    assert tempfile.gettempdir() == os.environ["TMPDIR"]
