"""Leases: pins on blocks that a lookup has found, until they are loaded, released or expired."""

from collections.abc import Sequence
from functools import partial

from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Entries, LeaseId
from kvtierd.core.state.asks import Ask
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.entities import GroupPlan, Instance, LeaseGrant
from kvtierd.core.state.transitions import Event
from kvtierd.core.stimuli import ReleaseLeases

EXPIRED_KEPT = 1_024
"""Expired leases that are remembered for each instance."""


class Leases:
    def __init__(self, core: CoreState) -> None:
        self._core = core
        self._blocks = core.blocks

    def grant(self, instance: Instance, asks: Sequence[Ask], entries: Sequence[Entries]) -> None:
        """Gives each group a lease on these READY blocks of it, for which there must be room in the budget.
        Raises Refusal LEASE_LIMIT, and then grants none."""
        try:
            for ask, own in zip(asks, entries, strict=True):
                ask.lease = self._grant(instance, ask.query.group, ask.plan, own)
        except Refusal:
            for ask in asks:
                if ask.lease is not None:
                    self._drop(ask.lease, Event.RELEASE)
                    ask.lease = None
            raise

    def _grant(self, instance: Instance, group: int, plan: GroupPlan, entries: Entries) -> LeaseGrant:
        core, limits = self._core, self._core.limits
        if len(instance.leases) >= limits.leases_max:
            raise Refusal(
                Reason.LEASE_LIMIT,
                f"an instance may hold {limits.leases_max} leases (limits.leases_max): load or release some",
                field="lease",
                value=len(instance.leases),
            )
        try:
            self._blocks.table.pin(entries)
        except ValueError as error:
            raise Refusal(
                Reason.LEASE_LIMIT,
                f"too many hold these blocks at once: {error}; release some",
                field="lease",
            ) from error
        core.lease_budget.add(instance.held, plan.domain, entries)
        self._blocks.used(entries)
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
        return lease

    def no_room(self, instance: Instance, fitting: int, readable: int) -> Refusal:
        """Why only the `fitting` first of the readable tokens are leased."""
        room = self._core.lease_budget
        return Refusal(
            Reason.LEASE_LIMIT,
            f"{fitting} of {readable} readable tokens are leased: leases and loads may hold "
            f"{room.leasable_bytes >> 20:,} MiB of the pool (limits.leased_fraction_max); of them all "
            f"instances hold {room.all.bytes >> 20:,} MiB, this one {instance.held.bytes >> 20:,} MiB. Load "
            "or release what is leased and ask again, or make the pool larger (pool.size)",
            field="lease",
            value=readable,
        )

    def held(self, instance: Instance, lease: LeaseId) -> LeaseGrant:
        """A lease of this instance. Raises Refusal UNKNOWN_LEASE, LEASE_EXPIRED or FOREIGN."""
        found = self._core.leases.get(lease)
        if found is not None and found.instance is instance:
            return found
        refusal = partial(Refusal, field="lease_id", value=lease)
        if found is not None:
            raise refusal(Reason.FOREIGN, "this lease belongs to another instance")
        if lease in instance.expired:
            raise refusal(
                Reason.LEASE_EXPIRED, "the lease was not renewed in time, or was too old: look up again"
            )
        raise refusal(
            Reason.UNKNOWN_LEASE, "no such lease is held: it was consumed, released or never granted"
        )

    def _held_s(self, lease: LeaseGrant, now_s: float) -> float:
        """How long ago the lease was granted."""
        return now_s - (lease.ends_at_s - self._core.limits.lease_lifetime_s)

    def oldest_s(self, now_s: float) -> float:
        """How long ago the oldest lease was granted; 0 if there is none."""
        first = [next(iter(each.leases.values())) for each in self._core.names.values() if each.leases]
        return max((self._held_s(lease, now_s) for lease in first), default=0.0)

    def consume(self, lease: LeaseGrant, first: int, end: int) -> None:
        """Ends a lease. Its pins on [first, end) are the caller's from now on, and the others are dropped."""
        self._forget(lease, Event.LOAD)
        domain = lease.instance.plans[lease.group].domain
        if end < len(lease.entries):
            self._blocks.unpin(domain, lease.entries[end:])
        if first > 0:
            self._blocks.unpin(domain, lease.entries[:first])

    def release(self, stimulus: ReleaseLeases) -> None:
        """Gives leases back, and ignores those that this instance does not hold."""
        instance = self._core.submitter(stimulus.session, stimulus.epoch)
        for name in stimulus.leases:
            lease = instance.leases.get(name)
            if lease is not None:
                self._drop(lease, Event.RELEASE)

    def drop_all(self, instance: Instance) -> None:
        """Ends all leases of an instance whose epoch has ended."""
        for lease in list(instance.leases.values()):
            self._drop(lease, Event.END)
        instance.expired.clear()

    def expire(self) -> None:
        """Ends leases of instances that have been silent for too long, and leases that are too old."""
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
        """Instances keep their leases in the order in which they were granted, so leases end in that order as
        well."""
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
