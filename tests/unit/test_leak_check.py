"""The leak check itself: a check that cannot fail would hide every leak."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.support import leaks
from tests.support.leaks import SHM, SHM_PREFIX, LeakCheck, live_processes

ORPHAN_MAKER = """
import subprocess
quiet = subprocess.DEVNULL
print(subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=quiet, stderr=quiet).pid)
"""


def test_a_file_of_ours_in_shm_is_a_leak():
    check = LeakCheck()
    file = SHM / f"{SHM_PREFIX}{uuid.uuid4().hex}"
    file.touch()
    try:
        assert check.leaks() == [f"file left in /dev/shm: {file.name}"]
    finally:
        file.unlink()
    assert check.leaks() == []


def test_an_orphan_in_a_session_of_its_own_is_a_leak(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leaks, "SETTLE_S", 0.2)
    check = LeakCheck()
    maker = [sys.executable, "-c", ORPHAN_MAKER]
    orphan = int(subprocess.run(maker, capture_output=True, text=True, timeout=60, check=True).stdout)
    try:
        assert live_processes()[orphan] == "sleep 60"
        with pytest.raises(AssertionError, match=f"process left: {orphan} sleep 60"):
            check.verify()
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_files_of_others_are_none_of_our_business():
    """Another test run, or a daemon that somebody uses on this machine."""
    check = LeakCheck()
    others = [SHM / f"kvtier-test-{uuid.uuid4().hex}", SHM / f"kvtier-{uuid.uuid4().hex}.pool"]
    for other in others:
        other.touch()
    try:
        assert check.leaks() == []
    finally:
        for other in others:
            other.unlink()


def test_what_was_there_before_is_not_a_leak():
    with subprocess.Popen(["sleep", "60"]) as earlier:
        try:
            assert LeakCheck().leaks() == []
        finally:
            earlier.kill()


def test_socket_paths_in_the_socket_folder_are_short(socket_dir: Path):
    assert len(bytes(socket_dir / "a-rather-long-name-for-a-socket.sock")) < 108
