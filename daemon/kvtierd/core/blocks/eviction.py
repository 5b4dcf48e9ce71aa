"""Makes room for new blocks: it takes free extents first, then whatever has not been used for longest.

Within a domain, the order of the table decides. Between domains, and between slot sizes, age decides: the
oldest victim of the domain that needs room is compared with the oldest of each rival. A rival gives way only
if its victim is clearly older, so that two busy models do not take extents from each other in turn. A model
that is not used any more loses its extents one by one.

Between tenants, their shares come before ages (`tenants.py`).
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from kvtierd.core.actions import AssignExtent
from kvtierd.core.blocks.blocks import READY, STAMPS_PER_S, Blocks, owned
from kvtierd.core.blocks.domains import Domain
from kvtierd.core.blocks.retention import BlockRetention
from kvtierd.core.blocks.table import BlockFlag
from kvtierd.core.blocks.tenants import Tenants, TierShares
from kvtierd.core.ids import NO_ENTRY, Entries
from kvtierd.core.status import DiskTally, Tally

CLEAN = int(BlockFlag.CLEAN | BlockFlag.STORE_CLEAN)
QUEUED = int(BlockFlag.QUEUED | BlockFlag.STORE_QUEUED)
PASSED_LOOKS = 8
"""How many blocks beyond the oldest are looked at for each of those that is being written to a disk."""
CLEARLY_OLDER = 1.25
GRACE_S = 1.0
RECLAIM_TRIES = 16
"""Extents that are looked at for one store, coldest first. Each look reads the owners of all slots."""
RECLAIM_PAUSE_S = 1.0
"""For this long, an extent that could not be taken is not looked at again."""


class Room(NamedTuple):
    """What room was made."""

    blocks: int
    """For so many of the wanted blocks, the first ones."""
    short: int
    """So many more found none. Those after them are not worth it."""


class Eviction:
    """Finds room among the slots and in the block table of one tier."""

    def __init__(
        self,
        blocks: Blocks,
        tally: Tally | DiskTally,
        tenants: Tenants,
        retention: BlockRetention | None = None,
    ) -> None:
        """`retention` is that of these blocks; None if they are never held for a time, as on disks."""
        self._blocks = blocks
        self._shares = TierShares(tenants, blocks.domains, blocks.slots)
        self._retention = retention
        self._table = blocks.table
        self._slots = blocks.slots
        self._tally = tally
        self._by_tenant = None if isinstance(tally, DiskTally) else tenants.tallies
        self._not_before = np.zeros(blocks.geometry.extents, np.uint32)
        """When each extent may be looked at again."""
        self._held_not_before = np.zeros(blocks.geometry.extents, np.uint32)
        """The same for looks that may remove held blocks."""

    def for_slots(
        self,
        domain: Domain,
        wanted: int,
        entries: Entries | None = None,
        *,
        waiting: int | None = None,
        unhold: bool = False,
    ) -> Room:
        """Makes room for the slots of up to `wanted` blocks that the domain has already. With `entries`, the
        blocks that are wanted, room is made only for those that are worth more than what would have to go.
        `waiting`: how many blocks of the domain have no slots yet; None: those that are wanted. With
        `unhold`, blocks that are held for a time are evicted if there is no room at all otherwise."""
        waiting = wanted if waiting is None else waiting
        asked = wanted
        if entries is not None and self._blocks.ranks:
            wanted = self._worth(domain, entries, waiting)
        worth = wanted
        wanted = self._within_limit(domain, wanted, waiting)
        short, sizes = self._short(domain, wanted)
        if short and self._slots.retire_empty(domain.sizes):
            short, sizes = self._short(domain, wanted)
        while short and self._give_way(domain, short, sizes):
            short, sizes = self._short(domain, wanted)
        while unhold and short == wanted > 0 and self._unhold(domain, short, sizes):
            short, sizes = self._short(domain, wanted)
            while short and self._give_way(domain, short, sizes):
                short, sizes = self._short(domain, wanted)
        roomy = wanted - short
        if worth < asked and roomy == worth:  # a rival may have lost a whole extent
            roomy = max(roomy, self._free(domain, asked, waiting))
        return Room(roomy, max(0, worth - roomy))

    def worth_of(self, domain: Domain, above: Blocks, entries: Entries) -> int:
        """How many of these blocks of the tier above, in their order, are worth what would have to go for
        them here, where they are not yet."""
        wanted = len(entries)
        free = self._free(domain, wanted, 0)
        if free >= wanted:
            return wanted
        return self._table.admitted_of(domain.domain, above.table, entries, free)

    def _worth(self, domain: Domain, entries: Entries, waiting: int) -> int:
        """How many of these new blocks, in their order, are worth what would have to go for them."""
        wanted = len(entries)
        free = self._free(domain, wanted, waiting)
        if free < wanted and self._slots.retire_empty(domain.sizes):
            free = self._free(domain, wanted, waiting)
        return wanted if free >= wanted else self._table.admitted(domain.domain, entries, free)

    def _free(self, domain: Domain, wanted: int, waiting: int) -> int:
        """For how many of the wanted blocks there is room, if nothing goes for them."""
        room = self._limit(domain, wanted, waiting)
        return room - self._short(domain, room)[0]

    def _limit(self, domain: Domain, wanted: int, waiting: int) -> int:
        """How many of the wanted blocks the domain's tenant may have now."""
        room = self._shares.room(domain, waiting)
        return wanted if room is None else min(wanted, room)

    def _within_limit(self, domain: Domain, wanted: int, waiting: int) -> int:
        """How many of the wanted blocks the domain's tenant may have, which first loses as many of its
        own."""
        room = self._limit(domain, wanted, waiting)
        if room < wanted:
            self._evict(domain, wanted - room)
            room = self._limit(domain, wanted, waiting)
        return room

    def for_entries(self, domain: Domain, wanted: int, *, unhold: bool = False) -> None:
        """Evicts until the table has `wanted` free entries, or nothing more can be evicted. With `unhold`,
        blocks that are held for a time are evicted if the table has no free entry at all otherwise."""
        blocks = self._blocks
        while (short := wanted - (blocks.capacity - blocks.live)) > 0:
            shares = self._shares.now()
            sources = [each for each in blocks.domains.by_id.values() if shares.spare(each, domain)]
            source = self._oldest(sources, domain)
            if source is not None:
                self._evict(source, min(short, shares.spare(source, domain)))
            elif short < wanted or not unhold or not self._give_up(sources, short):
                return

    def _short(self, domain: Domain, wanted: int) -> tuple[int, list[int]]:
        """For how many of the wanted blocks slots are missing, and of which sizes. Assigns free extents
        first."""
        short = 0
        sizes = []
        for slot_bytes, per_block in domain.per_size:
            need = wanted * per_block
            free = self._slots.free(slot_bytes)
            if free < need:
                for extent in self._slots.assign_free(slot_bytes, need):
                    self._blocks.actions.append(AssignExtent(extent, slot_bytes, self._blocks.disk))
                free = self._slots.free(slot_bytes)
                if free < need:
                    sizes.append(slot_bytes)
                    short = max(short, wanted - free // per_block)
        return short, sizes

    def _give_way(self, domain: Domain, short: int, sizes: list[int]) -> bool:
        """Evicts something to make room for `short` blocks. False if nothing can be evicted."""
        shares = self._shares.now()
        rivals = [
            each
            for each in self._blocks.domains.by_id.values()
            if each is not domain and shares.spare(each, domain)
        ]
        if not rivals:
            return self._evict(domain, short)
        own_age = self._age(domain)
        at_least = 0 if own_age is None else int(own_age * CLEARLY_OLDER + GRACE_S * STAMPS_PER_S)
        foreign = [each for each in rivals if each.tenant != domain.tenant]
        if foreign and shares.is_owed(domain, short) and self._take(domain, foreign, 0, short, sizes):
            return True
        return self._take(domain, rivals, at_least, short, sizes) or self._evict(domain, short)

    def _take(
        self, domain: Domain, rivals: list[Domain], at_least: int, short: int, sizes: list[int]
    ) -> bool:
        """Takes an extent, or slots of the rival with the oldest victim, if that is at least so old."""
        sharing = [d for d in rivals if any(slot_bytes in d.sizes for slot_bytes in sizes)]
        rival = self._oldest(sharing, None)
        rival_age = -1 if rival is None else self._age(rival)
        assert rival_age is not None
        if self._reclaim(domain, max(at_least, rival_age)):
            return True
        if rival is None or rival_age < at_least:
            return False
        slots = max(short * per_block for size, per_block in domain.per_size if size in sizes)
        fewest = min(per_block for size, per_block in rival.per_size if size in sizes)
        spare = self._shares.now().spare(rival, domain)
        return self._evict(rival, min(-(-slots // fewest), spare))

    # --- blocks that are held for a time ---

    def _unhold(self, domain: Domain, short: int, sizes: list[int]) -> bool:
        """Ends holds, because nothing else can be evicted. Otherwise a few held blocks, one in each extent,
        would keep all other models out. False if there are none."""
        shares = self._shares.now()
        sharing = [
            each
            for each in self._blocks.domains.by_id.values()
            if any(size in each.sizes for size in sizes) and shares.spare(each, domain)
        ]
        if sharing:
            slots = max(short * per_block for size, per_block in domain.per_size if size in sizes)
            fewest = min(per for each in sharing for size, per in each.per_size if size in sizes)
            if self._give_up(sharing, -(-slots // fewest)):
                return True
        return self._reclaim(domain, 0, held=True)

    def _give_up(self, domains: Collection[Domain], wanted: int) -> bool:
        """Ends the holds of up to `wanted` blocks of these domains. False if there are none."""
        return self._retention is not None and self._retention.give_up(domains, wanted)

    # --- ages ---

    def _age(self, domain: Domain) -> int | None:
        """How long ago the oldest victim of a domain was used."""
        victim = self._table.victims(domain.domain, 1)
        return self._blocks.now - int(self._blocks.used_at[victim[0]]) if len(victim) else None

    def _oldest(self, domains: list[Domain], preferred: Domain | None) -> Domain | None:
        """The domain with the oldest victim, or the preferred one unless another is clearly older."""
        ages = {domain: age for domain in domains if (age := self._age(domain)) is not None}
        if not ages:
            return None
        oldest = max(ages, key=ages.__getitem__)
        if preferred in ages and ages[oldest] < ages[preferred] * CLEARLY_OLDER + GRACE_S * STAMPS_PER_S:
            return preferred
        return oldest

    def _victims(self, domain: Domain, wanted: int) -> Entries:
        """The oldest victims. Those that are being written to a disk are passed over where younger ones that
        a disk has already can go instead: evicting the former loses them, evicting the latter does not."""
        table = self._table
        victims = table.victims(domain.domain, wanted)
        queued = table.flags(victims) & QUEUED != 0
        passed = int(np.count_nonzero(queued))
        if not passed:
            return victims
        # A table that ranks may see the order anew: those that were found first may be anywhere among these.
        more = table.victims(domain.domain, len(victims) + PASSED_LOOKS * passed)
        beyond = more[~np.isin(more, victims)]
        clean = beyond[table.flags(beyond) & CLEAN != 0][:passed]
        return np.concatenate((victims[~queued], victims[queued][: passed - len(clean)], clean))

    def _evict(self, domain: Domain, wanted: int) -> bool:
        victims = self._victims(domain, wanted)
        if len(victims) == 0:
            return False
        self._count(domain, victims)
        self._blocks.evict(domain, victims)
        if domain.blocks == 0:
            self._blocks.domains.forget_idle(domain)
        return True

    def _count(self, domain: Domain, entries: Entries) -> None:
        """Counts entries of a domain that are about to be evicted."""
        ages = self._blocks.now - self._blocks.used_at[entries].astype(np.int64)
        self._tally.evicted_blocks += len(entries)
        if self._by_tenant is not None:
            self._by_tenant.of(domain.tenant).evicted_blocks += len(entries)
        self._tally.evicted_age_s += int(ages.sum()) / STAMPS_PER_S

    # --- extents of other sizes ---

    def _reclaim(self, domain: Domain, age: int, *, held: bool = False) -> bool:
        """Takes the coldest extent of a size that the domain does not use, if it is at least `age` old and
        nothing holds it. With `held`, takes one in which only blocks that are held for a time are in the
        way."""
        slots, now, retention = self._slots, self._blocks.now, self._retention
        if held and (retention is None or not retention.held.total()):
            return False
        old = slots.used_at <= now - age if age <= now else np.zeros(len(slots.used_at), np.bool_)
        not_before = self._held_not_before if held else self._not_before
        candidates = np.flatnonzero(old & (slots.extent_size != 0) & (not_before <= now))
        if len(candidates) == 0:
            return False
        candidates = candidates[~np.isin(slots.extent_size[candidates], domain.sizes)]
        coldest_first = candidates[np.argsort(slots.used_at[candidates], kind="stable")]
        for extent in coldest_first[:RECLAIM_TRIES].tolist():
            if self._empty(extent, domain, held=held):
                slots.retire(extent)
                self._tally.reclaimed_extents += 1
                return True
            not_before[extent] = now + int(RECLAIM_PAUSE_S * STAMPS_PER_S)
        return False

    def _empty(self, extent: int, taker: Domain, *, held: bool) -> bool:
        """Evicts all blocks of an extent for a domain, if every slot of it is free or has a block that may
        go. With `held`, blocks that are only held for a time may go too."""
        table, slots = self._table, self._slots
        owners = table.owners(slots.geometry.slots_of(extent, int(slots.extent_size[extent])))
        entries = owned(owners)
        if slots.free_in(extent) != int(np.count_nonzero(owners == NO_ENTRY)):
            return False  # some are quarantined
        if (table.states(entries) != READY).any():
            return False
        chosen = list(self._blocks.by_domain(entries))
        if not self._shares.now().may_lose({domain: len(each) for domain, each in chosen}, taker):
            return False
        retention = self._retention
        if held and retention is not None and (table.pins(entries) == retention.is_held(entries)).all():
            retention.give_up_these(entries)
        if table.pins(entries).any():
            return False
        for domain, each in chosen:
            self._count(domain, each)
            self._blocks.evict(domain, each)
            if domain.blocks == 0:
                self._blocks.domains.forget_idle(domain)
        return True
