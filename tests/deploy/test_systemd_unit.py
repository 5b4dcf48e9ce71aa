"""The unit as systemd itself reads it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SYSTEMD = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
UNIT = SYSTEMD / "kvtierd.service"
EXPOSURE_MAX = 2.2
"""Of 10. What remains is listed in the unit, with the reason."""


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.fail("systemd-analyze is missing: apt install systemd")
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The units, with commands that exist here in place of those of an installation."""
    for source in SYSTEMD.iterdir():
        text = source.read_text().replace("/opt/kvtier/bin/", f"{tmp_path}/")
        (tmp_path / source.name).write_text(text)
    for command in ("kvtierd", "kvtierctl"):
        (tmp_path / command).write_text("#!/bin/sh\n")
        (tmp_path / command).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("name", ["kvtierd.service", "mnt-kvtier.mount"])
def test_systemd_has_no_complaint(name: str, here: Path) -> None:
    done = analyze("verify", "--man=no", str(here / name))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_systemd_would_find_a_mistake(here: Path) -> None:
    unit = here / "kvtierd.service"
    unit.write_text(unit.read_text().replace("ProtectClock=yes", "ProtectClok=yes"))
    assert "ProtectClok" in analyze("verify", "--man=no", str(unit)).stderr


def test_it_exposes_little(here: Path) -> None:
    done = analyze(
        "security",
        "--offline=true",
        f"--threshold={round(EXPOSURE_MAX * 10)}",
        "--no-pager",
        str(here / UNIT.name),
    )
    assert done.returncode == 0, done.stdout
    found = re.search(r"Overall exposure level for kvtierd.service: ([\d.]+)", done.stdout)
    assert found is not None
    assert float(found[1]) <= EXPOSURE_MAX
