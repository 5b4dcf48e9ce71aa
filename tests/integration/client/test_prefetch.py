"""Prefetch, and how fast an engine computes, as a daemon without a disk takes them: on the stream, as unary
calls, blocking and async."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import kvtier.aio
import pytest
from kvtier import HIT, MISS, PENDING, Doorbell, KvtierError, LookupMode, Namespace, Reason
from kvtier.connection.rpc_errors import from_rpc_error
from kvtier.v1 import cache_pb2, types_pb2

from tests.integration.client.conftest import Connect
from tests.integration.daemon.raw import RawSession, Refused
from tests.support.daemon import DaemonHost, until
from tests.support.plain_client import READY_S, Cache, block_hashes

PREFIX = block_hashes("prefetched", range(4))


@pytest.fixture
def raw(shared_host: DaemonHost, request: pytest.FixtureRequest) -> Iterator[RawSession]:
    """A client made of stubs."""
    session = RawSession(shared_host.socket)
    session.ready(instance=request.node.name)
    yield session
    session.close()


def test_a_prefetch_tells_what_a_lookup_would_and_leases_nothing(
    shared_host: DaemonHost, connect_to: Connect
) -> None:
    plain = connect_to(shared_host)
    assert plain.store(PREFIX[:2]).done
    storing = plain.client.store(PREFIX[2:3], [2], doorbell=Doorbell(0, 1))
    until(lambda: storing.results is not None, "the daemon has accepted it")
    before = shared_host.status().counters
    answer = plain.client.prefetch(PREFIX, timeout_s=READY_S)
    assert (answer.answered, answer.hits, answer.states) == (True, 2, bytes([HIT, HIT, PENDING]))
    assert answer.pending
    exact = plain.client.prefetch(PREFIX[::-1], mode=LookupMode.EXACT, timeout_s=READY_S)
    assert (exact.hits, exact.states) == (2, bytes([MISS, PENDING, HIT, HIT]))
    status = shared_host.status()
    assert (status.leases, status.counters.lookups) == (0, before.lookups)
    plain.client.ring(0, 1)
    assert storing.wait(30).done
    assert not plain.client.prefetch(PREFIX[:3], timeout_s=READY_S).pending


async def test_the_async_client_prefetches_too(shared_host: DaemonHost, namespace: Namespace) -> None:
    cache = Cache()
    try:
        async with kvtier.aio.Client(
            instance=namespace.tenant,
            namespace=namespace,
            groups=[cache.group],
            memory=cache.memory,
            socket=shared_host.socket,
            prefill_tokens_per_s=12_000.0,
        ) as client:
            assert await client.wait_ready(60)
            assert (await client.store(PREFIX[:2], [0, 1]).wait(30)).done
            answer = await client.prefetch(PREFIX, timeout_s=READY_S)
            assert (answer.hits, answer.lease) == (2, None)
            client.report_prefill_rate(15_000.0)
    finally:
        cache.close()


def test_a_unary_prefetch_is_the_same_and_is_checked_as_a_lookup_is(raw: RawSession) -> None:
    joined = b"".join(PREFIX)
    stored = raw.store(joined[:64], [0, 1])
    assert stored.state == types_pb2.TRANSFER_STATE_DONE

    def ask(**changes: object) -> cache_pb2.PrefetchResponse:
        fields: dict[str, Any] = {"mode": cache_pb2.LOOKUP_MODE_PREFIX, "hashes": joined} | changes
        query = cache_pb2.GroupQuery(**fields)
        return raw.stub.Prefetch(cache_pb2.PrefetchRequest(session=raw.ref(), queries=[query]))

    assert ask().answers[0] == cache_pb2.GroupAnswer(hits=2, states=b"\2\2\0", readable=2)
    assert raw.attached.call(prefetch=_on_stream(joined)).prefetch == ask()
    for changes, reason in (
        ({"hashes": b"x"}, Reason.HASH_LENGTH),
        ({"mode": cache_pb2.LOOKUP_MODE_SUFFIX}, Reason.MODE_UNSUPPORTED),
        ({"group": 9}, Reason.UNKNOWN_GROUP),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            ask(**changes)
        error = from_rpc_error(refused.value)
        assert error is not None
        assert error.reason is reason


def _on_stream(joined: bytes) -> cache_pb2.PrefetchRequest:
    query = cache_pb2.GroupQuery(mode=cache_pb2.LOOKUP_MODE_PREFIX, hashes=joined)
    return cache_pb2.PrefetchRequest(queries=[query])


def test_a_heartbeat_with_a_rate_beyond_belief_is_refused_and_the_session_goes_on(raw: RawSession) -> None:
    for rate in (-1.0, float("nan"), float("inf"), 1e-30, 1e30):
        with pytest.raises(Refused, match="MALFORMED") as refused:
            raw.attached.call(heartbeat=cache_pb2.Heartbeat(prefill_tokens_per_s=rate))
        assert refused.value.error.field == "prefill_tokens_per_s"
    raw.attached.call(heartbeat=cache_pb2.Heartbeat(prefill_tokens_per_s=20_000.0))
    assert raw.lookup(b"".join(PREFIX)).answers


def test_a_client_refuses_such_a_rate_itself(shared_host: DaemonHost, connect_to: Connect) -> None:
    plain = connect_to(shared_host)
    plain.client.report_prefill_rate(1_000.0)
    for rate in (-1.0, float("nan"), float("inf"), 1e30):
        with pytest.raises(KvtierError) as refused:
            plain.client.report_prefill_rate(rate)
        assert (refused.value.reason, refused.value.field) == (Reason.MALFORMED, "prefill_tokens_per_s")
    assert plain.client.prefetch(PREFIX, timeout_s=READY_S).answered
