import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.disk.rig import Front

NewFront = Callable[..., Front]
ALSO_ENCRYPTED = pytest.mark.parametrize("new_front", ["plain", "encrypted"], indirect=True)
"""For a test of `front` or `new_front`: it is run on an encrypted slab as well."""


def make_key(folder: Path, name: str = "default") -> Path:
    """A new key in a folder, which is made if it is not there; returns its file."""
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / name
    path.unlink(missing_ok=True)
    path.write_text(secrets.token_hex(32) + "\n")
    path.chmod(0o400)
    return path


@pytest.fixture
def folder() -> Iterator[Path]:
    """A disk's directory on a file system that is one, not memory."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-disk-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
    assert not list(folder.parent.glob(f"{folder.name}*"))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with a key for everybody."""
    return make_key(tmp_path / "keys").parent


@pytest.fixture
def new_front(folder: Path, keys: Path, request: pytest.FixtureRequest) -> Iterator[NewFront]:
    """Boots of a daemon, one after another: the one before is closed first."""
    fronts: list[Front] = []

    def boot(path: Path | None = None, **arguments: Any) -> Front:
        if getattr(request, "param", "plain") == "encrypted":
            arguments.setdefault("keys", keys)
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
