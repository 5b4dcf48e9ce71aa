"""The image installs what its lock files name, with hashes, and they have what `pyproject.toml` asks for."""

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.locks import FOLDER, requirements

HASH = r"--hash=sha256:[0-9a-f]{64}"


@pytest.mark.parametrize("name", requirements())
def test_everything_that_is_asked_for_is_locked_with_hashes(name: str) -> None:
    text = (FOLDER / name).read_text()
    entries = re.findall(rf"^([\w.-]+)==(\S+) \\\n((?:    {HASH}(?: \\)?\n)+)", text, re.MULTILINE)
    locked = {canonicalize_name(package): version for package, version, _ in entries}
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == sum(1 + len(hashes.splitlines()) for _, _, hashes in entries), (
        "nothing else is there"
    )
    for wanted in map(Requirement, requirements()[name]):
        assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)]), f"{wanted}: make locks"


def test_the_image_installs_from_them_alone() -> None:
    installs = re.findall(r"/pip (?:install|wheel) (.*)", (FOLDER / "Dockerfile").read_text())
    assert len(installs) == 4
    for arguments in installs:
        assert "--require-hashes" in arguments or {"--no-index", "--no-deps"} <= set(arguments.split())
    assert {name for name in requirements() if any(name in each for each in installs)} == set(requirements())
