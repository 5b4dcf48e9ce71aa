"""Messages become stimuli only if they are sound; nothing is copied that need not be."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier.v1 import cache_pb2, types_pb2
from kvtierd.core.actions import (
    GroupHits,
    InstanceView,
    LookupReply,
    SubmitReply,
    TransferEnd,
    TransferEnded,
)
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Epoch, LeaseId, NamespaceDigest, Rank, SessionId, Ticket, TransferNumber
from kvtierd.core.stimuli import (
    AuditReport,
    BlockQuery,
    CoreLimits,
    RenewSession,
    RetentionRequest,
    Signals,
)
from kvtierd.rpc import calls, heartbeats, queries, replies
from kvtierd.rpc.queries import Caller

LIMITS = CoreLimits(
    lookup_hashes_max=100, transfer_blocks_max=10, leases_max=5, terminal_kept=3, transfers_max=2
)
CALLER = Caller(SessionId(3), Epoch(7), 32)


def hashes(count: int, size: int = 32) -> bytes:
    return bytes(i % 251 for i in range(count * size))


def lookup(**changes: object) -> cache_pb2.LookupRequest:
    query: dict[str, Any] = {"group": 0, "mode": cache_pb2.LOOKUP_MODE_PREFIX, "hashes": hashes(2)} | changes
    return cache_pb2.LookupRequest(queries=[cache_pb2.GroupQuery(**query)])


def store(count: int = 2, ids: list[int] | None = None, **signals: int) -> cache_pb2.StoreRequest:
    fields: dict[str, Any] = {"ticket": 1} | signals
    return cache_pb2.StoreRequest(
        signals=cache_pb2.Signals(**fields),
        hashes=hashes(count),
        block_ids=list(range(count)) if ids is None else ids,
    )


def reason(call: object, *arguments: object) -> tuple[Reason, str]:
    with pytest.raises(Refusal) as refusal:
        call(*arguments)  # type: ignore[operator]
    assert refusal.value.message
    return refusal.value.reason, refusal.value.field


class TestHashes:
    def test_full_length_hashes_are_a_view_of_the_message(self) -> None:
        data = hashes(3)
        found = queries.hashes_of(data, 32, "hashes", 10)
        assert found.shape == (3, 32)
        assert np.shares_memory(found, np.frombuffer(data, np.uint8))
        assert found.tobytes() == data

    @given(st.integers(8, 31), st.integers(0, 9))
    def test_shorter_ones_are_padded_with_zeros(self, size: int, count: int) -> None:
        data = hashes(count, size)
        found = queries.hashes_of(data, size, "hashes", 10)
        assert found.shape == (count, 32)
        assert found[:, :size].tobytes() == data
        assert not found[:, size:].any()

    @given(st.integers(8, 32), st.integers(1, 400))
    def test_a_broken_last_hash_is_refused(self, size: int, length: int) -> None:
        if length % size:
            assert reason(queries.hashes_of, bytes(length), size, "hashes", 1000) == (
                Reason.HASH_LENGTH,
                "hashes",
            )

    def test_too_many_are_refused(self) -> None:
        assert reason(queries.hashes_of, hashes(11), 32, "hashes", 10)[0] is Reason.TOO_MANY_BLOCKS


class TestLookup:
    def test_a_sound_one(self) -> None:
        stimulus = calls.lookup_of(lookup(mode=cache_pb2.LOOKUP_MODE_EXACT, group=2), CALLER, LIMITS)
        [query] = stimulus.queries
        assert (stimulus.session, stimulus.epoch, query.group) == (3, 7, 2)
        assert (query.exact, query.window_blocks) == (True, 0)
        assert not stimulus.lease

    @pytest.mark.parametrize("mode", [cache_pb2.LOOKUP_MODE_UNSPECIFIED, 99])
    def test_modes_of_other_versions_are_refused(self, mode: int) -> None:
        found = reason(calls.lookup_of, lookup(mode=mode), CALLER, LIMITS)
        assert found == (Reason.MODE_UNSUPPORTED, "queries[0].mode")

    def test_only_a_suffix_has_a_window_and_it_needs_one(self) -> None:
        window = reason(calls.lookup_of, lookup(window_blocks=4), CALLER, LIMITS)
        none = reason(calls.lookup_of, lookup(mode=cache_pb2.LOOKUP_MODE_SUFFIX), CALLER, LIMITS)
        assert window == none == (Reason.MODE_UNSUPPORTED, "queries[0].window_blocks")

    @pytest.mark.parametrize("count", [0, 65])
    def test_there_is_a_query_for_each_group(self, count: int) -> None:
        request = cache_pb2.LookupRequest(queries=[cache_pb2.GroupQuery()] * count)
        assert reason(calls.lookup_of, request, CALLER, LIMITS) == (Reason.COUNT_MISMATCH, "queries")

    def test_the_reply_says_why_there_is_no_lease(self) -> None:
        states = np.array([2, 2, 0], np.uint8)
        refused = Refusal(Reason.LEASE_LIMIT, "too many", field="leases", value=4)
        asked = (BlockQuery(1, np.zeros((3, 32), np.uint8)),)
        response = replies.lookup_reply(asked, LookupReply((GroupHits(2, states, 3),), refused))
        assert response.answers[0] == cache_pb2.GroupAnswer(group=1, hits=2, states=b"\2\2\0", readable=3)
        assert response.lease_id == 0
        assert response.lease_refused.reason == types_pb2.REASON_LEASE_LIMIT
        response = replies.lookup_reply(asked, LookupReply((GroupHits(2, states, 2, LeaseId(9)),)))
        assert response.lease_id == 9
        assert not response.HasField("lease_refused")

    @pytest.mark.parametrize(
        ("states", "told"), [([2, 2], b"\2\2\0"), ([2, 2, 1, 1], b"\2\2\1"), ([2] * 5, b"\2\2\2")]
    )
    def test_a_prefix_by_itself_is_told_up_to_the_first_that_is_no_hit(
        self, states: list[int], told: bytes
    ) -> None:
        asked = (BlockQuery(0, np.zeros((5, 32), np.uint8)),)
        reply = LookupReply((GroupHits(2, np.array(states, np.uint8), 2),))
        assert replies.lookup_reply(asked, reply).answers[0].states == told
        whole = LookupReply((GroupHits(5, np.full(5, 2, np.uint8), 5),))
        assert replies.lookup_reply(asked, whole).answers[0].states == b"\2" * 5


class TestPrefetch:
    def test_a_sound_one(self) -> None:
        query = cache_pb2.GroupQuery(group=1, mode=cache_pb2.LOOKUP_MODE_EXACT, hashes=hashes(3))
        stimulus = calls.prefetch_of(cache_pb2.PrefetchRequest(queries=[query]), CALLER, LIMITS)
        [asked] = stimulus.queries
        assert (stimulus.session, stimulus.epoch, asked.group) == (3, 7, 1)
        assert asked.exact
        assert asked.hashes.tobytes() == hashes(3)

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"hashes": hashes(101)}, (Reason.TOO_MANY_BLOCKS, "queries[0].hashes")),
            ({"hashes": b"x"}, (Reason.HASH_LENGTH, "queries[0].hashes")),
            ({"mode": 0}, (Reason.MODE_UNSUPPORTED, "queries[0].mode")),
            ({"mode": cache_pb2.LOOKUP_MODE_SUFFIX}, (Reason.MODE_UNSUPPORTED, "queries[0].window_blocks")),
            ({"window_blocks": 1}, (Reason.MODE_UNSUPPORTED, "queries[0].window_blocks")),
        ],
    )
    def test_it_is_bounded_as_a_lookup_is(self, changes: dict[str, object], why: tuple[Reason, str]) -> None:
        request = cache_pb2.PrefetchRequest(queries=lookup(**changes).queries)
        assert reason(calls.prefetch_of, request, CALLER, LIMITS) == why
        many = cache_pb2.PrefetchRequest(queries=[cache_pb2.GroupQuery()] * 65)
        assert reason(calls.prefetch_of, many, CALLER, LIMITS) == (Reason.COUNT_MISMATCH, "queries")

    def test_the_reply_is_what_a_lookup_would_say(self) -> None:
        query = cache_pb2.GroupQuery(group=1, mode=cache_pb2.LOOKUP_MODE_EXACT, hashes=hashes(4))
        stimulus = calls.prefetch_of(cache_pb2.PrefetchRequest(queries=[query]), CALLER, LIMITS)
        reply = LookupReply((GroupHits(2, np.array([2, 1, 0, 2], np.uint8), 2),))
        response = replies.prefetch_reply(stimulus.queries, reply)
        told = cache_pb2.GroupAnswer(group=1, hits=2, states=b"\2\1\0\2", readable=2)
        assert list(response.answers) == [told]


PREFIX, EXACT, SUFFIX = (
    cache_pb2.LOOKUP_MODE_PREFIX,
    cache_pb2.LOOKUP_MODE_EXACT,
    cache_pb2.LOOKUP_MODE_SUFFIX,
)


def joint(*asked: dict[str, Any], shared: int = 0) -> cache_pb2.LookupRequest:
    return cache_pb2.LookupRequest(
        queries=[cache_pb2.GroupQuery(**query) for query in asked], hashes=hashes(shared), lease=True
    )


class TestSeveralGroups:
    def test_hashes_travel_once_and_coarser_blocks_take_the_last_of_theirs(self) -> None:
        fine = {"group": 0, "mode": PREFIX, "hash_stride": 1}
        coarse = {"group": 1, "mode": SUFFIX, "window_blocks": 1, "hash_stride": 3}
        stimulus = calls.lookup_of(joint(fine, coarse, shared=8), CALLER, LIMITS)
        assert stimulus.lease
        [one, two] = stimulus.queries
        assert (one.group, one.window_blocks, two.group, two.window_blocks) == (0, 0, 1, 1)
        rows = np.frombuffer(hashes(8), np.uint8).reshape(8, 32)
        assert one.hashes.tobytes() == rows.tobytes()
        assert two.hashes.tobytes() == rows[[2, 5]].tobytes()
        assert two.hashes.flags.c_contiguous

    def test_one_window_alone_is_answered_as_several_groups_are(self) -> None:
        request = joint({"mode": SUFFIX, "window_blocks": 2, "hashes": hashes(4)})
        stimulus = calls.lookup_of(request, CALLER, LIMITS)
        assert stimulus.queries[0].window_blocks == 2
        reply = LookupReply((GroupHits(3, np.array([0, 2, 2, 1], np.uint8), 3, LeaseId(8), 1),))
        response = replies.lookup_reply(stimulus.queries, reply)
        told = cache_pb2.GroupAnswer(hits=3, states=b"\0\2\2\1", lease_id=8, lease_first=1)
        assert (list(response.answers), response.lease_id) == ([told], 0)

    @pytest.mark.parametrize(
        ("second", "shared", "why"),
        [
            ({"mode": EXACT}, 0, (Reason.MODE_UNSUPPORTED, "queries[1].mode")),
            ({"mode": SUFFIX}, 0, (Reason.MODE_UNSUPPORTED, "queries[1].window_blocks")),
            (
                {"mode": PREFIX, "hash_stride": 1, "hashes": hashes(1)},
                0,
                (Reason.MODE_UNSUPPORTED, "queries[1].hashes"),
            ),
            ({"mode": PREFIX, "hashes": b"x"}, 0, (Reason.HASH_LENGTH, "queries[1].hashes")),
            ({"mode": PREFIX, "hash_stride": 1}, 101, (Reason.TOO_MANY_BLOCKS, "hashes")),
            ({"mode": PREFIX, "hashes": hashes(99)}, 0, (Reason.TOO_MANY_BLOCKS, "queries")),
        ],
    )
    def test_what_is_wrong_is_named(
        self, second: dict[str, Any], shared: int, why: tuple[Reason, str]
    ) -> None:
        request = joint({"mode": PREFIX, "hashes": hashes(2)}, second | {"group": 1}, shared=shared)
        assert reason(calls.lookup_of, request, CALLER, LIMITS) == why

    def test_a_touch_of_several_groups_takes_exact_ones(self) -> None:
        request = cache_pb2.TouchRequest(
            queries=[
                cache_pb2.GroupQuery(group=0, mode=PREFIX, hash_stride=1),
                cache_pb2.GroupQuery(group=1, mode=EXACT, hashes=hashes(2)),
            ],
            hashes=hashes(3),
        )
        stimulus = calls.touch_of(request, CALLER, LIMITS)
        assert [(len(query.hashes), query.exact) for query in stimulus.queries] == [(3, False), (2, True)]
        request.queries[1].mode = SUFFIX
        assert reason(calls.touch_of, request, CALLER, LIMITS)[1] == "queries[1].mode"

    @pytest.mark.parametrize("groups", [1, 2])
    def test_a_touch_holds_or_cools(self, groups: int) -> None:
        asked = [cache_pb2.GroupQuery(group=group, mode=PREFIX, hash_stride=1) for group in range(groups)]
        request = cache_pb2.TouchRequest(queries=asked, hashes=hashes(3), hold_ms=2**64 - 1)
        stimulus = calls.touch_of(request, CALLER, LIMITS)
        assert (stimulus.hold_ms, stimulus.cold) == (2**64 - 1, False)
        request.cold = True
        assert reason(calls.touch_of, request, CALLER, LIMITS) == (Reason.MALFORMED, "cold")
        request.hold_ms = 0
        assert calls.touch_of(request, CALLER, LIMITS).cold

    @pytest.mark.parametrize("groups", [1, 2])
    def test_a_lookup_of_the_host_alone(self, groups: int) -> None:
        request = joint(
            *({"mode": PREFIX, "hash_stride": 1, "group": group} for group in range(groups)), shared=3
        )
        for host_only in (False, True):
            request.host_only = host_only
            stimulus = calls.lookup_of(request, CALLER, LIMITS)
            assert stimulus.host_only is host_only

    def test_every_group_is_told_its_own_lease(self) -> None:
        states = np.array([0, 2], np.uint8)
        reply = LookupReply((GroupHits(2, states, 3, LeaseId(9), 1), GroupHits(1, states[:1], 2)))
        asked = (BlockQuery(4, np.zeros((2, 32), np.uint8), 1), BlockQuery(5, np.zeros((1, 32), np.uint8)))
        response = replies.lookup_reply(asked, reply)
        assert list(response.answers) == [
            cache_pb2.GroupAnswer(group=4, hits=2, states=b"\0\2", lease_id=9, lease_first=1),
            cache_pb2.GroupAnswer(group=5, hits=1, states=b"\0"),
        ]
        assert not response.lease_id


class TestHeartbeat:
    @given(st.floats(1e-3, 1e9) | st.just(0.0))
    def test_a_rate_goes_to_the_core_as_it_is(self, rate: float) -> None:
        stimulus = heartbeats.renew_of(cache_pb2.Heartbeat(prefill_tokens_per_s=rate), SessionId(4))
        assert stimulus == RenewSession(SessionId(4), rate)

    @given(st.floats().filter(lambda rate: rate != 0 and not 1e-3 <= rate <= 1e9))
    def test_no_engine_computes_like_that(self, rate: float) -> None:
        beat = cache_pb2.Heartbeat(prefill_tokens_per_s=rate)
        assert reason(heartbeats.renew_of, beat, SessionId(4)) == (Reason.MALFORMED, "prefill_tokens_per_s")


class TestAudits:
    SOUND = cache_pb2.Audit(
        matched=False, error=0.5, threshold=0.2, group=1, block_hash=b"h" * 32, detail="l"
    )

    def test_a_sound_one_goes_to_the_core_as_it_is(self) -> None:
        renewal = heartbeats.renew_of(cache_pb2.Heartbeat(audits=[self.SOUND]), SessionId(4))
        assert renewal.audits == (AuditReport(False, 0.5, 0.2, 1, b"h" * 32, "l"),)

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"error": math.nan}, "audits.error"),
            ({"error": -1.0}, "audits.error"),
            ({"threshold": math.inf}, "audits.threshold"),
            ({"block_hash": b""}, "audits.block_hash"),
            ({"block_hash": b"h" * 33}, "audits.block_hash"),
            ({"detail": "x" * 513}, "audits.detail"),
            ({"detail": "two\nlines"}, "audits.detail"),
        ],
    )
    def test_one_that_makes_no_sense_is_refused_by_field(self, changes: dict[str, Any], field: str) -> None:
        audit = cache_pb2.Audit()
        audit.CopyFrom(self.SOUND)
        audit.MergeFrom(cache_pb2.Audit(**changes))
        if changes.get("block_hash") == b"":
            audit.block_hash = b""
        beat = cache_pb2.Heartbeat(audits=[audit])
        assert reason(heartbeats.renew_of, beat, SessionId(4)) == (Reason.MALFORMED, field)

    def test_a_heartbeat_has_some_at_most(self) -> None:
        beat = cache_pb2.Heartbeat(audits=[self.SOUND] * 17)
        assert reason(heartbeats.renew_of, beat, SessionId(4)) == (Reason.MALFORMED, "audits")


class TestSubmissions:
    def test_a_sound_store(self) -> None:
        stimulus = calls.store_of(
            store(
                2,
                [7, 2**32 - 1],
                ticket=5,
                part_word=1,
                gate=types_pb2.GATE_DOORBELL,
                doorbell=2,
                doorbell_value=9,
            ),
            CALLER,
            LIMITS,
        )
        assert stimulus.block_ids.dtype == np.uint32
        assert stimulus.block_ids.tolist() == [7, 2**32 - 1]
        assert stimulus.signals == Signals(Ticket(5), 1, True, 2, 9)

    def test_its_retention(self) -> None:
        request = store()
        assert calls.store_of(request, CALLER, LIMITS).retention == RetentionRequest()
        request.retention.CopyFrom(cache_pb2.Retention(hold_ms=5, ttl_ms=5, host_only=True))
        assert calls.store_of(request, CALLER, LIMITS).retention == RetentionRequest(5, 5, True)
        request.retention.hold_ms = 6
        assert reason(calls.store_of, request, CALLER, LIMITS) == (Reason.MALFORMED, "retention.hold_ms")
        request.retention.ttl_ms = 0
        assert calls.store_of(request, CALLER, LIMITS).retention == RetentionRequest(6, 0, True)

    def test_how_the_blocks_of_a_store_belong_together(self) -> None:
        request = store(3)
        assert calls.store_of(request, CALLER, LIMITS).chains == ()
        previous = b"p" * CALLER.hash_bytes
        request.chains.add(blocks=1)
        request.chains.add(blocks=2, previous_hash=previous)
        first, second = calls.store_of(request, CALLER, LIMITS).chains
        assert (first.blocks, first.previous, second.blocks) == (1, None, 2)
        assert second.previous is not None
        assert second.previous[0].tobytes().rstrip(b"\0") == previous
        request.chains[1].previous_hash += b"p"
        found = reason(calls.store_of, request, CALLER, LIMITS)
        assert found == (Reason.HASH_LENGTH, "chains[1].previous_hash")

    @pytest.mark.parametrize("lengths", [[2], [4], [3, 0], [0, 3], [2**32 - 1, 1], [1] * 4, [1] * 100])
    def test_chains_are_the_whole_store_and_nothing_else(self, lengths: list[int]) -> None:
        request = store(3)
        for blocks in lengths:
            request.chains.add(blocks=blocks)
        assert reason(calls.store_of, request, CALLER, LIMITS) == (Reason.COUNT_MISMATCH, "chains")

    def test_one_block_id_for_each_hash(self) -> None:
        assert reason(calls.store_of, store(2, [1]), CALLER, LIMITS) == (
            Reason.COUNT_MISMATCH,
            "block_ids",
        )

    @pytest.mark.parametrize("ticket", [0, 2**56, 2**64 - 1])
    def test_a_ticket_no_part_word_can_hold_is_refused(self, ticket: int) -> None:
        found = reason(calls.store_of, store(ticket=ticket), CALLER, LIMITS)
        assert found == (Reason.TICKET_ORDER, "signals.ticket")

    def test_an_unknown_gate_is_refused(self) -> None:
        assert reason(calls.store_of, store(gate=2), CALLER, LIMITS) == (
            Reason.MODE_UNSUPPORTED,
            "signals.gate",
        )

    def test_too_many_blocks_are_refused(self) -> None:
        assert reason(calls.store_of, store(11), CALLER, LIMITS)[0] is Reason.TOO_MANY_BLOCKS
        load = cache_pb2.LoadRequest(signals=cache_pb2.Signals(ticket=1), block_ids=list(range(11)))
        assert reason(calls.load_of, load, CALLER, LIMITS)[0] is Reason.TOO_MANY_BLOCKS

    def test_a_sound_load(self) -> None:
        request = cache_pb2.LoadRequest(
            signals=cache_pb2.Signals(ticket=1),
            group=1,
            lease_id=8,
            first=3,
            block_ids=[5, 4],
            keep_lease=True,
        )
        stimulus = calls.load_of(request, CALLER, LIMITS)
        assert (stimulus.lease, stimulus.first, stimulus.keep_lease) == (8, 3, True)
        assert stimulus.block_ids.tolist() == [5, 4]

    def test_the_reply_carries_one_byte_per_key(self) -> None:
        reply = SubmitReply(TransferNumber(4), np.array([0, 1, 3], np.uint8))
        response = replies.submit_reply(2**64 - 1, reply)
        assert response.results == b"\0\1\3"
        assert (response.transfer.boot_nonce, response.transfer.number) == (2**64 - 1, 4)


class TestTheRest:
    def test_lists_of_leases_and_tickets_are_bounded(self) -> None:
        assert reason(calls.release_of, range(6), CALLER, LIMITS) == (Reason.TOO_MANY_BLOCKS, "lease_ids")
        tickets = cache_pb2.CancelRequest(tickets=range(6))
        assert reason(calls.cancel_of, tickets, CALLER, LIMITS) == (Reason.TOO_MANY_BLOCKS, "tickets")
        assert calls.release_of([1, 2], CALLER, LIMITS).leases == (
            1,
            2,
        )
        assert calls.cancel_of(cache_pb2.CancelRequest(tickets=[4]), CALLER, LIMITS).tickets == (4,)

    def test_a_wait_has_an_end(self) -> None:
        assert calls.wait_timeout_s(cache_pb2.WaitRequest(timeout_ms=1500)) == 1.5
        assert reason(calls.wait_timeout_s, cache_pb2.WaitRequest(timeout_ms=60_001))[0] is Reason.DEADLINE

    @pytest.mark.parametrize("end", list(TransferEnd))
    def test_an_ended_transfer(self, end: TransferEnd) -> None:
        error = None if end is TransferEnd.DONE else Refusal(Reason.REVOKED, "revoked")
        event = TransferEnded(TransferNumber(1), Ticket(2), end, np.array([1, 0], np.uint8), error)
        message = replies.transfer_event(6, event)
        assert types_pb2.TransferState.Name(message.state) == f"TRANSFER_STATE_{end.name}"
        assert message.succeeded == b"\1\0"
        assert message.HasField("error") == (error is not None)

    def test_an_instance(self) -> None:
        view = InstanceView(False, (Rank(1), Rank(3)), NamespaceDigest(b"\xab" * 16), (Rank(2),))
        message = replies.instance_event(view)
        assert not message.ready
        assert list(message.missing_ranks) == [1, 3]
        assert list(message.reregister_ranks) == [2]
        assert message.namespace_digest == "ab" * 16
