"""The blocking client against a real daemon: bytes come back as they were, and only where they may."""

from __future__ import annotations

import dataclasses
import threading
from functools import partial

import pytest
from kvtier import (
    ClientState,
    Doorbell,
    KvtierError,
    LookupMode,
    Namespace,
    PartState,
    Reason,
    StoreResult,
    TransferState,
)

from tests.integration.client.conftest import Connect
from tests.support.daemon import DaemonHost, until
from tests.support.plain_client import block_hashes

HASHES = block_hashes("sequence", range(20))


@pytest.fixture
def connect(shared_host: DaemonHost, connect_to: Connect) -> Connect:
    return partial(connect_to, shared_host)


def test_what_was_stored_comes_back_byte_for_byte(connect: Connect) -> None:
    plain = connect()
    outcome = plain.store(HASHES)
    assert outcome.done
    assert outcome.succeeded == b"\1" * 20
    assert plain.load(HASHES) == 20
    assert plain.load(HASHES[:7]) == 7
    assert plain.load([*HASHES[:5], *block_hashes("other", [1]), *HASHES[5:]]) == 5


def test_a_second_store_of_the_same_blocks_copies_nothing(connect: Connect) -> None:
    plain = connect()
    plain.store(HASHES)
    transfer = plain.client.store(HASHES, range(20))
    assert transfer.wait(60).done
    assert transfer.results == (StoreResult.EXISTS,) * 20


def test_an_exact_lookup_tells_of_every_block(connect: Connect) -> None:
    plain = connect()
    plain.store(HASHES[:2])
    answer = plain.lookup([HASHES[1], HASHES[9], HASHES[0]], LookupMode.EXACT)
    assert (answer.hits, answer.states) == (2, b"\2\0\2")


def test_a_touch_keeps_a_prefix_and_counts_as_no_lookup(connect: Connect, shared_host: DaemonHost) -> None:
    plain = connect()
    plain.store(HASHES[:2])
    before = shared_host.status().counters.lookups
    plain.client.touch(HASHES)
    assert plain.load(HASHES[:2]) == 2, "answered after the touch, on the same stream"
    assert shared_host.status().counters.lookups == before + 1


def test_two_instances_of_one_namespace_share_blocks(connect: Connect) -> None:
    first, second = connect("one"), connect("two")
    first.store(HASHES)
    assert second.load(HASHES) == 20


@pytest.mark.parametrize(
    "change", [{"tenant": "other"}, {"salt": "s"}, {"kv_dtype": "bfloat16"}, {"generation": 1}]
)
def test_another_namespace_misses(connect: Connect, namespace: Namespace, change: dict[str, object]) -> None:
    first = connect("one")
    stranger = connect("two", dataclasses.replace(namespace, **change))  # type: ignore[arg-type]
    first.store(HASHES)
    answer = stranger.lookup(HASHES)
    assert answer.hits == 0


def test_a_lease_left_by_its_with_is_given_back(shared_host: DaemonHost, connect: Connect) -> None:
    plain = connect()
    plain.store(HASHES)
    with plain.lookup(HASHES, lease=True) as hit:
        assert hit.lease is not None
        assert shared_host.status().leases == 1
    until(lambda: shared_host.status().leases == 0, "the lease is released")


def test_a_lease_nobody_waited_for_is_given_back(shared_host: DaemonHost, connect: Connect) -> None:
    plain = connect()
    plain.store(HASHES)
    for _ in range(50):
        with plain.client.start_lookup(HASHES, lease=True).wait(0):
            pass  # whoever was quick enough to get the lease gives it back
    until(lambda: plain.client.status.leases == 0 and shared_host.status().leases == 0, "no lease is left")
    assert plain.load(HASHES) == 20


def test_a_kept_lease_loads_twice_and_a_consumed_one_once(connect: Connect) -> None:
    plain = connect()
    plain.store(HASHES)
    with plain.lookup(HASHES, lease=True) as hit:
        assert plain.client.load(hit, [30, 31], first=3, keep_lease=True).wait(60).done
        assert plain.client.load(hit, [40], first=19).wait(60).done
        again = plain.client.load(hit, [50]).wait(60)
    assert again.refused
    assert again.error is not None
    assert again.error.reason is Reason.UNKNOWN_LEASE
    assert plain.cache.right(30, HASHES[3])
    assert plain.cache.right(31, HASHES[4])
    assert plain.cache.right(40, HASHES[19])


