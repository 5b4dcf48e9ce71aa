"""kvtierctl's commands that look at a daemon, as processes against a real one."""

from __future__ import annotations

import json
import subprocess
import sys
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
    assert f"pid {instance['sessions'][0]['pid']}, attached for " in text
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
