"""Programs that ask a daemon on another host: `kvtierctl remote`, and the router of the examples."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvtier.v1 import types_pb2

from tests.integration.daemon.raw import RawSession, hashes
from tests.security.conftest import As, Start
from tests.security.people import VICTIM, session
from tests.security.remote import Remote, port_of
from tests.support.certificates import HOST, CertificateAuthority, Issued
from tests.support.process import DEADLINE_S, Daemon

EXAMPLE = Path(__file__).parents[2] / "examples" / "prefix_router.py"


def run(command: list[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def options(remote: Remote, folder: Path, own: Issued) -> list[str]:
    """Who asks, as files and options."""
    files = {"certificate": own.certificate, "key": own.key, "ca": remote.authority.pem}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [f"--{name}={folder / name}" for name in files]


def kvtierctl(remote: Remote, folder: Path, own: Issued, *rest: str) -> subprocess.CompletedProcess[str]:
    at = f"--at={HOST}:{remote.port}"
    return run(["-m", "kvtierd.ctl", "remote", at, *options(remote, folder, own), *rest])


@pytest.fixture
def remote(start: Start, certificates: Path) -> Remote:
    return Remote(start, certificates)


@pytest.fixture
def victim(remote: Remote, connect: As) -> RawSession:
    """One block."""
    found = connect(VICTIM).ready(instance="victims")
    found.fill(1)
    assert found.store(hashes(1), [0]).state == types_pb2.TRANSFER_STATE_DONE
    return found


def test_the_command_line_asks(remote: Remote, certificates: Path, victim: RawSession) -> None:
    status = kvtierctl(remote, certificates, remote.router, "status")
    assert (status.returncode, status.stderr) == (0, "")
    assert "victims" in status.stdout
    assert "pid" not in status.stdout.splitlines()[0]
    listed = kvtierctl(remote, certificates, remote.router, "namespaces")
    digest = listed.stdout.split()[1]
    found = kvtierctl(
        remote,
        certificates,
        remote.router,
        "find",
        f"--namespace={digest[:6]}",
        hashes(1).hex(),
        "00" * 32,
    )
    said = (
        "1 of 2 blocks from the first one on without a gap: 1 in memory, 0 on a disk or in the store only; "
        "0 behind the gap"
    )
    assert (found.stdout, found.stderr) == (f"{said}\n", "")


def test_the_command_line_says_why_it_is_told_nothing(remote: Remote, certificates: Path) -> None:
    stranger = kvtierctl(remote, certificates, remote.authority.issue("stranger"), "status")
    assert stranger.returncode == 69
    assert "add cert:stranger=TENANT to server.tenants" in stranger.stderr
    nobody = kvtierctl(remote, certificates, CertificateAuthority().issue("nobody"), "status")
    assert nobody.returncode == 69
    assert "does its remote.client_ca vouch for --certificate?" in nobody.stderr
    missing = run(["-m", "kvtierd.ctl", "remote", "--at=localhost:1", "status"])
    assert missing.returncode == 2
    assert "--certificate is missing" in missing.stderr


@pytest.fixture
def other(remote: Remote, socket_dir: Path, shm_dir: Path) -> Iterator[Daemon]:
    """A daemon of another host, as it were, with three blocks of another prompt's beginning."""
    run_folder = socket_dir / "other"
    run_folder.mkdir(mode=0o755)
    settings: dict[str, Any] = {"remote__listen": "127.0.0.1:0", "server__group": "daemon"}
    settings |= {"server__tenants": f"cert:{remote.router_name}=uid:{VICTIM}"}
    daemon = Daemon(run_folder, shm_dir / "other", **(settings | remote.files.settings))
    engine = session(VICTIM, daemon.socket).ready(instance="others")
    engine.fill(2)
    assert engine.store(hashes(3), [0, 1, 2]).state == types_pb2.TRANSFER_STATE_DONE
    yield daemon
    engine.close()
    daemon.stop()


def test_the_router_of_the_examples_chooses_the_longest_prefix(
    remote: Remote, certificates: Path, victim: RawSession, other: Daemon
) -> None:
    """Both are asked for the same prompt, of which one has a block and the other three."""
    here, there = f"{HOST}:{remote.port}", f"{HOST}:{port_of(other)}"
    lines = "\n".join(hashes(4)[first : first + 32].hex() for first in range(0, 128, 32))
    who = [*options(remote, certificates, remote.router), "--model=tiny"]
    routed = run([str(EXAMPLE), here, there, *who], lines)
    assert routed.stdout.splitlines() == [
        f"{here} has 1 blocks",
        f"{there} has 3 blocks",
        f"send the request to {there}",
    ]
    assert (routed.returncode, routed.stderr) == (0, "")
    gone = run([str(EXAMPLE), here, f"{HOST}:1", *who], lines)
    assert gone.stdout.splitlines()[-1] == f"send the request to {here}"
    assert f"{HOST}:1 is left out" in gone.stderr
