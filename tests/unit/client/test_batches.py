"""Several requests, replies and events in one message of the session stream."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier import ClientState, LookupMode
from kvtier.asking import Touch
from kvtier.batches import BATCH_BYTES_MAX, BATCHES, MESSAGES_MAX, in_batches
from kvtier.session import SILENCE_S, UNHURRIED_MAX
from kvtier.v1 import cache_pb2, types_pb2

from tests.unit.client.peer import Peer, hashes


def requests(sizes: list[int]) -> list[cache_pb2.AttachRequest]:
    return [
        cache_pb2.AttachRequest(id=number + 1, touch=cache_pb2.TouchRequest(hashes=b"h" * size))
        for number, size in enumerate(sizes)
    ]


def taken_apart(messages: list[cache_pb2.AttachRequest]) -> list[cache_pb2.AttachRequest]:
    return [each for one in messages for each in (one.batch.requests if one.HasField("batch") else [one])]


@given(st.lists(st.sampled_from([0, 32, 1_000, BATCH_BYTES_MAX - 100, BATCH_BYTES_MAX + 1]), max_size=200))
def test_the_same_requests_in_their_order_in_bounded_messages(sizes: list[int]) -> None:
    sent = list(in_batches(requests(sizes)))
    assert taken_apart(sent) == requests(sizes)
    for message in sent:
        if message.HasField("batch"):
            assert not message.id
            assert 2 <= len(message.batch.requests) <= MESSAGES_MAX
            assert sum(each.ByteSize() for each in message.batch.requests) <= BATCH_BYTES_MAX


@pytest.fixture
def modern(make_peer: Callable[..., Peer]) -> Peer:
    """Of a daemon that knows batches."""
    made = make_peer()
    made.welcome(features=[BATCHES])
    return made


class TestSession:
    def test_an_older_daemon_gets_every_request_in_a_message_of_its_own(self, peer: Peer) -> None:
        ask_twice(peer)
        assert [each.WhichOneof("body") for each in peer.sent()] == ["lookup", "lookup"]

    def test_a_daemon_that_knows_batches_gets_one_message(self, modern: Peer) -> None:
        ask_twice(modern)
        [message] = modern.sent()
        assert [each.WhichOneof("body") for each in message.batch.requests] == ["lookup", "lookup"]
        assert [each.id for each in message.batch.requests] == sorted(
            {each.id for each in message.batch.requests}
        )

    def test_one_request_goes_as_it_is(self, modern: Peer) -> None:
        modern.session.lookup(0, hashes(1), LookupMode.PREFIX, lease=False)
        [message] = modern.sent()
        assert message.WhichOneof("body") == "lookup"

    def test_replies_and_events_of_one_message_are_taken_in_order(self, modern: Peer) -> None:
        record = modern.session.store(0, hashes(1), [0], None)
        [request] = modern.sent()
        assert record.part is not None
        modern.say(
            batch=cache_pb2.ResponseBatch(
                responses=[
                    cache_pb2.AttachResponse(id=request.id, submit=cache_pb2.SubmitResponse(results=b"\1")),
                    cache_pb2.AttachResponse(
                        transfer=cache_pb2.TransferEvent(
                            ticket=record.part.ticket,
                            state=types_pb2.TRANSFER_STATE_DONE,
                            succeeded=b"\1",
                        )
                    ),
                ]
            )
        )
        assert record.accepted
        assert modern.session.outcome(record).done

    def test_a_touch_in_no_hurry_goes_with_the_next_message(self, modern: Peer) -> None:
        for number in range(3):
            modern.session.touch(Touch(hashes(number)), lazily=True)
        assert not modern.session.has_outgoing
        modern.now_s += 2 * SILENCE_S
        assert modern.session.state is not ClientState.UNRESPONSIVE, "nothing is on its way"
        modern.session.lookup(0, hashes(9), LookupMode.PREFIX, lease=False)
        [message] = modern.sent()
        assert bodies(message) == ["lookup", "touch", "touch", "touch"]
        assert not modern.session.has_outgoing

    def test_it_goes_with_a_heartbeat_at_the_latest(self, modern: Peer) -> None:
        modern.session.touch(Touch(hashes(1)), lazily=True)
        modern.now_s += modern.session.tick()
        modern.session.tick()
        [message] = modern.sent()
        assert bodies(message) == ["heartbeat", "touch"]

    def test_one_in_a_hurry_takes_those_before_it_along(self, modern: Peer) -> None:
        for number, lazily in enumerate((True, False)):
            modern.session.touch(Touch(hashes(number)), lazily=lazily)
        [message] = modern.sent()
        assert [each.touch.queries[0].hashes for each in message.batch.requests] == [hashes(0), hashes(1)]

    def test_stores_in_no_hurry_go_together_and_in_order(self, modern: Peer) -> None:
        for number in range(2):
            modern.session.store(0, hashes(number), [number], None, lazily=True)
        assert (modern.session.has_unhurried, modern.session.has_outgoing) == (True, False)
        modern.session.store(0, hashes(2), [2], None)
        assert (modern.session.has_unhurried, modern.session.has_outgoing) == (False, True)
        [message] = modern.sent()
        tickets = [each.store.signals.ticket for each in taken_apart([message])]
        assert tickets == sorted(tickets), "the daemon takes tickets in their order alone"
        assert [each.store.hashes for each in taken_apart([message])] == [hashes(0), hashes(1), hashes(2)]

    def test_whoever_waits_for_one_hurries_them(self, modern: Peer) -> None:
        modern.session.store(0, hashes(0), [0], None, lazily=True)
        modern.session.hurry()
        assert [bodies(each) for each in modern.sent()] == [["store"]]
        modern.session.hurry()
        assert not modern.session.has_outgoing, "there is nothing left"

    def test_what_waits_is_owed_no_answer(self, modern: Peer) -> None:
        modern.session.lookup(0, hashes(9), LookupMode.PREFIX, lease=False)
        [lookup] = modern.sent()
        modern.session.store(0, hashes(0), [0], None, lazily=True)
        modern.say(lookup.id, lookup=cache_pb2.LookupResponse())
        states = []
        for _ in range(2):
            modern.now_s += 2 * SILENCE_S
            states.append(modern.session.state)
            modern.session.hurry()
            modern.sent()
        assert states == [ClientState.READY, ClientState.UNRESPONSIVE], "it is owed one when it was sent"

    def test_only_so_many_wait(self, modern: Peer) -> None:
        for number in range(UNHURRIED_MAX):
            modern.session.touch(Touch(hashes(number)), lazily=True)
            assert not modern.session.has_outgoing
        modern.session.touch(Touch(hashes(0)), lazily=True)
        assert len(taken_apart(modern.sent())) == UNHURRIED_MAX + 1

    def test_an_older_daemon_is_told_at_once(self, peer: Peer) -> None:
        peer.session.touch(Touch(hashes(1)), lazily=True)
        assert [bodies(each) for each in peer.sent()] == [["touch"]]

    def test_none_outlives_its_session(self, modern: Peer) -> None:
        modern.session.touch(Touch(hashes(1)), lazily=True)
        modern.session.lost("it was stopped")
        modern.welcome(features=[BATCHES])
        modern.session.lookup(0, hashes(9), LookupMode.PREFIX, lease=False)
        assert [bodies(each) for each in modern.sent()] == [["lookup"]]


def bodies(message: cache_pb2.AttachRequest) -> list[str]:
    return sorted(str(each.WhichOneof("body")) for each in taken_apart([message]))


def ask_twice(peer: Peer) -> None:
    for number in (1, 2):
        peer.session.lookup(0, hashes(number), LookupMode.PREFIX, lease=False)
