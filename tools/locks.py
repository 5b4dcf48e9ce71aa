"""What the image is made of: `make locks` writes every Python package with its version and hashes.

    python -m tools.locks

The image installs nothing that is not in these files. Run it when a dependency changes, or to take over new
releases, and look at what has changed before you commit it. The index is the one that uv is set up for; its
name is not written.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).with_name("uv")
FOLDER = REPO / "deploy" / "container"
PYTHON = "3.11"
"""That of Debian 12, on which the image is based."""
BUILD_TOOLS = ("cmake", "ninja")
"""What builds the native core, besides what `pyproject.toml` names as the build's requirements."""


def requirements() -> dict[str, list[str]]:
    """What is to be installed, by the name of the file that locks it."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    about, extras = project["project"], project["project"]["optional-dependencies"]
    tools = [each for each in extras["dev"] if each.startswith(BUILD_TOOLS)]
    return {
        "daemon.lock": [
            *about["dependencies"],
            *(each for extra in ("daemon", "encryption", "store", "events") for each in extras[extra]),
        ],
        "build.lock": [*project["build-system"]["requires"], *tools],
    }


def main() -> None:
    """Writes the lock files."""
    for name, wanted in requirements().items():
        command = [str(UV), "pip", "compile", "-", "--quiet", "--generate-hashes", "--upgrade"]
        command += ["--python-version", PYTHON, "--python-platform", "linux", "--no-annotate"]
        command += ["--no-emit-index-url", "--no-emit-find-links", "--output-file", str(FOLDER / name)]
        command += ["--custom-compile-command", "make locks"]
        subprocess.run(command, input="\n".join(wanted), text=True, check=True, cwd=REPO)


if __name__ == "__main__":
    main()
