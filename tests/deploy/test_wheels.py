"""The wheels of `make wheels`, where they have to be enough: a Debian with its Python and nothing else."""

from __future__ import annotations

import email
import hashlib
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.image import SUITE
from tests.deploy.installation import PLACE, REPO, UV, sources_digest
from tests.deploy.tools import installed
from tools import wheels

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_000)]
HERE = Path(__file__).parent
TIMEOUT_S = 1_800.0
OLDEST = ("grpcio==1.66.2", "protobuf==5.29.6")
"""protobuf: the oldest that a vLLM from 0.29 to 0.33 can be installed with. No vLLM says more of grpcio than
its own dependencies do, which go below the oldest of ours."""
BETWEEN = ("grpcio", "protobuf==6.33.6")
"""What vLLM 0.29 insists on."""
NEWEST = ("grpcio", "protobuf")
"""vLLM 0.30 to 0.33 take the newest of both."""
FORBIDDEN = ("cc", "c++", "gcc", "g++", "clang", "ld", "as", "make", "cmake", "ninja", "git")

SCRIPT = r"""
set -eu
for program in FORBIDDEN; do
    if command -v $program; then echo "this machine is not bare: it has $program" >&2; exit 3; fi
done
install() {
    python3 -m venv "$1"; pip="$1/bin/pip"; shift
    $pip install --quiet --no-index --find-links /wheels "$@"
}
install /opt/kvtier 'kvtier[daemon]'
install /opt/oldest kvtier OLDEST
install /opt/between kvtier BETWEEN
install /opt/newest kvtier NEWEST
/opt/kvtier/bin/kvtierd --version >&2
mkdir -m 700 /run/kvtier /dev/shm/kvtier
/opt/kvtier/bin/kvtierd serve --server-socket /run/kvtier/d.sock --pool-path /dev/shm/kvtier/pool \
    --pool-size 66MiB --metrics-listen off > /tmp/greeting 2> /tmp/log &
daemon=$!
trap 'cat /tmp/log >&2' EXIT
for _ in $(seq 600); do grep -q vLLM /tmp/greeting && break; kill -0 $daemon; sleep 0.1; done
cd /
for client in oldest between newest; do
    /opt/$client/bin/python -I /wheels/bare_client.py /run/kvtier/d.sock $client
done
/opt/kvtier/bin/kvtierctl status --json --socket /run/kvtier/d.sock | tr '\n' ' '; echo
/opt/kvtier/bin/kvtierctl drain --for-restart --json --socket /run/kvtier/d.sock | tr '\n' ' '; echo
wait $daemon
trap - EXIT
"""


@pytest.fixture(scope="session")
def release() -> list[Path]:
    """sdist and wheels, made once for each state of the sources."""
    out = PLACE / "release" / sources_digest()
    if not (out / "complete").exists():
        shutil.rmtree(PLACE / "release", ignore_errors=True)
        wheels.build(out, wheels.pythons().values())
        (out / "complete").touch()
    return [*out.glob("*.tar.gz"), *sorted(out.glob("*.whl"))]


