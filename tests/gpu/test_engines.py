"""An engine's blocks on a GPU: stored, found and loaded by kvtierd, every byte of the cache compared."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import Place, StartEngine, places
from tests.gpu.parts.right import right, shuffled
from tests.support.daemon import DaemonHost

KIB = 1 << 10
MORE_TURNS = 30
"""At most, until a doorbell was rung while the stream was busy: an engine that is slow may come too late."""


@pytest.mark.parametrize(
    ("planes", "fragment_bytes"),
    [(1, 512 * KIB), (4, 64 * KIB), (32, 4 * KIB), (3, 1_000)],
    ids=["one plane", "planes", "many small planes", "odd sizes"],
)
def test_what_is_stored_is_loaded_byte_for_byte(
    start_engine: StartEngine, family: str, planes: int, fragment_bytes: int
) -> None:
    engine = start_engine(planes=planes, fragment_bytes=fragment_bytes, num_blocks=64)
    numbers = list(range(24))
    stored = engine.ask("store", family=family, numbers=numbers, ids=shuffled(24))
    assert stored["done"], stored["said"]
    assert right(engine.ask("load", family=family, numbers=numbers, ids=shuffled(24)), 24)
    assert right(engine.ask("load", family=family, numbers=numbers, ids=list(range(40, 64))), 24)
    assert right(engine.ask("load", family=family, numbers=numbers, ids=list(range(23, -1, -1))), 24)


@pytest.mark.parametrize("place", places(real=("mirror",), fake=("mirror",)), indirect=True)
def test_memory_that_cannot_be_exported_goes_by_a_mirror(start_engine: StartEngine, family: str) -> None:
    engine, other = start_engine("mirrored"), start_engine("exported", kind="driver")
    assert engine.ask("store", family=family, numbers=list(range(16)), ids=shuffled(16))["done"]
    assert right(engine.ask("load", family=family, numbers=list(range(16)), ids=shuffled(16)), 16)
    assert right(other.ask("load", family=family, numbers=list(range(16)), ids=shuffled(16)), 16)


def test_an_engine_loads_what_another_stored(start_engine: StartEngine, place: Place, family: str) -> None:
    one, other = start_engine("one", kind="driver"), start_engine("other")
    assert one.ask("store", family=family, numbers=list(range(16)), ids=shuffled(16))["done"]
    assert right(other.ask("load", family=family, numbers=list(range(16)), ids=shuffled(16)), 16)


def test_a_store_waits_for_what_the_stream_does_before_it_rings(
    start_engine: StartEngine, place: Place, family: str
) -> None:
    engine = start_engine()
    was_running, turns = 0, place.pick(10, 2)
    for turn in range(turns + MORE_TURNS):
        if turn >= turns and was_running:
            break
        numbers = list(range(8 * turn, 8 * turn + 8))
        stored = engine.ask("store", family=family, numbers=numbers, ids=shuffled(8), late=True)
        assert stored["done"], stored["said"]
        was_running += stored["was_running"]
        assert right(engine.ask("load", family=family, numbers=numbers, ids=shuffled(8)), 8)
    assert was_running, "the stream was never busy when the doorbell was enqueued: nothing was shown"


def test_a_load_waits_for_what_the_stream_does_before_it_rings(
    start_engine: StartEngine, place: Place, family: str
) -> None:
    engine = start_engine()
    assert engine.ask("store", family=family, numbers=list(range(8)), ids=shuffled(8))["done"]
    was_running, turns = 0, place.pick(10, 2)
    for turn in range(turns + MORE_TURNS):
        if turn >= turns and was_running:
            break
        loaded = engine.ask("load", family=family, numbers=list(range(8)), ids=shuffled(8), late=True)
        assert right(loaded, 8)
        was_running += loaded["was_running"]
    assert was_running, "the stream was never busy when the doorbell was enqueued: nothing was shown"


def test_blocks_survive_the_daemon(start_engine: StartEngine, host: DaemonHost, family: str) -> None:
    engine = start_engine()
    assert engine.ask("store", family=family, numbers=list(range(16)), ids=shuffled(16))["done"]
    host.restart()
    # The client may not have noticed yet; what it says of before the kill is no answer.
    for _ in range(100):
        loaded = engine.ask("load", family=family, numbers=list(range(16)), ids=shuffled(16))
        if loaded["hits"] == 16:
            break
        engine.ask("wait_ready")
    assert right(loaded, 16)


@pytest.mark.parametrize("place", places(real=("driver",), fake=("driver",)), indirect=True)
def test_a_full_pool_evicts_and_what_is_found_is_right(start_engine: StartEngine, family: str) -> None:
    engine = start_engine()
    found = 0
    for turn in range(12):
        numbers = list(range(48 * turn, 48 * turn + 48))
        stored = engine.ask("store", family=family, numbers=numbers, ids=shuffled(48))
        assert stored["fenced"]
        loaded = engine.ask("load", family=family, numbers=numbers[:16], ids=shuffled(16))
        if loaded["hits"] == 16:
            found += right(loaded, 16)
    assert found
