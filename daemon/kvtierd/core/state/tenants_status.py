"""What each tenant has, and has done, for people."""

from collections import Counter
from collections.abc import Iterable

from kvtierd.core.blocks.blocks import Blocks
from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.ids import TenantTag
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.status import TenantStatus


def tenants_status(core: CoreState) -> tuple[TenantStatus, ...]:
    """All tenants that have blocks or instances or were counted since the start. Takes time for each of them,
    for each domain and for each instance, but not for each block."""
    host_blocks, host_bytes = _held([core.blocks])
    disk_blocks, disk_bytes = _held(disk.blocks for disk in core.below.all)
    instances: Counter[TenantTag] = Counter()
    sessions: Counter[TenantTag] = Counter()
    names: dict[TenantTag, str] = {}
    for instance in core.instances.values():
        tag = tag_of(instance.owner.tenant)
        names[tag] = instance.owner.tenant
        instances[tag] += 1
        sessions[tag] += len(instance.sessions)
    tallies = core.tenants.tallies
    return tuple(
        TenantStatus(
            tag=tag,
            name=tallies.name_of(tag) or names.get(tag, ""),
            host_blocks=host_blocks[tag],
            host_bytes=host_bytes[tag],
            disk_blocks=disk_blocks[tag],
            disk_bytes=disk_bytes[tag],
            leased_bytes=core.lease_budget.held_bytes(tag),
            guaranteed_fraction=core.tenants.least(tag),
            most_fraction=core.tenants.most(tag),
            instances=instances[tag],
            sessions=sessions[tag],
            counters=tallies.copy_of(tag),
        )
        for tag in dict.fromkeys([*tallies, *host_blocks, *disk_blocks, *instances])
    )


def _held(tiers: Iterable[Blocks]) -> tuple[Counter[TenantTag], Counter[TenantTag]]:
    """How many blocks each tenant has on some tiers, and what they take there."""
    blocks: Counter[TenantTag] = Counter()
    taken_bytes: Counter[TenantTag] = Counter()
    for tier in tiers:
        for domain in tier.domains.by_id.values():
            if domain.blocks:
                blocks[domain.tenant] += domain.blocks
                taken_bytes[domain.tenant] += domain.blocks * tier.geometry.taken_by(domain.per_size)
    return blocks, taken_bytes
