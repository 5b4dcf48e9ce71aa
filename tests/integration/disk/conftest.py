import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.disk.rig import Front

NewFront = Callable[..., Front]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A disk's directory on a file system that is one, not memory."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-disk-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
    assert not list(folder.parent.glob(f"{folder.name}*"))


@pytest.fixture
def new_front(folder: Path) -> Iterator[NewFront]:
    """Boots of a daemon, one after another: the one before is closed first."""
    fronts: list[Front] = []

    def boot(path: Path | None = None, **arguments: Any) -> Front:
        if fronts:
            fronts[-1].close()
        fronts.append(Front(path or folder, **arguments))
        return fronts[-1]

    yield boot
    if fronts:
        fronts[-1].close()


@pytest.fixture
def front(new_front: NewFront) -> Front:
    """With a first worker, on a new slab."""
    front = new_front()
    front.start()
    return front
