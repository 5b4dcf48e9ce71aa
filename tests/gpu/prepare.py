"""Makes the project importable without a network: what is installed if it is this tree's, else a build of its
own.

Nothing is put where it was not before: wheels that were carried and the build itself go into one private
folder, which is only named in PYTHONPATH of what is run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.isolate import REPO, run_group
from tests.gpu.machine import source_digest

TARGET = REPO / "build" / "gpu" / f"site-{sys.version_info[0]}.{sys.version_info[1]}"
BUILD_S = 300.0
STAMP = "built-from"
WORKS = "import kvtierd, kvtierd.cli, kvtier, kvtier_kernels.cuda; print(kvtier_kernels.__file__)"


class CannotPrepareError(Exception):
    """The project cannot be imported here, and could not be built; the message ends with the reason."""


@dataclass(frozen=True)
class Prepared:
    """What child processes need to import the project, and what was done for it."""

    environment: dict[str, str]
    facts: dict[str, Any]


def prepare(build: str, wheels: Path | None, log: Path) -> Prepared:
    """`build` is "never", "always", or "auto": build unless the project can be imported as it is.

    Raises CannotPrepareError; everything that was said is in `log`.
    """
    environment = with_path(os.environ)
    facts: dict[str, Any] = {"built": False, "wheels": []}
    if wheels is not None:
        files = sorted(wheels.glob("*.whl"))
        if not files:
            raise CannotPrepareError(f"--wheels {wheels}: there are no wheels in this folder")
        _pip(["--upgrade", *map(str, files)], "the carried wheels", environment, log)
        facts["wheels"] = [file.name for file in files]
    where = _works(environment)
    stamp = TARGET / STAMP
    is_ours = where is not None and TARGET in Path(where).parents
    stale = is_ours and (not stamp.exists() or stamp.read_text() != source_digest())
    if build == "always" or (build == "auto" and (where is None or stale)):
        _pip(["--upgrade", str(REPO)], "the project", environment, log)
        stamp.write_text(source_digest())
        facts["built"] = True
        where = _works(environment)
    if where is None:
        raise CannotPrepareError(
            f"the project cannot be imported by {sys.executable}: {_complaint(environment)}\n"
            "Carry what is missing as wheels (--wheels DIR; tests/gpu/README.md), or build (--build always)."
        )
    return Prepared(
        environment, facts | {"kvtier_kernels": "private" if TARGET in Path(where).parents else "installed"}
    )


def with_path(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with our private folder and the tree first in PYTHONPATH."""
    paths = [str(TARGET), str(REPO), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _pip(what: list[str], name: str, environment: Mapping[str, str], log: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--quiet", "--target", str(TARGET), *what]
    status, tail = run_group(command, environment, BUILD_S, log)
    if status != 0:
        raise CannotPrepareError(f"{name} could not be installed into {TARGET}:\n{tail}")


def _works(environment: Mapping[str, str]) -> str | None:
    """Where the native core was found; None if anything needed cannot be imported."""
    done = _try(environment)
    return done.stdout.strip() if done.returncode == 0 else None


def _complaint(environment: Mapping[str, str]) -> str:
    return (_try(environment).stderr.strip().splitlines() or ["no reason was given"])[-1]


def _try(environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WORKS],
        capture_output=True,
        text=True,
        check=False,
        env=dict(environment),
        cwd=REPO,
    )
