"""The line that `make wheels` prints is one that pip takes."""

from __future__ import annotations

import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

from tools import wheels

METADATA = """Metadata-Version: 2.1
Name: kvtier
Version: 9.9.9
Provides-Extra: daemon
"""
TAG = f"cp3{sys.version_info.minor}"


def make_wheel(folder: Path, tag: str) -> Path:
    """One with nothing in it."""
    folder.mkdir(exist_ok=True)
    path = folder / f"kvtier-9.9.9-{tag}-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("kvtier-9.9.9.dist-info/METADATA", METADATA)
        wheel.writestr("kvtier-9.9.9.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}-none-any\n")
        wheel.writestr("kvtier-9.9.9.dist-info/RECORD", "")
    return path


def test_pip_takes_it_from_a_folder_with_a_blank_in_its_name(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "a folder", TAG)
    for extra in ("daemon", ""):
        python, *line = shlex.split(wheels.install_line(wheel, extra))
        assert python == f"python3.{sys.version_info.minor}"
        command = [sys.executable, *line, "--dry-run", "--no-deps", "--no-index", "--target", str(tmp_path)]
        said = subprocess.run(
            [*command, "--ignore-installed"], capture_output=True, text=True, timeout=120, check=False
        )
        assert said.returncode == 0, said.stderr
        assert "Would install kvtier-9.9.9" in said.stdout
        assert "does not provide" not in said.stderr


def test_it_names_the_wheel_of_this_python(tmp_path: Path) -> None:
    made = [make_wheel(tmp_path, f"cp3{minor}") for minor in wheels.MINORS]
    assert f"-{TAG}-" in wheels.fitting(made).name
    assert wheels.fitting(made, minor=99) == made[0]
    assert wheels.install_line(made[0]).startswith("python3.11 -m pip install ")
