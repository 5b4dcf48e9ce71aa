"""A new daemon takes over what an old one has left in the pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvtierd.core.actions import FreeSlots
from kvtierd.core.ids import PAGE_BYTES, NamespaceDigest
from kvtierd.core.stimuli import PartOutcome, Recovered, SlotsProven

from tests.unit.core.host import GEOMETRY, NONE, Host, Instance
from tests.unit.core.recovering import SMALL, digest_of, recovered

LARGE = GEOMETRY.slots_of(1, 8192)


@pytest.fixture
def found(host: Host, table: Any) -> Instance:
    """An instance of world size 1 that finds blocks 1 to 4; 4 is the youngest."""
    digest = digest_of(table)
    host.do(recovered([(digest, 0, 1)], [(0, key, [SMALL[key]]) for key in (1, 2, 3, 4)]))
    assert host.actions == []
    return host.instance()


def test_blocks_are_found_by_whoever_has_their_namespace(host: Host, found: Instance) -> None:
    assert found.lookup(1, 2, 3, 4).hits == 4
    assert host.instance("stranger", fields=b"x").hits(1) == []
    status = host.machine.status()
    assert (status.blocks.ready, status.used_bytes, status.extents_free) == (4, 4 * 4096, 2)


def test_blocks_are_verified_until_a_load_has_found_them_sound(host: Host, found: Instance) -> None:
    first = found.load(found.lease(1, 2), [0, 1])
    assert first.posts[0].verify is not None
    assert first.posts[0].verify.tolist() == [1, 1]
    first.part(0, PartOutcome.FAILED, [1])
    again = found.load(found.lease(1, 2), [0, 1]).posts[0].verify
    assert again is not None
    assert again.tolist() == [0, 1]


def test_a_load_that_never_ran_has_verified_nothing(host: Host, found: Instance) -> None:
    found.load(found.lease(1), [0]).part(0, PartOutcome.REVOKED)
    assert found.load(found.lease(1), [0]).posts[0].verify is not None


def test_a_block_is_verified_when_all_its_shards_are(host: Host, table: Any) -> None:
    digest = digest_of(table, sizes=((4096, 8192),))
    host.do(recovered([(digest, 0, 2)], [(0, 1, [SMALL[0], LARGE[0]])]))
    pair = host.instance(sizes=((4096, 8192),))
    load = pair.load(pair.lease(1), [0])
    load.part(0)
    load.part(1, PartOutcome.FAILED)
    assert pair.load(pair.lease(1), [0]).posts[0].verify is not None


def test_what_was_stored_since_is_not_verified(host: Host, found: Instance) -> None:
    found.stored(9)
    assert found.load(found.lease(9), [0]).posts[0].verify is None


def test_recency_is_the_order_in_which_blocks_are_handed_in(host: Host, found: Instance) -> None:
    for first in range(0, 52, 13):
        found.stored(*range(100 + first, 113 + first))
    found.stored(200, 201)
    assert found.hits(1, 2, 3, 4) == [3, 4]


def test_the_clock_goes_on(host: Host, found: Instance) -> None:
    assert host.machine.core.blocks.clock == 1000


def test_namespaces_groups_and_worlds_are_kept_apart(host: Host, table: Any) -> None:
    pair = {"sizes": ((4096, 8192), (8192, 8192)), "fields": b"pair"}
    one, two = digest_of(table), digest_of(table, **pair)
    host.do(
        recovered(
            [(one, 0, 1), (two, 0, 2), (two, 1, 2)],
            [
                (0, 1, [SMALL[0]]),
                (1, 1, [SMALL[1], LARGE[0]]),
                (2, 2, [LARGE[1], LARGE[2]]),
                (0, 2, [SMALL[2]]),
            ],
        )
    )
    assert host.instance("one").hits(1, 2) == [1, 2]
    other = host.instance("pair", **pair)
    assert (other.hits(1, 2), other.hits(1, 2, group=1)) == ([1], [2])
    load = other.load(other.lease(1), [0])
    assert [post.slots.tolist() for post in load.posts] == [[SMALL[1]], [LARGE[0]]]


def test_a_table_that_is_too_small_keeps_the_youngest(table: Any) -> None:
    pages = (GEOMETRY.first_extent_offset + GEOMETRY.capacity_bytes) // PAGE_BYTES
    host = Host(table(2, pages))
    host.do(recovered([(digest_of(table), 0, 1)], [(0, key, [SMALL[key]]) for key in (1, 2, 3)]))
    assert host.of(FreeSlots)[0].slots.tolist() == [SMALL[1]]
    assert host.instance().hits(1, 2, 3) == [2, 3]


def test_a_key_that_comes_twice_is_kept_once(host: Host, table: Any) -> None:
    host.do(recovered([(digest_of(table), 0, 1)], [(0, 1, [SMALL[1]]), (0, 1, [SMALL[2]])]))
    assert len(host.of(FreeSlots)[0].slots) == 1
    assert host.instance().hits(1) == [1]


def test_an_empty_pool_recovers_to_nothing(host: Host) -> None:
    host.do(recovered([], [], extents=()))
    host.instance().stored(1)


class TestQuarantine:
    def test_slots_stay_out_of_use_until_their_writers_are_gone(self, host: Host) -> None:
        host.do(recovered([], [], quarantined=SMALL.tolist(), extents=[(e, 4096) for e in range(4)]))
        one = host.instance()
        assert one.store(*range(43)).results == [0] * 42 + [3]
        host.do(SlotsProven(SMALL[:2]))
        assert host.of(FreeSlots)[0].slots.tolist() == SMALL[:2].tolist()
        assert one.store(100, 101, 102).results == [0, 0, 3]
        assert host.machine.status().quarantined_slots == 12

    def test_proving_twice_or_what_is_in_use_is_nothing(self, host: Host) -> None:
        host.do(recovered([], [], quarantined=[SMALL[0]]))
        one = host.instance()
        one.store(1)
        for _ in range(2):
            host.do(SlotsProven(SMALL))
        assert host.actions == []

    def test_only_what_is_quarantined_is_freed(self, host: Host) -> None:
        host.do(recovered([], [], quarantined=SMALL[1:].tolist()))
        host.do(SlotsProven(SMALL[:2]))
        assert host.of(FreeSlots)[0].slots.tolist() == [SMALL[1]]

    def test_their_extent_is_not_taken_for_another_size(self, host: Host) -> None:
        host.do(recovered([], [], quarantined=[SMALL[0]], extents=[(e, 4096) for e in range(4)]))
        large = host.instance(sizes=((8192,),))
        assert large.store(*range(22)).results == [0] * 21 + [3]
        host.do(SlotsProven(SMALL[:1]))
        host.now_s += 60
        assert large.store(100).results == [0]


def test_recovery_comes_first_and_once(host: Host) -> None:
    host.do(recovered([], [], extents=()))
    with pytest.raises(AssertionError):
        host.do(recovered([], [], extents=()))


@pytest.mark.parametrize(
    "change",
    [
        {"slots": NONE},
        {"spaces": np.array([1], np.uint32)},
        {"spaces": NONE},
    ],
)
def test_nonsense_is_an_error(host: Host, change: dict[str, Any]) -> None:
    good = recovered([(NamespaceDigest(bytes(16)), 0, 1)], [(0, 1, [SMALL[0]])])
    fields = {name: getattr(good, name) for name in good.__slots__} | change
    with pytest.raises(ValueError, match="recovered"):
        host.do(Recovered(**fields))