@pytest.fixture(scope="session")
def bare(as_root: None) -> Path:
    """The root of a Debian that has Python and no compiler."""
    root = PLACE / "bare"
    if not (root / "complete").exists():
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(parents=True, exist_ok=True)
        command = [installed("debootstrap", "debootstrap"), "--variant=minbase"]
        command += ["--include=python3,python3-venv", SUITE, root]
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4_000:]
        (root / "complete").touch()
    return root


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def names(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {each.partition("/")[2] for each in archive.getnames()}


def test_there_is_a_wheel_for_every_python_at_hand_and_they_say_the_same(release: list[Path]) -> None:
    sdist, *made = release
    tags = {re.search(r"-(cp3\d+)-\1-manylinux_2_(\d+)_(\w+)\.whl$", each.name) for each in made}
    assert None not in tags, made
    found = {(tag[1], int(tag[2]), tag[3]) for tag in tags if tag}
    assert {tag for tag, _, _ in found} == {f"cp3{minor}" for minor in wheels.pythons()}
    assert {machine for _, _, machine in found} == {platform.machine()}
    assert all(glibc <= 34 for _, glibc, _ in found), "RHEL 9's glibc is older than that of this wheel"
    version = re.search(r'^version = "(.+)"', (REPO / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert {metadata(each)["Version"] for each in made} == {version[1]}
    assert sdist.name == f"kvtier-{version[1]}.tar.gz"


def test_each_wheel_and_the_image_have_a_bill_of_materials(release: list[Path]) -> None:
    folder = release[0].parent
    wheels_made = [each for each in release if each.suffix == ".whl"]
    bills = {path.name: json.loads(path.read_text()) for path in folder.glob("*.cdx.json")}
    assert set(bills) == {f"{each.name}.cdx.json" for each in wheels_made} | {"kvtier-image.cdx.json"}
    for wheel in wheels_made:
        [digest] = bills[f"{wheel.name}.cdx.json"]["metadata"]["component"]["hashes"]
        assert digest["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_the_sdist_has_what_builds_it_and_nothing_of_this_machine(release: list[Path]) -> None:
    found = names(release[0])
    assert {"pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "CHANGELOG.md"} <= found
    assert {
        "kernels/native/module.cpp",
        "proto/kvtier/v1/cache.proto",
        "deploy/systemd/kvtierd.service",
    } <= found
    strange = {
        each for each in found if re.search(r"(^|/)(\.venv|build|dist|__pycache__|tests)(/|$)|\.so$", each)
    }
    assert not strange, strange


def test_every_package_is_in_the_wheel_with_its_native_core_and_types(release: list[Path]) -> None:
    for wheel in release[1:]:
        with zipfile.ZipFile(wheel) as archive:
            found = set(archive.namelist())
        assert any(re.fullmatch(r"kvtier_kernels/_native\.cpython-.+\.so", each) for each in found), wheel
        for package in ("kvtier", "kvtierd", "kvtier_vllm", "kvtier_kernels"):
            assert f"{package}/__init__.py" in found
            assert f"{package}/py.typed" in found
        assert not [each for each in found if each.startswith(("tests/", "tools/", "daemon/"))]


def test_a_machine_without_a_compiler_installs_it_and_serves_clients_old_and_new(
    release: list[Path], bare: Path, tmp_path: Path, proved: Callable[[str], None]
) -> None:
    house = tmp_path / "wheels"
    house.mkdir()
    here = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    [wheel] = [each for each in release[1:] if f"-{here}-" in each.name]
    shutil.copy(wheel, house)
    for pins in (("kvtier[daemon]",), OLDEST, BETWEEN, NEWEST):
        requirements = [f"{pins[0]} @ {wheel.as_uri()}"] if pins[0].startswith("kvtier") else ["numpy", *pins]
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--only-binary=:all:",
            "--dest",
            str(house),
        ]
        subprocess.run([*command, *requirements], check=True, timeout=TIMEOUT_S)
    shutil.copy(HERE / "bare_client.py", house)
    script = SCRIPT.replace("FORBIDDEN", " ".join(FORBIDDEN))
    for name, pins in (("OLDEST", OLDEST), ("BETWEEN", BETWEEN), ("NEWEST", NEWEST)):
        script = script.replace(name, " ".join(pins))
    folder = tmp_path / "machine"
    folder.mkdir()
    namespaces = ["unshare", "--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "--kill-child"]
    command = [*namespaces, str(HERE / "bare.sh"), str(bare), str(house), str(folder), "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    *clients, status, drained = map(json.loads, done.stdout.splitlines())
    assert len(clients) == 3
    for client in clients:
        assert (client["hits_before"], client["hits"], client["same"]) == (0, 32, 32)
        assert client["from"].startswith("/opt/")
        assert client["heavy"] == []
    found = [client["versions"] for client in clients]
    assert [found[0]["grpcio"], found[0]["protobuf"]] == [pin.partition("==")[2] for pin in OLDEST]
    assert found[2]["protobuf"] > found[1]["protobuf"] > found[0]["protobuf"]
    assert status["counters"]["stored_blocks"] == status["counters"]["loaded_blocks"] == 96
    assert drained["state"] == "stopping"
    said = [f"grpcio {each['grpcio']} and protobuf {each['protobuf']}" for each in found]
    proved(f"{wheel.name}: on a Debian without compiler and network it serves clients with {'; '.join(said)}")


@pytest.mark.parametrize("minor", wheels.MINORS)
def test_each_wheel_serves_and_is_served_under_its_own_python(
    minor: int, release: list[Path], tmp_path: Path, socket_dir: Path, shm_dir: Path
) -> None:
    """In a virtual environment, its programs being all that is on the path."""
    python = wheels.pythons().get(minor)
    if python is None:
        pytest.skip(f"no Python 3.{minor} is at hand")
    [wheel] = [each for each in release[1:] if f"-cp3{minor}-" in each.name]
    venv = tmp_path / "venv"
    subprocess.run([str(UV), "venv", "--quiet", "--python", str(python), str(venv)], check=True, timeout=120)
    command = [
        str(UV),
        "pip",
        "install",
        "--quiet",
        "--only-binary=:all:",
        "--python",
        str(venv / "bin/python"),
    ]
    *pip, requirement = shlex.split(wheels.install_line(wheel))
    assert pip == [f"python3.{minor}", "-m", "pip", "install"]
    subprocess.run([*command, requirement], check=True, timeout=TIMEOUT_S)
    socket, environment = socket_dir / "d.sock", {"PATH": str(venv / "bin")}
    flags = [f"--server-socket={socket}", f"--pool-path={shm_dir / 'pool'}", "--pool-size=66MiB"]
    daemon = subprocess.Popen(
        [str(venv / "bin/kvtierd"), "serve", *flags, "--metrics-listen=off"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd="/",
    )
    try:
        assert daemon.stdout is not None
        while "vLLM" not in (line := daemon.stdout.readline()):
            assert line, "it did not start"
        said = subprocess.run(
            [str(venv / "bin/python"), "-I", str(HERE / "bare_client.py"), str(socket), "client"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=environment,
            cwd="/",
        )
        assert said.returncode == 0, said.stderr
        client = json.loads(said.stdout)
        assert (client["hits"], client["same"]) == (32, 32)
        assert client["from"].startswith(str(venv))
    finally:
        daemon.terminate()
        status = daemon.wait(120)
        if daemon.stdout is not None:
            daemon.stdout.close()
    assert status == 0
