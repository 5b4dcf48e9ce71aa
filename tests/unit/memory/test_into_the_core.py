"""What was recovered, handed to the real core over the real block table: all of it is taken over."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from kvtier_kernels import BlockTable, PoolRecords
from kvtierd.core.actions import FreeSlots
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.machine import Machine
from kvtierd.core.stimuli import CoreLimits, SlotsProven
from kvtierd.memory.recovery import free_proven, recover

from tests.unit.memory.copies import THOROUGH, Copy, copies, gone, write
from tests.unit.memory.plain_pool import HEADER_AREA, MIB, PAGE, new_pool


@THOROUGH
@given(mixture=st.lists(copies, max_size=14), seed=st.integers(0, 3))
def test_the_core_takes_over_every_block_and_every_slot(mixture: list[Copy], seed: int) -> None:
    # A namespace digest covers the world size, so one digest has one.
    mixture = [replace(copy, space=copy.world) for copy in mixture]
    pool = new_pool(extents=3)
    records = PoolRecords(pool)
    write(records, pool, mixture, seed)
    result = recover(records, gone)
    table = BlockTable(100, len(pool) // PAGE)
    machine = Machine(table, lambda: 0.0, CoreLimits(), PoolGeometry(3, MIB, HEADER_AREA))

    assert machine.handle(result.recovered) == (None, [])
    table.check()
    assert table.stats()["ready"] == result.blocks

    quarantined, writers = result.recovered.quarantined, result.quarantined_writers
    proven = quarantined[free_proven(records, quarantined, writers, lambda writer: True)]
    _, actions = machine.handle(SlotsProven(proven))
    for action in actions:
        assert isinstance(action, FreeSlots)
        assert set(action.slots.tolist()) <= set(proven.tolist())
        records.free(action.slots)
    left = set(result.recovered.slots.tolist()) | set(result.recovered.corrupt.tolist())
    assert set(records.scan()["slots"].tolist()) == left
    assert machine.status().corrupt_slots == len(result.recovered.corrupt)
