"""Eviction domains and spaces: the small integers that stand for layouts and namespaces in the block
table."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtierd.core.blocks.namespaces import NamespaceAbout
from kvtierd.core.blocks.table import BlockTable
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import NamespaceDigest, SpaceId, TenantTag

DOMAINS_MAX = 65_536
"""The block table keeps a domain's id in 16 bits."""
SWEEP_AT_LEAST = 256
DomainKey = tuple[TenantTag, tuple[int, ...]]


@dataclass(slots=True, eq=False)
class Domain:
    """Blocks of one tenant whose shards have the same slot sizes, so that evicting one makes room for exactly
    one other."""

    domain: int
    tenant: TenantTag
    sizes: tuple[int, ...]
    """Slot bytes of each shard, in rank order."""
    blocks: int = 0
    """Blocks in the table, in whatever state."""
    users: int = 0
    """Groups of instances that are not GONE."""
    opened: int = 0
    """Blocks that were ever given slots."""
    evicted: int = 0
    """Blocks that were ever evicted."""
    pool_bytes: int = 0
    """Bytes of the host's pool that one block takes, for its shadow; 0 as long as it does not know the
    domain."""
    per_size: tuple[tuple[int, int], ...] = field(init=False)
    """(slot bytes, slots of that size in one block)."""
    block_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.per_size = tuple(Counter(self.sizes).items())
        self.block_bytes = sum(self.sizes)

    @property
    def world(self) -> int:
        return len(self.sizes)


class Domains:
    """All domains in use, by tenant and slot sizes. Ids are reused."""

    def __init__(self) -> None:
        self._by_key: dict[DomainKey, Domain] = {}
        self.by_id: dict[int, Domain] = {}
        self._free: list[int] = []
        self._used = 0

    def require_room(self, wanted: Iterable[DomainKey]) -> None:
        """Raises Refusal QUEUE_FULL if there are not enough ids left for all of these."""
        new = {key for key in wanted if key not in self._by_key}
        if len(self.by_id) + len(new) > DOMAINS_MAX:
            raise Refusal(
                Reason.QUEUE_FULL,
                f"the pool holds blocks of {DOMAINS_MAX} layouts already: end instances, or start it anew",
                field="groups",
                value=len(new),
            )

    def has_room(self, tenant: TenantTag, sizes: tuple[int, ...]) -> bool:
        """Whether a tenant's blocks with these slot sizes could have a domain."""
        return (tenant, sizes) in self._by_key or len(self.by_id) < DOMAINS_MAX

    def of(self, tenant: TenantTag, sizes: tuple[int, ...]) -> Domain:
        """The domain of a tenant's blocks with these slot sizes, made if there is none."""
        domain = self._by_key.get((tenant, sizes))
        if domain is None:
            number = self._free.pop() if self._free else self._used
            self._used = max(self._used, number + 1)
            assert number < DOMAINS_MAX
            domain = self._by_key[tenant, sizes] = self.by_id[number] = Domain(number, tenant, sizes)
        return domain

    def forget_idle(self, domain: Domain) -> None:
        """Gives the domain's id back if neither blocks nor instances use it."""
        if domain.blocks == 0 and domain.users == 0 and self.by_id.get(domain.domain) is domain:
            del self.by_id[domain.domain], self._by_key[domain.tenant, domain.sizes]
            self._free.append(domain.domain)


class Spaces:
    """Ids of (namespace, group), never reused within a boot."""

    def __init__(self, table: BlockTable) -> None:
        self.tables = [table]
        """The tables of all tiers, whose blocks refer to spaces."""
        self.ids: dict[tuple[NamespaceDigest, int], SpaceId] = {}
        self.names: dict[SpaceId, tuple[NamespaceDigest, int]] = {}
        """The inverse of `ids`."""
        self.about: dict[NamespaceDigest, NamespaceAbout] = {}
        """What is known of the namespaces in `ids` whose instances have attached in this boot."""
        self.users: Counter[SpaceId] = Counter()
        """Groups of instances that are not GONE, by space."""
        self._issued = 0
        self._sweep_at = SWEEP_AT_LEAST

    def of(self, digest: NamespaceDigest, group: int) -> SpaceId:
        """The id of a space, which is issued if there is none."""
        space = self.ids.get((digest, group))
        if space is None:
            if len(self.ids) >= self._sweep_at:
                self._sweep()
            space = self.ids[digest, group] = SpaceId(self._issued)
            self.names[space] = (digest, group)
            self._issued += 1
        return space

    def leave(self, space: SpaceId) -> bool:
        """An instance does not use the space any more, but its blocks stay. True if no other instance uses
        it."""
        self.users[space] -= 1
        if self.users[space]:
            return False
        del self.users[space]
        return True

    def _sweep(self) -> None:
        """Forgets spaces that nobody uses and that have no blocks. How many others there are is bounded by
        the tables."""
        for key, space in list(self.ids.items()):
            if space not in self.users and not any(table.count(space) for table in self.tables):
                del self.ids[key], self.names[space]
        digests = {digest for digest, _ in self.ids}
        self.about = {digest: about for digest, about in self.about.items() if digest in digests}
        self._sweep_at = max(SWEEP_AT_LEAST, 2 * len(self.ids))
