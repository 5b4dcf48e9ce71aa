"""Several requests in one message of the session stream, and what comes back in few."""

from __future__ import annotations

import time
from typing import Any

import pytest
from kvtier.v1 import cache_pb2

from tests.integration.daemon.conftest import Connect
from tests.integration.daemon.raw import RawSession, Refused, hashes
from tests.integration.daemon.shared import connect as connect
from tests.integration.daemon.shared import daemon as daemon
from tests.integration.daemon.shared import shared_daemon as shared_daemon
from tests.support.process import Daemon

BATCHES = ["batches"]
PAUSE_S = 0.3
"""Longer than a reply waits for others, whatever the machine does."""


@pytest.fixture
def talking(daemon: Daemon, connect: Connect) -> RawSession:
    """Attached with the feature, registered, with random bytes in its cache."""
    session = connect().ready(features=BATCHES)
    session.fill(1)
    return session


def touch(key: bytes) -> cache_pb2.TouchRequest:
    query = cache_pb2.GroupQuery(mode=cache_pb2.LOOKUP_MODE_PREFIX, hashes=key)
    return cache_pb2.TouchRequest(queries=[query])


def lookup(session: RawSession, seed: int, count: int = 1) -> dict[str, Any]:
    query = cache_pb2.GroupQuery(mode=cache_pb2.LOOKUP_MODE_EXACT, hashes=hashes(count, seed=seed))
    return {"lookup": session.lookup_request(b"", queries=[query])}


def test_requests_are_answered_each_and_in_one_message(talking: RawSession) -> None:
    stream = talking.attached
    ids = stream.post_batch(*(lookup(talking, seed, count=seed) for seed in (1, 2, 3)))
    assert [len(stream.answer(each).lookup.answers[0].states) for each in ids] == [1, 2, 3]
    assert stream.batches == 1


def test_one_that_is_refused_takes_no_other_with_it(talking: RawSession) -> None:
    stream = talking.attached
    good, bad, last = stream.post_batch(
        lookup(talking, 1), {"lookup": cache_pb2.LookupRequest()}, lookup(talking, 2)
    )
    assert stream.answer(good).lookup.answers
    with pytest.raises(Refused):
        stream.answer(bad)
    assert stream.answer(last).lookup.answers


def test_stores_and_touches_of_one_message_come_back_in_few(talking: RawSession) -> None:
    stream = talking.attached
    stored = [(hashes(2, seed=seed), [seed, seed + 10]) for seed in range(8)]
    before = stream.messages
    requests = [talking.store_request(key, blocks) for key, blocks in stored]
    ids = stream.post_batch(
        *({"store": each} for each in requests),
        *({"touch": touch(key)} for key, _ in stored),
    )
    for each in ids:
        stream.answer(each)
    ended = [stream.event("transfer") for _ in stored]
    assert sorted(each.ticket for each in ended) == sorted(each.signals.ticket for each in requests)
    assert all(each.succeeded == b"\1\1" for each in ended)
    assert stream.messages - before < len(ids), "less than one for each request, and none for each event"
    for key, _ in stored:
        assert talking.lookup(key).answers[0].hits == 2


def test_ends_that_nobody_waits_for_are_told_together(talking: RawSession) -> None:
    stream = talking.attached
    for attempt in range(20):  # on a busy machine they may end long after each other
        before = stream.messages
        requests = [talking.store_request(hashes(2, seed=8 * attempt + seed), [0, 1]) for seed in range(8)]
        for each in requests:
            each.lazily = True
        stream.post_batch(*({"store": each} for each in requests))
        ended = [stream.event("transfer") for _ in requests]
        assert sorted(each.ticket for each in ended) == [each.signals.ticket for each in requests]
        if stream.messages - before == 1:  # with the replies
            return
    pytest.fail("their ends never came in one message")


def test_a_store_that_is_refused_leaves_no_trace_of_its_haste(talking: RawSession) -> None:
    stream = talking.attached
    bad = talking.store_request(hashes(1), [10**6])
    bad.lazily = True
    [one] = stream.post_batch({"store": bad})
    with pytest.raises(Refused):
        stream.answer(one)
    good = talking.store_request(hashes(1), [0])
    good.lazily = True
    stream.post_batch({"store": good})
    assert stream.event("transfer").succeeded == b"\1"


