"""Makes room for the new blocks of a store: for as many as there can be room for, of each prompt from its
beginning on. If the pool goes by reuse, only for those that are worth it, on the host or below."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtierd.core.blocks.table import U8, BlockState
from kvtierd.core.ids import NO_ENTRY, Entries, Slots
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.entities import GroupPlan
from kvtierd.core.stimuli import SubmittedChain
from kvtierd.core.tier import Tier

ACCEPTED, EXISTS, PENDING, THROTTLED, UNWANTED = range(5)
CREATED = 1
"""What the table says of a block that a store has made."""


@dataclass(frozen=True, slots=True)
class StoreRoom:
    """For which new blocks of a store there is room now."""

    results: U8 | None
    """Of each new block: ACCEPTED, THROTTLED or UNWANTED. The latter two have no entry any more. None if all
    are accepted."""
    slots: Slots
    """Of the accepted ones."""


def make_room(
    core: CoreState,
    tier: Tier,
    plan: GroupPlan,
    new: Entries,
    entries: Entries,
    created: U8,
    chains: Sequence[SubmittedChain],
) -> StoreRoom:
    """Gives slots to the `new` blocks of a store, and forgets those that get none. `entries` and `created`
    are what the table has said of all its blocks."""
    blocks, domain = core.blocks, plan.domain
    if blocks.ranks:
        _tell_chains(core, plan, entries, chains)
    else:  # the usual case, for which nothing else is to be done
        room = core.eviction.for_slots(domain, len(new), unhold=True)
        if room.blocks == len(new):
            return StoreRoom(None, blocks.give_slots(domain, new))
    results: U8 = np.full(len(new), ACCEPTED, np.uint8)
    slots: list[Slots] = []
    waiting = len(new)
    for first, end, begins in _pieces(core, tier, plan, created, chains):
        piece = new[first:end]
        roomy = worth = 0
        if begins:
            room = core.eviction.for_slots(domain, len(piece), piece, waiting=waiting, unhold=True)
            roomy, worth = room.blocks, room.blocks + room.short
            if roomy == worth < len(piece) and (below := tier.wants(plan, piece[worth:])):
                worth = roomy = core.eviction.for_slots(domain, roomy + below, waiting=waiting).blocks
                tier.promise(plan, roomy - room.blocks)
        results[first + roomy : first + worth] = THROTTLED
        results[first + worth : end] = UNWANTED
        # Parents come before their children, so the blocks that are kept are of use without the others.
        slots.append(blocks.give_slots(domain, piece[:roomy]))
        blocks.discard(domain, piece[roomy:], None)
        waiting -= len(piece)
    return StoreRoom(results, np.concatenate(slots, axis=1) if len(slots) != 1 else slots[0])


def _tell_chains(
    core: CoreState, plan: GroupPlan, entries: Entries, chains: Sequence[SubmittedChain]
) -> None:
    """Tells the table which blocks of a store follow each other, and what comes before them. Those that found
    no entry are left out."""
    first = 0
    for chain in chains:
        part = entries[first : first + chain.blocks]
        first += chain.blocks
        if chain.previous is not None:
            previous, _ = core.blocks.table.lookup(plan.space, chain.previous)
            part = np.concatenate((previous, part))
        core.blocks.chain(part[part != NO_ENTRY])


def _pieces(
    core: CoreState, tier: Tier, plan: GroupPlan, created: U8, chains: Sequence[SubmittedChain]
) -> Iterator[tuple[int, int, bool]]:
    """Where among the new blocks those of each prompt lie, and whether what comes before them is there. Only
    a table that ranks cares."""
    total = int(np.count_nonzero(created == CREATED))
    if not core.blocks.ranks or not chains:
        yield 0, total, True
        return
    first_of_store = first = 0
    for chain in chains:
        end = first + int(
            np.count_nonzero(created[first_of_store : first_of_store + chain.blocks] == CREATED)
        )
        first_of_store += chain.blocks
        if first < end or not total:
            yield first, end, chain.previous is None or _is_there(core, tier, plan, chain.previous)
        first = end


def _is_there(core: CoreState, tier: Tier, plan: GroupPlan, hashes: npt.NDArray[np.uint8]) -> bool:
    _, states = core.blocks.table.lookup(plan.space, hashes)
    if states[0] in (BlockState.WRITING, BlockState.READY):
        return True
    return bool(tier.find(plan.space, hashes)[0] != NO_ENTRY)
