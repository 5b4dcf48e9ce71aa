"""What was learnt of reuse, in a file beside the pool, so that it outlives the daemon."""

import asyncio
import os
from pathlib import Path

from kvtierd.cache.facade import Cache
from kvtierd.logs import logger

SAVE_EVERY_S = 600.0
SUFFIX = ".learnt"
BYTES_MAX = 1 << 20
"""A longer file is none of ours."""

log = logger(__name__)


class LearntFile:
    """Keeps what the cache has learnt. Whoever can write this file can have blocks kept badly, and nothing
    else: they are found by their hashes, and checked as ever."""

    def __init__(self, pool: Path | None) -> None:
        """`pool` is the pool's file; without one nothing is kept."""
        self._path = None if pool is None else pool.with_name(pool.name + SUFFIX)

    def restore(self, cache: Cache) -> None:
        """Has the cache go on with what the file has, if there is one that it can use."""
        if self._path is None or not cache.ranks:
            return
        try:
            with open(self._path, "rb", opener=_no_link) as file:
                saved = file.read(BYTES_MAX + 1)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("what was learnt of reuse cannot be read", path=str(self._path), error=str(error))
            return
        if cache.restore_learnt(saved):
            log.info("going on with what was learnt of reuse", path=str(self._path))
        else:
            log.warning(
                "what was learnt of reuse is not of this version: it is learnt anew", path=str(self._path)
            )

    def save(self, cache: Cache) -> None:
        """Writes what the cache has learnt, if it learns. A failure is logged."""
        if self._path is None or not (learnt := cache.learnt()):
            return
        new = self._path.with_name(self._path.name + ".new")
        try:
            new.unlink(missing_ok=True)
            with open(new, "xb", opener=_no_link) as file:
                file.write(learnt)
            new.replace(self._path)
        except OSError as error:
            log.warning("what was learnt of reuse cannot be kept", path=str(self._path), error=str(error))

    async def keep_saving(self, cache: Cache) -> None:
        """Saves now and then until it is cancelled."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            self.save(cache)


def _no_link(path: str, flags: int) -> int:
    """Opens a file that is no link, and does not wait for the other end of a pipe. A new file is the daemon's
    alone."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
