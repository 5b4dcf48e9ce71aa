"""What part of each tier is guaranteed to a tenant, and how much it may have at most.

A tenant that needs room gets it wherever there is some. Only when others want it as well do shares matter: no
store of one tenant evicts blocks of another that has no more than its guarantee, and a tenant that has less
than its own takes from those who have more, however recent their blocks are. What is configured holds always;
the rest is guaranteed, in equal parts, to those other tenants of which an engine is attached.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvtierd.core.blocks.domains import Domain, Domains
from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.blocks.slots import SlotAllocator
from kvtierd.core.blocks.tenant_tallies import TenantTallies
from kvtierd.core.ids import TenantTag
from kvtierd.core.status import TenantTally


@dataclass(frozen=True, slots=True)
class TenantShare:
    """What is configured for a tenant, as fractions of each tier."""

    least: float
    most: float = 1.0


class Tenants:
    """The tenants that have a share: those that are configured, and those that are here."""

    def __init__(self, shares: Mapping[str, TenantShare]) -> None:
        self._shares = {tag_of(tenant): share for tenant, share in shares.items()}
        self._here: Counter[TenantTag] = Counter()
        self._left = 1.0 - sum(share.least for share in shares.values())
        """What nobody in particular was promised."""
        self.reserved = tuple((tag, share.least) for tag, share in self._shares.items() if share.least)
        """The tenants to whom something is guaranteed even while they are not here, and what fraction."""
        self.tallies = TenantTallies()
        for tenant in shares:
            self.tallies.name(tag_of(tenant), tenant)

    @property
    def several(self) -> bool:
        """Whether engines of more than one tenant are attached."""
        return len(self._here) > 1

    def come(self, tenant: TenantTag, name: str) -> TenantTally:
        """An instance of this tenant begins. Returns the tenant's tally."""
        self._here[tenant] += 1
        return self.tallies.name(tenant, name)

    def go(self, tenant: TenantTag) -> None:
        """Undoes a `come`."""
        self._here[tenant] -= 1
        if not self._here[tenant]:
            del self._here[tenant]

    def least(self, tenant: TenantTag) -> float:
        """The fraction of each tier that is guaranteed to a tenant now."""
        if tenant in self._shares:
            return self._shares[tenant].least
        if tenant not in self._here:
            return 0.0
        return max(0.0, self._left) / len(self._here.keys() - self._shares.keys())

    def most(self, tenant: TenantTag) -> float:
        """The fraction of each tier that a tenant may have."""
        return self._shares[tenant].most if tenant in self._shares else 1.0


class TierShares:
    """The shares of one tier."""

    def __init__(self, tenants: Tenants, domains: Domains, slots: SlotAllocator) -> None:
        self._tenants = tenants
        self._domains = domains
        self._slots = slots

    def now(self) -> "SharesNow":
        """How much each tenant has now."""
        used: Counter[TenantTag] = Counter()
        for domain in self._domains.by_id.values():
            used[domain.tenant] += domain.blocks * self._slots.geometry.taken_by(domain.per_size)
        return SharesNow(self._tenants, self._slots, used)

    def room(self, domain: Domain, without_slots: int) -> int | None:
        """How many blocks of a domain its tenant may give slots to; None if there is no limit. The domain has
        `without_slots` blocks that have none yet."""
        most = self._tenants.most(domain.tenant)
        if most >= 1.0:
            return None
        block_bytes = self._slots.geometry.taken_by(domain.per_size)
        free = int(most * self._slots.capacity_bytes) - self.now().used[domain.tenant]
        return max(0, free // block_bytes + without_slots)


@dataclass(frozen=True, slots=True)
class SharesNow:
    """The shares of one tier as they are until the next block comes or goes."""

    tenants: Tenants
    slots: SlotAllocator
    used: Counter[TenantTag]
    """Bytes that each tenant's blocks take, including what is lost where slots do not fill their extents."""

    def spare(self, domain: Domain, taker: Domain) -> int:
        """How many blocks of a domain may be evicted to make room for blocks of another."""
        if domain.tenant == taker.tenant:
            return domain.blocks
        beyond = self.used[domain.tenant] - self._least_bytes(domain.tenant)
        return min(domain.blocks, max(0, beyond // self.slots.geometry.taken_by(domain.per_size)))

    def may_lose(self, lost: Mapping[Domain, int], taker: Domain) -> bool:
        """Whether so many blocks of each of these domains may be evicted to make room for another domain."""
        losses: Counter[TenantTag] = Counter()
        for domain, blocks in lost.items():
            losses[domain.tenant] += blocks * self.slots.geometry.taken_by(domain.per_size)
        return all(
            self.used[tenant] - lost_bytes >= self._least_bytes(tenant)
            for tenant, lost_bytes in losses.items()
            if tenant != taker.tenant
        )

    def is_owed(self, domain: Domain, without_slots: int) -> bool:
        """Whether a tenant has less than is guaranteed to it, even if one more of the `without_slots` blocks
        of this domain gets its slots."""
        block_bytes = self.slots.geometry.taken_by(domain.per_size)
        with_it = self.used[domain.tenant] - (without_slots - 1) * block_bytes
        return with_it <= self._least_bytes(domain.tenant)

    def _least_bytes(self, tenant: TenantTag) -> int:
        return int(self.tenants.least(tenant) * self.slots.capacity_bytes)
