"""The session core: what it sends, what it accepts, and how it ends what the daemon will not end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier import (
    ClientState,
    Doorbell,
    GroupQuery,
    LookupMode,
    PartRef,
    PartState,
    Reason,
    Role,
    TransferState,
)
from kvtier.connection.steps import OpenStream, SideCall, SideReply, attach
from kvtier.errors import ConnectionLostError
from kvtier.lookups import Lease, LookupRecord
from kvtier.queries import one_query
from kvtier.session.state import PATIENCE_S, SILENCE_S
from kvtier.spec import FEATURES
from kvtier.transfers import TransferRecord
from kvtier.v1 import cache_pb2, side_pb2, types_pb2

from tests.unit.client.peer import Peer, hashes


def state(peer: Peer) -> ClientState:
    return peer.session.state


def wants_registration(peer: Peer) -> bool:
    return peer.session.memory.wants_registration


def ask(peer: Peer, *numbers: int, lease: bool = False) -> LookupRecord:
    return peer.session.lookup(hashes(*numbers), one_query(0), lease=lease)


def part_of(record: TransferRecord) -> PartRef:
    assert record.part is not None
    return record.part


def leased(peer: Peer, hits: int = 2, lease_id: int = 5) -> Lease:
    record = ask(peer, *range(hits), lease=True)
    peer.answer_lookup(peer.sent()[-1], hits, lease_id)
    assert record.answer is not None
    assert record.answer.lease is not None
    return record.answer.lease


def store(peer: Peer, *numbers: int, doorbell: Doorbell | None = None) -> TransferRecord:
    return peer.session.store(0, hashes(*numbers), list(range(len(numbers))), doorbell)


# --- states ---


def test_is_connecting_until_welcomed_and_ready_once_registered_and_complete(
    make_peer: Callable[..., Peer],
) -> None:
    peer = make_peer()
    assert state(peer) is ClientState.CONNECTING
    peer.session.say_hello(b"t" * 16, 1)
    [hello] = peer.sent()
    assert hello.hello.token == b"t" * 16
    assert [g.group for g in hello.hello.groups] == [0]
    peer.say(
        hello.id,
        welcome=cache_pb2.Welcome(
            epoch=3, features=FEATURES, instance=cache_pb2.InstanceEvent(missing_ranks=[0])
        ),
    )
    assert state(peer) is ClientState.ATTACHED
    assert "ranks [0]" in peer.session.status().why
    assert wants_registration(peer)
    peer.register()
    assert state(peer) is ClientState.ATTACHED
    peer.say(instance=cache_pb2.InstanceEvent(ready=True))
    assert state(peer) is ClientState.READY
    assert peer.session.status().why == ""


def test_a_refused_hello_carries_its_reason(make_peer: Callable[..., Peer]) -> None:
    peer = make_peer()
    record = peer.session.say_hello(b"t" * 16, 1)
    peer.refuse(peer.sent()[0], types_pb2.REASON_FINGERPRINT_MISMATCH)
    assert record.error is not None
    assert record.error.reason is Reason.FINGERPRINT_MISMATCH
    assert record.event.is_set()


def test_without_a_session_everything_is_a_miss_or_refused_at_once(make_peer: Callable[..., Peer]) -> None:
    peer = make_peer()
    lookup, transfer = ask(peer, 1), store(peer, 1)
    assert lookup.answer is not None
    assert (lookup.answer.hits, lookup.answer.answered) == (0, False)
    assert lookup.answer.error is not None
    assert lookup.answer.error.reason is Reason.NOT_ATTACHED
    assert transfer.part is None
    assert transfer.outcome.throttled
    assert transfer.outcome.fenced
    assert not peer.sent()


def test_an_incomplete_instance_misses_without_asking(make_peer: Callable[..., Peer]) -> None:
    peer = make_peer(Role.SCHEDULER, world_size=2)
    peer.welcome(ready=False)
    record = ask(peer, 1)
    assert record.answer is not None
    assert record.answer.error is not None
    assert record.answer.error.reason is Reason.INSTANCE_INCOMPLETE
    assert not peer.sent()


def test_goodbye_ends_the_session_with_its_reason(peer: Peer) -> None:
    why = types_pb2.Error(reason=types_pb2.REASON_EPOCH_ENDED, message="rank 3 died")
    peer.say(goodbye=cache_pb2.Goodbye(why=why))
    with pytest.raises(ConnectionLostError, match="rank 3 died"):
        peer.session.tick()


def test_the_next_epoch_starts_clean(peer: Peer) -> None:
    held = leased(peer)
    pending = ask(peer, 9)
    peer.session.lost("gone")
    assert pending.answer is not None
    assert not pending.answer.answered
    peer.welcome(epoch=8)
    assert state(peer) is ClientState.READY
    transfer = peer.session.load(0, held, 0, [0], None, keep_lease=False)
    assert transfer.outcome.error is not None
    assert transfer.outcome.error.reason is Reason.UNKNOWN_LEASE
    peer.session.release(held)
    assert not peer.sent()


# --- lookups and leases ---


def test_a_lookup_is_answered_under_its_id_in_any_order(peer: Peer) -> None:
    first, second = ask(peer, 1), ask(peer, 2, 3)
    one, two = peer.sent()
    peer.answer_lookup(two, 2)
    assert not first.event.is_set()
    peer.answer_lookup(one, 1)
    assert first.answer is not None
    assert second.answer is not None
    assert (first.answer.hits, second.answer.hits) == (1, 2)


def test_no_hashes_is_an_answer_without_asking(peer: Peer) -> None:
    record = ask(peer)
    assert record.answer is not None
    assert record.answer.answered
    assert not peer.sent()


def test_a_prefix_is_cut_to_the_limit_and_an_exact_lookup_is_not(make_peer: Callable[..., Peer]) -> None:
    peer = make_peer()
    peer.welcome(lookup_hashes_max=2)
    ask(peer, 1, 2, 3)
    assert peer.sent()[0].lookup.hashes == hashes(1, 2)
    exact = peer.session.lookup(hashes(1, 2, 3), one_query(0, LookupMode.EXACT), lease=False)
    assert exact.answer is not None
    assert exact.answer.error is not None
    assert exact.answer.error.reason is Reason.TOO_MANY_BLOCKS


def test_no_message_passes_the_daemons_limit(make_peer: Callable[..., Peer]) -> None:
    peer = make_peer()
    peer.welcome(message_bytes_max=1024 + 10 * 37)
    ask(peer, *range(100))
    assert peer.sent()[0].ByteSize() <= 1024 + 10 * 37
    assert store(peer, *range(10)).part is not None
    assert peer.sent()[0].ByteSize() <= 1024 + 10 * 37
    refused = store(peer, *range(11))
    assert refused.outcome.error is not None
    assert refused.outcome.error.reason is Reason.TOO_MANY_BLOCKS


def test_a_lease_that_comes_too_late_is_released_at_once(peer: Peer) -> None:
    record = ask(peer, 1, lease=True)
    [request] = peer.sent()
    assert not peer.session.abandon(record).answered
    peer.answer_lookup(request, 1, lease_id=44)
    [release] = peer.sent()
    assert list(release.released_leases) == [44]
    assert record.answer is not None
    assert not record.answer.answered, "what was said to be a miss stays one"


def test_releasing_is_idempotent_and_batched(peer: Peer) -> None:
    one, two = leased(peer, lease_id=5), leased(peer, lease_id=6)
    for lease in (one, two, one, two):
        peer.session.release(lease)
    [release] = peer.sent()
    assert list(release.released_leases) == [5, 6]


def test_a_load_consumes_its_lease_only_when_it_is_accepted(peer: Peer) -> None:
    lease = leased(peer)
    peer.session.load(0, lease, 0, [3, 4], None, keep_lease=False)
    [request] = peer.sent()
    peer.session.release(lease)
    assert not peer.sent(), "the load has it"
    peer.say(request.id, submit=cache_pb2.SubmitResponse())
    peer.session.release(lease)
    assert not peer.sent()
    assert peer.session.status().leases == 0


def test_a_lease_released_while_its_load_is_refused_is_given_back(peer: Peer) -> None:
    lease = leased(peer)
    transfer = peer.session.load(0, lease, 0, [3], None, keep_lease=False)
    [request] = peer.sent()
    second = peer.session.load(0, lease, 0, [5], None, keep_lease=False)
    assert second.outcome.refused, "one load at a time may consume it"
    peer.session.release(lease)
    peer.refuse(request, types_pb2.REASON_QUEUE_FULL)
    assert transfer.outcome.throttled
    [release] = peer.sent()
    assert list(release.released_leases) == [lease.lease_id]


def test_a_refused_load_leaves_the_lease_for_another_try(peer: Peer) -> None:
    lease = leased(peer)
    peer.session.load(0, lease, 0, [3], None, keep_lease=False)
    peer.refuse(peer.sent()[0], types_pb2.REASON_QUEUE_FULL)
    assert peer.session.load(0, lease, 0, [3], None, keep_lease=False).part is not None


def test_what_was_given_back_is_told_before_more_is_asked_for(peer: Peer) -> None:
    """Leases are bounded: the daemon must not count the old one against the new."""
    peer.session.release(leased(peer, lease_id=5))
    ask(peer, 1, lease=True)
    [message] = peer.sent()
    assert (message.WhichOneof("body"), list(message.released_leases)) == ("lookup", [5])


def test_what_is_given_back_is_told_after_what_still_uses_it(peer: Peer) -> None:
    lease = leased(peer, lease_id=5)
    peer.session.load(0, lease, 0, [3], None, keep_lease=True)
    peer.session.release(lease)
    load, release = peer.sent()
    assert (load.WhichOneof("body"), list(load.released_leases)) == ("load", [])
    assert (release.WhichOneof("body"), list(release.released_leases)) == (None, [5])


@pytest.mark.parametrize(
    ("states", "pending"), [(b"", False), (b"\2\2", False), (b"\2\1", True), (b"\2\0", False), (b"\1", True)]
)
def test_a_lookup_says_whether_it_ended_at_a_block_on_its_way(
    peer: Peer, states: bytes, pending: bool
) -> None:
    record = ask(peer, 1, 2)
    answer = cache_pb2.GroupAnswer(hits=states.count(2), states=states)
    peer.say(peer.sent()[0].id, lookup=cache_pb2.LookupResponse(answers=[answer]))
    assert record.answer is not None
    assert record.answer.pending is pending


# --- prefetch ---


def prefetch(peer: Peer, *numbers: int, mode: LookupMode = LookupMode.PREFIX) -> LookupRecord:
    return peer.session.prefetch(hashes(*numbers), one_query(0, mode))


def test_a_prefetch_is_answered_with_states_and_no_lease(peer: Peer) -> None:
    record = prefetch(peer, 1, 2, 3, mode=LookupMode.EXACT)
    [request] = peer.sent()
    [query] = request.prefetch.queries
    assert (query.mode, query.hash_stride) == (cache_pb2.LOOKUP_MODE_EXACT, 1)
    assert request.prefetch.hashes == hashes(1, 2, 3)
    answer = cache_pb2.GroupAnswer(hits=1, states=b"\2\0\1")
    peer.say(request.id, prefetch=cache_pb2.PrefetchResponse(answers=[answer]))
    assert record.answer is not None
    assert (record.answer.answered, record.answer.hits, record.answer.lease) == (True, 1, None)
    assert record.answer.pending
    counters = peer.session.counters
    assert (counters.lookups, counters.blocks_hit) == (0, 0)


def test_a_prefetch_that_comes_to_nothing_says_why_and_counts_as_no_miss(
    make_peer: Callable[..., Peer],
) -> None:
    away = make_peer()
    record = prefetch(away, 1)
    assert record.answer is not None
    assert record.answer.error is not None
    assert record.answer.error.reason is Reason.NOT_ATTACHED
    small = make_peer()
    small.welcome(lookup_hashes_max=2)
    record = prefetch(small, 1, 2, 3)
    [request] = small.sent()
    assert request.prefetch.hashes == hashes(1, 2)
    small.refuse(request, types_pb2.REASON_MALFORMED)
    assert record.answer is not None
    assert record.answer.error is not None
    assert small.session.abandon(prefetch(small, 1)).error is not None
    assert not away.session.counters.lookups_unanswered
    assert not small.session.counters.lookups_unanswered


# --- how fast prompts are computed ---


def beat(peer: Peer) -> float:
    """The rate in the next heartbeat, which is answered."""
    peer.now_s += 2.0
    peer.session.tick()
    [message] = peer.sent()
    peer.say(message.id, heartbeat_ack=cache_pb2.HeartbeatAck())
    return message.heartbeat.prefill_tokens_per_s


def test_a_reported_rate_goes_with_one_heartbeat_the_last_of_several(peer: Peer) -> None:
    assert beat(peer) == 0
    peer.session.news.prefill(1000.0)
    peer.session.news.prefill(2000.0)
    assert not peer.sent()
    assert beat(peer) == 2000.0
    assert beat(peer) == 0
    peer.session.news.prefill(2000.0)
    assert beat(peer) == 0, "it is known"
    peer.session.news.prefill(0)
    assert beat(peer) == 0
    peer.session.news.prefill(1500.0)
    assert beat(peer) == 1500.0


def test_the_next_daemon_is_told_the_rate_at_once(peer: Peer) -> None:
    peer.session.news.prefill(1000.0)
    peer.session.lost("gone")
    peer.session.say_hello(b"t" * 16, 1)
    [hello] = peer.sent()
    assert hello.hello.prefill_tokens_per_s == 1000.0


# --- silence ---


def test_audits_go_with_heartbeats_some_at_a_time(peer: Peer) -> None:
    for number in range(20):
        peer.session.news.audits.append(cache_pb2.Audit(matched=True, group=number, block_hash=b"h"))
    told: list[int] = []
    for expected in (16, 4, 0):
        peer.now_s += 2.0
        peer.session.tick()
        [message] = peer.sent()
        peer.say(message.id, heartbeat_ack=cache_pb2.HeartbeatAck())
        told += [audit.group for audit in message.heartbeat.audits]
        assert len(message.heartbeat.audits) == expected
    assert told == list(range(20))


def test_heartbeats_go_out_one_at_a_time(peer: Peer) -> None:
    assert peer.session.tick() == pytest.approx(2.0)
    peer.now_s += 2.0
    peer.session.tick()
    [beat] = peer.sent()
    assert beat.HasField("heartbeat")
    peer.now_s += 2.0
    peer.session.tick()
    assert not peer.sent(), "the first has not been answered"
    peer.say(beat.id, heartbeat_ack=cache_pb2.HeartbeatAck())
    peer.now_s += 2.0
    peer.session.tick()
    assert len(peer.sent()) == 1


def test_a_daemon_that_owes_an_answer_is_unresponsive_until_it_speaks(peer: Peer) -> None:
    peer.now_s += 2.0
    peer.session.tick()
    [beat] = peer.sent()
    peer.now_s += SILENCE_S / 2
    assert state(peer) is ClientState.READY
    peer.now_s += SILENCE_S
    assert state(peer) is ClientState.UNRESPONSIVE
    lookup, transfer = ask(peer, 1), store(peer, 1)
    assert lookup.answer is not None
    assert lookup.answer.error is not None
    assert lookup.answer.error.reason is Reason.DEADLINE
    assert transfer.outcome.throttled
    assert not peer.sent()
    peer.say(beat.id, heartbeat_ack=cache_pb2.HeartbeatAck())
    assert state(peer) is ClientState.READY


def test_a_quiet_daemon_that_owes_nothing_is_responsive(peer: Peer) -> None:
    peer.now_s += 1000
    assert state(peer) is ClientState.READY


def test_one_lookup_without_answer_is_enough_for_the_others_not_to_wait(peer: Peer) -> None:
    first = ask(peer, 1)
    peer.now_s += 2 * PATIENCE_S
    peer.session.abandon(first)
    [request] = peer.sent()
    second = ask(peer, 2)
    assert second.answer is not None
    assert not second.answer.answered
    peer.answer_lookup(request, 1)
    assert ask(peer, 3).answer is None, "it speaks again, so it is asked again"


def test_giving_up_at_once_blames_nobody(peer: Peer) -> None:
    peer.session.abandon(ask(peer, 1))
    assert ask(peer, 2).answer is None


def test_a_late_lookup_of_a_daemon_that_speaks_blames_nobody(peer: Peer) -> None:
    slow = ask(peer, 1)
    quick = ask(peer, 2)
    peer.now_s += 2 * PATIENCE_S
    peer.answer_lookup(peer.sent()[1], 1)
    assert quick.answer is not None
    peer.session.abandon(slow)
    assert state(peer) is ClientState.READY


# --- transfers ---


def test_a_store_is_sent_with_its_signals_and_ends_with_its_event(peer: Peer) -> None:
    record = store(peer, 1, 2, doorbell=Doorbell(3, 77))
    [request] = peer.sent()
    assert record.part is not None
    signals = request.store.signals
    assert (signals.ticket, signals.part_word) == (record.part.ticket, record.part.word)
    assert (signals.gate, signals.doorbell, signals.doorbell_value) == (types_pb2.GATE_DOORBELL, 3, 77)
    assert record.part.epoch == 7
    peer.say(
        request.id,
        submit=cache_pb2.SubmitResponse(
            transfer=types_pb2.TransferId(boot_nonce=1, number=9), results=b"\0\1"
        ),
    )
    assert not record.event.is_set()
    peer.end(signals.ticket, succeeded=b"\1\0")
    assert record.event.is_set()
    assert record.outcome.done
    assert record.outcome.succeeded == b"\1\0"
    assert record.number == (1, 9)


def test_the_event_may_come_before_the_submits_answer(peer: Peer) -> None:
    record = store(peer, 1)
    [request] = peer.sent()
    peer.end(request.store.signals.ticket)
    peer.say(request.id, submit=cache_pb2.SubmitResponse(results=b"\0"))
    assert record.outcome.done
    assert record.results == b"\0"


def test_a_refused_submit_ends_the_transfer_and_frees_its_word(make_peer: Callable[..., Peer]) -> None:
    peer = make_peer(parts=1)
    peer.welcome()
    record = store(peer, 1)
    assert store(peer, 2).outcome.throttled, "the only word is in use"
    peer.refuse(peer.sent()[0], types_pb2.REASON_BLOCK_ID_RANGE)
    assert record.outcome.refused
    assert record.outcome.fenced
    assert store(peer, 2).part is not None


def test_nothing_to_store_is_done(peer: Peer) -> None:
    record = store(peer)
    assert record.outcome.done
    assert record.part is None
    assert not peer.sent()


def test_an_unknown_event_changes_nothing(peer: Peer) -> None:
    record = store(peer, 1)
    peer.end(999)
    assert record.outcome.state is TransferState.ACTIVE


def test_cancel_names_the_ticket_and_only_while_it_runs(peer: Peer) -> None:
    record = store(peer, 1)
    peer.sent()
    peer.session.cancel(record)
    [request] = peer.sent()
    assert record.part is not None
    assert list(request.cancel.tickets) == [record.part.ticket]
    peer.end(record.part.ticket, types_pb2.TRANSFER_STATE_CANCELLED)
    peer.session.cancel(record)
    assert not peer.sent()
    assert record.outcome.state is TransferState.CANCELLED


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["store", "end", "refuse", "reattach"]), max_size=60), st.integers(1, 5))
def test_words_are_never_shared_and_tickets_always_rise(steps: list[str], parts: int) -> None:
    peer = Peer(Role.SCHEDULER, parts=parts)
    epoch = 1
    peer.welcome(epoch)
    running: list[tuple[TransferRecord, cache_pb2.AttachRequest]] = []
    last_ticket = 0
    for step in steps:
        if step == "store":
            record = store(peer, 1)
            if record.part is None:
                assert len(running) == parts, "refused although a word was free"
                continue
            assert record.part.ticket > last_ticket
            last_ticket = record.part.ticket
            assert record.part.word not in [other.part.word for other, _ in running if other.part]
            running.append((record, peer.sent()[-1]))
        elif step == "reattach":
            peer.session.lost("gone")
            assert all(
                record.outcome.state is TransferState.FAILED and not record.outcome.fenced
                for record, _ in running
            )
            running.clear()
            epoch += 1
            peer.welcome(epoch)
        elif running:
            record, request = running.pop(len(running) // 2)
            if step == "end":
                peer.end(part_of(record).ticket)
            else:
                peer.refuse(request, types_pb2.REASON_QUEUE_FULL)
            assert record.event.is_set()
    assert peer.session.status().transfers_active == len(running)


# --- when the daemon goes away ---


def test_a_lost_load_is_done_if_its_word_says_so(peer: Peer) -> None:
    lease = leased(peer)
    record = peer.session.load(0, lease, 0, [1, 2], None, keep_lease=False)
    assert peer.start(part_of(record))
    peer.session.lost("gone")
    assert record.event.is_set()
    assert peer.session.outcome(record).state is TransferState.ACTIVE, "a copy may still land"
    assert not peer.session.outcome(record).fenced
    peer.finish(part_of(record))
    outcome = peer.session.outcome(record)
    assert outcome.done
    assert outcome.succeeded == b"\1\1"


def test_a_lost_store_is_failed_and_fenced_once_its_source_is_free(peer: Peer) -> None:
    record = store(peer, 1)
    assert peer.start(part_of(record))
    peer.session.lost("gone")
    assert not peer.session.outcome(record).fenced
    peer.finish(part_of(record))
    outcome = peer.session.outcome(record)
    assert (outcome.state, outcome.fenced) == (TransferState.FAILED, True)
    assert outcome.error is not None
    assert outcome.error.reason is Reason.EPOCH_ENDED


def test_what_had_not_started_when_the_daemon_went_never_starts(peer: Peer) -> None:
    record = store(peer, 1)
    assert record.part is not None
    peer.session.lost("gone")
    assert not peer.start(part_of(record))
    assert peer.session.outcome(record).fenced
    assert peer.session.words.state(record.part) is PartState.LOST


def test_an_internal_error_is_no_refusal_because_a_part_may_be_under_way(peer: Peer) -> None:
    record = store(peer, 1)
    request = peer.sent()[-1]
    assert peer.start(part_of(record))
    peer.refuse(request, types_pb2.REASON_INTERNAL)
    assert not peer.session.outcome(record).fenced
    assert peer.session.ended is not None
    peer.session.lost(peer.session.ended)
    assert not peer.session.outcome(record).fenced
    peer.finish(part_of(record))
    outcome = peer.session.outcome(record)
    assert (outcome.state, outcome.fenced, outcome.refused) == (TransferState.FAILED, True, False)


def test_a_stores_source_is_free_before_its_commit_is_reported(peer: Peer) -> None:
    record = store(peer, 1)
    assert peer.start(part_of(record))
    peer.finish(part_of(record))
    outcome = peer.session.outcome(record)
    assert (outcome.state, outcome.fenced) == (TransferState.ACTIVE, True)


def test_a_scheduler_does_not_claim_a_fence_it_cannot_see(scheduler: Peer) -> None:
    record = store(scheduler, 1)
    scheduler.session.lost("gone")
    assert record.outcome.state is TransferState.FAILED
    assert not record.outcome.fenced


def test_registers_again_when_its_worker_was_lost_but_not_for_an_old_request(peer: Peer) -> None:
    asking = cache_pb2.InstanceEvent(reregister_ranks=[0])
    peer.say(instance=asking)
    assert wants_registration(peer)
    assert state(peer) is ClientState.ATTACHED
    peer.register()
    peer.say(instance=asking)
    assert not wants_registration(peer), "it was sent before we registered"
    peer.say(instance=cache_pb2.InstanceEvent(ready=True))
    assert state(peer) is ClientState.READY
    peer.say(instance=asking)
    assert wants_registration(peer), "and this one is new"


def test_a_lookup_ends_at_once_if_the_daemon_takes_no_hashes_at_all() -> None:
    peer = Peer()
    peer.welcome(lookup_hashes_max=0)
    record = ask(peer, 1, lease=True)
    assert record.event.is_set()
    assert record.answer is not None
    assert record.answer.error is not None
    assert record.answer.error.reason is Reason.TOO_MANY_BLOCKS


BODIES = st.sampled_from(
    [
        {"welcome": cache_pb2.Welcome(epoch=9, features=FEATURES)},
        {"welcome": cache_pb2.Welcome(epoch=9)},
        {"heartbeat_ack": cache_pb2.HeartbeatAck()},
        {"lookup": cache_pb2.LookupResponse()},
        {"lookup": cache_pb2.LookupResponse(answers=[cache_pb2.GroupAnswer(hits=1)], lease_id=3)},
        {"submit": cache_pb2.SubmitResponse(results=b"\x09")},
        {"release": cache_pb2.ReleaseResponse()},
        {"cancel": cache_pb2.CancelResponse()},
        {"wait": cache_pb2.WaitResponse()},
        {"error": types_pb2.Error(reason=types_pb2.REASON_INTERNAL, message="no")},
        {"transfer": cache_pb2.TransferEvent(ticket=1, state=types_pb2.TransferState.ValueType(77))},
        {"instance": cache_pb2.InstanceEvent(ready=True, reregister_ranks=[0])},
        {"goodbye": cache_pb2.Goodbye()},
        {},
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 12), BODIES),
            st.sampled_from(["lookup", "store", "load", "release", "cancel", "tick", "lost", "hello"]),
        ),
        max_size=40,
    )
)
def test_whatever_the_daemon_says_nothing_is_raised_and_everything_ends_when_it_is_gone(
    steps: list[Any],
) -> None:
    peer = Peer(parts=3)
    session = peer.session
    lookups: list[LookupRecord] = []
    transfers: list[TransferRecord] = []
    lease = Lease(3, 9, 1)
    for step in steps:
        if isinstance(step, tuple):
            peer.say(step[0], **step[1])
        elif step == "lookup":
            lookups.append(ask(peer, 1, lease=True))
        elif step == "store":
            transfers.append(store(peer, 1, 2))
        elif step == "load":
            transfers.append(session.load(0, lease, 0, [1], None, keep_lease=False))
        elif step == "release":
            session.release(lease)
        elif step == "cancel":
            for transfer in transfers:
                session.cancel(transfer)
        elif step == "tick" and session.epoch is not None and session.ended is None:
            session.tick()
        elif step == "lost":
            session.lost("gone")
        elif step == "hello" and session.epoch is None:
            session.lost("gone")
            session.say_hello(b"t" * 16, 1)
        if session.memory.wants_registration:
            peer.register()
        session.status()
        peer.sent()
        peer.now_s += 0.3
    session.lost("gone")
    assert all(lookup.answer is not None and lookup.event.is_set() for lookup in lookups)
    assert all(transfer.event.is_set() for transfer in transfers)
    assert all(session.outcome(transfer).fenced for transfer in transfers), "nothing had started"
    peer.close()


BOTH = [GroupQuery(0), GroupQuery(1, window_blocks=2, hash_stride=2)]


def test_groups_are_asked_together_with_hashes_that_travel_once(scheduler: Peer) -> None:
    record = scheduler.session.lookup(hashes(1, 2, 3, 4), BOTH, lease=True)
    [message] = scheduler.sent()
    assert message.lookup.hashes == hashes(1, 2, 3, 4)
    assert [(query.hashes, query.hash_stride, query.window_blocks) for query in message.lookup.queries] == [
        (b"", 1, 0),
        (b"", 2, 2),
    ]
    answers = [
        cache_pb2.GroupAnswer(group=0, hits=4, states=bytes([2] * 4), lease_id=7),
        cache_pb2.GroupAnswer(group=1, hits=2, states=bytes([0, 2]), lease_id=8, lease_first=1),
    ]
    scheduler.say(message.id, lookup=cache_pb2.LookupResponse(answers=answers))
    assert record.answer is not None
    assert [(lease.lease_id, lease.first, lease.blocks) for lease in record.answer.leases] == [
        (7, 0, 4),
        (8, 1, 1),
    ]
    assert scheduler.session.status().leases == 2
    record.answer.release()
    record.answer.release()
    [release] = scheduler.sent()
    assert list(release.released_leases) == [7, 8]


def test_a_miss_has_every_group_that_was_asked_about(make_peer: Callable[..., Peer]) -> None:
    record = make_peer(Role.SCHEDULER).session.lookup(hashes(1), BOTH, lease=True)
    assert record.answer is not None
    assert [(found.group, found.hits, found.lease) for found in record.answer.groups] == [
        (0, 0, None),
        (1, 0, None),
    ]


def test_an_answer_to_other_queries_is_none(scheduler: Peer) -> None:
    record = scheduler.session.lookup(hashes(1, 2), BOTH, lease=True)
    [message] = scheduler.sent()
    scheduler.answer_lookup(message, 1)
    assert record.answer is not None
    assert record.answer.error is not None
    assert (record.answer.answered, record.answer.error.reason) == (False, Reason.MALFORMED)


def test_a_daemon_that_lacks_a_feature_is_named_and_not_used(make_peer: Callable[..., Peer]) -> None:
    for lacking in FEATURES:
        peer = make_peer(Role.SCHEDULER)
        steps = attach(peer.session)
        assert isinstance(next(steps), SideCall)
        opened = side_pb2.SideResponse(opened=side_pb2.SideOpened(token=b"t" * 16, daemon_pid=1))
        step = steps.send(SideReply(opened, []))
        assert isinstance(step, OpenStream)
        [hello] = peer.sent()
        assert list(hello.hello.features) == list(FEATURES)
        others = [feature for feature in FEATURES if feature != lacking]
        welcome = cache_pb2.Welcome(
            epoch=3, daemon_version="0.0.9", features=others, instance=cache_pb2.InstanceEvent(ready=True)
        )
        peer.say(hello.id, welcome=welcome)
        assert step.record.event.is_set(), "nobody waits for more"
        with pytest.raises(ConnectionLostError, match=rf"kvtierd 0\.0\.9 lacks .*\({lacking}\)"):
            steps.send(None)
        assert state(peer) is ClientState.CONNECTING
        assert ask(peer, 1).answer is not None
