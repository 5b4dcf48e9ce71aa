"""The memory of blocks that are gone, against a list that forgets nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kvtierd.core.blocks.history import Fate, History, RememberedFate
from kvtierd.core.errors import Reason
from kvtierd.core.ids import SpaceId

from tests.unit.core.host import keys

batches = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=9),
        st.sampled_from(list(Fate)),
        st.sampled_from([None, *(reason for reason in Reason if reason is not Reason.UNSPECIFIED)]),
    ),
    max_size=12,
)


@given(capacity=st.integers(1, 7), story=batches)
def test_the_latest_fate_of_the_latest_blocks_is_known(
    capacity: int, story: list[tuple[list[tuple[int, int]], Fate, Reason | None]]
) -> None:
    history = History(capacity)
    everything: list[tuple[int, int, RememberedFate]] = []
    for now, (blocks, fate, reason) in enumerate(story):
        spaces = np.array([space for space, _ in blocks], np.uint32)
        history.remember(spaces, keys(*(key for _, key in blocks)), fate, now, reason)
        everything += [(space, key, RememberedFate(fate, reason, now)) for space, key in blocks]
    kept = everything[-capacity:]
    assert len(history) == len(kept)
    latest = {(space, key): memory for space, key, memory in kept}
    for space in range(3):
        for key in range(6):
            assert history.fates(keys(key)).get(SpaceId(space)) == latest.get((space, key))
    assert history.oldest_at() == (kept[0][2].at if len(everything) > capacity else None)


def test_one_space_for_a_whole_batch() -> None:
    history = History(3)
    history.remember(SpaceId(7), keys(1, 2, 3, 4), Fate.REFUSED, 5)
    assert history.fates(keys(1)).get(SpaceId(7)) is None
    assert history.fates(keys(4)).get(SpaceId(7)) == RememberedFate(Fate.REFUSED, None, 5)
    assert history.fates(keys(4)).get(SpaceId(8)) is None


def test_hashes_that_begin_alike_are_told_apart() -> None:
    history = History(4)
    alike = np.zeros((2, 32), np.uint8)
    alike[:, 31] = (1, 2)
    history.remember(SpaceId(0), alike[:1], Fate.EVICTED, 1)
    history.remember(SpaceId(0), alike[1:], Fate.CORRUPT, 2)
    assert history.fates(alike[:1]).get(SpaceId(0)) == RememberedFate(Fate.EVICTED, None, 1)
