"""Takes over what an earlier daemon left in the pool, or on a disk."""

import numpy as np
import numpy.typing as npt

from kvtierd.core.actions import FreeSlots
from kvtierd.core.blocks.blocks import Blocks
from kvtierd.core.blocks.domains import Domain
from kvtierd.core.blocks.namespaces import tag_in
from kvtierd.core.blocks.table import U32
from kvtierd.core.ids import Slots
from kvtierd.core.stimuli import Recovered


def recover(blocks: Blocks, found: Recovered, wanted: npt.NDArray[np.bool_] | None = None) -> None:
    """Builds table, slots and recency from what was found. Called once, before anything else. `wanted` says
    which of the blocks are taken over; None for all. Raises ValueError if what was found is inconsistent.

    Blocks start READY. Those of the host are verified before their first load, at least. If the table is too
    small, the oldest are given up.
    """
    worlds = np.array([world for _, _, world in found.namespaces], np.int64)
    count = len(found.hashes)
    if len(found.spaces) != count or (count and int(found.spaces.max()) >= len(worlds)):
        raise ValueError("recovered blocks and namespaces do not fit together")
    width = worlds[found.spaces] if count else np.empty(0, np.int64)
    start = np.cumsum(width) - width
    if int(width.sum()) != len(found.slots):
        raise ValueError(f"recovered blocks have {int(width.sum())} shards, but {len(found.slots)} slots")
    ordered = np.sort(found.slots)
    if (ordered[1:] == ordered[:-1]).any():
        raise ValueError("two recovered blocks share a slot")

    size_of_extent = np.zeros(blocks.geometry.extents, np.int64)
    for extent in found.extents:
        size_of_extent[extent.extent] = extent.slot_bytes
    taken = _by_extent(blocks, found.slots)
    quarantined = _by_extent(blocks, found.quarantined)
    corrupt = _by_extent(blocks, found.corrupt)
    for extent in found.extents:
        index = extent.extent
        blocks.slots.recover(index, extent.slot_bytes, taken[index], quarantined[index], corrupt[index])
    sizes = size_of_extent[blocks.geometry.extent_of(found.slots)]

    entries = np.zeros(count, np.uint32)
    kept = np.zeros(count, np.bool_)
    candidates = np.ones(count, np.bool_) if wanted is None else wanted
    younger = np.cumsum(candidates[::-1])[::-1]  # each counts itself
    fitting = candidates & (younger <= blocks.capacity)
    by_space = np.argsort(found.spaces, kind="stable")
    bounds = np.searchsorted(found.spaces[by_space], np.arange(len(worlds) + 1))
    for index, (digest, group, world) in enumerate(found.namespaces):
        chosen = by_space[bounds[index] : bounds[index + 1]]
        chosen = chosen[fitting[chosen]]
        if len(chosen) == 0:
            continue
        space = blocks.spaces.of(digest, group)
        rows = start[chosen][:, None] + np.arange(world)
        block_sizes = sizes[rows]
        if (block_sizes == block_sizes[0]).all():  # nearly always; sorting a million rows takes half a second
            shapes, shape_of = block_sizes[:1], np.zeros(len(chosen), np.int64)
        else:
            shapes, shape_of = np.unique(block_sizes, axis=0, return_inverse=True)
        for number, shape in enumerate(shapes):
            domain = blocks.domains.of(tag_in(digest), tuple(shape.tolist()))
            members = shape_of.reshape(-1) == number
            places = chosen[members]
            new = _insert(blocks, space, domain, found.hashes[places], found.slots[rows[members]])
            entries[places], kept[places] = new
            blocks.domains.forget_idle(domain)
    blocks.table.commit(entries[kept])
    if blocks.came is not None:
        blocks.came(entries[kept])
    blocks.clock = found.clock
    _give_up(blocks, found.slots, sizes, np.repeat(~kept, width))


def _by_extent(blocks: Blocks, slots: Slots) -> list[Slots]:
    """The slots of each extent of the pool."""
    slots = np.sort(slots)
    bounds = np.searchsorted(blocks.geometry.extent_of(slots), np.arange(1, blocks.geometry.extents))
    return np.split(slots, bounds)


def _insert(
    blocks: Blocks, space: int, domain: Domain, hashes: np.ndarray, slots: Slots
) -> tuple[U32, np.ndarray]:
    """Entries, and which of the keys are new. A key that was there already is given up."""
    flags = blocks.flags_of_recovered
    entries, created = blocks.table.insert(space, domain.domain, np.ascontiguousarray(hashes), flags)
    new = created == 1
    blocks.table.attach_slots(entries[new], np.ascontiguousarray(slots[new]))
    added = int(np.count_nonzero(new))
    blocks.live += added
    blocks.opened_bytes += added * domain.block_bytes
    domain.blocks += added
    return entries, new


def _give_up(blocks: Blocks, slots: Slots, sizes: np.ndarray, given_up: np.ndarray) -> None:
    """Frees the slots of blocks that were not taken over."""
    if not given_up.any():
        return
    blocks.actions.append(FreeSlots(slots[given_up], blocks.disk))
    for slot_bytes in np.unique(sizes[given_up]).tolist():
        blocks.slots.give_back(slot_bytes, slots[given_up & (sizes == slot_bytes)])
