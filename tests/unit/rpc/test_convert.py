"""Messages become stimuli only if they are sound; nothing is copied that need not be."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier.v1 import cache_pb2, types_pb2
from kvtierd.core.actions import (
    InstanceView,
    LookupReply,
    PrefetchReply,
    SubmitReply,
    TransferEnd,
    TransferEnded,
)
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Epoch, LeaseId, NamespaceDigest, Rank, SessionId, Ticket, TransferNumber
from kvtierd.core.stimuli import CoreLimits, LookupMode, RenewSession, Signals
from kvtierd.rpc import convert
from kvtierd.rpc.convert import Caller

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
        found = convert.hashes_of(data, 32, "hashes", 10)
        assert found.shape == (3, 32)
        assert np.shares_memory(found, np.frombuffer(data, np.uint8))
        assert found.tobytes() == data

    @given(st.integers(8, 31), st.integers(0, 9))
    def test_shorter_ones_are_padded_with_zeros(self, size: int, count: int) -> None:
        data = hashes(count, size)
        found = convert.hashes_of(data, size, "hashes", 10)
        assert found.shape == (count, 32)
        assert found[:, :size].tobytes() == data
        assert not found[:, size:].any()

    @given(st.integers(8, 32), st.integers(1, 400))
    def test_a_broken_last_hash_is_refused(self, size: int, length: int) -> None:
        if length % size:
            assert reason(convert.hashes_of, bytes(length), size, "hashes", 1000) == (
                Reason.HASH_LENGTH,
                "hashes",
            )

    def test_too_many_are_refused(self) -> None:
        assert reason(convert.hashes_of, hashes(11), 32, "hashes", 10)[0] is Reason.TOO_MANY_BLOCKS


class TestLookup:
    def test_a_sound_one(self) -> None:
        stimulus = convert.lookup_of(lookup(mode=cache_pb2.LOOKUP_MODE_EXACT, group=2), CALLER, LIMITS)
        assert (stimulus.session, stimulus.epoch, stimulus.group) == (3, 7, 2)
        assert stimulus.mode is LookupMode.EXACT
        assert not stimulus.lease

    @pytest.mark.parametrize("mode", [cache_pb2.LOOKUP_MODE_UNSPECIFIED, cache_pb2.LOOKUP_MODE_SUFFIX, 99])
    def test_modes_of_other_versions_are_refused(self, mode: int) -> None:
        found = reason(convert.lookup_of, lookup(mode=mode), CALLER, LIMITS)
        assert found == (Reason.MODE_UNSUPPORTED, "queries[0].mode")

    def test_a_window_is_refused(self) -> None:
        assert (
            reason(convert.lookup_of, lookup(window_blocks=4), CALLER, LIMITS)[0] is Reason.MODE_UNSUPPORTED
        )

    @pytest.mark.parametrize("count", [0, 2])
    def test_exactly_one_query_is_answered(self, count: int) -> None:
        request = cache_pb2.LookupRequest(queries=[cache_pb2.GroupQuery()] * count)
        assert reason(convert.lookup_of, request, CALLER, LIMITS) == (Reason.COUNT_MISMATCH, "queries")

    def test_the_reply_says_why_there_is_no_lease(self) -> None:
        states = np.array([2, 2, 0], np.uint8)
        refused = Refusal(Reason.LEASE_LIMIT, "too many", field="leases", value=4)
        response = convert.lookup_reply(1, LookupReply(2, states, None, refused))
        assert response.answers[0] == cache_pb2.GroupAnswer(group=1, hits=2, states=b"\2\2\0")
        assert response.lease_id == 0
        assert response.lease_refused.reason == types_pb2.REASON_LEASE_LIMIT
        assert not convert.lookup_reply(1, LookupReply(2, states, LeaseId(9), None)).HasField("lease_refused")


class TestPrefetch:
    def test_a_sound_one(self) -> None:
        query = cache_pb2.GroupQuery(group=1, mode=cache_pb2.LOOKUP_MODE_EXACT, hashes=hashes(3))
        stimulus = convert.prefetch_of(cache_pb2.PrefetchRequest(queries=[query]), CALLER, LIMITS)
        assert (stimulus.session, stimulus.epoch, stimulus.group) == (3, 7, 1)
        assert stimulus.mode is LookupMode.EXACT
        assert stimulus.hashes.tobytes() == hashes(3)

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"hashes": hashes(101)}, (Reason.TOO_MANY_BLOCKS, "queries[0].hashes")),
            ({"hashes": b"x"}, (Reason.HASH_LENGTH, "queries[0].hashes")),
            ({"mode": cache_pb2.LOOKUP_MODE_SUFFIX}, (Reason.MODE_UNSUPPORTED, "queries[0].mode")),
            ({"window_blocks": 1}, (Reason.MODE_UNSUPPORTED, "queries[0].window_blocks")),
        ],
    )
    def test_it_is_bounded_as_a_lookup_is(self, changes: dict[str, object], why: tuple[Reason, str]) -> None:
        request = cache_pb2.PrefetchRequest(queries=lookup(**changes).queries)
        assert reason(convert.prefetch_of, request, CALLER, LIMITS) == why
        twice = cache_pb2.PrefetchRequest(queries=[cache_pb2.GroupQuery()] * 2)
        assert reason(convert.prefetch_of, twice, CALLER, LIMITS) == (Reason.COUNT_MISMATCH, "queries")

    def test_the_reply_is_what_a_lookup_would_say(self) -> None:
        query = cache_pb2.GroupQuery(group=1, mode=cache_pb2.LOOKUP_MODE_EXACT, hashes=hashes(4))
        stimulus = convert.prefetch_of(cache_pb2.PrefetchRequest(queries=[query]), CALLER, LIMITS)
        response = convert.prefetch_reply(stimulus, PrefetchReply(np.array([2, 1, 0, 2], np.uint8)))
        assert list(response.answers) == [cache_pb2.GroupAnswer(group=1, hits=2, states=b"\2\1\0\2")]


class TestHeartbeat:
    @given(st.floats(1e-3, 1e9) | st.just(0.0))
    def test_a_rate_goes_to_the_core_as_it_is(self, rate: float) -> None:
        stimulus = convert.renew_of(cache_pb2.Heartbeat(prefill_tokens_per_s=rate), SessionId(4))
        assert stimulus == RenewSession(SessionId(4), rate)

    @given(st.floats().filter(lambda rate: rate != 0 and not 1e-3 <= rate <= 1e9))
    def test_no_engine_computes_like_that(self, rate: float) -> None:
        beat = cache_pb2.Heartbeat(prefill_tokens_per_s=rate)
        assert reason(convert.renew_of, beat, SessionId(4)) == (Reason.MALFORMED, "prefill_tokens_per_s")


class TestSubmissions:
    def test_a_sound_store(self) -> None:
        stimulus = convert.store_of(
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

    def test_one_block_id_for_each_hash(self) -> None:
        assert reason(convert.store_of, store(2, [1]), CALLER, LIMITS) == (Reason.COUNT_MISMATCH, "block_ids")

    @pytest.mark.parametrize("ticket", [0, 2**56, 2**64 - 1])
    def test_a_ticket_no_part_word_can_hold_is_refused(self, ticket: int) -> None:
        found = reason(convert.store_of, store(ticket=ticket), CALLER, LIMITS)
        assert found == (Reason.TICKET_ORDER, "signals.ticket")

    def test_an_unknown_gate_is_refused(self) -> None:
        assert reason(convert.store_of, store(gate=2), CALLER, LIMITS) == (
            Reason.MODE_UNSUPPORTED,
            "signals.gate",
        )

    def test_too_many_blocks_are_refused(self) -> None:
        assert reason(convert.store_of, store(11), CALLER, LIMITS)[0] is Reason.TOO_MANY_BLOCKS
        load = cache_pb2.LoadRequest(signals=cache_pb2.Signals(ticket=1), block_ids=list(range(11)))
        assert reason(convert.load_of, load, CALLER, LIMITS)[0] is Reason.TOO_MANY_BLOCKS

    def test_a_sound_load(self) -> None:
        request = cache_pb2.LoadRequest(
            signals=cache_pb2.Signals(ticket=1),
            group=1,
            lease_id=8,
            first=3,
            block_ids=[5, 4],
            keep_lease=True,
        )
        stimulus = convert.load_of(request, CALLER, LIMITS)
        assert (stimulus.lease, stimulus.first, stimulus.keep_lease) == (8, 3, True)
        assert stimulus.block_ids.tolist() == [5, 4]

    def test_the_reply_carries_one_byte_per_key(self) -> None:
        reply = SubmitReply(TransferNumber(4), np.array([0, 1, 3], np.uint8))
        response = convert.submit_reply(2**64 - 1, reply)
        assert response.results == b"\0\1\3"
        assert (response.transfer.boot_nonce, response.transfer.number) == (2**64 - 1, 4)


class TestTheRest:
    def test_lists_of_leases_and_tickets_are_bounded(self) -> None:
        many = cache_pb2.ReleaseRequest(lease_ids=range(6))
        assert reason(convert.release_of, many, CALLER, LIMITS) == (Reason.TOO_MANY_BLOCKS, "lease_ids")
        tickets = cache_pb2.CancelRequest(tickets=range(6))
        assert reason(convert.cancel_of, tickets, CALLER, LIMITS) == (Reason.TOO_MANY_BLOCKS, "tickets")
        assert convert.release_of(cache_pb2.ReleaseRequest(lease_ids=[1, 2]), CALLER, LIMITS).leases == (1, 2)
        assert convert.cancel_of(cache_pb2.CancelRequest(tickets=[4]), CALLER, LIMITS).tickets == (4,)

    def test_a_wait_has_an_end(self) -> None:
        assert convert.wait_timeout_s(cache_pb2.WaitRequest(timeout_ms=1500)) == 1.5
        assert reason(convert.wait_timeout_s, cache_pb2.WaitRequest(timeout_ms=60_001))[0] is Reason.DEADLINE

    @pytest.mark.parametrize("end", list(TransferEnd))
    def test_an_ended_transfer(self, end: TransferEnd) -> None:
        error = None if end is TransferEnd.DONE else Refusal(Reason.REVOKED, "revoked")
        event = TransferEnded(TransferNumber(1), Ticket(2), end, np.array([1, 0], np.uint8), error)
        message = convert.transfer_event(6, event)
        assert types_pb2.TransferState.Name(message.state) == f"TRANSFER_STATE_{end.name}"
        assert message.succeeded == b"\1\0"
        assert message.HasField("error") == (error is not None)

    def test_an_instance(self) -> None:
        view = InstanceView(False, (Rank(1), Rank(3)), NamespaceDigest(b"\xab" * 16), (Rank(2),))
        message = convert.instance_event(view)
        assert not message.ready
        assert list(message.missing_ranks) == [1, 3]
        assert list(message.reregister_ranks) == [2]
        assert message.namespace_digest == "ab" * 16
