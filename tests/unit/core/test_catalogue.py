"""The catalogue of a store: beside a plain model of it, whatever comes and goes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtierd.core.ids import NO_ENTRY, Hashes, SpaceId
from kvtierd.core.store.catalogue import Catalogue

ROOM = 8
BLOCKS = 14
Key = tuple[int, int]
"""Space and number of a block."""


def hashes(numbers: list[int]) -> Hashes:
    rows = np.zeros((len(numbers), 32), np.uint8)
    rows[:, 0] = numbers
    return rows


class Model:
    """The same, slowly: known blocks from the least recent on."""

    def __init__(self) -> None:
        self.known: dict[Key, tuple[str, int]] = {}

    def use(self, keys: list[Key]) -> None:
        for key in reversed(keys):
            if key in self.known:
                self.known[key] = self.known.pop(key)

    def add(self, space: int, name: str, blocks: list[int]) -> int:
        keys = [(space, block) for block in blocks[:ROOM]]
        self.use(keys)
        new = [key for key in keys if key not in self.known]
        while len(self.known) + len(new) > ROOM:
            del self.known[next(iter(self.known))]
        for key in new:
            self.known[key] = ("", 0)
        for record, key in enumerate(keys):
            self.known[key] = (name, record)
        return len(keys)

    def gone(self, space: int, name: str) -> None:
        for key, (pack, _) in list(self.known.items()):
            if key[0] == space and pack == name:
                del self.known[key]


def number_of(catalogue: Catalogue, space: int, name: str) -> int:
    for number in range(1, 64):
        pack = catalogue.pack(number)
        if pack is not None and (pack.space, pack.name) == (space, name):
            return number
    return 0


PROMPT = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=ROOM + 2, unique=True)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 2), PROMPT),
    st.tuples(st.just("use"), st.integers(1, 2), PROMPT),
    st.tuples(st.just("lost"), st.integers(1, 2), PROMPT),
    st.tuples(st.just("gone"), st.integers(1, 2), st.integers(0, 20)),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_it_knows_what_a_plain_model_knows(actions: list[tuple[Any, ...]]) -> None:
    catalogue, model = Catalogue(ROOM, seed=1), Model()
    for number, (what, space, given_) in enumerate(actions):
        match what:
            case "add":
                records = np.arange(len(given_), dtype=np.uint32)
                kept = catalogue.add(SpaceId(space), f"pack {number}", hashes(given_), records)
                assert kept == model.add(space, f"pack {number}", given_)
            case "gone":
                name = f"pack {given_}"
                gone = number_of(catalogue, space, name)
                before = len(model.known)
                model.gone(space, name)
                assert catalogue.gone(gone) == before - len(model.known)
            case _:
                found = catalogue.find(SpaceId(space), hashes(given_))
                there = found[found != NO_ENTRY]
                if what == "use":
                    catalogue.use(there)
                    model.use([(space, block) for block in given_])
                else:
                    catalogue.lost(there)
                    for block in given_:
                        model.known.pop((space, block), None)
        assert len(catalogue) == len(model.known)
        for space_ in (1, 2):
            found = catalogue.find(SpaceId(space_), hashes(list(range(BLOCKS))))
            for block, entry in enumerate(found.tolist()):
                if entry == NO_ENTRY:
                    assert (space_, block) not in model.known
                    continue
                places = catalogue.places(np.array([entry], np.uint32))
                pack = catalogue.pack(int(places.packs[0]))
                assert pack is not None
                assert (pack.name, int(places.records[0])) == model.known[space_, block]
        names = {(key[0], name) for key, (name, _) in model.known.items()}
        assert catalogue.packs == len(names)
        assert all(catalogue.knows(SpaceId(space_), name) for space_, name in names)
