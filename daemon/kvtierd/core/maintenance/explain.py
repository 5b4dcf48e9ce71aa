"""Why a block is or is not readable, from the table, from what is remembered of the past, and from other
namespaces.

These are people's questions; nothing here changes anything.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from enum import Enum
from itertools import islice, takewhile
from typing import Self

import numpy as np

from kvtierd.core.blocks.blocks import STAMPS_PER_S
from kvtierd.core.blocks.history import RememberedFate
from kvtierd.core.blocks.namespaces import NamespaceAbout
from kvtierd.core.blocks.table import BlockState
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import HASH_BYTES_MAX, NO_ENTRY, Hashes, NamespaceDigest, SpaceId
from kvtierd.core.state.audits import Mismatch
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.entities import LeaseCut

SPACES_MAX = 1_024
"""How many spaces one question searches, the youngest first."""
ELSEWHERE_MAX = 8
"""How many other places of a block one explanation names."""
COMPARED_MAX = 64
"""How many namespaces, and characters of their names, are compared with one that there is not."""
NAMED_MAX = 4
"""How many namespaces a refusal names."""


class BlockVerdict(Enum):
    """Of a block that is gone, named as its `Fate`."""

    READABLE = "readable"
    ON_DISK = "on disk"
    """It is on a disk or in the store only: a lookup would return PENDING, and promote it."""
    BEING_WRITTEN = "being written"
    EVICTED = "evicted"
    STORE_ENDED = "store ended"
    """Its store failed or was called off."""
    REFUSED = "refused"
    """There was no room to store it."""
    CORRUPT = "corrupt"
    CLEARED = "cleared"
    """An operator dropped it."""
    EXPIRED = "expired"
    """Its time was over."""
    UNWANTED = "unwanted"
    """It was not stored because it was not worth its room, or what comes before it was not there."""
    ELSEWHERE = "elsewhere"
    """As far as is remembered it was never stored in this namespace, but another one has it."""
    NEVER_STORED = "never stored"
    """As far as is remembered."""


_OF_STATE = {
    BlockState.WRITING: BlockVerdict.BEING_WRITTEN,
    BlockState.READY: BlockVerdict.READABLE,
    BlockState.EVICTING: BlockVerdict.CORRUPT,  # condemned, and still held by a load
}


@dataclass(frozen=True, slots=True)
class Place:
    """One group of a namespace."""

    namespace: NamespaceDigest
    group: int
    about: NamespaceAbout | None
    """None if only an earlier daemon has met an instance of it."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of one block in one place."""

    place: Place
    verdict: BlockVerdict
    age_s: float | None
    """How long ago that happened; None if it is so now, or if it was never otherwise."""
    reason: Reason | None
    """Why the block's store ended."""
    elsewhere: tuple[Place, ...]
    """The first `ELSEWHERE_MAX` other places where a block of this hash is readable, on a disk, or being
    written now."""
    cut: LeaseCut | None = None
    """The latest lookup in this place that found more than it could lease, of an instance that still lives: a
    readable block may have been among those that were not leased. `at` is in seconds ago."""
    mismatch: Mismatch | None = None
    """The latest block of this namespace that was not what an engine computed."""


@dataclass(frozen=True, slots=True)
class Explained:
    explanations: tuple[Explanation, ...]
    """First those of places in which the block is or was known, then those of places that instances use."""
    remembered_blocks: int
    remembered_s: float | None
    """How far back the memory reaches; None if it reaches back to the start."""
    known_namespaces: int
    """How many namespaces have been met or have blocks, whether asked about or not."""


