"""Programs of Debian's that the tests use: unpacked below build/, not installed, where that is enough."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PLACE = Path(__file__).resolve().parents[2] / "build" / "deploy" / "debian"
PACKAGES = {
    "kubectl": "kubernetes-client",
    "prometheus": "prometheus",
    "promtool": "prometheus",
}
"""Each is one program that needs nothing else of its package, so it need not be installed, nor be root's."""
DOWNLOAD_TIMEOUT_S = 300


def debian(program: str) -> Path:
    """Debian's own build of a program, unpacked below build/. Fails the test if it cannot be had."""
    package = PACKAGES[program]
    place = PLACE / package
    found = place / "usr" / "bin" / program
    if not found.exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        try:
            for command in (["apt-get", "download", package], ["sh", "-c", "dpkg-deb --extract ./*.deb ."]):
                subprocess.run(
                    command, cwd=place, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
                )
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(place, ignore_errors=True)
            pytest.fail(
                f"{program} cannot be had: `apt-get download {package}` failed on this machine ({error} "
                f"{getattr(error, 'stderr', '')}); these tests want Debian and its lists (apt-get update)"
            )
    return found


def installed(program: str, package: str) -> Path:
    """A program that has to be set up; installs its package if we may."""
    found = shutil.which(program)
    if found is None:
        command = ["apt-get", "install", "--yes", "--no-install-recommends", package]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
        found = shutil.which(program)
        if found is None:
            pytest.fail(f"{program} cannot be had: {' '.join(command)} says {done.stdout}{done.stderr}")
    return Path(found)
