"""Lookups and leases."""

from collections.abc import Sequence

import numpy as np

from kvtierd.core.actions import LookupReply, PrefetchReply
from kvtierd.core.blocks.table import U8, BlockState
from kvtierd.core.disk.tier import DiskTier
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import HASH_BYTES_MAX, Entries, Hashes, LeaseId
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.entities import GroupPlan, Instance, LeaseCut, LeaseGrant
from kvtierd.core.state.transitions import Event
from kvtierd.core.stimuli import (
    LookupBlocks,
    MatchMode,
    PrefetchBlocks,
    ReleaseLeases,
    TouchBlocks,
    TouchGroups,
)

MISS, PENDING, HIT = 0, 1, 2
EXPIRED_KEPT = 1_024
"""Expired leases remembered per instance."""

_TOLD = np.zeros(len(BlockState), np.uint8)
"""kvtier.v1.BlockState of each state of the table."""
_TOLD[BlockState.WRITING] = PENDING
_TOLD[BlockState.READY] = HIT
READY = int(BlockState.READY)


class Leases:
    def __init__(self, core: CoreState, tier: DiskTier) -> None:
        self._core = core
        self._tier = tier if tier else None
        self._blocks = core.blocks

    # --- lookups ---

    def lookup(self, stimulus: LookupBlocks) -> LookupReply:
        """What of this can be loaded now; hits become recent, or are pinned under a lease. What only disks
        have is pending, and promoted."""
        core = self._core
        instance = core.submitter(stimulus.session, stimulus.epoch)
        hashes = stimulus.hashes
        check_hashes(hashes, core.limits.lookup_hashes_max)
        tally = core.tally
        if not instance.live or core.draining:  # who hits would ask for a load, which is refused
            instance.alive_at_s = core.now_s
            tally.lookups += 1
            tally.lookup_hashes += len(hashes)
            if core.draining:
                tally.missed_draining += len(hashes)
            else:
                tally.missed_not_ready += len(hashes)
            return LookupReply(0, np.zeros(_told(stimulus), np.uint8), None, None)
        plan = core.plan(instance, stimulus.group)
        instance.alive_at_s = core.now_s
        tally.lookups += 1
        tally.lookup_hashes += len(hashes)
        found, states = self._find(plan, hashes, stimulus.mode)
        if self._tier is not None and self._tier.recompute(instance, plan, len(found)):
            tally.missed_recompute += len(found)
            self._count_misses(stimulus.mode, len(hashes) - len(found), states)
            return LookupReply(0, np.zeros_like(states[: _told(stimulus)]), None, None)
        readable = hits = len(found)
        lease: LeaseGrant | None = None
        refused: Refusal | None = None
        if readable and stimulus.lease:
            lease, refused = self._grant(instance, stimulus.group, plan, found)
            hits = 0 if lease is None else len(lease.entries)
        tally.lookup_hits += hits
        self._blocks.touch(found if lease is None else found[hits:])
        if self._tier is not None:
            self._tier.found(plan.domain, found)
            promotion = self._tier.promotion
            if readable < len(hashes) and stimulus.host_only:
                states = promotion.without_late(plan, hashes, states)
            elif readable < len(hashes) and refused is None:
                states = promotion.beyond(
                    instance, plan, hashes, stimulus.mode, found, states, held=lease is not None
                )
        self._count_misses(stimulus.mode, len(hashes) - readable, states)
        if refused is not None:
            tally.refused_leases += 1
            tally.missed_lease_limit += readable - hits
            plan.cut = LeaseCut(self._blocks.now, hits, readable)
            more_later = hits < min(readable, core.lease_budget.alone_blocks(plan.domain))
            states = _cut(stimulus.mode, states, hits, PENDING if more_later else MISS)
        return LookupReply(hits, states, None if lease is None else lease.lease, refused, readable)

    def _count_misses(self, mode: MatchMode, misses: int, states: U8) -> None:
        """Of a lookup, by what is told of them."""
        tally = self._core.tally
        if mode is MatchMode.PREFIX:
            if misses:
                if states[-1] == PENDING:
                    tally.missed_pending += 1
                else:
                    tally.missed_absent += 1
                tally.missed_beyond += misses - 1
        else:
            pending = int(np.count_nonzero(states == PENDING))
            tally.missed_pending += pending
            tally.missed_absent += misses - pending

    def prefetch(self, stimulus: PrefetchBlocks) -> PrefetchReply:
        """As a lookup that wants nothing but to be told, and to have promoted what disks have."""
        core = self._core
        instance = core.submitter(stimulus.session, stimulus.epoch)
        hashes = stimulus.hashes
        check_hashes(hashes, core.limits.lookup_hashes_max)
        if not instance.live or core.draining:
            instance.alive_at_s = core.now_s
            return PrefetchReply(np.zeros(_told(stimulus), np.uint8))
        plan = core.plan(instance, stimulus.group)
        instance.alive_at_s = core.now_s
        found, states = self._find(plan, hashes, stimulus.mode)
        if self._tier is not None and len(found) < len(hashes):
            promotion = self._tier.promotion
            states = promotion.beyond(instance, plan, hashes, stimulus.mode, found, states, held=False)
        return PrefetchReply(states)

    def touch(self, stimulus: TouchBlocks) -> None:
        """Makes hits recent, or cold; says nothing."""
        core = self._core
        instance = core.submitter(stimulus.session, stimulus.epoch)
        check_hashes(stimulus.hashes, core.limits.lookup_hashes_max)
        if instance.live:
            plan = core.plan(instance, stimulus.group)
            found, _ = self._find(plan, stimulus.hashes, stimulus.mode)
            touch(core, plan, found, stimulus)
        instance.alive_at_s = core.now_s

    def _find(self, plan: GroupPlan, hashes: Hashes, mode: MatchMode) -> tuple[Entries, U8]:
        """The hits in order, and the states to tell."""
        table = self._blocks.table
        if mode is MatchMode.PREFIX:
            found, ended = table.lookup_prefix(plan.space, hashes)
            hits = len(found)
            states = np.full(min(hits + 1, len(hashes)), HIT, np.uint8)
            if hits < len(hashes):
                states[hits] = _TOLD[ended]
            return found, states
        entries, raw = table.lookup(plan.space, hashes)
        return entries[raw == READY], _TOLD[raw]

    # --- leases ---

    def _grant(
        self, instance: Instance, group: int, plan: GroupPlan, found: Entries, *, fits: bool = False
    ) -> tuple[LeaseGrant | None, Refusal | None]:
        """A lease on as many of these READY blocks as there is room for, from the first on; and, where that
        is not all of them, why. `fits`: there is room for all of them, with others that are leased with
        them."""
        core, room = self._core, self._core.lease_budget
        limits = core.limits
        if len(instance.leases) >= limits.leases_max:
            return None, Refusal(
                Reason.LEASE_LIMIT,
                f"an instance may hold {limits.leases_max} leases (limits.leases_max): load or release some",
                field="lease",
                value=len(instance.leases),
            )
        fitting = len(found) if fits else room.fitting(instance.held, plan.domain, found)
        refused = None if fitting == len(found) else self.no_room(instance, fitting, len(found), "blocks")
        if fitting == 0:
            return None, refused
        entries = found[:fitting]
        try:
            self._blocks.table.pin(entries)
        except ValueError as error:
            return None, Refusal(
                Reason.LEASE_LIMIT,
                f"too many hold these blocks at once: {error}; release some",
                field="lease",
            )
        room.add(instance.held, plan.domain, entries)
        self._blocks.used_at[entries] = self._blocks.now
        lease = LeaseGrant(
            lease=LeaseId(next(core.lease_ids)),
            instance=instance,
            group=group,
            entries=entries,
            ends_at_s=core.now_s + limits.lease_lifetime_s,
        )
        core.leases[lease.lease] = lease
        instance.leases[lease.lease] = lease
        instance.leased_blocks += len(entries)
        instance.leased_bytes += len(entries) * plan.domain.block_bytes
        return lease, refused

    def no_room(self, instance: Instance, fitting: int, readable: int, unit: str) -> Refusal:
        """Why no more than so many of the readable blocks, or tokens, are leased."""
        room = self._core.lease_budget
        return Refusal(
            Reason.LEASE_LIMIT,
            f"{fitting} of {readable} readable {unit} are leased: leases and loads may hold "
            f"{room.leasable_bytes >> 20:,} MiB of the pool (limits.leased_fraction_max); of them all "
            f"instances hold {room.all.bytes >> 20:,} MiB, this one {instance.held.bytes >> 20:,} MiB. Load "
            "or release what is leased and ask again, or make the pool larger (pool.size)",
            field="lease",
            value=readable,
        )

    def grant_all(
        self, instance: Instance, wanted: Sequence[tuple[int, GroupPlan, Entries]]
    ) -> tuple[LeaseGrant, ...]:
        """A lease for each group, on READY blocks for which there is room in all. Refusal LEASE_LIMIT: then
        none is granted."""
        granted: list[LeaseGrant] = []
        for group, plan, entries in wanted:
            lease, refused = self._grant(instance, group, plan, entries, fits=True)
            if lease is not None:
                granted.append(lease)
            if refused is not None:
                for lease in granted:
                    self._drop(lease, Event.RELEASE)
                raise refused
        return tuple(granted)

    def held(self, instance: Instance, lease: LeaseId) -> LeaseGrant:
        """A lease of this instance. Refusal UNKNOWN_LEASE, LEASE_EXPIRED or FOREIGN."""
        found = self._core.leases.get(lease)
        if found is not None and found.instance is instance:
            return found
        if found is not None:
            raise Refusal(
                Reason.FOREIGN, "this lease belongs to another instance", field="lease_id", value=lease
            )
        if lease in instance.expired:
            raise Refusal(
                Reason.LEASE_EXPIRED,
                "the lease was not renewed in time, or was too old: look up again",
                field="lease_id",
                value=lease,
            )
        raise Refusal(
            Reason.UNKNOWN_LEASE,
            "no such lease is held: it was consumed, released or never granted",
            field="lease_id",
            value=lease,
        )

    def _held_s(self, lease: LeaseGrant, now_s: float) -> float:
        """Since it was granted."""
        return now_s - (lease.ends_at_s - self._core.limits.lease_lifetime_s)

    def oldest_s(self, now_s: float) -> float:
        """Since the oldest lease was granted; 0 if there is none."""
        first = [next(iter(each.leases.values())) for each in self._core.names.values() if each.leases]
        return max((self._held_s(lease, now_s) for lease in first), default=0.0)

    def consume(self, lease: LeaseGrant, first: int, end: int) -> None:
        """Ends a lease; its pins on [first, end) are the caller's from now on, the others drop."""
        self._forget(lease, Event.LOAD)
        domain = lease.instance.plans[lease.group].domain
        if end < len(lease.entries):
            self._blocks.unpin(domain, lease.entries[end:])
        if first > 0:
            self._blocks.unpin(domain, lease.entries[:first])

    def release(self, stimulus: ReleaseLeases) -> None:
        """Gives leases back; those that are not held by this instance are ignored."""
        instance = self._core.submitter(stimulus.session, stimulus.epoch)
        for name in stimulus.leases:
            lease = instance.leases.get(name)
            if lease is not None:
                self._drop(lease, Event.RELEASE)

    def drop_all(self, instance: Instance) -> None:
        """The epoch has ended."""
        for lease in list(instance.leases.values()):
            self._drop(lease, Event.END)
        instance.expired.clear()

    def expire(self) -> None:
        """Ends leases whose instance was not heard of for too long, and those that are too old."""
        now_s, ttl_s = self._core.now_s, self._core.limits.lease_ttl_s
        for instance in list(self._core.names.values()):
            silent = now_s - instance.alive_at_s > ttl_s
            for lease in list(instance.leases.values()) if silent else self._too_old(instance):
                self._drop(lease, Event.EXPIRE)
                self._core.tally.expired_leases += 1
                instance.expired[lease.lease] = None
                if len(instance.expired) > EXPIRED_KEPT:
                    del instance.expired[next(iter(instance.expired))]

    def _too_old(self, instance: Instance) -> list[LeaseGrant]:
        """Leases are kept in the order in which they were granted, so they end in that order as well."""
        found = []
        for lease in instance.leases.values():
            if lease.ends_at_s > self._core.now_s:
                break
            found.append(lease)
        return found

    def _drop(self, lease: LeaseGrant, event: Event) -> None:
        self._forget(lease, event)
        self._blocks.unpin(lease.instance.plans[lease.group].domain, lease.entries)

    def _forget(self, lease: LeaseGrant, event: Event) -> None:
        instance = lease.instance
        self._core.step(lease, event)
        self._core.tally.ended_leases += 1
        self._core.tally.lease_held_s += self._held_s(lease, self._core.now_s)
        del self._core.leases[lease.lease], instance.leases[lease.lease]
        domain = instance.plans[lease.group].domain
        self._core.lease_budget.remove(instance.held, domain, lease.entries)
        instance.leased_blocks -= len(lease.entries)
        instance.leased_bytes -= len(lease.entries) * domain.block_bytes


