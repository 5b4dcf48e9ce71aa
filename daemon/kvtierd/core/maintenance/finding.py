"""Where blocks are, for those who choose a host and load nothing. Nothing here changes anything: no block is
held, promoted, made recent or counted."""

from collections.abc import Mapping

import numpy as np

from kvtierd.core.blocks.blocks import READY
from kvtierd.core.blocks.namespaces import NamespaceAbout
from kvtierd.core.blocks.table import U8
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import NO_ENTRY, Hashes, NamespaceDigest, SpaceId
from kvtierd.core.maintenance.explain import no_such
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.tier import Tier

NOWHERE, ON_HOST, ON_DISK = 0, 1, 2
"""As kvtier.v1.BlockPlace."""


def space_of(core: CoreState, namespace: str, group: int, tenant: str) -> tuple[SpaceId, NamespaceAbout]:
    """One group of the namespace of a tenant with this hexadecimal digest. Raises Refusal NAMESPACE_INVALID
    if the tenant has none, or only an earlier daemon has met an engine of it; UNKNOWN_GROUP."""
    about = _known(core.blocks.spaces.about, namespace)
    if about is None or about.tenant != tenant:
        why = no_such(core, namespace, tenant) if namespace else "name the whole digest of a namespace"
        raise Refusal(Reason.NAMESPACE_INVALID, why, field="namespace_digest", value=namespace)
    space = core.blocks.spaces.ids.get((NamespaceDigest(bytes.fromhex(namespace)), group))
    if space is None:
        raise Refusal(
            Reason.UNKNOWN_GROUP,
            f"this namespace has {len(about.groups)} groups, counted from 0",
            field="group",
            value=group,
        )
    return space, about


def _known(about: Mapping[NamespaceDigest, NamespaceAbout], namespace: str) -> NamespaceAbout | None:
    try:
        return about.get(NamespaceDigest(bytes.fromhex(namespace)))
    except ValueError:
        return None


def find(core: CoreState, tier: Tier, space: SpaceId, hashes: Hashes) -> U8:
    """Where the block of each hash can be read now. While the daemon drains that is nowhere, as lookups
    say."""
    if core.draining:
        return np.zeros(len(hashes), np.uint8)
    _, states = core.blocks.table.lookup(space, hashes)
    places: U8 = np.where(states == READY, np.uint8(ON_HOST), np.uint8(NOWHERE))
    missing = np.flatnonzero(places == NOWHERE)
    if tier.reads and len(missing):
        copies = tier.find(space, np.ascontiguousarray(hashes[missing]))
        places[missing[copies != NO_ENTRY]] = ON_DISK
    return places
