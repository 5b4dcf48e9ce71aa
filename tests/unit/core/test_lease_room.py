"""What is held for loads, against sets that say the same."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kvtierd.core.lease_room import Held

ENTRIES = 12
runs = st.lists(st.integers(0, ENTRIES - 1), max_size=8)


@given(st.lists(st.tuples(runs, st.booleans()), max_size=30))
def test_blocks_are_counted_once_however_often_they_are_held(steps: list[tuple[list[int], bool]]) -> None:
    held = Held(ENTRIES)
    holders: list[list[int]] = []
    for run, let_go in steps:
        if let_go and holders:
            gone = holders.pop(len(run) % len(holders))
            held.remove(np.array(gone, np.uint32), 10)
        else:
            holders.append(run)
            held.add(np.array(run, np.uint32), 10)
        owners = Counter(entry for each in holders for entry in set(each))
        assert held.counts.tolist() == [owners[entry] for entry in range(ENTRIES)]
        assert held.bytes == 10 * len(owners)
