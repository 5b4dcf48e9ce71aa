"""Every command of the documentation is run: those of a host on a host with systemd, in their order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.installation import REPO
from tests.deploy.machine import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_200)]
DOCS = REPO / "docs"
ELSEWHERE = {
    "python3 -m venv /opt/kvtier": "tests/deploy/installation.py",
    "/opt/kvtier/bin/pip install '.[daemon]'": "tests/deploy/installation.py",
    "podman build -f deploy/container/Dockerfile -t kvtier .": "tests/deploy/image.py",
    "podman run --rm -v /dev/shm/kvtier:/pool -v /run/kvtier:/run/kvtier kvtier serve --pool-size 64MiB": (
        "tests/deploy/test_rollout.py"
    ),
}
"""Commands that need a network, or a container runtime, and where what they do is done."""
KUBECTL = "kubectl kustomize deploy/kubernetes/"
MAY_FAIL = ("systemctl reload kvtierd", "kvtierctl explain ")
"""Of these the status depends on what a reader has done before."""


def commands(page: str) -> list[str]:
    """Every command of a page, in its order."""
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


@pytest.fixture(scope="module")
def machine(as_root: None, installation: Path) -> Iterator[Machine]:
    machine = Machine(installation, config="", shipped=False)
    try:
        yield machine
    finally:
        machine.power_off()


def run(machine: Machine, command: str) -> tuple[int, str]:
    """As a reader's shell in a checkout would."""
    path = "/opt/kvtier/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return machine.run("bash", "-c", command, wrap=("env", "-C", str(REPO), f"PATH={path}"))


def must(machine: Machine, command: str) -> None:
    status, said = run(machine, command)
    fails_well = command.startswith(MAY_FAIL) and "Traceback" not in said
    assert status == 0 or fails_well, f"{command}: status {status}\n{said}\n{machine.log()}"


def test_the_pages_of_a_host_from_the_first_command_to_the_last(machine: Machine) -> None:
    for command in commands("install.md"):
        if command in ELSEWHERE or command.startswith(KUBECTL):
            continue
        must(machine, command)
        if command.endswith(" /etc/kvtier/kvtierd.toml"):  # the reader edits it
            must(machine, r"sed -i 's/^size = .*/size = \"66MiB\"/' /etc/kvtier/kvtierd.toml")
            must(machine, r"sed -i 's/^# \(\[disk\]\|paths = \)/\1/' /etc/kvtier/kvtierd.toml")
            must(machine, r"sed -i 's/^# size = \"500GiB\"/size = \"34MiB\"/' /etc/kvtier/kvtierd.toml")
    assert machine.show("ActiveState") == "active"
    assert machine.show("UnitFileState") == "enabled"
    status, said = run(machine, "kvtierctl status --socket /run/kvtier/kvtierd.sock")
    assert status == 0, said
    assert "/var/lib/kvtier/disk" in said
    for command in commands("operate.md"):
        must(machine, command)
    assert machine.show("ActiveState") == "active"


def test_what_is_not_run_here_is_run_where_it_says() -> None:
    every = [*commands("install.md"), *commands("operate.md")]
    assert set(ELSEWHERE) <= set(every), "a command that no page has"
    for place in set(ELSEWHERE.values()):
        assert (REPO / place).exists()
    overlays = {command.removeprefix(KUBECTL) for command in every if command.startswith(KUBECTL)}
    there = {"base", *(f"overlays/{path.name}" for path in (REPO / "deploy/kubernetes/overlays").iterdir())}
    assert overlays == there, "tests/deploy/test_kubernetes.py builds all of them"
