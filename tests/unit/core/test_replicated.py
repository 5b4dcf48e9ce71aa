"""Groups of which every rank holds the same bytes: stored once, by one rank, and loaded by all."""

from __future__ import annotations

import numpy as np
import pytest
from kvtierd.core.actions import CommitSlots, OpenSlots, TransferEnd
from kvtierd.core.errors import Reason
from kvtierd.core.ids import Rank
from kvtierd.core.stimuli import NOBODY, GroupGeometry, PartOutcome

from tests.unit.core.host import Host, Instance, Running, keys


@pytest.fixture
def pair(host: Host) -> Instance:
    """Group 0 is the same on both ranks, group 1 is not."""
    return host.instance(sizes=((4096, 4096), (4096, 8192)), replicated=[0])


def storing(running: Running) -> int:
    """The only rank that copies anything."""
    [rank] = [rank for rank, post in enumerate(running.posts) if len(post.slots)]
    return rank


class TestStores:
    def test_a_block_is_one_slot_that_one_rank_fills(self, host: Host, pair: Instance) -> None:
        running = pair.store(1, 2, 3)
        [opened] = host.of(OpenSlots)
        assert (opened.shard, opened.world_size, opened.data_bytes) == (0, 1, 4096)
        assert np.array_equal(opened.hashes, keys(1, 2, 3))
        rank = storing(running)
        assert np.array_equal(running.posts[rank].slots, opened.slots)
        assert [len(post.block_ids) for post in running.posts] == [3 * (rank == 0), 3 * (rank == 1)]
        running.finish()
        [commit] = host.of(CommitSlots)
        assert commit.slots.shape == (3, 1)
        assert pair.hits(1, 2, 3) == [1, 2, 3]
        assert host.counters.stored_bytes == 3 * 4096

    def test_ranks_take_turns(self, pair: Instance) -> None:
        assert {storing(pair.store(number)) for number in range(4)} == {0, 1}

    def test_other_groups_of_the_instance_are_stored_by_all(self, host: Host, pair: Instance) -> None:
        running = pair.store(1, group=1)
        assert [(o.shard, o.world_size, o.data_bytes) for o in host.of(OpenSlots)] == [
            (0, 2, 4096),
            (1, 2, 8192),
        ]
        assert [len(post.slots) for post in running.posts] == [1, 1]

    @pytest.mark.parametrize("outcome", [PartOutcome.FAILED, PartOutcome.GATE_DEADLINE, PartOutcome.REVOKED])
    def test_only_the_rank_that_stores_can_spoil_a_block(self, pair: Instance, outcome: PartOutcome) -> None:
        running = pair.store(1, 2)
        rank = storing(running)
        running.part(1 - rank, outcome)
        ended = running.part(rank)
        assert ended is not None
        assert ended.end is not TransferEnd.DONE, "a rank's part has not gone well, and it is told so"
        assert ended.succeeded.tolist() == [1, 1]
        assert pair.hits(1, 2) == [1, 2]
        running = pair.store(3, 4)
        rank = storing(running)
        running.part(rank, outcome)
        ended = running.part(1 - rank) or running.ended()
        assert ended is not None
        assert ended.succeeded.tolist() == [0, 0]
        assert pair.hits(3, 4) == []

    def test_some_of_its_blocks_can_fail(self, pair: Instance) -> None:
        running = pair.store(1, 2, 3)
        rank = storing(running)
        running.part(rank, PartOutcome.FAILED, failed=[1])
        ended = running.part(1 - rank)
        assert ended is not None
        assert ended.succeeded.tolist() == [1, 0, 1]
        assert pair.hits(1, 2, 3) == [1, 3]


class TestLoads:
    def test_every_rank_loads_the_one_shard(self, pair: Instance) -> None:
        pair.stored(1, 2)
        running = pair.load(pair.lease(1, 2), [7, 9])
        assert [post.block_ids.tolist() for post in running.posts] == [[7, 9], [7, 9]]
        assert np.array_equal(running.posts[0].slots, running.posts[1].slots)
        assert running.finish().succeeded.tolist() == [1, 1]

    @pytest.mark.parametrize("rank", [0, 1])
    def test_whoever_finds_it_corrupt_condemns_it(self, host: Host, pair: Instance, rank: int) -> None:
        pair.stored(1, 2)
        running = pair.load(pair.lease(1, 2), [7, 9])
        running.part(rank, PartOutcome.FAILED, [1], corrupt=True)
        assert pair.hits(1, 2) == [1]
        ended = running.part(1 - rank)
        assert ended is not None
        assert ended.succeeded.tolist() == [1, 0]
        assert host.machine.status().corrupt_slots == 1

    def test_both_may_find_it_corrupt(self, host: Host, pair: Instance) -> None:
        pair.stored(1)
        running = pair.load(pair.lease(1), [7])
        running.part(0, PartOutcome.FAILED, corrupt=True)
        running.part(1, PartOutcome.FAILED, corrupt=True)
        assert host.machine.status().corrupt_slots == 1
        assert host.counters.corrupt_on_load == 1
        pair.stored(1)
        assert pair.hits(1) == [1]


class TestAgreement:
    def geometry(self, size: int = 4096, what: str = "kv", *, replicated: bool = True) -> GroupGeometry:
        return GroupGeometry(1, 16, 0, ((size, what),), replicated)

    @pytest.mark.parametrize(
        ("other", "field"),
        [
            ({"replicated": False}, "groups[0].replicated"),
            ({"size": 8192}, "groups[0].planes[0].fragment_bytes"),
            ({"what": "another layer"}, "groups[0].planes[0].description"),
        ],
    )
    def test_ranks_that_do_not_hold_the_same_are_refused(
        self, host: Host, other: dict[str, object], field: str
    ) -> None:
        one = host.instance(sizes=((4096, 4096),), replicated=[0], processes=[0])
        hello = one.hello(1, groups=(self.geometry(**other),))  # type: ignore[arg-type]
        refusal = host.refused(hello)
        assert (refusal.reason, refusal.field) == (Reason.FINGERPRINT_MISMATCH, field)
        one.attach(1)
        assert host.machine.core.names[NOBODY, one.name].digest is not None

    def test_blocks_stored_once_and_by_all_are_not_shared(self, host: Host, pair: Instance) -> None:
        pair.stored(1)
        split = host.instance("split", sizes=((4096, 4096), (4096, 8192)))
        assert split.lookup(1).hits == 0
        twin = host.instance("twin", sizes=((4096, 4096), (4096, 8192)), replicated=[0])
        assert twin.lookup(1).hits == 1

    def test_alone_it_makes_no_difference_but_to_the_name(self, host: Host) -> None:
        alone = host.instance(sizes=((4096,),), replicated=[0])
        running = alone.store(1)
        assert [len(post.slots) for post in running.posts] == [1]
        assert running.finish().end is TransferEnd.DONE

    def test_the_rank_that_stores_is_of_the_instance(self, pair: Instance) -> None:
        plan = pair.host.machine.core.names[NOBODY, pair.name].plans
        assert [plan[0].shard(Rank(rank)) for rank in range(2)] == [0, 0]
        assert [plan[1].shard(Rank(rank)) for rank in range(2)] == [0, 1]
