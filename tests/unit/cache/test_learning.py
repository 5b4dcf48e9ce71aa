"""What was learnt of reuse outlives the daemon in a file beside the pool, and a bad file costs no more than
that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvtierd.cache.learning import BYTES_MAX, LearntFile


class Cache:
    """As much of a cache as matters here."""

    def __init__(self, learnt: bytes = b"", *, ranks: bool = True, takes: bool = True) -> None:
        self.ranks, self.takes = ranks, takes
        self._learnt = learnt
        self.restored: bytes | None = None

    def learnt(self) -> bytes:
        return self._learnt

    def restore_learnt(self, saved: bytes) -> bool:
        self.restored = saved
        return self.takes


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return tmp_path / "pool"


def test_what_is_saved_is_there_for_the_next_daemon_and_for_nobody_else(pool: Path) -> None:
    LearntFile(pool).save(Cache(b"first"))  # type: ignore[arg-type]
    LearntFile(pool).save(Cache(b"what was learnt"))  # type: ignore[arg-type]
    assert sorted(path.name for path in pool.parent.iterdir()) == ["pool.learnt"]
    assert (pool.parent / "pool.learnt").stat().st_mode & 0o777 == 0o600
    cache = Cache()
    LearntFile(pool).restore(cache)  # type: ignore[arg-type]
    assert cache.restored == b"what was learnt"


@pytest.mark.parametrize(("where", "ranks"), [(None, True), ("pool", False)])
def test_without_a_file_or_a_policy_that_learns_nothing_happens(
    pool: Path, where: str | None, ranks: bool
) -> None:
    LearntFile(pool).save(Cache(b"what was learnt"))  # type: ignore[arg-type]
    cache = Cache(ranks=ranks)
    LearntFile(None if where is None else pool).restore(cache)  # type: ignore[arg-type]
    assert cache.restored is None
    LearntFile(None).save(Cache(b"x"))  # type: ignore[arg-type]
    LearntFile(pool).save(Cache(b""))  # type: ignore[arg-type]
    assert (pool.parent / "pool.learnt").read_bytes() == b"what was learnt"


@pytest.mark.parametrize("what", ["link", "folder", "pipe", "other version", "huge"])
def test_a_file_that_is_no_use_is_told_and_left_out(
    pool: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = pool.parent / "pool.learnt"
    if what == "link":
        path.symlink_to("/etc/passwd")
    elif what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"x" * (BYTES_MAX * 3 if what == "huge" else 5))
    cache = Cache(takes=False)
    LearntFile(pool).restore(cache)  # type: ignore[arg-type]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert cache.restored is None or len(cache.restored) <= BYTES_MAX + 1


def test_a_folder_that_cannot_be_written_is_told_once(pool: Path, caplog: pytest.LogCaptureFixture) -> None:
    LearntFile(pool.parent / "missing" / "pool").save(Cache(b"x"))  # type: ignore[arg-type]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
