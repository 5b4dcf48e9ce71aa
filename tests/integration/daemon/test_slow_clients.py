"""Clients that do not read what they are sent: dropped, at a bounded cost, and nobody else notices."""

import queue
from collections.abc import Iterator

import pytest
from kvtier.v1 import admin_pb2, cache_pb2

from tests.integration.daemon.conftest import Connect, Start
from tests.integration.daemon.raw import RawSession, hashes
from tests.support.process import DEADLINE_S, Daemon, until

LOOKUPS = 400
HASHES = 4_000
"""Answers of 4 kB each: together far more than a stream's flow-control window."""


class Deaf:
    """A session that attaches, asks a lot, and reads none of the answers."""

    def __init__(self, session: RawSession, daemon: Daemon) -> None:
        session.token = session.side.open()
        self._outgoing: queue.Queue[cache_pb2.AttachRequest | None] = queue.Queue()
        self._call = session.stub.Attach(self._requests(), timeout=600)
        self.say(hello=session.hello(instance="deaf"))
        until(lambda: deaf_instance(daemon) is not None, "attached")
        instance = deaf_instance(daemon)
        assert instance is not None
        session.epoch = instance.epoch
        session.register_words()
        session.register_memory()
        query = cache_pb2.GroupQuery(mode=cache_pb2.LOOKUP_MODE_EXACT, hashes=hashes(HASHES, seed=77))
        for number in range(LOOKUPS):
            self.say(id=number + 2, lookup=cache_pb2.LookupRequest(queries=[query]))

    def _requests(self) -> Iterator[cache_pb2.AttachRequest]:
        while (request := self._outgoing.get()) is not None:
            yield request

    def say(self, **fields: object) -> None:
        self._outgoing.put(cache_pb2.AttachRequest(**({"id": 1} | fields)))  # type: ignore[arg-type]

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()


def deaf_instance(daemon: Daemon) -> admin_pb2.InstanceStatus | None:
    return next((found for found in daemon.status().instances if found.instance == "deaf"), None)


@pytest.fixture
def deaf(
    start: Start, connect: Connect, request: pytest.FixtureRequest
) -> Iterator[tuple[Daemon, RawSession]]:
    """`indirect` parameters are how long it may be silent."""
    daemon = start(
        server__outgoing_max=16,
        server__session_silence_s=getattr(request, "param", 3),
        server__heartbeat_interval_s=0.5,
        limits__lookup_hashes_max=HASHES,
    )
    session = connect()
    client = Deaf(session, daemon)
    yield daemon, session
    client.close()


def test_a_client_that_does_not_read_is_not_read_from_and_falls_silent(
    deaf: tuple[Daemon, RawSession], connect: Connect
) -> None:
    daemon, _ = deaf
    until(lambda: deaf_instance(daemon) is None, "dropped")
    assert daemon.status().counters.lookups < LOOKUPS, "the answers it did not read held back the rest"
    connect().ready().store(hashes(1), [0])
    assert "silent for 3 s" in daemon.log()
    assert daemon.stop() == 0, "it does not hold up the end either"


@pytest.mark.parametrize("deaf", [30], indirect=True)  # so that nothing else ends it first
def test_events_that_pile_up_end_the_session_at_once(
    deaf: tuple[Daemon, RawSession], connect: Connect
) -> None:
    daemon, session = deaf
    ref = session.ref()
    for number in range(200):
        request = session.store_request(hashes(1, seed=number), [number % 32])
        request.session.CopyFrom(ref)
        try:
            session.stub.Store(request, timeout=DEADLINE_S)
        except Exception:
            break  # the session is over
    until(lambda: deaf_instance(daemon) is None, "dropped")
    assert "it does not read" in daemon.log()
    status = daemon.status()
    assert (status.transfers_active, status.blocks.writing) == (0, 0)
    connect().ready().store(hashes(1, seed=999), [0])
