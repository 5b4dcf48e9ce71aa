"""A stage of checks that is ended, however, leaves nothing running and no file behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.daemon import until
from tools import leftovers

REPO = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0

# What a test run may have started: a process in a session of its own that ignores what can be ignored, and
# whose parent has ended; and files.
STARTER = """
import os, pathlib, signal, subprocess, sys, tempfile
from tools.leftovers import RUN_VARIABLE, SHM, shm_prefix, socket_prefix
signal.signal(signal.SIGINT, signal.SIG_IGN)
orphan = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
run = os.environ[RUN_VARIABLE]
environment = os.environ | {RUN_VARIABLE: f"{run}-gw0"}
quiet = subprocess.DEVNULL
child = subprocess.Popen(
    [sys.executable, "-c", orphan], env=environment, start_new_session=True, stdout=quiet, stderr=quiet
)
pool = tempfile.mkdtemp(prefix=shm_prefix(f"{run}-gw0"), dir=SHM)
sockets = tempfile.mkdtemp(prefix=socket_prefix(run), dir="/tmp")
partial = pathlib.Path(sys.argv[1]).with_suffix(".partial")
partial.write_text("\\n".join([str(child.pid), pool, sockets]))
partial.rename(sys.argv[1])
if sys.argv[2] == "waits":
    signal.pause()
"""
RUNNER = """
import pathlib, signal, sys
from tools import stages
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
stages.LOGS = stages.REPO = pathlib.Path(sys.argv[1])
stages.END_GRACE_S = 1
stages.LOGS.mkdir(exist_ok=True)
command = ["env", f"PYTHONPATH={sys.argv[2]}", sys.executable, "-c", sys.argv[3], *sys.argv[4:]]
stage = stages.Stage("stage", command, "It holds.")
sys.exit(stages.to_the_end(lambda: stages.run_all([stage])))
"""


def start(folder: Path, form: str) -> tuple[subprocess.Popen[bytes], int, list[Path]]:
    """A stage under way: the process that runs it, the orphan that it has started, and its files."""
    told = folder / "told"
    arguments = [str(folder / "logs"), str(REPO), STARTER, str(told), form]
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, *arguments], cwd=REPO, stdout=subprocess.DEVNULL)
    deadline_s = time.monotonic() + DEADLINE_S
    while not told.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    pid, *files = told.read_text().splitlines()
    return runner, int(pid), [Path(file) for file in files]


def runs(pid: int) -> bool:
    """Whether it does; zombies do not."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("form", "number", "status"),
    [
        ("waits", signal.SIGTERM, 130),
        ("waits", signal.SIGHUP, 130),
        ("waits", signal.SIGINT, 130),
        ("ends", 0, 0),
    ],
)
def test_nothing_is_left_of_a_stage(tmp_path: Path, form: str, number: int, status: int) -> None:
    runner, orphan, files = start(tmp_path, form)
    try:
        if number:
            os.kill(runner.pid, number)
        assert runner.wait(DEADLINE_S) == status
        assert not runs(orphan)
        assert not any(file.exists() for file in files)
    finally:
        runner.kill()
        runner.wait(DEADLINE_S)


def test_files_and_processes_of_another_run_are_left_alone(tmp_path: Path) -> None:
    """Even of one whose name begins like this one's."""
    other = tmp_path.name + "0"
    environment = os.environ | {leftovers.RUN_VARIABLE: other}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        try:
            until(lambda: Path(f"/proc/{process.pid}/environ").read_bytes(), "it is executed")
            leftovers.end_processes(tmp_path.name)
            assert process.poll() is None
            leftovers.end_processes(other)
            assert process.wait(DEADLINE_S) == -signal.SIGKILL
        finally:
            process.kill()


RESUMED = """
import pathlib, sys
from tools import stages
stages.LOGS = pathlib.Path(sys.argv[1]) / "build"
stages.REPO = pathlib.Path(sys.argv[1])
stages.LOGS.mkdir(exist_ok=True)
count = ["sh", "-c", "echo x >> build/runs; test ! -e build/fails"]
sys.exit(stages.run_all([stages.Stage("stage", count, "It holds.")]))
"""


def test_what_has_passed_on_this_tree_need_not_be_repeated(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *name, *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=60)

    def runs_after(*, resume: bool = True, status: int = 0) -> int:
        environment = os.environ | {"PYTHONPATH": str(REPO), "KVTIER_RESUME": "1" if resume else ""}
        ended = subprocess.run(
            [sys.executable, "-c", RESUMED, str(tmp_path)],
            cwd=tmp_path,
            env=environment,
            check=False,
            capture_output=True,
            timeout=DEADLINE_S,
        )
        assert ended.returncode == status, ended.stderr
        return len((tmp_path / "build" / "runs").read_text().split())

    git("init")
    (tmp_path / ".gitignore").write_text("build/\n")
    git("add", ".")
    git("commit", "-m", "one")
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "fails").touch()
    assert runs_after(status=1) == 1
    assert runs_after(status=1) == 2, "what has failed is repeated"
    (tmp_path / "build" / "fails").unlink()
    assert runs_after() == 3
    assert runs_after() == 3, "it has passed"
    assert runs_after(resume=False) == 4, "only whoever asks for it leaves something out"
    (tmp_path / "changed").touch()
    assert runs_after() == 5, "something is not committed"
    git("add", ".")
    git("commit", "-m", "two")
    assert runs_after() == 6, "another tree"
    assert runs_after() == 6
