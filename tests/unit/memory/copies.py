"""Copies of a pool file, to recover from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from kvtier_kernels import PoolRecords
from kvtierd.memory.recovery import NOBODY

from tests.unit.memory.plain_pool import (
    HEADER_AREA,
    MIB,
    PAGE,
    hashes,
    read_records,
    slots_of,
    u64,
)

SLOT_BYTES = (8192, 3000)
GONE, ALIVE = 1, 2
# Examples of many statements; shrinking them is worth more than their number.
THOROUGH = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def gone(writer: int) -> bool:
    return writer == GONE


@dataclass(frozen=True)
class Copy:
    """One stored copy of a block, as a test wants it: some shards committed, some not, some damaged."""

    key: int
    world: int
    space: int
    group: int
    clock: int
    writer: int
    shards: tuple[str, ...]
    """Per rank: ready, writing, absent, damaged."""


copies = st.integers(1, 3).flatmap(
    lambda world: st.builds(
        Copy,
        key=st.integers(0, 3),
        world=st.just(world),
        space=st.integers(0, 1),
        group=st.integers(0, 1),
        clock=st.integers(0, 1000),
        writer=st.sampled_from([GONE, ALIVE, NOBODY]),
        shards=st.tuples(
            *[st.sampled_from(["ready", "ready", "ready", "writing", "absent", "damaged"])] * world
        ),
    )
)


def write(records: PoolRecords, pool: npt.NDArray[np.uint8], mixture: list[Copy], seed: int) -> None:
    """Store the copies into slots all over two extents of different slot sizes."""
    for extent, slot_bytes in enumerate(SLOT_BYTES):
        records.format_extent(extent, slot_bytes)
    free = np.random.default_rng(seed).permutation(
        np.concatenate([slots_of(records, 0), slots_of(records, 1)])
    )
    taken = 0
    for transfer, copy in enumerate(mixture):
        for shard, fate in enumerate(copy.shards):
            if fate == "absent":
                continue
            slot = free[taken : taken + 1]
            taken += 1
            space = bytes([copy.space]) * 16
            records.open(
                slot, copy.writer, 99, transfer, space, copy.group, shard, copy.world, hashes(copy.key), 1000
            )
            if fate != "writing":
                records.commit(slot, u64(copy.clock))
            if fate == "damaged":
                position = next(i for i, record in enumerate(read_records(pool)) if record.slot == slot[0])
                count = len(slots_of(records, 0))
                extent, index = (0, position) if position < count else (1, position - count)
                pool[HEADER_AREA + extent * MIB + PAGE + 128 * index + 44] ^= 1