def explain(
    core: CoreState, key: bytes, namespace: str, group: int | None, now: int, tenant: str | None = None
) -> Explained:
    """Explains the block of a hash in the namespaces whose hexadecimal digest begins with `namespace`. With
    `tenant`, the answer is as if there were only its namespaces.

    If no namespace is known at all and none was asked for, the answer is empty. Raises Refusal HASH_LENGTH if
    none of them has hashes of that length, NAMESPACE_INVALID if none begins so.
    """
    if not 1 <= len(key) <= HASH_BYTES_MAX:
        raise Refusal(
            Reason.HASH_LENGTH, f"a block hash has 1 to {HASH_BYTES_MAX} bytes", field="hash", value=len(key)
        )
    row = np.frombuffer(key.ljust(HASH_BYTES_MAX, b"\0"), np.uint8).reshape(1, -1)
    places = list(_places(core, tenant))
    asked = [(place, space) for place, space in places if place.namespace.hex().startswith(namespace)]
    known = len({place.namespace for place, _ in places})
    if namespace and not asked:
        raise Refusal(
            Reason.NAMESPACE_INVALID, no_such(core, namespace, tenant), field="namespace", value=namespace
        )
    fitting = [each for each in asked if each[0].about is None or each[0].about.hash_bytes == len(key)]
    if asked and not fitting:
        lengths = sorted({place.about.hash_bytes for place, _ in asked if place.about is not None})
        digests = list(dict.fromkeys(place.namespace.hex() for place, _ in asked))
        whose = f"namespace {digests[0]}" if len(digests) == 1 else f"the {len(digests):,} namespaces"
        raise Refusal(
            Reason.HASH_LENGTH,
            f"hash '{key.hex()}' has {len(key)} bytes, and those of {whose} have "
            f"{' or '.join(map(str, lengths))}: give the whole hash",
            field="hash",
            value=len(key),
        )
    block = _Block.find(core, places, row)
    history = core.blocks.history
    oldest = history.oldest_at()
    explanations = [
        _explain(core, place, space, block, now)
        for place, space in fitting
        if group is None or place.group == group
    ]
    return Explained(
        tuple(sorted(explanations, key=_relevance(core))), len(history), _ago(now, oldest), known
    )


def no_such(core: CoreState, wanted: str, tenant: str | None = None) -> str:
    """Says that no namespace begins so, and which there are, those first that are most like it."""
    known = {
        place.namespace.hex(): place.about.model if place.about else "" for place, _ in _places(core, tenant)
    }
    if not known:
        return "no engine has attached since the daemon started, and nothing is stored: no namespace is known"

    compared = SequenceMatcher(None, "", wanted[:COMPARED_MAX].lower())

    def likeness(digest: str) -> float:
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(digest, wanted, strict=False)))
        compared.set_seq1(known[digest][:COMPARED_MAX].lower())
        return max(alike / len(wanted), compared.quick_ratio())  # `ratio` may take a second for all of them

    nearest = sorted(list(known)[:COMPARED_MAX], key=likeness, reverse=True)[:NAMED_MAX]
    named = ", ".join(f"{digest} ({known[digest] or 'of an earlier daemon'})" for digest in nearest)
    return (
        f"no engine has attached with such a namespace, and nothing is stored in one. The nearest of the "
        f"{len(known):,} that are known: {named}; `kvtierctl namespaces` lists all"
    )


_STORED = (int(BlockState.WRITING), int(BlockState.READY))


@dataclass(frozen=True, slots=True)
class _Block:
    """What is known of one block, in all places. Each table and the memory are read once."""

    states: Mapping[SpaceId, int]
    """Its state on the host, where it is there in any."""
    on_disk: Collection[SpaceId]
    """Where only a disk has it readable."""
    fates: Mapping[SpaceId, RememberedFate]
    cuts: Mapping[SpaceId, LeaseCut]
    """The latest lookup in each space that found more than it could lease, whatever it asked for."""
    stored: Sequence[Place]
    """Some of the places where it is readable, on a disk, or being written: enough for every explanation."""

    @classmethod
    def find(cls, core: CoreState, places: Iterable[tuple[Place, SpaceId]], row: Hashes) -> Self:
        states: dict[SpaceId, int] = {}
        on_disk: set[SpaceId] = set()
        stored: list[Place] = []
        for place, space in places:
            entries, found = core.blocks.table.lookup(space, row)
            if entries[0] != NO_ENTRY:
                states[space] = int(found[0])
            if states.get(space) not in _STORED:
                if core.below.find(space, row)[0] == NO_ENTRY:
                    continue
                on_disk.add(space)
            if len(stored) <= ELSEWHERE_MAX:
                stored.append(place)
        return cls(states, on_disk, core.blocks.history.fates(row), _latest_cuts(core), stored)

    def elsewhere(self, place: Place) -> tuple[Place, ...]:
        return tuple(other for other in self.stored if other is not place)[:ELSEWHERE_MAX]


