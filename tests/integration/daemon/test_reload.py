"""Settings that change while the daemon runs, those that cannot, and a file that is no use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.daemon.commands import reload
from tests.integration.daemon.raw import RawSession
from tests.support.process import Daemon, until


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "kvtierd.toml"
    file.write_text("")
    return file


def test_what_can_change_changes(file: Path, start: Callable[..., Daemon]) -> None:
    daemon = start(config=file)
    assert reload(daemon) == (0, "nothing has changed\n")
    file.write_text('[integrity]\nsample_bytes_per_s = "7MiB"\n[log]\nlevel = "debug"\n')
    status, said = reload(daemon)
    assert (status, said) == (
        0,
        'integrity.sample_bytes_per_s: "16MiB" -> "7MiB"\nlog.level: "info" -> "debug"\n',
    )
    assert daemon.status().integrity.sample_bytes_per_s == 7 << 20
    assert reload(daemon) == (0, "nothing has changed\n"), "it is in force"


def test_a_session_that_is_silent_is_ended_sooner(
    file: Path, start: Callable[..., Daemon], connect: Callable[..., RawSession]
) -> None:
    daemon = start(config=file, server__heartbeat_interval_s=0.2)
    connect().ready()
    assert len(daemon.status().instances) == 1
    file.write_text("[server]\nsession_silence_s = 0.5\n")
    assert reload(daemon)[0] == 0
    until(lambda: not daemon.status().instances, "the silent session is ended")


def test_what_needs_a_restart_is_said_and_the_rest_is_in_force(
    file: Path, start: Callable[..., Daemon]
) -> None:
    daemon = start(config=file)
    daemon.may_complain = True
    file.write_text('[limits]\nleases_max = 5\n[integrity]\nsample_bytes_per_s = "7MiB"\n')
    status, said = reload(daemon, "--json")
    assert status == 75
    assert json.loads(said) == {
        "applied": [{"key": "integrity.sample_bytes_per_s", "before": '"16MiB"', "after": '"7MiB"'}],
        "needs_restart": [{"key": "limits.leases_max", "before": "8192", "after": "5"}],
    }
    assert daemon.status().integrity.sample_bytes_per_s == 7 << 20
    status, said = reload(daemon)
    assert (status, said) == (75, "limits.leases_max: stays 8192; 5 takes a restart (drain --for-restart)\n")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[integrity]\nsample_bytes_per_s = "7MiB"\nverifi = 1\n', "integrity.verifi"),
        ('[integrity]\nsample_bytes_per_s = "much"\n', "integrity.sample_bytes_per_s"),
        ('[integrity]\nsample_bytes_per_s = "7MiB"\n[server]\nsession_silence_s = 1\n', "session_silence_s"),
        ("[integrity", "not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing(
    text: str, named: str, file: Path, start: Callable[..., Daemon]
) -> None:
    daemon = start(config=file)
    file.write_text(text)
    status, said = reload(daemon)
    assert status == 69
    assert named in said
    assert "nothing has changed" in said
    assert daemon.status().integrity.sample_bytes_per_s == 16 << 20


def test_a_file_that_is_gone_changes_nothing(file: Path, start: Callable[..., Daemon]) -> None:
    daemon = start(config=file)
    file.unlink()
    status, said = reload(daemon)
    assert status == 69
    assert str(file) in said
    assert daemon.status().state == "serving"
