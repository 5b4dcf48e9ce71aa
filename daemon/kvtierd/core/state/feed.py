"""What is told to routers of blocks that come to a tier or leave it: of each namespace by itself, and of each
block exactly once as stored, and once as removed.

A namespace begins with everything that it has. As index pages are filled, a walk goes through the tables, so
many entries in each tick. What changes behind it is told at once. What changes in front of it is not told, as
the walk will find it as it is then.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvtierd.core.actions import BlockNews, NewsKind, TellOfBlocks
from kvtierd.core.blocks.blocks import Blocks
from kvtierd.core.blocks.namespaces import NamespaceAbout, tag_in
from kvtierd.core.ids import HASH_BYTES_MAX, DiskId, Entries, Hashes, NamespaceDigest, SpaceId, TenantTag
from kvtierd.core.state.below import Below
from kvtierd.core.state.disks import by_space

WALKED_PER_TICK = 1 << 17
"""Entries that all walks together look at in one tick, which takes about 2 ms."""
WALKED_AT_ONCE = 1 << 14
NAMESPACES_MAX = 256
"""Namespaces that are told of at once. Others are not."""
_NONE: Hashes = np.zeros((0, HASH_BYTES_MAX), np.uint8)


@dataclass(slots=True, eq=False)
class _Place:
    """One group of a namespace in one tier."""

    namespace: NamespaceDigest
    group: int
    space: SpaceId
    blocks: Blocks
    passed: int = 0
    """The walk has been at all entries below this one."""


@dataclass(slots=True, eq=False)
class _Namespace:
    about: NamespaceAbout
    spaces: tuple[SpaceId, ...]
    places: list[_Place]
    shown: list[_Place] = field(default_factory=list)
    """How far everything is shown to those who have asked; empty if it is not being shown."""
    asked: bool = False
    """Somebody has asked since that began, or it has not begun."""

    @property
    def walked(self) -> bool:
        """Whether the walk is over, so that everything is told."""
        return _over(self.places)


@dataclass(slots=True, eq=False)
class _Noted:
    kind: NewsKind
    namespace: NamespaceDigest
    place: _Place | None = None
    about: NamespaceAbout | None = None
    pieces: list[Hashes] = field(default_factory=list)

    def news(self) -> BlockNews:
        hashes = np.concatenate(self.pieces) if self.pieces else _NONE
        place = self.place
        if place is None:
            return BlockNews(self.kind, self.namespace, hashes, about=self.about)
        return BlockNews(self.kind, self.namespace, hashes, place.group, place.blocks.disk)


class BlockFeed:
    """The news of all namespaces that are told of. It notes them, and hands them out at each tick."""

    def __init__(self, host: Blocks, below: Below, of_tenant: Callable[[TenantTag], bool]) -> None:
        """`of_tenant`: whether blocks of a tenant are told of."""
        self._host = host
        self._tiers = (host, *(disk.blocks for disk in below.all))
        self._of_tenant = of_tenant
        self.walked_per_tick = WALKED_PER_TICK
        self._namespaces: dict[NamespaceDigest, _Namespace] = {}
        self._places: dict[tuple[DiskId | None, SpaceId], _Place] = {}
        self._noted: list[_Noted] = []
        for blocks in self._tiers:
            blocks.came = partial(self._note, NewsKind.STORED, blocks)
            blocks.going = partial(self._note, NewsKind.REMOVED, blocks)

    @property
    def busy(self) -> bool:
        """Whether the next tick has something to do."""
        return bool(self._noted) or any(
            each.asked or each.shown or not each.walked for each in self._namespaces.values()
        )

    # --- what is told of ---

    def follow(self, digest: NamespaceDigest, about: NamespaceAbout, spaces: tuple[SpaceId, ...]) -> None:
        """An engine uses a namespace; `spaces` are those of its groups. If its tenant's blocks are told of,
        they are from now on."""
        known = self._namespaces.get(digest)
        if (known is not None and known.spaces == spaces) or not self._of_tenant(tag_in(digest)):
            return
        if known is not None:
            self._forget(digest)
        elif len(self._namespaces) >= NAMESPACES_MAX:
            self._forget_unused()
            if len(self._namespaces) >= NAMESPACES_MAX:
                return
        places = list(self._places_of(digest, spaces))
        self._namespaces[digest] = _Namespace(about, spaces, places)
        self._places.update(((place.blocks.disk, place.space), place) for place in places)
        self._noted.append(_Noted(NewsKind.CLEARED, digest, about=about))

    def again(self) -> None:
        """What was handed out lately has not reached anybody, so every namespace begins anew."""
        self._noted.clear()
        for digest, namespace in self._namespaces.items():
            self._noted.append(_Noted(NewsKind.CLEARED, digest, about=namespace.about))
            namespace.shown = []
            for place in namespace.places:
                place.passed = 0

    def show(self, digest: NamespaceDigest) -> None:
        """Everything that a namespace has is to be shown once more, to those who have just asked. If the
        namespace begins anew meanwhile, this has to be said again."""
        namespace = self._namespaces.get(digest)
        if namespace is None:
            self._noted.append(_Noted(NewsKind.SHOWN_ALL, digest))
        else:
            namespace.asked = True

    def _places_of(self, digest: NamespaceDigest, spaces: tuple[SpaceId, ...]) -> Iterator[_Place]:
        for group, space in enumerate(spaces):
            for blocks in self._tiers:
                yield _Place(digest, group, space, blocks)

    def _forget(self, digest: NamespaceDigest) -> None:
        for place in self._namespaces.pop(digest).places:
            del self._places[place.blocks.disk, place.space]

    def _forget_unused(self) -> None:
        """Forgets namespaces without blocks and without engines."""
        in_use = self._host.spaces.names
        for digest, namespace in list(self._namespaces.items()):
            if not any(space in in_use for space in namespace.spaces):
                self._forget(digest)

    # --- what happens ---

    def _note(self, kind: NewsKind, blocks: Blocks, entries: Entries) -> None:
        """READY blocks have come to a tier, or are about to leave it."""
        if not self._places or len(entries) == 0:
            return
        for space, own in by_space(blocks.table.spaces(entries)):
            place = self._places.get((blocks.disk, space))
            if place is not None:
                passed = entries[own]
                if place.passed < blocks.capacity:
                    passed = passed[passed < place.passed]
                self._add(kind, place, passed)

    def _add(self, kind: NewsKind, place: _Place, entries: Entries) -> None:
        if len(entries) == 0:
            return
        hashes = place.blocks.table.hashes(entries)
        if self._noted:
            last = self._noted[-1]
            if last.kind is kind and last.place is place:
                last.pieces.append(hashes)
                return
        self._noted.append(_Noted(kind, place.namespace, place, pieces=[hashes]))

    # --- time ---

    def tick(self) -> None:
        """Walks a little further, and hands out what was noted."""
        left = self.walked_per_tick
        for digest, namespace in self._namespaces.items():
            left = self._walk(namespace.places, NewsKind.STORED, left)
            if namespace.asked and not namespace.shown and namespace.walked:
                namespace.shown = list(self._places_of(digest, namespace.spaces))
                namespace.asked = False
                self._noted.append(_Noted(NewsKind.SHOWING, digest))
            if namespace.shown:
                left = self._walk(namespace.shown, NewsKind.SHOWN, left)
                if _over(namespace.shown):
                    namespace.shown = []
                    self._noted.append(_Noted(NewsKind.SHOWN_ALL, digest))
        self._take_turns()
        if self._noted:
            self._host.actions.append(TellOfBlocks(tuple(each.news() for each in self._noted)))
            self._noted = []

    def _walk(self, places: list[_Place], kind: NewsKind, left: int) -> int:
        """Looks at up to `left` more entries. Returns how many may still be looked at."""
        for place in places:
            while place.passed < place.blocks.capacity and left > 0:
                step = min(left, WALKED_AT_ONCE)
                entries, place.passed = place.blocks.table.ready_among(place.space, place.passed, step)
                left -= step
                self._add(kind, place, entries)
        return left

    def _take_turns(self) -> None:
        """The namespace that came first in this tick comes last in the next one."""
        if len(self._namespaces) > 1:
            first = next(iter(self._namespaces))
            self._namespaces[first] = self._namespaces.pop(first)


def _over(places: list[_Place]) -> bool:
    return all(place.passed >= place.blocks.capacity for place in places)