def _explain(core: CoreState, place: Place, space: SpaceId, block: _Block, now: int) -> Explanation:
    explanation = _of_block(place, space, block, now)
    found = core.mismatches.latest(place.namespace)
    if found is None:
        return explanation
    return replace(explanation, mismatch=replace(found, at=(now - found.at) // STAMPS_PER_S))


def _of_block(place: Place, space: SpaceId, block: _Block, now: int) -> Explanation:
    past, state, elsewhere = block.fates.get(space), block.states.get(space), block.elsewhere(place)
    if state is not None:
        verdict = _OF_STATE[BlockState(state)]
        since = past.at if past is not None and verdict is BlockVerdict.CORRUPT else None
        cut = block.cuts.get(space) if verdict is BlockVerdict.READABLE else None
        if cut is not None:
            cut = replace(cut, at=(now - cut.at) // STAMPS_PER_S)
        return Explanation(place, verdict, _ago(now, since), None, elsewhere, cut)
    if space in block.on_disk:
        return Explanation(place, BlockVerdict.ON_DISK, None, None, elsewhere)
    if past is not None:
        return Explanation(place, BlockVerdict[past.fate.name], _ago(now, past.at), past.reason, elsewhere)
    verdict = BlockVerdict.ELSEWHERE if elsewhere else BlockVerdict.NEVER_STORED
    return Explanation(place, verdict, None, None, elsewhere)


def _relevance(core: CoreState) -> Callable[[Explanation], int]:
    ids, users = core.blocks.spaces.ids, core.blocks.spaces.users

    def relevance(each: Explanation) -> int:
        if each.verdict not in (BlockVerdict.ELSEWHERE, BlockVerdict.NEVER_STORED):
            return 0
        return 1 if ids[each.place.namespace, each.place.group] in users else 2

    return relevance


def _latest_cuts(core: CoreState) -> dict[SpaceId, LeaseCut]:
    cuts: dict[SpaceId, LeaseCut] = {}
    for instance in core.instances.values():
        for plan in instance.plans:
            cut = plan.cut
            if cut is not None and (plan.space not in cuts or cuts[plan.space].at < cut.at):
                cuts[plan.space] = cut
    return cuts


def _ago(now: int, at: int | None) -> float | None:
    return None if at is None else max(0, now - at) / STAMPS_PER_S


@dataclass(frozen=True, slots=True)
class PlaceStatus:
    """One group of one namespace, and how many blocks of it there are."""

    place: Place
    host_blocks: int
    disk_blocks: int
    instances: tuple[str, ...]
    """Instances that use it now."""


def places(core: CoreState, namespace: str, tenant: str | None = None) -> tuple[PlaceStatus, ...]:
    """The latest namespaces that are used or have blocks, latest first: those whose hexadecimal digest begins
    with `namespace`, and, with `tenant`, that are its own."""
    users: dict[SpaceId, list[str]] = {}
    for instance in core.instances.values():
        if not instance.over:
            for plan in instance.plans:
                users.setdefault(plan.space, []).append(instance.name)
    host, *disks = core.blocks.spaces.tables
    return tuple(
        PlaceStatus(
            place,
            host.count(space),
            sum(disk.count(space) for disk in disks),
            tuple(sorted(users.get(space, ()))),
        )
        for place, space in _places(core, tenant)
        if place.namespace.hex().startswith(namespace)
    )


def _places(core: CoreState, tenant: str | None) -> Iterator[tuple[Place, SpaceId]]:
    spaces = core.blocks.spaces
    for (digest, group), space in islice(reversed(spaces.ids.items()), SPACES_MAX):
        about = spaces.about.get(digest)
        if tenant is None or (about is not None and about.tenant == tenant):
            yield Place(digest, group, about), space
