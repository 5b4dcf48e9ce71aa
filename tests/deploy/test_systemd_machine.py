"""The unit as it is shipped, started, reloaded, wedged, killed and stopped by a real systemd.

Not here: GPUs, whose devices this machine lacks; the unit's list of them is checked by systemd only.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.machine import REPO, Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SOCKET = "/run/kvtier/kvtierd.sock"
BLOCKS = 128
CAP_SYS_RESOURCE = 24
CONFIG = """
[server]
socket = "/run/kvtier/kvtierd.sock"
group = "kvtier"
[pool]
path = "/dev/shm/kvtier/pool"
size = "66MiB"
extent_size = "1MiB"
[disk]
paths = ["/var/lib/kvtier/disk"]
size = "34MiB"
[metrics]
listen = "127.0.0.1:0"
"""
DROP_IN = "WatchdogSec=20\n"
"""Shorter than in the unit, for the test's sake; long for a machine that is busy."""


@pytest.fixture(scope="module")
def machine(as_root: None, installation: Path) -> Iterator[Machine]:
    machine = Machine(installation, drop_in=DROP_IN, config=CONFIG)
    try:
        yield machine
    finally:
        machine.power_off()


@pytest.fixture
def running(machine: Machine) -> Iterator[Machine]:
    """With the service started, and the configuration as it was."""
    (machine.exchange / "kvtierd.toml").write_text(CONFIG)
    machine.must("cp", "/run/exchange/kvtierd.toml", "/etc/kvtier/kvtierd.toml")
    machine.must("systemctl", "reset-failed")
    machine.must("systemctl", "start", "kvtierd")
    yield machine
    machine.run("systemctl", "stop", "kvtierd")


def configure(machine: Machine, text: str) -> None:
    (machine.exchange / "kvtierd.toml").write_text(text)
    machine.must("cp", "/run/exchange/kvtierd.toml", "/etc/kvtier/kvtierd.toml")


def ctl(machine: Machine, *arguments: str, wrap: tuple[str, ...] = ()) -> tuple[int, str]:
    return machine.run("/opt/kvtier/bin/kvtierctl", *arguments, "--socket", SOCKET, wrap=wrap)


def engine(machine: Machine, verb: str, name: str) -> int:
    """Blocks that an engine of root's has stored, or hit and compared."""
    command = [sys.executable, "-m", "tests.deploy.blocks", SOCKET, verb, name, str(BLOCKS)]
    return int(machine.must(*command, wrap=("env", "-C", str(REPO))).split()[-1])


def main_pid(machine: Machine) -> int:
    return int(machine.show("MainPID"))


def test_systemctl_start_returns_when_it_serves_and_says_how_it_is(running: Machine) -> None:
    assert running.show("ActiveState") == "active"
    assert running.show("StatusText").startswith("Serving 0 engines, ")
    status, said = ctl(running, "status")
    assert status == 0, said
    assert "/var/lib/kvtier/disk" in said
    assert engine(running, "store", "first") == BLOCKS
    assert engine(running, "load", "first") == BLOCKS


