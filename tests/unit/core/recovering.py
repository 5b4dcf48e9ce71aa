"""A core that has found a pool again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from kvtierd.core.ids import NamespaceDigest
from kvtierd.core.stimuli import Recovered, RecoveredExtent

from tests.unit.core.host import GEOMETRY, Host, keys

SMALL = GEOMETRY.slots_of(0, 4096)


def digest_of(table: Any, **options: Any) -> NamespaceDigest:
    """The namespace that an instance with these options will have."""
    host = Host(table)
    host.instance(**options)
    digest = host.machine.status().instances[0].namespace
    assert digest is not None
    return digest


def recovered(
    namespaces: Sequence[tuple[NamespaceDigest, int, int]],
    blocks: Sequence[tuple[int, int, Sequence[int]]],
    *,
    quarantined: Sequence[int] = (),
    extents: Sequence[tuple[int, int]] = ((0, 4096), (1, 8192)),
) -> Recovered:
    """`blocks`: (index of the namespace, key, slots)."""
    return Recovered(
        extents=tuple(RecoveredExtent(extent, size) for extent, size in extents),
        namespaces=tuple(namespaces),
        spaces=np.array([space for space, _, _ in blocks], np.uint32),
        hashes=keys(*(key for _, key, _ in blocks)),
        slots=np.array([slot for _, _, slots in blocks for slot in slots], np.uint32),
        clock=1000,
        quarantined=np.array(quarantined, np.uint32),
    )
