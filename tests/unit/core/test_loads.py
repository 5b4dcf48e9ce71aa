"""Loads: they name a lease, hold their blocks, and tell a rank what to verify."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvtierd.core.actions import (
    CommitSlots,
    Direction,
    FreeSlots,
    OpenSlots,
    PostPart,
    QuarantineSlots,
    TransferEnd,
)
from kvtierd.core.errors import Reason
from kvtierd.core.ids import LeaseId
from kvtierd.core.stimuli import PartOutcome, ReleaseLeases

from tests.unit.core.host import Host, Instance

EVICTING_ALL = range(1000, 1056)
"""As many keys as the pool has slots."""


@pytest.fixture
def one(host: Host) -> Instance:
    one = host.instance()
    one.stored(1, 2, 3, 4)
    return one


def test_a_load_reads_the_slots_that_the_store_wrote(host: Host, one: Instance) -> None:
    pair = host.instance("pair", sizes=((4096, 8192),))
    pair.store(1, 2).finish()
    written = host.of(CommitSlots)[0].slots
    load = pair.load(pair.lease(1, 2), [7, 5])
    assert [post.slots.tolist() for post in load.posts] == written.T.tolist()
    assert all(post.direction is Direction.LOAD for post in load.posts)
    assert all(post.block_ids.tolist() == [7, 5] for post in load.posts)
    assert all(post.verify is None for post in load.posts)
    assert host.of(OpenSlots) == []


def test_a_finished_load_is_done_and_counted(host: Host, one: Instance) -> None:
    ended = one.load(one.lease(1, 2), [0, 1]).finish()
    assert (ended.end, ended.succeeded.tolist()) == (TransferEnd.DONE, [1, 1])
    assert (host.counters.loaded_blocks, host.counters.loaded_bytes) == (2, 8192)


class TestLease:
    def test_is_consumed(self, host: Host, one: Instance) -> None:
        lease = one.lease(1, 2)
        one.load(lease, [0, 1])
        assert host.machine.status().leases == 0
        assert host.reason(one.load_of(lease, [2])) is Reason.UNKNOWN_LEASE

    def test_is_kept_if_asked(self, host: Host, one: Instance) -> None:
        lease = one.lease(1, 2)
        one.load(lease, [0], keep_lease=True)
        one.load(lease, [1], first=1)
        assert host.machine.status().leases == 0

    def test_loads_a_run_of_it_and_releases_the_rest(self, host: Host, one: Instance) -> None:
        load = one.load(one.lease(1, 2, 3, 4), [0, 1], first=1)
        one.store(*EVICTING_ALL)
        assert one.hits(1, 2, 3, 4) == [2, 3], "the others could go"
        load.finish()

    def test_is_not_needed_while_a_transfer_runs(self, host: Host, one: Instance) -> None:
        lease = one.lease(1, 2)
        load = one.load(lease, [0, 1], keep_lease=True)
        host.do(ReleaseLeases(one.scheduler, one.epoch, (lease,)))
        one.store(*EVICTING_ALL)
        assert one.hits(1, 2) == [1, 2]
        load.finish()
        one.store(*range(2000, 2002))
        assert one.hits(1, 2) == [], "now they may go"

    @pytest.mark.parametrize(
        ("blocks", "changes", "reason"),
        [
            ([0, 1, 2], {}, Reason.COUNT_MISMATCH),
            ([0], {"first": 2}, Reason.COUNT_MISMATCH),
            ([0], {"first": -1}, Reason.COUNT_MISMATCH),
            ([5, 5], {}, Reason.BLOCK_ID_DUPLICATE),
            ([64], {}, Reason.BLOCK_ID_RANGE),
            ([0], {"group": 1}, Reason.UNKNOWN_GROUP),
            ([0], {"lease": LeaseId(999)}, Reason.UNKNOWN_LEASE),
        ],
    )
    def test_must_cover_what_is_loaded(
        self, host: Host, blocks: list[int], changes: dict[str, Any], reason: Reason
    ) -> None:
        two = host.instance(sizes=((4096,), (4096,)))
        two.stored(1, 2)
        lease = two.lease(1, 2)
        options: dict[str, Any] = {"lease": lease, "blocks": blocks} | changes
        assert host.reason(two.load_of(**options)) is reason
        two.load(lease, [0, 1]).finish()

    def test_of_exact_hits_may_hold_one_block_twice(self, host: Host, one: Instance) -> None:
        reply = one.lookup(1, 1, exact=True, lease=True)
        assert reply.lease is not None
        ended = one.load(reply.lease, [0, 1]).finish()
        assert ended.succeeded.tolist() == [1, 1]


def test_nothing_loaded_is_nothing_failed(host: Host, one: Instance) -> None:
    ended = one.load(one.lease(1), []).finish()
    assert (ended.end, len(ended.succeeded)) == (TransferEnd.DONE, 0)
    assert host.machine.status().leases == 0


def test_a_block_is_in_place_only_if_every_rank_has_it(host: Host) -> None:
    pair = host.instance(sizes=((4096, 4096),))
    pair.stored(1, 2, 3)
    load = pair.load(pair.lease(1, 2, 3), [0, 1, 2])
    load.part(0, PartOutcome.FAILED, [0])
    ended = load.part(1, PartOutcome.FAILED, [1])
    assert ended is not None
    assert (ended.end, ended.succeeded.tolist()) == (TransferEnd.FAILED, [0, 0, 1])
    assert pair.hits(1, 2, 3) == [1, 2, 3], "a failed copy says nothing about the block"


class TestCorruptBlocks:
    def test_are_misses_at_once_and_go_with_the_last_pin(self, host: Host, one: Instance) -> None:
        held = one.lease(2)
        load = one.load(one.lease(1, 2), [0, 1])
        ended = load.part(0, PartOutcome.FAILED, [1], corrupt=True)
        assert ended is not None
        assert ended.error is not None
        assert (ended.succeeded.tolist(), ended.error.reason) == ([1, 0], Reason.CORRUPT)
        assert host.of(QuarantineSlots) == []
        assert one.hits(1, 2) == [1]
        assert one.store(2).results == [3], "its key is in the way until then"
        host.do(ReleaseLeases(one.scheduler, one.epoch, (held,)))
        assert [len(action.slots) for action in host.of(QuarantineSlots)] == [1]
        assert host.of(FreeSlots) == []
        assert one.store(2).results == [0]
        assert host.counters.integrity_failures == 1

    def test_go_when_the_load_ends_if_nobody_else_holds_them(self, host: Host) -> None:
        pair = host.instance(sizes=((4096, 4096),))
        pair.stored(1)
        load = pair.load(pair.lease(1), [0])
        load.part(0, PartOutcome.FAILED, corrupt=True)
        assert host.of(QuarantineSlots) == [], "the other rank still reads"
        load.part(1, PartOutcome.FAILED, corrupt=True)
        assert len(host.of(QuarantineSlots)[0].slots) == 2
        assert host.counters.integrity_failures == 1, "one block, whoever notices"

    def test_only_the_slots_that_failed_are_set_aside(self, host: Host) -> None:
        pair = host.instance(sizes=((4096, 8192),))
        pair.stored(1)
        load = pair.load(pair.lease(1), [0])
        bad, good = (post.slots.tolist() for post in load.posts)
        load.part(1)
        load.part(0, PartOutcome.FAILED, corrupt=True)
        assert host.of(QuarantineSlots)[0].slots.tolist() == bad
        assert host.of(FreeSlots)[0].slots.tolist() == good
        status = host.machine.status()
        assert (status.corrupt_slots, status.used_bytes) == (1, 0)

    def test_a_slot_that_failed_is_never_handed_out_again(self, host: Host, one: Instance) -> None:
        load = one.load(one.lease(1), [0])
        [bad] = load.posts[0].slots.tolist()
        load.part(0, PartOutcome.FAILED, corrupt=True)
        for first in range(100, 200, 5):
            opened = one.store(*range(first, first + 5))
            assert bad not in opened.posts[0].slots.tolist()
            opened.finish()

    def test_are_verified_by_whoever_still_loads_them(self, host: Host, one: Instance) -> None:
        held = one.lease(1)
        one.load(one.lease(1), [0]).part(0, PartOutcome.FAILED, corrupt=True)
        verify = one.load(held, [1]).posts[0].verify
        assert verify is not None
        assert verify.tolist() == [1]

    def test_a_store_that_found_them_does_not_claim_them(self, host: Host, one: Instance) -> None:
        running = one.store(1, 9)
        one.load(one.lease(1), [8]).part(0, PartOutcome.FAILED, corrupt=True)
        assert running.finish().succeeded.tolist() == [0, 1]
        assert one.store(1).results == [0]

    def test_a_failed_store_condemns_nothing(self, host: Host, one: Instance) -> None:
        one.store(9).part(0, PartOutcome.FAILED, corrupt=True)
        assert host.counters.integrity_failures == 0


def test_the_slots_of_a_load_are_contiguous_arrays(host: Host) -> None:
    pair = host.instance(sizes=((4096, 4096),))
    pair.stored(1, 2)
    pair.load(pair.lease(1, 2), [0, 1])
    assert all(post.slots.flags.c_contiguous and post.slots.dtype == np.uint32 for post in host.of(PostPart))