def test_it_runs_without_any_right_that_it_does_not_need(running: Machine) -> None:
    status = running.must("cat", f"/proc/{main_pid(running)}/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    uid = running.must("id", "-u", "kvtier").strip()
    assert fields["Uid"].split() == [uid] * 4
    assert [fields[name].strip("0") for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")] == [""] * 4
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    limits = running.must("cat", f"/proc/{main_pid(running)}/limits")
    assert running.show("LimitMEMLOCK") == "infinity"
    assert re.search(rf"Max locked memory +{most_locked()} ", limits), limits
    assert re.search(r"Max core file size +0 +0", limits)
    for worker in set(running.processes()) - {main_pid(running)}:
        assert b"NOTIFY_SOCKET" not in running.must("cat", f"/proc/{worker}/environ").encode()


def most_locked() -> str:
    """What a root of this machine can allow: in some containers not even root may raise a limit."""
    capabilities = re.search(r"CapEff:\s+(\w+)", Path("/proc/self/status").read_text())
    assert capabilities is not None
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    may_raise = int(capabilities[1], 16) >> CAP_SYS_RESOURCE & 1
    return "unlimited" if may_raise or hard == resource.RLIM_INFINITY else str(hard)


@pytest.mark.parametrize(("groups", "may"), [("kvtier", True), ("nogroup", False)])
def test_the_group_may_use_the_socket_and_nobody_else(running: Machine, groups: str, may: bool) -> None:
    somebody = ("setpriv", "--reuid=nobody", "--regid=nogroup", f"--groups={groups}")
    status, said = ctl(running, "status", wrap=somebody)
    assert (status == 0) == may, said


def test_a_reload_takes_over_what_it_can_and_fails_for_the_rest(running: Machine) -> None:
    configure(running, CONFIG + '[log]\nlevel = "debug"\n')
    running.must("systemctl", "reload", "kvtierd")
    before = main_pid(running)
    configure(running, CONFIG.replace("66MiB", "67MiB"))
    status, _ = running.run("systemctl", "reload", "kvtierd")
    assert status != 0
    assert "pool.size: stays " in running.log()
    assert "takes a restart" in running.log()
    assert (running.show("ActiveState"), main_pid(running)) == ("active", before)
    assert running.show("StatusText").startswith("Serving ")


def test_a_restart_keeps_the_cache(running: Machine) -> None:
    assert engine(running, "store", "restart") == BLOCKS
    before = main_pid(running)
    running.must("systemctl", "restart", "kvtierd")
    assert main_pid(running) != before
    assert engine(running, "load", "restart") == BLOCKS


def test_drained_for_a_restart_it_comes_back_by_itself(running: Machine) -> None:
    assert engine(running, "store", "drained") == BLOCKS
    before = main_pid(running)
    status, said = ctl(running, "drain", "--for-restart")
    assert status == 0, said
    running.until(lambda: main_pid(running) not in (0, before), "another has been started")
    running.until(lambda: running.show("ActiveState") == "active", "it serves")
    assert engine(running, "load", "drained") == BLOCKS


def test_killed_it_comes_back_with_its_cache_and_its_workers_end_by_themselves(running: Machine) -> None:
    assert engine(running, "store", "killed") == BLOCKS
    running.until(lambda: len(running.processes()) >= 3, "front, copy worker and disk are there")
    before = set(running.processes())
    running.must("kill", "-KILL", str(main_pid(running)))
    running.until(lambda: running.show("NRestarts") != "0", "systemd has seen it")
    running.until(lambda: running.show("ActiveState") == "active", "it serves again")
    running.until(lambda: not before & set(running.processes()), "all of the old ones have ended")
    assert engine(running, "load", "killed") == BLOCKS


def test_a_front_that_stands_still_is_ended_by_the_watchdog_and_replaced(running: Machine) -> None:
    assert engine(running, "store", "wedged") == BLOCKS
    restarts = running.show("NRestarts")
    running.must("kill", "-STOP", str(main_pid(running)))
    running.until(lambda: running.show("NRestarts") != restarts, "the watchdog has ended it")
    running.until(lambda: running.show("ActiveState") == "active", "it serves again")
    assert engine(running, "load", "wedged") == BLOCKS


def children(running: Machine, pid: int) -> set[int]:
    """The processes of the service that this one has started, and that have not ended."""
    return {
        each
        for each in running.processes()
        if running.run("grep", "-qx", f"PPid:\\s*{pid}", f"/proc/{each}/status")[0] == 0
    }


def test_a_worker_that_stands_still_is_replaced_and_the_service_goes_on(running: Machine) -> None:
    front = main_pid(running)
    # Not all processes of the service: some of the front before, which the watchdog has ended, may still end.
    before = {front, *children(running, front)}
    status, said = ctl(running, "status", "--json")
    assert status == 0
    [worker] = [str(each["pid"]) for each in json.loads(said)["workers"] if each["device"] == "cpu"]
    running.must("kill", "-STOP", worker)
    running.until(lambda: int(worker) not in running.processes(), "the daemon has ended the worker")
    assert main_pid(running) == front
    assert engine(running, "store", "after") == BLOCKS
    assert before - {int(worker)} <= set(running.processes())


def test_what_cannot_be_used_is_not_tried_again_and_says_why(running: Machine) -> None:
    running.must("systemctl", "stop", "kvtierd")
    configure(running, CONFIG + "[pol]\n")
    status, _ = running.run("systemctl", "start", "kvtierd")
    assert status != 0
    assert (running.show("ActiveState"), running.show("ExecMainStatus")) == ("failed", "78")
    assert "unknown section in /etc/kvtier/kvtierd.toml; the nearest known one is pool" in running.log()


def test_stopped_it_leaves_the_cache_and_the_folder_of_the_sockets(running: Machine) -> None:
    running.must("systemctl", "stop", "kvtierd")
    assert (running.show("ActiveState"), running.show("Result")) == ("inactive", "success")
    assert running.processes() == []
    assert running.must("ls", "/run/kvtier") == ""
    assert running.must("ls", "/dev/shm/kvtier").split() == ["pool"]