def test_a_reply_that_nothing_follows_comes_all_the_same(talking: RawSession) -> None:
    stream = talking.attached
    [one] = stream.post_batch({"touch": touch(hashes(1))})
    assert stream.answer(one).HasField("touch")
    for _ in range(200):  # more than wait for others
        stream.post_batch({"touch": touch(hashes(1))})
    time.sleep(PAUSE_S)
    assert talking.lookup(hashes(1)).answers


@pytest.mark.parametrize("what", ["too many", "an id", "a batch", "a hello", "nothing"])
def test_what_no_batch_may_have_is_refused_by_name(talking: RawSession, what: str) -> None:
    stream = talking.attached
    if what == "too many":
        stream.post_plain(batch=cache_pb2.RequestBatch(requests=[cache_pb2.AttachRequest()] * 65))
        assert stream.event("error").field == "batch.requests"
    elif what == "an id":
        stream.post_plain(id=1_000, batch=cache_pb2.RequestBatch())
        assert stream.event("error").field == "id"
    elif what == "nothing":
        stream.post_plain(batch=cache_pb2.RequestBatch())
    else:
        body = {"batch": cache_pb2.RequestBatch()} if what == "a batch" else {"hello": talking.hello()}
        [one] = stream.post_batch(body)
        with pytest.raises(Refused) as refused:
            stream.answer(one)
        assert refused.value.reason == ("MALFORMED" if what == "a batch" else "SECOND_HELLO")
    assert talking.lookup(hashes(1)).answers, "the session goes on"


def test_a_client_that_has_not_said_so_sends_and_gets_none(session: RawSession) -> None:
    stream = session.attached
    stream.post_plain(id=1_000, batch=cache_pb2.RequestBatch())
    assert stream.event("error").field == "body"
    one = stream.post(touch=touch(hashes(1)))
    assert stream.answer(one).HasField("touch")
    assert not stream.batches


def test_a_batch_cannot_be_the_first_message(connect: Connect, daemon: Daemon) -> None:
    session = connect()
    session.token = session.side.open()
    stream = session.open_stream()
    stream.post_plain(
        batch=cache_pb2.RequestBatch(requests=[cache_pb2.AttachRequest(id=1, hello=session.hello())])
    )
    assert stream.goodbye() == "NOT_ATTACHED"


def test_what_has_no_id_is_done_and_not_answered(talking: RawSession, daemon: Daemon) -> None:
    stream = talking.attached
    key = hashes(1, seed=77)
    talking.store(key, [0])
    lease = talking.lookup(key, lease=True).lease_id
    assert lease
    messages = stream.messages + 1
    other = talking.lookup(key, lease=True).lease_id
    stream.post_plain(release=cache_pb2.ReleaseRequest(lease_ids=[lease]))
    stream.post_plain(released_leases=[other])
    stream.post_plain(touch=touch(b"not a hash"))  # refused, as any would be
    stream.post_plain(touch=touch(key))
    stream.post_plain(cancel=cache_pb2.CancelRequest(tickets=[1 << 40]))
    assert talking.lookup(key).answers[0].hits == 1
    assert daemon.status().leases == 0
    time.sleep(PAUSE_S)
    assert stream.messages == messages + 1, "of the lookup alone"


def test_what_is_waited_for_needs_an_id(talking: RawSession) -> None:
    talking.attached.post_plain(**lookup(talking, 1))
    assert talking.attached.event("error").field == "id"


def test_leases_given_back_with_a_message_are_free_before_its_body(
    talking: RawSession, daemon: Daemon
) -> None:
    stream = talking.attached
    key = hashes(1, seed=78)
    talking.store(key, [0])
    first = talking.lookup(key, lease=True).lease_id
    load = cache_pb2.LoadRequest(signals=talking.signals(), lease_id=first, block_ids=[0])
    refused = stream.post(load=load, released_leases=[first])
    with pytest.raises(Refused) as why:
        stream.answer(refused)
    assert why.value.reason == "UNKNOWN_LEASE"
    second = talking.lookup(key, lease=True).lease_id
    request = cache_pb2.AttachRequest(id=1_000, **lookup(talking, 78))
    stream.post_plain(batch=cache_pb2.RequestBatch(requests=[request]), released_leases=[second, 1 << 60])
    assert talking.lookup(key).answers[0].hits == 1
    assert daemon.status().leases == 0