def touch(core: CoreState, plan: GroupPlan, found: Entries, stimulus: TouchBlocks | TouchGroups) -> None:
    """Does to READY blocks of one group what is asked, the head of a sequence first."""
    if len(found) == 0:
        return
    if stimulus.cold:
        core.blocks.cool(plan.domain, found)
    else:
        core.blocks.touch(found)
        core.retention.hold(plan.domain, found, stimulus.hold_ms)


def _cut(mode: MatchMode, states: U8, hits: int, beyond: int) -> U8:
    """What to tell if no more than `hits` of the readable blocks are leased, and `beyond` of the others."""
    if mode is MatchMode.PREFIX:
        states = states[: hits + 1]
    states[np.flatnonzero(states == HIT)[hits:]] = beyond
    return states


def _told(stimulus: LookupBlocks | PrefetchBlocks) -> int:
    """Of how many blocks the state is told if none is hit."""
    count = len(stimulus.hashes)
    return count if stimulus.mode is MatchMode.EXACT else min(1, count)


def check_hashes(hashes: Hashes, count_max: int) -> None:
    """Refusal MALFORMED or TOO_MANY_BLOCKS."""
    if hashes.dtype != np.uint8 or hashes.ndim != 2 or hashes.shape[1] != HASH_BYTES_MAX:
        raise Refusal(
            Reason.MALFORMED,
            f"hashes are rows of {HASH_BYTES_MAX} bytes, padded with zeros",
            field="hashes",
            value=f"{hashes.dtype} {hashes.shape}",
        )
    if not hashes.flags.c_contiguous:
        raise Refusal(
            Reason.MALFORMED, "hashes must lie one after another", field="hashes", value=hashes.strides
        )
    if len(hashes) > count_max:
        raise Refusal(
            Reason.TOO_MANY_BLOCKS,
            f"at most {count_max} in one call: split it",
            field="hashes",
            value=len(hashes),
        )
