"""Looks for packs that other hosts have made, and tells the front of them, a few at a time."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtierd.core.state.disks import JOB_SLOTS_MAX
from kvtierd.tiers.store.objects import StoreError
from kvtierd.tiers.store.packed import PackNews, Shelf
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.log import logger
from kvtierd.workers.store.shelves import Shelves

UNANSWERED_MAX = 8
"""Of so many finds it is waited what the front says to them, before there are more."""
PACKS_AT_ONCE = 64
_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Find:
    """Blocks of a pack of which the front was told, until it says which of them it wants."""

    news: PackNews
    shelf: Shelf


@dataclass(frozen=True, slots=True)
class _Watched:
    shelf: Shelf
    sizes: tuple[int, ...]


class Looking:
    """For the worker's event loop."""

    def __init__(self, shelves: Shelves, every_s: float, tell: Callable[[wire.PackFound], None]) -> None:
        """A space is listed every `every_s` seconds, and at once when it comes to be watched."""
        self._shelves = shelves
        self._every_s = every_s
        self._tell = tell
        self._watched: dict[int, _Watched] = {}
        self._finds: dict[int, Find] = {}
        self._next = 1
        self._asked = asyncio.Event()
        """Set when a space has come to be watched."""
        self._answered = asyncio.Event()
        """Set when the front has said what it wants of a find."""
        self._well = True

    def watch(self, message: wire.WatchSpace) -> None:
        sizes = tuple(np.frombuffer(message.sizes, "<u8").tolist())
        shelf = self._shelves.of(message.namespace, message.group)
        shelf.start_over()  # what was found before may not have been wanted, or be forgotten
        self._watched[message.space] = _Watched(shelf, sizes)
        self._asked.set()

    def unwatch(self, message: wire.UnwatchSpace) -> None:
        self._watched.pop(message.space, None)

    def answered(self, number: int) -> Find | None:
        """Takes a find of which the front has said what it wants."""
        self._answered.set()
        return self._finds.pop(number, None)

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            self._asked.clear()
            # Only who is behind looks again at once: where others put packs all the time, there is always
            # something new, and each look is paid for.
            is_behind = False
            for space, watched in list(self._watched.items()):
                try:
                    await self._look(space, watched)
                except StoreError as error:
                    self._say(error)
                else:
                    self._say(None)
                    is_behind |= watched.shelf.behind
            if not is_behind:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._asked.wait(), self._every_s)

    async def _look(self, space: int, watched: _Watched) -> None:
        """Tells of the next packs of a space that are new."""
        for news in await watched.shelf.news(PACKS_AT_ONCE):
            wanted = _fitting(news, watched.sizes)
            per_find = max(1, JOB_SLOTS_MAX // len(watched.sizes))
            for first in range(0, len(wanted.records), per_find):
                while len(self._finds) >= UNANSWERED_MAX:
                    self._answered.clear()
                    await self._answered.wait()
                end = first + per_find
                some = PackNews(wanted.name, wanted.hashes[first:end], wanted.records[first:end], wanted.pack)
                number, self._next = self._next, self._next + 1
                self._finds[number] = Find(some, watched.shelf)
                self._tell(wire.PackFound(pack=number, space=space, hashes=some.hashes.tobytes()))

    def _say(self, error: StoreError | None) -> None:
        if error is not None and self._well:
            _log.warning(
                "what other hosts have put into the store cannot be seen just now",
                why=str(error),
                trouble=error.trouble.value,
            )
        elif error is None and not self._well:
            _log.info("what other hosts put into the store can be seen again")
        self._well = error is None


def _fitting(news: PackNews, sizes: tuple[int, ...]) -> PackNews:
    """The blocks of a pack whose shards have these sizes."""
    records, world = news.pack.records, len(sizes)
    rows = news.records[news.records + world <= len(records)]
    kept = np.flatnonzero(news.records + world <= len(records))
    fits = records["world"][rows] == world
    for rank, size in enumerate(sizes):
        fits &= records["data_bytes"][rows + rank] == size
    kept = kept[fits]
    return PackNews(news.name, np.ascontiguousarray(news.hashes[kept]), news.records[kept], news.pack)
