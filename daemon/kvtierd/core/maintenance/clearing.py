"""Drops blocks because an operator says so, from every tier at once, so that none brings them back."""

import numpy as np

from kvtierd.core.actions import ClearReply
from kvtierd.core.blocks.blocks import READY, Blocks
from kvtierd.core.blocks.history import Fate
from kvtierd.core.blocks.table import BlockState
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import NO_ENTRY, Entries, Hashes, SpaceId
from kvtierd.core.maintenance.explain import no_such
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.disks import Disk, Indexes
from kvtierd.core.stimuli import ClearBlocks

WRITING = int(BlockState.WRITING)


class BlockClearing:
    def __init__(self, core: CoreState) -> None:
        self._core = core

    def spaces(self, namespace: str) -> tuple[SpaceId, ...]:
        """The spaces of the one namespace whose hexadecimal digest begins with `namespace`, or all spaces if
        it is empty; those that have blocks or engines. Changes nothing. Raises Refusal NAMESPACE_INVALID if
        no namespace, or more than one, begins so."""
        ids = self._core.blocks.spaces.ids
        fitting = {digest for digest, _ in ids if digest.hex().startswith(namespace)}
        if namespace and len(fitting) != 1:
            several = f"{len(fitting)} namespaces begin so: write more of its digest"
            found = several if fitting else no_such(self._core, namespace)
            raise Refusal(Reason.NAMESPACE_INVALID, found, field="namespace", value=namespace)
        return tuple(space for (digest, _), space in ids.items() if digest in fitting)

    def keys(self, space: SpaceId) -> Hashes:
        """The hashes of all blocks of a space, in whatever state and tier, each once. Changes nothing."""
        host = self._core.blocks.table
        found, above = [host.hashes(host.entries_of(space))], [host]
        for level in self._core.below.levels:
            tables = [disk.blocks.table for disk in level.all]
            for table in tables:
                hashes = table.hashes(table.entries_of(space))
                for other in above:
                    entries, _ = other.lookup(space, hashes)
                    hashes = np.ascontiguousarray(hashes[entries == NO_ENTRY])
                found.append(hashes)
            above += tables
        return np.concatenate(found)

    def clear(self, stimulus: ClearBlocks) -> ClearReply:
        """Drops those of the blocks that nothing holds, and counts the others."""
        core, space = self._core, stimulus.space
        hashes = np.unique(stimulus.hashes, axis=0) if len(stimulus.hashes) else stimulus.hashes
        host = core.blocks
        entries, states = host.table.lookup(space, hashes)
        there = entries != NO_ENTRY
        core.retention.release(entries[there])  # an operator overrules the engines
        held = there & (states != WRITING)
        held[held] = (host.table.pins(entries[held]) > 0) | (states[held] != READY)
        under_way = there & (states == WRITING)
        copies: list[tuple[Disk, Indexes, Entries]] = []
        for disk, own in (each for level in core.below.levels for each in level.by_disk(hashes)):
            table = disk.blocks.table
            found, of_disk = table.lookup(space, np.ascontiguousarray(hashes[own]))
            copies.append((disk, own, found))
            known = found != NO_ENTRY
            busy = known & (of_disk != READY)
            busy[known] |= table.pins(found[known]) > 0
            under_way[own] |= busy
            there[own] |= known
        under_way &= ~held
        free = there & ~held & ~under_way
        # The disks' copies go first, so that a block is not clean on the host any more when it goes there.
        disk_bytes = 0
        for disk, own, found in copies:
            disk_bytes += _drop(disk.blocks, found[free[own] & (found != NO_ENTRY)])
        host_bytes = _drop(host, entries[free & (entries != NO_ENTRY)])
        cleared = int(np.count_nonzero(free))
        core.tally.cleared_blocks += cleared
        return ClearReply(
            cleared_blocks=cleared,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
            held_blocks=int(np.count_nonzero(held)),
            under_way_blocks=int(np.count_nonzero(under_way)),
        )


def _drop(blocks: Blocks, entries: Entries) -> int:
    """Removes READY, unpinned blocks from one tier; they may be of several domains. Returns the bytes of
    their slots."""
    dropped_bytes = 0
    for domain, chosen in blocks.by_domain(entries):
        blocks.drop(domain, chosen, Fate.CLEARED)
        blocks.domains.forget_idle(domain)
        dropped_bytes += len(chosen) * domain.block_bytes
    return dropped_bytes
