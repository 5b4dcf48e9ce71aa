"""What is held for loads, against counts that say the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_kernels import BlockTable as NativeTable
from kvtierd.core.blocks.lease_budget import HeldBlocks
from kvtierd.core.ids import NO_TENANT

from tests.oracles.block_table import BlockTable as OracleTable

ENTRIES = 12
runs = st.lists(st.integers(0, ENTRIES - 1), max_size=8)


def entries(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint32)


@given(table=st.sampled_from([NativeTable, OracleTable]), steps=st.lists(st.tuples(runs, st.booleans())))
def test_blocks_are_counted_once_however_often_they_are_held(
    table: Any, steps: list[tuple[list[int], bool]]
) -> None:
    held = HeldBlocks(table(ENTRIES, 100).hold_counts(), NO_TENANT)
    holders: list[list[int]] = []
    for run, let_go in steps:
        if let_go and holders:
            held.remove(entries(*holders.pop(len(run) % len(holders))), 10)
        else:
            holders.append(run)
            held.add(entries(*run), 10)
        owners = Counter(entry for each in holders for entry in each)
        assert held.counts.of(np.arange(ENTRIES, dtype=np.uint32)).tolist() == [
            owners[entry] for entry in range(ENTRIES)
        ]
        assert held.bytes == 10 * len(owners)


@pytest.mark.parametrize("table", [NativeTable, OracleTable])
class TestCounts:
    def test_what_nobody_holds_cannot_be_let_go(self, table: Any) -> None:
        counts = table(ENTRIES, 100).hold_counts()
        counts.add(entries(1, 2, 2))
        with pytest.raises(ValueError):
            counts.remove(entries(1, 2, 2, 2))
        assert counts.of(entries(1, 2)).tolist() == [1, 2], "nothing has changed"

    def test_entries_out_of_range_are_refused(self, table: Any) -> None:
        counts = table(ENTRIES, 100).hold_counts()
        for call in (counts.add, counts.remove, counts.of):
            with pytest.raises(ValueError):
                call(entries(0, ENTRIES))
        assert counts.of(entries(0)).tolist() == [0]
