"""What a client says of how long and where blocks are kept, and what it does where a daemon knows nothing of
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvtier import Client, GroupQuery, KvtierError, LookupMode, Namespace, Reason, Retention, Role
from kvtier.asking import Touch
from kvtier.retention import RETENTION, SECONDS_MAX
from kvtier.v1 import cache_pb2

from tests.unit.client.peer import Peer, hashes

BOTH = [GroupQuery(0), GroupQuery(1, window_blocks=2)]


@pytest.fixture
def able(make_peer: Callable[..., Peer]) -> Peer:
    """A scheduler whose daemon has the feature."""
    peer = make_peer(Role.SCHEDULER)
    peer.welcome(features=[RETENTION, "joint-lookup"], lookup_hashes_max=4)
    return peer


def touched(peer: Peer, touch: Touch) -> cache_pb2.TouchRequest:
    peer.session.touch(touch)
    [message] = peer.sent()
    return message.touch


def test_a_client_says_that_it_knows_the_feature(make_peer: Callable[..., Peer]) -> None:
    peer = make_peer(Role.SCHEDULER)
    peer.session.say_hello(b"t" * 16, 1)
    [hello] = peer.sent()
    assert RETENTION in hello.hello.features


def test_the_status_tells_whether_the_daemon_does(able: Peer, scheduler: Peer) -> None:
    assert able.session.status().can_retain
    assert not scheduler.session.status().can_retain


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"hold_s": -1}, "retention.hold_s"),
        ({"hold_s": float("nan")}, "retention.hold_s"),
        ({"ttl_s": float("inf")}, "retention.ttl_s"),
        ({"ttl_s": 2 * SECONDS_MAX}, "retention.ttl_s"),
        ({"ttl_s": 10**400}, "retention.ttl_s"),
        ({"ttl_s": True}, "retention.ttl_s"),
        ({"hold_s": 5.1, "ttl_s": 5}, "retention.hold_s"),
    ],
)
def test_a_wish_that_makes_no_sense_names_its_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(KvtierError) as refused:
        Retention(**given)
    assert (refused.value.reason, refused.value.field) == (Reason.MALFORMED, field)
    assert refused.value.value == str(given[field.removeprefix("retention.")])[:120]


def test_times_travel_in_milliseconds_rounded_up() -> None:
    wish = Retention(hold_s=0.0001, ttl_s=2.5, host_only=True)
    assert wish.to_proto() == cache_pb2.Retention(hold_ms=1, ttl_ms=2_500, host_only=True)
    assert Retention(hold_s=7, ttl_s=7).to_proto() == cache_pb2.Retention(hold_ms=7_000, ttl_ms=7_000)
    assert Retention().plain
    assert not any(Retention(**one).plain for one in ({"hold_s": 1}, {"ttl_s": 1}, {"host_only": True}))


def test_a_store_carries_its_wishes(able: Peer) -> None:
    able.session.store(0, hashes(1, 2), [3, 4], None, Retention(hold_s=1, ttl_s=60))
    able.session.store(0, hashes(5), [6], None, Retention())
    able.session.store(0, hashes(7), [8], None)
    wishing, *others = [message.store for message in able.sent()]
    assert wishing.retention == cache_pb2.Retention(hold_ms=1_000, ttl_ms=60_000)
    assert not any(store.HasField("retention") for store in others), "an older daemon can do that, too"


def test_a_store_with_wishes_is_refused_where_they_mean_nothing(scheduler: Peer) -> None:
    record = scheduler.session.store(0, hashes(1), [2], None, Retention(ttl_s=60))
    assert record.outcome.refused
    assert record.outcome.fenced
    assert not record.outcome.throttled, "trying again changes nothing"
    assert record.outcome.error is not None
    assert (record.outcome.error.reason, record.outcome.error.field) == (
        Reason.MODE_UNSUPPORTED,
        "retention",
    )
    assert "use a newer one" in record.outcome.error.message
    assert scheduler.sent() == []
    assert scheduler.session.store(0, hashes(1), [2], None, Retention()).part is not None


def test_lookups_say_that_they_look_at_the_host_alone(able: Peer) -> None:
    able.session.lookup(0, hashes(1), LookupMode.PREFIX, lease=True, host_only=True)
    able.session.lookup(0, hashes(1), LookupMode.EXACT, lease=False)
    able.session.lookup_groups(hashes(1, 2), BOTH, lease=True, host_only=True)
    sent = [message.lookup for message in able.sent()]
    assert [(lookup.lease, lookup.host_only) for lookup in sent] == [
        (True, True),
        (False, False),
        (True, True),
    ]


def test_a_daemon_that_cannot_is_not_asked_about_the_host_alone(make_peer: Callable[..., Peer]) -> None:
    peer = make_peer(Role.SCHEDULER)
    peer.welcome(features=["joint-lookup"])
    for record in (
        peer.session.lookup(0, hashes(1), LookupMode.PREFIX, lease=True, host_only=True),
        peer.session.lookup_groups(hashes(1), BOTH, lease=True, host_only=True),
    ):
        assert record.event.is_set()
        assert record.answer is not None
        assert record.answer.error is not None
        assert (record.answer.hits, record.answer.answered) == (0, False)
        assert (record.answer.error.reason, record.answer.error.field) == (
            Reason.MODE_UNSUPPORTED,
            "host_only",
        )
    assert peer.sent() == []
    assert peer.session.counters.lookups_unanswered == 2


def test_a_touch_may_hold_and_a_cool_one_takes_each_block_by_itself(able: Peer) -> None:
    held = touched(able, Touch(hashes(1, 2, 3, 4, 5), hold_s=0.25, group=2))
    assert (held.hold_ms, held.cold) == (250, False)
    assert [(query.group, query.mode, query.hashes) for query in held.queries] == [
        (2, cache_pb2.LOOKUP_MODE_PREFIX, hashes(1, 2, 3, 4))
    ]
    cooled = touched(able, Touch(hashes(1, 2, 3, 4, 5), cold=True))
    assert (cooled.hold_ms, cooled.cold) == (0, True)
    assert [(query.mode, query.hashes) for query in cooled.queries] == [
        (cache_pb2.LOOKUP_MODE_EXACT, hashes(2, 3, 4, 5))
    ], "of too many the tail, which is to go first"


def test_groups_are_held_and_cooled_together(able: Peer) -> None:
    held = touched(able, Touch(hashes(1, 2, 3), BOTH, hold_s=3))
    cooled = touched(able, Touch(hashes(1, 2, 3), BOTH, cold=True))
    assert (held.hold_ms, held.cold, cooled.hold_ms, cooled.cold) == (3_000, False, 0, True)
    for touch in (held, cooled):
        assert touch.hashes == hashes(1, 2)
        assert [(query.mode, query.hashes) for query in touch.queries] == [
            (cache_pb2.LOOKUP_MODE_PREFIX, b""),
            (cache_pb2.LOOKUP_MODE_EXACT, hashes(2, 3)),
        ]


def test_a_daemon_that_cannot_is_told_nothing_and_that_is_noted(scheduler: Peer) -> None:
    for touch in (Touch(hashes(1), hold_s=1), Touch(hashes(1), cold=True)):
        scheduler.session.note("")
        scheduler.session.touch(touch)
        assert "does not hold, expire or cool blocks" in scheduler.session.status().last_error
    assert scheduler.sent() == []
    scheduler.session.touch(Touch(hashes(1)))
    assert len(scheduler.sent()) == 1


def test_mistakes_are_the_callers_with_or_without_a_daemon() -> None:
    namespace = Namespace(model="m", kv_dtype="bfloat16", hash_scheme="test")
    with Client(
        instance="i", namespace=namespace, role=Role.SCHEDULER, socket="/nonexistent/kvtierd.sock"
    ) as client:
        for call in (
            lambda: client.touch([bytes(32)], hold_s=-1),
            lambda: client.touch_groups([bytes(32)], BOTH, hold_s=float("nan")),
        ):
            with pytest.raises(KvtierError) as refused:
                call()
            assert (refused.value.reason, refused.value.field) == (Reason.MALFORMED, "hold_s")
        client.touch([bytes(32)], hold_s=1)
        client.cool([bytes(32)])
        client.cool_groups([bytes(32)], BOTH)
        with pytest.raises(KvtierError, match="HASH_LENGTH"):
            client.cool([b"x"])
        outcome = client.store([bytes(32)], [0], retention=Retention(ttl_s=1)).outcome
        assert outcome.error is not None
        assert outcome.error.reason is Reason.NOT_ATTACHED
