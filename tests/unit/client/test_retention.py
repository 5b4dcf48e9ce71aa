"""What a client says of how long and where blocks are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvtier import Client, GroupQuery, KvtierError, LookupMode, Namespace, Reason, Retention, Role
from kvtier.queries import Touch, one_query
from kvtier.retention import SECONDS_MAX
from kvtier.v1 import cache_pb2

from tests.unit.client.peer import Peer, hashes

BOTH = [GroupQuery(0), GroupQuery(1, window_blocks=2)]


@pytest.fixture
def able(make_peer: Callable[..., Peer]) -> Peer:
    """A scheduler whose daemon takes few hashes."""
    peer = make_peer(Role.SCHEDULER)
    peer.welcome(lookup_hashes_max=4)
    return peer


def touched(peer: Peer, touch: Touch) -> cache_pb2.TouchRequest:
    peer.session.touch(touch)
    [message] = peer.sent()
    return message.touch


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


def test_a_store_carries_its_retention(able: Peer) -> None:
    able.session.store(0, hashes(1, 2), [3, 4], None, Retention(hold_s=1, ttl_s=60))
    able.session.store(0, hashes(5), [6], None, Retention())
    able.session.store(0, hashes(7), [8], None)
    wishing, *others = [message.store for message in able.sent()]
    assert wishing.retention == cache_pb2.Retention(hold_ms=1_000, ttl_ms=60_000)
    assert not any(store.HasField("retention") for store in others), "nothing is asked"


def test_lookups_say_that_they_look_at_the_host_alone(able: Peer) -> None:
    able.session.lookup(hashes(1), one_query(0), lease=True, host_only=True)
    able.session.lookup(hashes(1), one_query(0, LookupMode.EXACT), lease=False)
    able.session.lookup(hashes(1, 2), BOTH, lease=True, host_only=True)
    sent = [message.lookup for message in able.sent()]
    assert [(lookup.lease, lookup.host_only) for lookup in sent] == [
        (True, True),
        (False, False),
        (True, True),
    ]


def test_a_touch_may_hold_and_a_cool_one_takes_each_block_by_itself(able: Peer) -> None:
    held = touched(able, Touch(hashes(1, 2, 3, 4, 5), one_query(2), hold_s=0.25))
    assert (held.hold_ms, held.cold) == (250, False)
    assert held.hashes == hashes(1, 2, 3, 4)
    assert [(query.group, query.mode, query.hashes, query.hash_stride) for query in held.queries] == [
        (2, cache_pb2.LOOKUP_MODE_PREFIX, b"", 1)
    ]
    cooled = touched(able, Touch(hashes(1, 2, 3, 4, 5), one_query(0), cold=True))
    assert (cooled.hold_ms, cooled.cold) == (0, True)
    assert [(query.mode, query.hashes) for query in cooled.queries] == [
        (cache_pb2.LOOKUP_MODE_EXACT, hashes(2, 3, 4, 5))
    ], "of too many the tail, which is to go first"


def test_groups_are_held_and_cooled_together(able: Peer) -> None:
    held = touched(able, Touch(hashes(1, 2, 3), BOTH, hold_s=3))
    cooled = touched(able, Touch(hashes(1, 2, 3), BOTH, cold=True))
    assert (held.hold_ms, held.cold, cooled.hold_ms, cooled.cold) == (3_000, False, 0, True)
    assert (held.hashes, cooled.hashes) == (hashes(1, 2), b"")
    assert [(query.group, query.mode, query.hashes) for query in held.queries] == [
        (0, cache_pb2.LOOKUP_MODE_PREFIX, b""),
        (1, cache_pb2.LOOKUP_MODE_EXACT, hashes(2, 3)),
    ]
    assert [(query.group, query.mode, query.hashes) for query in cooled.queries] == [
        (0, cache_pb2.LOOKUP_MODE_EXACT, hashes(2, 3)),
        (1, cache_pb2.LOOKUP_MODE_EXACT, hashes(2, 3)),
    ], "what goes first is the end of each"


def test_what_has_larger_blocks_is_touched_by_the_last_hash_of_each(able: Peer) -> None:
    coarse = [GroupQuery(0, hash_stride=2), GroupQuery(1, window_blocks=1, hash_stride=2)]
    held = touched(able, Touch(hashes(1, 2, 3, 4, 5), coarse))
    assert [(query.hash_stride, query.hashes) for query in held.queries] == [(2, b""), (0, hashes(4))]
    cooled = touched(able, Touch(hashes(1, 2, 3, 4, 5), coarse, cold=True))
    assert [query.hashes for query in cooled.queries] == [hashes(2, 4), hashes(4)]


def test_mistakes_are_the_callers_with_or_without_a_daemon() -> None:
    namespace = Namespace(model="m", kv_dtype="bfloat16", hash_scheme="test")
    with Client(
        instance="i", namespace=namespace, role=Role.SCHEDULER, socket="/nonexistent/kvtierd.sock"
    ) as client:
        for call in (
            lambda: client.touch([bytes(32)], hold_s=-1),
            lambda: client.touch([bytes(32)], BOTH, hold_s=float("nan")),
        ):
            with pytest.raises(KvtierError) as refused:
                call()
            assert (refused.value.reason, refused.value.field) == (Reason.MALFORMED, "hold_s")
        client.touch([bytes(32)], hold_s=1)
        client.cool([bytes(32)])
        client.cool([bytes(32)], BOTH)
        with pytest.raises(KvtierError, match="HASH_LENGTH"):
            client.cool([b"x"])
        outcome = client.store([bytes(32)], [0], retention=Retention(ttl_s=1)).outcome
        assert outcome.error is not None
        assert outcome.error.reason is Reason.NOT_ATTACHED
