"""The wheel, built as for a release, and an installation of it that can be put to another place."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PLACE = REPO / "build" / "deploy"
UV = Path(sys.executable).with_name("uv")
BUILD_TIMEOUT_S = 900
SOURCES = (
    "CMakeLists.txt",
    "pyproject.toml",
    "LICENSE",
    "README.md",
    "kernels",
    "clients",
    "daemon",
    "proto",
)
OPT_PYTHON = Path("/opt/python")


def sources_digest() -> str:
    """Differs whenever a wheel would."""
    digest = hashlib.sha256()
    for source in SOURCES:
        top = REPO / source
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
                digest.update(f"{path.relative_to(REPO)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build_wheel() -> Path:
    """The wheel of the sources as they are; built once for each state of them."""
    out = PLACE / "wheels" / sources_digest()
    if not (found := list(out.glob("*.whl"))):
        for old in ("wheels", "installations"):
            shutil.rmtree(PLACE / old, ignore_errors=True)
        command = [str(UV), "build", "--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable]
        command += ["--out-dir", str(out), "--config-setting", f"build-dir={PLACE / 'cmake'}"]
        subprocess.run(command, cwd=REPO, timeout=BUILD_TIMEOUT_S, check=True)
        found = list(out.glob("*.whl"))
    [wheel] = found
    return wheel


def make_installation(wheel: Path) -> Path:
    """A virtual environment with the daemon, to be seen at any path, beside an interpreter at /opt/python."""
    venv = PLACE / "installations" / wheel.parent.name
    if (venv / "complete").exists():
        return venv
    shutil.rmtree(venv, ignore_errors=True)
    _uv("venv", "--quiet", "--relocatable", "--python", sys.executable, str(venv))
    python = venv / "bin" / "python"
    _uv("pip", "install", "--quiet", "--python", str(python), f"kvtier[daemon] @ {wheel.as_uri()}")
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python.unlink()
    python.symlink_to(OPT_PYTHON / "bin" / name)
    config = venv / "pyvenv.cfg"
    lines = config.read_text().splitlines()
    config.write_text(
        "\n".join(f"home = {OPT_PYTHON}/bin" if line.startswith("home") else line for line in lines) + "\n"
    )
    (venv / "complete").touch()
    return venv


def _uv(*arguments: str) -> None:
    subprocess.run([str(UV), *arguments], timeout=BUILD_TIMEOUT_S, check=True)
