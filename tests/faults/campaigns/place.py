"""Sockets and a pool of their own for the daemons of one chapter of a campaign, so that chapters run side by
side."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.support.process import Daemon

SIDE_BY_SIDE = 3
"""Chapters at a time: a daemon's start leaves a core idle, and so does a client that waits for it."""


class Place:
    """Daemons live here one after another; a context manager that leaves nothing."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._run = self._folder(SOCKET_PREFIX, Path("/tmp"))
        self._shm = self._folder(SHM_PREFIX, SHM)
        self._started: list[Daemon] = []

    def _folder(self, prefix: str, where: Path) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def start(self, **settings: Any) -> Daemon:
        """Settings as `pool__size="1GiB"`. Returns when all of the pool can be used."""
        daemon = self.start_growing(**settings)
        daemon.wait_whole()
        return daemon

    def start_growing(self, **settings: Any) -> Daemon:
        """Returns as soon as it serves."""
        self._started.append(Daemon(self._run, self._shm / "pool", **settings))
        return self._started[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            for daemon in self._started:
                if daemon.process.poll() is None:
                    daemon.kill()
            if error is None:
                for daemon in self._started:
                    complaints = [] if daemon.may_complain else daemon.complaints()
                    assert not complaints, "\n".join(complaints)


def side_by_side(
    chapters: Sequence[Callable[[Counter[str]], None]], count: Counter[str], at_once: int = SIDE_BY_SIDE
) -> None:
    """Runs all of them, each with a count of its own, which are added to `count`; the first failure is raised
    when all are over."""
    counts = [Counter[str]() for _ in chapters]
    with ThreadPoolExecutor(at_once) as pool:
        running = [pool.submit(chapter, own) for chapter, own in zip(chapters, counts, strict=True)]
    for own in counts:
        for name, number in own.items():  # zeros too: somebody has looked
            count[name] += number
    for future in running:
        future.result()
