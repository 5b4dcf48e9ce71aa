"""Stores: what is accepted, what is posted, what is committed, and in which order the front hears of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kvtier_kernels import PINS_MAX
from kvtierd.core.actions import (
    Action,
    AssignExtent,
    CommitSlots,
    Direction,
    FreeSlots,
    Notify,
    OpenSlots,
    PostPart,
    RevokePart,
    SubmitReply,
    TransferEnd,
)
from kvtierd.core.errors import Reason
from kvtierd.core.ids import Epoch, SessionId, Ticket
from kvtierd.core.stimuli import NOBODY, CancelTransfers, CoreLimits, Drain, PartOutcome, Resume, Tick

from tests.unit.core.host import Host, Running, finished, keys

ACCEPTED, EXISTS, PENDING, THROTTLED = 0, 1, 2, 3


def kinds(actions: list[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


class TestSubmission:
    def test_slots_are_opened_before_any_part_is_posted(self, host: Host) -> None:
        pair = host.instance(sizes=((4096, 8192),))
        pair.store(1, 2, 3)
        assert kinds(host.actions) == [
            "AssignExtent",
            "AssignExtent",
            "OpenSlots",
            "OpenSlots",
            "PostPart",
            "PostPart",
        ]

    def test_every_rank_gets_its_own_slots_of_its_own_size(self, host: Host) -> None:
        pair = host.instance(sizes=((4096, 8192),))
        running = pair.store(1, 2, 3)
        opened = host.of(OpenSlots)
        assert [(o.shard, o.world_size, o.data_bytes, o.group) for o in opened] == [
            (0, 2, 4096, 0),
            (1, 2, 8192, 0),
        ]
        assert all(np.array_equal(o.hashes, keys(1, 2, 3)) for o in opened)
        assert all(o.store == running.reply.transfer for o in opened)
        for one, post in zip(opened, running.posts, strict=True):
            assert np.array_equal(one.slots, post.slots)
            assert (post.direction, post.verify) == (Direction.STORE, None)
            assert post.block_ids.tolist() == [0, 1, 2]
        sizes = {assigned.extent: assigned.slot_bytes for assigned in host.of(AssignExtent)}
        assert sorted(sizes.values()) == [4096, 8192]

    def test_what_is_there_is_not_stored_again(self, host: Host) -> None:
        one = host.instance()
        one.stored(1, 2)
        first = one.store(3)
        second = one.store(1, 2, 3, 4)
        assert first.results == [ACCEPTED]
        assert second.results == [EXISTS, EXISTS, PENDING, ACCEPTED]
        assert second.posts[0].block_ids.tolist() == [3]
        assert np.array_equal(host.of(OpenSlots)[0].hashes, keys(4))
        assert host.counters.deduplicated_blocks == 3

    def test_a_block_that_can_be_pinned_no_more_costs_the_batch_nothing(self, host: Host) -> None:
        one = host.instance()
        one.stored(1, 2)
        table, space = (
            host.machine.core.blocks.table,
            host.machine.core.names[NOBODY, "engine"].plans[0].space,
        )
        crowd = np.repeat(table.lookup(space, keys(1))[0], PINS_MAX)
        table.pin(crowd)
        signals = one.signals()
        reply, actions = host.machine.handle(one.store_of(1, 2, 3, signals=signals))
        assert isinstance(reply, SubmitReply)
        pins = table.pins(table.lookup(space, keys(1, 2))[0]).tolist()
        assert pins == [PINS_MAX, 1], "who is pinned so often stays without one more"
        table.unpin(crowd)
        posts = [action for action in actions if isinstance(action, PostPart)]
        running = Running(one, reply, signals.ticket, posts)
        assert running.results == [EXISTS, EXISTS, ACCEPTED]
        assert running.finish().succeeded.tolist() == [0, 1, 1], "it is not vouched for"
        assert one.lookup(1, 2, 3).hits == 3

    def test_a_store_of_nothing_new_still_posts_a_part_to_every_rank(self, host: Host) -> None:
        pair = host.instance(sizes=((4096, 4096),))
        pair.stored(1)
        again = pair.store(1)
        assert kinds(host.actions) == ["PostPart", "PostPart"]
        assert [len(post.slots) for post in again.posts] == [0, 0]
        ended = again.finish()
        assert (ended.end, ended.succeeded.tolist()) == (TransferEnd.DONE, [1])

    def test_a_key_that_comes_twice_is_written_once(self, host: Host) -> None:
        one = host.instance()
        running = one.store(1, 2, 1)
        assert running.results == [ACCEPTED, ACCEPTED, PENDING]
        assert running.finish().succeeded.tolist() == [1, 1, 0]

    def test_parts_carry_the_signals(self, host: Host) -> None:
        one = host.instance()
        signals = one.signals(gated=True, doorbell=1, doorbell_value=77)
        assert one.store(1, signals=signals).posts[0].signals == signals

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"session": SessionId(999)}, Reason.NOT_ATTACHED),
            ({"epoch": Epoch(999)}, Reason.WRONG_EPOCH),
            ({"group": 1}, Reason.UNKNOWN_GROUP),
            ({"block_ids": np.zeros(1, np.uint32)}, Reason.COUNT_MISMATCH),
            ({"block_ids": np.array([0, 64], np.uint32)}, Reason.BLOCK_ID_RANGE),
            ({"block_ids": np.zeros(2, np.int64)}, Reason.MALFORMED),
            ({"hashes": keys(1, 2, 3, 4, 5)}, Reason.TOO_MANY_BLOCKS),
            ({"block_ids": np.zeros(5, np.uint32)}, Reason.TOO_MANY_BLOCKS),
            ({"hashes": np.zeros((2, 31), np.uint8)}, Reason.MALFORMED),
        ],
    )
    def test_what_makes_no_sense_is_refused(
        self, make_host: Callable[..., Host], changes: dict[str, Any], reason: Reason
    ) -> None:
        host = make_host(CoreLimits(transfer_blocks_max=4))
        one = host.instance()
        assert host.reason(one.store_of(1, 2, **changes)) is reason
        assert one.hits(1, 2) == []

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"ticket": Ticket(0)}, Reason.TICKET_ORDER),
            ({"ticket": Ticket(5)}, Reason.TICKET_ORDER),
            ({"ticket": Ticket(2**56)}, Reason.TICKET_ORDER),
            ({"part_word": 16}, Reason.WORD_INDEX_RANGE),
            ({"part_word": 3}, Reason.WORD_INDEX_RANGE),
            ({"gated": True, "doorbell": 2}, Reason.WORD_INDEX_RANGE),
        ],
        ids=["zero", "again", "too large", "beyond", "in use", "no such bell"],
    )
    def test_signals_must_fit_every_rank_and_all_transfers_before(
        self, host: Host, changes: dict[str, Any], reason: Reason
    ) -> None:
        one = host.instance()
        one.store(1, signals=one.signals(ticket=Ticket(5), part_word=3))
        bad = one.signals(**{"ticket": Ticket(6), "part_word": 4} | changes)
        assert host.reason(one.store_of(2, signals=bad)) is reason
        one.store(2, signals=one.signals(ticket=Ticket(6), part_word=4))

    def test_a_part_word_is_free_again_when_its_transfer_has_ended(self, host: Host) -> None:
        one = host.instance()
        first = one.store(1, signals=one.signals(part_word=3))
        first.finish()
        one.store(2, signals=one.signals(part_word=3))

    def test_only_a_scheduler_of_a_ready_instance_submits(self, host: Host) -> None:
        one = host.instance(together=False)
        assert host.reason(one.store_of(1, session=one.sessions[0])) is Reason.ROLE
        assert host.reason(host.instance("unready", worker=None).store_of(1)) is Reason.INSTANCE_INCOMPLETE

    def test_transfers_in_flight_are_limited(self, make_host: Callable[..., Host]) -> None:
        host = make_host(CoreLimits(transfers_max=2))
        one = host.instance()
        first = one.store(1)
        one.store(2)
        assert host.reason(one.store_of(3)) is Reason.QUEUE_FULL
        first.finish()
        one.store(3)

    def test_a_draining_daemon_takes_none_and_finishes_what_runs(self, host: Host) -> None:
        one = host.instance()
        running = one.store(1)
        host.do(Drain())
        assert host.reason(one.store_of(2)) is Reason.DRAINING
        assert running.finish().end is TransferEnd.DONE

    def test_a_draining_daemon_misses_until_it_is_resumed(self, host: Host) -> None:
        one = host.instance()
        one.stored(1)
        host.do(Drain())
        assert one.lookup(1).hits == 0
        host.do(Resume())
        assert one.lookup(1).hits == 1
        assert one.store(2).finish().end is TransferEnd.DONE


class TestEnds:
    def test_blocks_are_committed_before_their_submitter_hears_of_it(self, host: Host) -> None:
        one = host.instance(together=False)
        ended = one.store(1, 2).finish()
        assert kinds(host.actions) == ["CommitSlots", "Notify"]
        assert (ended.end, ended.succeeded.tolist(), ended.error) == (TransferEnd.DONE, [1, 1], None)
        assert host.of(Notify)[0].session == one.scheduler
        assert (host.counters.stored_blocks, host.counters.stored_bytes) == (2, 8192)

    def test_nothing_is_committed_before_the_last_rank(self, host: Host) -> None:
        pair = host.instance(sizes=((4096, 4096),))
        running = pair.store(1)
        assert running.part(1) is None
        assert host.actions == []
        assert pair.hits(1) == []
        assert running.part(0) is not None
        assert pair.hits(1) == [1]

    def test_recency_on_record_is_highest_for_the_head_of_the_newest_batch(self, host: Host) -> None:
        one = host.instance()
        one.store(1, 2).finish()
        first = host.of(CommitSlots)[0]
        one.store(3, 4, 5).finish()
        second = host.of(CommitSlots)[0]
        assert first.slots.shape == (2, 1)
        assert second.first_clock - len(second.slots) >= first.first_clock

    def test_a_block_counts_only_if_every_shard_of_it_succeeded(self, host: Host) -> None:
        pair = host.instance(sizes=((4096, 4096),))
        running = pair.store(1, 2, 3)
        assert running.part(0, PartOutcome.FAILED, [0]) is None
        ended = running.part(1, PartOutcome.FAILED, [2])
        assert ended is not None
        assert (ended.end, ended.succeeded.tolist()) == (TransferEnd.FAILED, [0, 1, 0])
        assert ended.error is not None
        assert ended.error.reason is Reason.COPY_FAILED
        assert kinds(host.actions) == ["CommitSlots", "FreeSlots", "Notify"]
        assert pair.hits(1, 2, 3) == [2]

    def test_slots_are_not_freed_while_another_rank_may_write_them(self, host: Host) -> None:
        pair = host.instance(sizes=((4096, 4096),))
        running = pair.store(1)
        assert running.part(0, PartOutcome.FAILED) is None
        assert host.of(FreeSlots) == []
        assert [revoke.part for revoke in host.of(RevokePart)] == [running.posts[1].part]
        assert running.part(1, PartOutcome.REVOKED) is not None
        assert len(host.of(FreeSlots)[0].slots) == 2

    @pytest.mark.parametrize(
        ("outcome", "end", "reason"),
        [
            (PartOutcome.FAILED, TransferEnd.FAILED, Reason.COPY_FAILED),
            (PartOutcome.REVOKED, TransferEnd.CANCELLED, Reason.REVOKED),
            (PartOutcome.GATE_DEADLINE, TransferEnd.CANCELLED, Reason.GATE_DEADLINE),
        ],
    )
    def test_how_a_part_ends_decides_how_the_transfer_does(
        self, host: Host, outcome: PartOutcome, end: TransferEnd, reason: Reason
    ) -> None:
        one = host.instance()
        ended = one.store(1).part(0, outcome, message="because")
        assert ended is not None
        assert ended.error is not None
        assert (ended.end, ended.error.reason, ended.error.message) == (end, reason, "because")
        assert one.store(1).results == [ACCEPTED], "the key is free again"

    def test_the_first_thing_that_went_wrong_is_the_one_that_is_told(self, host: Host) -> None:
        pair = host.instance(sizes=((4096, 4096),))
        running = pair.store(1)
        running.part(0, PartOutcome.FAILED)
        ended = running.part(1, PartOutcome.REVOKED)
        assert ended is not None
        assert ended.error is not None
        assert (ended.end, ended.error.reason) == (TransferEnd.FAILED, Reason.COPY_FAILED)

    def test_positions_beyond_the_part_fail_all_of_it(self, host: Host) -> None:
        one = host.instance()
        ended = one.store(1, 2).part(0, PartOutcome.FAILED, [7])
        assert ended is not None
        assert ended.succeeded.tolist() == [0, 0]

    def test_messages_that_come_late_or_from_the_wrong_worker_only_count(self, host: Host) -> None:
        one = host.instance()
        stranger = host.worker()
        running = one.store(1)
        post = running.posts[0]
        host.do(finished(stranger, post.part))
        assert running.ended() is None
        running.finish()
        host.do(finished(post.worker, post.part, PartOutcome.FAILED))
        assert one.hits(1) == [1]
        assert host.counters.late_messages == 2


class TestCallingOff:
    def test_every_open_part_is_asked_to_end_once(self, host: Host) -> None:
        three = host.instance(sizes=((4096,) * 3,))
        running = three.store(1)
        running.part(1)
        cancel = CancelTransfers(three.scheduler, three.epoch, (running.ticket, Ticket(999)))
        host.do(cancel)
        assert [revoke.part for revoke in host.of(RevokePart)] == [
            running.posts[0].part,
            running.posts[2].part,
        ]
        host.do(cancel)
        assert host.of(RevokePart) == []
        running.part(0, PartOutcome.REVOKED)
        ended = running.part(2, PartOutcome.DONE)
        assert ended is not None
        assert ended.error is not None
        assert (ended.end, ended.error.reason) == (TransferEnd.CANCELLED, Reason.CANCELLED)
        assert host.counters.cancelled_transfers == 1

    def test_a_cancellation_that_comes_too_late_changes_nothing(self, host: Host) -> None:
        one = host.instance()
        running = one.store(1)
        host.do(CancelTransfers(one.scheduler, one.epoch, (running.ticket,)))
        assert running.finish().end is TransferEnd.DONE
        assert one.hits(1) == [1]

    def test_a_transfer_past_its_deadline_is_cancelled_and_still_fenced(self, host: Host) -> None:
        one = host.instance()
        running = one.store(1)
        host.now_s += 119
        one.lookup(1)
        host.do(Tick())
        assert host.of(RevokePart) == []
        host.now_s += 1
        host.do(Tick())
        assert len(host.of(RevokePart)) == 1
        host.do(Tick())
        assert host.actions == []
        assert running.ended() is None, "not before its part has ended"
        ended = running.part(0, PartOutcome.REVOKED)
        assert ended is not None
        assert ended.error is not None
        assert ended.error.reason is Reason.DEADLINE


class TestWait:
    def test_answers_what_the_event_told(self, host: Host) -> None:
        one = host.instance()
        running = one.store(1)
        assert running.ended() is None
        assert running.ended() is not running.finish()
        ended = running.ended()
        assert ended is not None
        assert ended.end is TransferEnd.DONE

    def test_forgets_all_but_the_latest(self, make_host: Callable[..., Host]) -> None:
        host = make_host(CoreLimits(terminal_kept=2))
        one = host.instance()
        runs = [one.store(number) for number in range(3)]
        for run in runs:
            run.finish()
        assert runs[1].ended() is not None
        with pytest.raises(Exception, match="UNKNOWN_TRANSFER"):
            runs[0].ended()

    def test_forgets_sooner_what_was_large(self, make_host: Callable[..., Host]) -> None:
        host = make_host(CoreLimits(transfers_max=1, transfer_blocks_max=4))
        one = host.instance()
        runs = []
        for first in (0, 2, 4):
            runs.append(one.store(first, first + 1))
            runs[-1].finish()
        assert runs[1].ended() is not None
        assert runs[2].ended() is not None
        with pytest.raises(Exception, match="UNKNOWN_TRANSFER"):
            runs[0].ended()

    def test_asks_for_the_right_epoch(self, host: Host) -> None:
        one = host.instance()
        running = one.store(1)
        one.epoch = Epoch(999)
        with pytest.raises(Exception, match="WRONG_EPOCH"):
            running.ended()


def test_parts_go_to_each_ranks_own_worker(host: Host) -> None:
    pair = host.instance(sizes=((4096, 4096),), worker=None)
    workers = [host.worker(), host.worker()]
    for rank, worker in enumerate(workers):
        pair.register(rank, worker)
    pair.store(1)
    assert [post.worker for post in host.of(PostPart)] == workers
    assert [opened.worker for opened in host.of(OpenSlots)] == workers
