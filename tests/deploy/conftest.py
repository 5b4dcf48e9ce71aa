"""What the deployment tests need of a machine: they fail without it, for a skipped proof is no proof."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.deploy.installation import build_wheel, make_installation

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("deploy")


@pytest.fixture(scope="session")
def wheel() -> Path:
    return build_wheel()


@pytest.fixture(scope="session")
def installation(wheel: Path) -> Path:
    return make_installation(wheel)


@pytest.fixture(scope="session")
def as_root() -> None:
    """Namespaces, mounts and other users take root's rights."""
    if os.geteuid() != 0:
        pytest.fail("this test mounts and changes users: run `sudo make test-deploy`")