def test_a_revoked_part_never_starts_and_ends_as_cancelled_or_failed(connect: Connect) -> None:
    plain = connect()
    transfer = plain.client.store(HASHES, range(20), doorbell=Doorbell(0, 1))
    assert transfer.part is not None
    until(lambda: transfer.results is not None, "it was accepted")
    assert plain.client.part_state(transfer.part) is PartState.ARMED
    assert transfer.revoke()
    assert transfer.fenced
    plain.client.ring(0, 1)
    outcome = transfer.wait(60)
    assert outcome.state in (TransferState.FAILED, TransferState.CANCELLED)
    assert outcome.fenced
    assert plain.lookup(HASHES).hits == 0


def test_a_gated_store_waits_for_its_doorbell(connect: Connect) -> None:
    plain = connect()
    for index, value in enumerate(HASHES):
        plain.cache.fill(index, value)
    transfer = plain.client.store(HASHES, range(20), doorbell=Doorbell(3, 1000))
    plain.client.ring(3, 999)
    assert transfer.wait(0.2).state is TransferState.ACTIVE
    assert not transfer.fenced
    plain.client.ring(3, 1000)
    assert transfer.wait(60).done
    assert plain.load(HASHES) == 20


def test_cancel_ends_a_transfer_that_waits(connect: Connect) -> None:
    plain = connect()
    transfer = plain.client.store(HASHES, range(20), doorbell=Doorbell(0, 1))
    transfer.cancel()
    outcome = transfer.wait(60)
    assert outcome.state is TransferState.CANCELLED
    assert outcome.fenced


def test_many_threads_share_one_client(connect: Connect) -> None:
    plain = connect()
    plain.store(HASHES)
    wrong: list[object] = []

    def look() -> None:
        for count in range(1, 21):
            with plain.client.lookup(HASHES[:count], lease=True, timeout_s=60) as answer:
                if answer.hits != count:
                    wrong.append(answer)

    threads = [threading.Thread(target=look) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    until(lambda: plain.client.status.leases == 0, "all leases are released")


@pytest.mark.parametrize(
    ("call", "reason", "field"),
    [
        (lambda client: client.lookup([b"short"]), Reason.HASH_LENGTH, "hashes[0]"),
        (lambda client: client.lookup(b"x" * 33), Reason.HASH_LENGTH, "hashes"),
        (lambda client: client.lookup(HASHES, group=1), Reason.UNKNOWN_GROUP, "group"),
        (lambda client: client.store(HASHES, [1]), Reason.COUNT_MISMATCH, "block_ids"),
        (lambda client: client.store(HASHES[:2], [1, 64]), Reason.BLOCK_ID_RANGE, "block_ids[1]"),
        (lambda client: client.store(HASHES[:1], [-1]), Reason.BLOCK_ID_RANGE, "block_ids[0]"),
    ],
)
def test_the_callers_own_mistakes_are_raised_and_change_nothing(connect, call, reason, field) -> None:
    plain = connect()
    with pytest.raises(KvtierError) as raised:
        call(plain.client)
    assert (raised.value.reason, raised.value.field) == (reason, field)
    assert plain.client.status.counters.stores == 0
    assert plain.client.ready


def test_loads_to_one_place_or_beyond_the_lease_are_raised(connect: Connect) -> None:
    plain = connect()
    plain.store(HASHES)
    with plain.lookup(HASHES, lease=True) as hit:
        for ids, first, reason in (
            ([1, 1], 0, Reason.BLOCK_ID_DUPLICATE),
            ([1, 2], 19, Reason.COUNT_MISMATCH),
        ):
            with pytest.raises(KvtierError) as raised:
                plain.client.load(hit, ids, first=first)
            assert raised.value.reason is reason
    with pytest.raises(KvtierError), plain.client.lookup(HASHES) as no_lease:
        plain.client.load(no_lease, [1])


def test_a_second_live_client_of_one_instance_waits_its_turn_and_says_why(
    shared_host: DaemonHost, connect: Connect
) -> None:
    first = connect("one")
    second = connect("one", ready=False)
    until(lambda: "SESSION_EXISTS" in second.client.status.last_error, "it says why it cannot attach")
    assert second.client.status.state is ClientState.CONNECTING
    assert first.client.ready
    first.close()
    second.ready()
    assert first.client.epoch is None


def test_closing_leaves_no_thread_no_session_and_can_be_done_twice(
    shared_host: DaemonHost, connect: Connect
) -> None:
    before = set(threading.enumerate())
    plain = connect()
    transfer = plain.client.store(HASHES, range(20))
    assert plain.client.close()
    assert plain.client.close()
    assert transfer.fenced
    assert plain.client.status.state is ClientState.CLOSED
    assert not plain.client.lookup(HASHES).answered
    assert plain.client.store(HASHES, range(20)).outcome.throttled
    until(lambda: set(threading.enumerate()) <= before, "its threads are gone")
    name = plain.client.instance
    until(lambda: name not in [i.instance for i in shared_host.status().instances], "its session is gone")
