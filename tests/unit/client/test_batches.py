"""Several requests, replies and events in one message of the session stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvtier import ClientState, Lease
from kvtier.queries import Touch, one_query
from kvtier.session.batches import BATCH_BYTES_MAX, MESSAGES_MAX, in_batches
from kvtier.session.state import SILENCE_S, UNHURRIED_MAX
from kvtier.v1 import cache_pb2, types_pb2

from tests.unit.client.peer import Peer, hashes, taken_apart


def requests(sizes: list[int]) -> list[cache_pb2.AttachRequest]:
    return [
        cache_pb2.AttachRequest(id=number + 1, touch=cache_pb2.TouchRequest(hashes=b"h" * size))
        for number, size in enumerate(sizes)
    ]


@given(st.lists(st.sampled_from([0, 32, 1_000, BATCH_BYTES_MAX - 100, BATCH_BYTES_MAX + 1]), max_size=200))
def test_the_same_requests_in_their_order_in_bounded_messages(sizes: list[int]) -> None:
    sent = list(in_batches(requests(sizes)))
    assert taken_apart(sent) == requests(sizes)
    for message in sent:
        if message.HasField("batch"):
            assert not message.id
            assert 2 <= len(message.batch.requests) <= MESSAGES_MAX
            assert sum(each.ByteSize() for each in message.batch.requests) <= BATCH_BYTES_MAX


class TestSession:
    def test_several_requests_go_in_one_message(self, peer: Peer) -> None:
        ask_twice(peer)
        [message] = peer.messages()
        assert [each.WhichOneof("body") for each in message.batch.requests] == ["lookup", "lookup"]
        assert [each.id for each in message.batch.requests] == sorted(
            {each.id for each in message.batch.requests}
        )

    def test_one_request_goes_as_it_is(self, peer: Peer) -> None:
        peer.session.lookup(hashes(1), one_query(0), lease=False)
        [message] = peer.messages()
        assert message.WhichOneof("body") == "lookup"

    def test_replies_and_events_of_one_message_are_taken_in_order(self, peer: Peer) -> None:
        record = peer.session.store(0, hashes(1), [0], None)
        [request] = peer.messages()
        assert record.part is not None
        peer.say(
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
        assert peer.session.outcome(record).done

    def test_a_touch_in_no_hurry_goes_with_the_next_message(self, peer: Peer) -> None:
        for number in range(3):
            peer.session.touch(Touch(hashes(number), one_query(0)), lazily=True)
        assert not peer.session.has_outgoing
        peer.now_s += 2 * SILENCE_S
        assert peer.session.state is not ClientState.UNRESPONSIVE, "nothing is on its way"
        peer.session.lookup(hashes(9), one_query(0), lease=False)
        [message] = peer.messages()
        assert bodies(message) == ["lookup", "touch", "touch", "touch"]
        assert not peer.session.has_outgoing

    def test_it_goes_with_a_heartbeat_at_the_latest(self, peer: Peer) -> None:
        peer.session.touch(Touch(hashes(1), one_query(0)), lazily=True)
        peer.now_s += peer.session.tick()
        peer.session.tick()
        [message] = peer.messages()
        assert bodies(message) == ["heartbeat", "touch"]

    def test_one_in_a_hurry_takes_those_before_it_along(self, peer: Peer) -> None:
        for number, lazily in enumerate((True, False)):
            peer.session.touch(Touch(hashes(number), one_query(0)), lazily=lazily)
        [message] = peer.messages()
        assert [each.touch.hashes for each in message.batch.requests] == [hashes(0), hashes(1)]

    def test_stores_in_no_hurry_go_together_and_in_order(self, peer: Peer) -> None:
        for number in range(2):
            peer.session.store(0, hashes(number), [number], None, lazily=True)
        assert (peer.session.has_unhurried, peer.session.has_outgoing) == (True, False)
        peer.session.store(0, hashes(2), [2], None)
        assert (peer.session.has_unhurried, peer.session.has_outgoing) == (False, True)
        [message] = peer.messages()
        tickets = [each.store.signals.ticket for each in taken_apart([message])]
        assert tickets == sorted(tickets), "the daemon takes tickets in their order alone"
        assert [each.store.hashes for each in taken_apart([message])] == [hashes(0), hashes(1), hashes(2)]

    def test_whoever_waits_for_one_hurries_them(self, peer: Peer) -> None:
        peer.session.store(0, hashes(0), [0], None, lazily=True)
        peer.session.hurry()
        assert [bodies(each) for each in peer.messages()] == [["store"]]
        peer.session.hurry()
        assert not peer.session.has_outgoing, "there is nothing left"

    def test_what_waits_is_owed_no_answer(self, peer: Peer) -> None:
        peer.session.lookup(hashes(9), one_query(0), lease=False)
        [lookup] = peer.messages()
        peer.session.store(0, hashes(0), [0], None, lazily=True)
        peer.say(lookup.id, lookup=cache_pb2.LookupResponse())
        states = []
        for _ in range(2):
            peer.now_s += 2 * SILENCE_S
            states.append(peer.session.state)
            peer.session.hurry()
            peer.messages()
        assert states == [ClientState.READY, ClientState.UNRESPONSIVE], "it is owed one when it was sent"

    def test_leases_given_back_go_with_the_next_message_and_are_owed_no_answer(self, peer: Peer) -> None:
        peer.session.lookup(hashes(1), one_query(0), lease=True)
        [lookup] = peer.messages()
        assert (peer.session.take_lease_asked(), peer.session.take_lease_asked()) == (True, False)
        record = peer.session.lookup(hashes(1), one_query(0), lease=False)
        [other] = peer.messages()
        assert not peer.session.take_lease_asked()
        peer.answer_lookup(lookup, hits=1, lease_id=5)
        peer.answer_lookup(other, hits=1)
        assert record.answer is not None
        peer.session.release(Lease(5, peer.session.epoch or 0, 1))
        assert (peer.session.has_releases, peer.session.has_outgoing) == (True, False)
        peer.session.lookup(hashes(2), one_query(0), lease=True)
        [message] = peer.messages()
        assert (message.WhichOneof("body"), list(message.released_leases)) == ("lookup", [5])
        peer.answer_lookup(message, hits=0)
        for body in (Touch(hashes(1), one_query(0)), Touch(hashes(2), one_query(0))):
            peer.session.touch(body)
        assert not any(each.id for each in peer.sent())
        peer.now_s += 2 * SILENCE_S
        assert peer.session.state is ClientState.READY, "nothing is owed"

    def test_a_lease_given_back_goes_alone_if_it_must(self, peer: Peer) -> None:
        peer.session.lookup(hashes(1), one_query(0), lease=True)
        [lookup] = peer.messages()
        peer.answer_lookup(lookup, hits=1, lease_id=5)
        peer.session.release(Lease(5, peer.session.epoch or 0, 1))
        [message] = peer.messages()
        assert (message.WhichOneof("body"), message.id, list(message.released_leases)) == (None, 0, [5])
        peer.now_s += 2 * SILENCE_S
        assert peer.session.state is ClientState.READY

    def test_only_so_many_wait(self, peer: Peer) -> None:
        for number in range(UNHURRIED_MAX):
            peer.session.touch(Touch(hashes(number), one_query(0)), lazily=True)
            assert not peer.session.has_outgoing
        peer.session.touch(Touch(hashes(0), one_query(0)), lazily=True)
        assert len(taken_apart(peer.messages())) == UNHURRIED_MAX + 1

    def test_none_outlives_its_session(self, peer: Peer) -> None:
        peer.session.touch(Touch(hashes(1), one_query(0)), lazily=True)
        peer.session.lost("it was stopped")
        peer.welcome()
        peer.session.lookup(hashes(9), one_query(0), lease=False)
        assert [bodies(each) for each in peer.messages()] == [["lookup"]]


def bodies(message: cache_pb2.AttachRequest) -> list[str]:
    return sorted(str(each.WhichOneof("body")) for each in taken_apart([message]))


def ask_twice(peer: Peer) -> None:
    for number in (1, 2):
        peer.session.lookup(hashes(number), one_query(0), lease=False)
