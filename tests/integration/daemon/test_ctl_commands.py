"""kvtierctl's commands that look at a daemon, as processes against a real one."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.daemon.raw import RawSession, hashes
from tests.support.process import DEADLINE_S, Daemon

Connect = Callable[..., RawSession]


def ctl(daemon: Daemon, *arguments: str) -> str:
    command = [sys.executable, "-m", "kvtierd.ctl", *arguments, f"--socket={daemon.socket}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ctl_json(daemon: Daemon, *arguments: str) -> Any:
    return json.loads(ctl(daemon, *arguments, "--json"))


def test_a_daemon_without_engines_says_so(daemon: Daemon) -> None:
    assert ctl(daemon, "engines") == "no engine is attached\n"
    assert ctl(daemon, "namespaces") == "no engine has attached yet, and the pool is empty\n"
    assert ctl_json(daemon, "engines") == []


def test_engines_and_their_processes_are_listed(daemon: Daemon, session: RawSession) -> None:
    text = ctl(daemon, "engines")
    [instance] = ctl_json(daemon, "engines")
    assert text.splitlines()[0].split() == [
        "NO", "ENGINE", "STATE", "MODEL", "RANKS", "MAPPED", "LEASED", "TRANSFERS", "NAMESPACE",
    ]  # fmt: skip
    assert instance["instance"] in text
    assert text.splitlines()[1].startswith(f" {instance['number']}  {instance['instance']}")
    mapped = daemon.metrics()[f"kvtier_instance_mapped_bytes.{instance['number']}"]
    assert mapped == instance["mapped_bytes"] > 0
    process = next(line for line in text.splitlines() if " scheduler and rank 0 " in line)
    assert process.split()[0] == instance["instance"]
    assert f" {instance['sessions'][0]['pid']} " in process
    assert instance["namespace_digest"] in text


def test_namespaces_have_their_blocks_and_keep_them_after_a_restart(
    start: Callable[..., Daemon], connect: Connect
) -> None:
    daemon = start()
    session = connect().ready()
    assert session.store(hashes(8), range(8)).state
    [found] = ctl_json(daemon, "namespaces")["namespaces"]
    [instance] = ctl_json(daemon, "engines")
    assert (found["host_blocks"], found["disk_blocks"]) == (8, 0)
    assert found["instances"] == [instance["instance"]]
    assert found["namespace_digest"] == instance["namespace_digest"]
    assert found["block_bytes"] * 8 <= daemon.status().pool.used_bytes
    daemon.stop()
    session.close()
    daemon = start()
    [kept] = ctl_json(daemon, "namespaces")["namespaces"]
    assert (kept["namespace_digest"], kept["host_blocks"]) == (found["namespace_digest"], 8)
    assert (kept["model"], kept["block_bytes"], kept["instances"]) == ("", 0, [])
    assert "(of an earlier daemon)" in ctl(daemon, "namespaces")


def test_top_shows_frames_and_ends(daemon: Daemon, session: RawSession) -> None:
    text = ctl(daemon, "top", "--frames=2", "--interval=0.2")
    assert text.count("kvtierd ") == 2
    assert "(since its start)" in text
    assert "(every 0.2 s)" in text
    assert max(map(len, text.splitlines())) <= 80
    lines = ctl(daemon, "top", "--frames=2", "--interval=0.1", "--json").splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["serving"] * 2


class Terminal:
    """A process on a terminal of 80 columns and 24 lines, and everything that it writes there."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        self._main, shown = pty.openpty()
        termios.tcsetwinsize(shown, (24, 80))
        self.before = termios.tcgetattr(shown)
        command = [sys.executable, "-m", "kvtierd.ctl", *arguments]
        environ = {**os.environ, "TERM": "xterm-256color", **environ}
        self.process = subprocess.Popen(
            command, stdin=shown, stdout=shown, stderr=shown, env=environ, process_group=0
        )
        self._shown = shown
        self.written = ""

    def read_until(self, done: Callable[[str], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not done(self.written):
            assert time.monotonic() < deadline_s, self.written
            if select.select([self._main], [], [], 0.05)[0]:
                self.written += os.read(self._main, 65_536).decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)
        os.close(self._shown)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def modes(self) -> list[Any]:
        return termios.tcgetattr(self._shown)


ENTER, LEAVE, HIDE, SHOW = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25l", "\x1b[?25h"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_top_gives_the_terminal_back_when_it_is_ended(daemon: Daemon, number: signal.Signals) -> None:
    with Terminal("top", f"--socket={daemon.socket}", "--interval=0.2") as terminal:
        terminal.read_until(lambda written: "(every 0.2 s)" in written)
        assert terminal.written.startswith(ENTER)
        assert HIDE in terminal.written
        terminal.process.send_signal(number)
        terminal.read_until(lambda written: SHOW in written)
        assert terminal.process.wait(DEADLINE_S) == 0
        assert terminal.written.endswith(LEAVE + SHOW)
        assert terminal.modes == terminal.before


def test_top_waits_for_a_daemon_that_ends(start: Callable[..., Daemon]) -> None:
    daemon = start()
    with Terminal("top", f"--socket={daemon.socket}", "--interval=0.2") as terminal:
        terminal.read_until(lambda written: "(every 0.2 s)" in written)
        daemon.stop()
        terminal.read_until(lambda written: "no daemon answers at" in written)
        start()
        terminal.read_until(lambda written: "(every 0.2 s)" in written.rpartition("no daemon answers")[2])
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(DEADLINE_S) == 0


def test_top_gives_the_terminal_back_when_the_daemon_ends(daemon: Daemon) -> None:
    with Terminal("top", f"--socket={daemon.socket}", "--interval=0.2", "--frames=1000") as terminal:
        terminal.read_until(lambda written: "(every 0.2 s)" in written)
        daemon.stop()
        terminal.read_until(lambda written: "kvtierctl: " in written)
        assert terminal.process.wait(DEADLINE_S) == 69
        assert SHOW in terminal.written
        assert terminal.written.index(LEAVE) < terminal.written.index("kvtierctl: "), "the reason stays"


def test_a_daemon_that_is_stopped_is_said_to_be_so_by_every_command(daemon: Daemon) -> None:
    asked = [
        ("drain",), ("clear", "--yes"), ("scrub",), ("bench",), ("status",), ("explain", "aa" * 32),
        ("check-engine", "http://127.0.0.1:1"),
        ("doctor", f"--pool-path={daemon.pool}", "--metrics-listen=off"),
    ]  # fmt: skip
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "kvtierd.ctl", *each, f"--socket={daemon.socket}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for each in asked
        ]
        said = {
            each[0]: process.communicate(timeout=DEADLINE_S)[0]
            for each, process in zip(asked, running, strict=True)
        }
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    found = said.pop("doctor")
    assert f"pid {daemon.pid} listens at {daemon.socket}, but does not answer in 5 s" in found
    for name, each in said.items():
        assert f"the daemon at {daemon.socket} did not answer in 5 s" in each, name
        assert "kvtierctl doctor" in each
        assert (each.count("\n") <= 2, "StatusCode" in each) == (True, False), each
    assert [process.returncode for process in running] == [69] * 7 + [1]


def test_top_gives_the_terminal_back_while_it_is_stopped(daemon: Daemon) -> None:
    with Terminal("top", f"--socket={daemon.socket}", "--interval=0.2") as terminal:
        terminal.read_until(lambda written: "(every 0.2 s)" in written)
        terminal.process.send_signal(signal.SIGTSTP)
        _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        terminal.read_until(lambda written: written.endswith(LEAVE + SHOW))
        terminal.process.send_signal(signal.SIGCONT)
        terminal.read_until(
            lambda written: ENTER in written[1:] and "(every 0.2 s)" in written.rpartition(ENTER)[2]
        )


def test_the_last_frame_of_a_few_stays_on_the_terminal(daemon: Daemon) -> None:
    with Terminal("top", f"--socket={daemon.socket}", "--interval=0.1", "--frames=2") as terminal:
        terminal.read_until(lambda written: "no engine is attached" in written.partition(LEAVE)[2])
        assert terminal.process.wait(DEADLINE_S) == 0
        assert "(every 0.1 s)" in terminal.written.partition(LEAVE)[2]


def test_colour_is_for_terminals_that_want_it(daemon: Daemon) -> None:
    coloured = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    with Terminal("status", f"--socket={daemon.socket}", NO_COLOR="") as terminal:
        terminal.read_until(lambda written: "REPLACED" in written and "cpu" in written)
        assert coloured.search(terminal.written)
    with Terminal("status", f"--socket={daemon.socket}", NO_COLOR="1") as terminal:
        terminal.read_until(lambda written: "REPLACED" in written and "cpu" in written)
        assert not coloured.search(terminal.written)
    assert "\x1b" not in ctl(daemon, "status")
    assert "\x1b" not in ctl(daemon, "top", "--frames=1")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_the_shell(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvtierd.ctl", "completion", shell], capture_output=True, text=True, check=True
    )
    assert "_KVTIERCTL_COMPLETE" in done.stdout


def test_bash_completes_commands_and_options() -> None:
    script = (
        'source <("$0" -m kvtierd.ctl completion bash); '
        'kvtierctl() { "$KVTIER_PYTHON" -m kvtierd.ctl "$@"; }; '
        'COMP_WORDS=(kvtierctl na); COMP_CWORD=1; _kvtierctl_completion kvtierctl; echo "${COMPREPLY[@]}"; '
    )
    folder = sys.prefix
    done = subprocess.run(
        ["bash", "-c", script, sys.executable],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{folder}/bin:/usr/bin:/bin", "KVTIER_PYTHON": sys.executable},
        timeout=DEADLINE_S,
    )
    assert done.stdout.split() == ["namespaces"]
