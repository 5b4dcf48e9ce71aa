"""Subscribers that come late, miss batches or do not read, and daemons that end and begin again."""

from __future__ import annotations

from pathlib import Path

import zmq

from tests.integration.stores.conftest import Connect
from tests.support.daemon import until
from tests.support.events import CPU, STORAGE, EventPlace, Known, Subscriber, as_ints, replay
from tests.support.hosts import NewHost
from tests.support.plain_client import block_hashes

HASHES = block_hashes("prompt", range(24))
MORE = block_hashes("more", range(8))
SILENT = {"events__heartbeat_s": "600"}
"""Nothing is published without news."""


def known_by(place: EventPlace, number: int = 0) -> Known:
    """What somebody knows who has just asked."""
    known = Known(strict=False)
    for message in replay(place, number):
        known.apply(message)
    return known


def settled(router: Subscriber, hashes: list[bytes]) -> None:
    router.until_has(CPU, as_ints(hashes))


class TestReplay:
    def test_what_is_kept_is_sent_as_it_was(
        self, new_host: NewHost, connect_to: Connect, place: EventPlace
    ) -> None:
        client = connect_to(new_host(**place.settings | SILENT))
        with Subscriber(place) as router:
            for each in HASHES[:3]:
                assert client.store([each]).done
            settled(router, HASHES[:3])
            published = list(router.messages)
        first = published[0].number
        assert replay(place, first) == published
        assert replay(place, first + 1) == published[1:]
        assert replay(place, published[-1].number + 1) == []
        untold = [(each.number, each.payload) for each in replay(place, first, topic=None)]
        assert untold == [(each.number, each.payload) for each in published], "as vLLM's subscribers ask"

    def test_who_comes_late_is_shown_everything(
        self, new_host: NewHost, connect_to: Connect, place: EventPlace
    ) -> None:
        host = new_host(**place.settings)
        assert connect_to(host).store(HASHES).done
        until(lambda: host.status().events.stored_blocks == len(HASHES), "they are published")
        shown = replay(place, 0)
        assert shown[0].events == [{"type": "AllBlocksCleared"}]
        assert known_by(place).has(CPU) == as_ints(HASHES)
        with Subscriber(place) as router:
            router.catch_up()
            assert router.only.has(CPU) == as_ints(HASHES)
            assert connect_to(host, "other").store(MORE).done
            settled(router, [*HASHES, *MORE])
            assert router.gaps == 0, "the numbers go on where the replay ended"

    def test_the_ring_is_bounded_and_what_it_lacks_is_shown(
        self, new_host: NewHost, connect_to: Connect, place: EventPlace
    ) -> None:
        host = new_host(**place.settings | SILENT, events__replay_batches=3)
        client = connect_to(host)
        with Subscriber(place) as router:
            for number, each in enumerate(HASHES[:8], start=1):  # in batches of their own
                assert client.store([each]).done
                settled(router, HASHES[:number])
            published = list(router.messages)
        assert len(published) > 3
        events = host.status().events
        assert events.kept_batches == 3
        assert events.shown == 0
        assert replay(place, published[-3].number) == published[-3:]
        assert known_by(place, published[-4].number).has(CPU) == as_ints(HASHES[:8])
        assert host.status().events.shown == 1

    def test_numbers_of_the_future_are_those_of_somebody_else(
        self, new_host: NewHost, connect_to: Connect, place: EventPlace
    ) -> None:
        assert connect_to(new_host(**place.settings)).store(HASHES).done
        until(lambda: known_by(place, 2**63).has(CPU) == as_ints(HASHES), "it is shown everything")

    def test_nonsense_is_counted_and_nothing_else_happens(
        self, new_host: NewHost, connect_to: Connect, place: EventPlace
    ) -> None:
        host = new_host(**place.settings)
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 1_000)
            socket.connect(place.replay_endpoint)
            for frames in ([b""], [b"x", bytes(8)], [b"", bytes(7)], [b"", bytes(8), b"", b""], [b"", b""]):
                socket.send_multipart(frames)
            until(lambda: host.status().events.replays_refused == 5, "they are refused")
        assert connect_to(host).store(HASHES).done
        until(lambda: known_by(place).has(CPU) == as_ints(HASHES), "replays still work")

    def test_a_subscriber_that_goes_is_forgotten(
        self, new_host: NewHost, connect_to: Connect, place: EventPlace
    ) -> None:
        host = new_host(**place.settings)
        client = connect_to(host)
        assert client.store(HASHES).done
        for _ in range(100):
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, 1_000)
                socket.connect(place.replay_endpoint)
                socket.send_multipart([b"", bytes(8), b""])
        until(lambda: host.status().events.replays == 100, "all have asked")
        until(lambda: known_by(place).has(CPU) == as_ints(HASHES), "the next one is answered")


class TestRestart:
    def test_the_next_daemon_begins_anew(
        self, new_host: NewHost, connect_to: Connect, place: EventPlace, tmp_path: Path
    ) -> None:
        """After a kill, it tells what it has found in the pool and on the disk. Its numbers are higher."""
        disk = {"disk__paths": str(tmp_path), "disk__size": "34MiB", "disk__extent_size": "1MiB"}
        host = new_host(**place.settings, **disk, disk__write_mode="through")
        client = connect_to(host)
        with Subscriber(place) as router:
            assert client.store(HASHES).done
            router.until_has(STORAGE, as_ints(HASHES))
            before = router.only.number
            host.restart()
            with Subscriber(place) as late:
                assert replay(place, 0) == [], "no engine has come yet"
                until(lambda: client.client.ready, "the engine attaches again")
                assert connect_to(host, "other").store(MORE).done
                for each in (late, router):
                    each.until_has(STORAGE, as_ints([*HASHES, *MORE]))
                    assert each.only.has(CPU) == as_ints([*HASHES, *MORE])
                    assert each.only.number > before
            [cleared] = [
                message.number for message in router.messages[1:] if "AllBlocksCleared" in str(message.events)
            ]
            assert cleared > before + 1, "who has missed the end sees a gap"

    def test_an_orderly_end_is_told(self, new_host: NewHost, connect_to: Connect, place: EventPlace) -> None:
        host = new_host(**place.settings)
        with Subscriber(place) as router:
            assert connect_to(host).store(HASHES).done
            settled(router, HASHES)
            host.stop()
            settled(router, [])
            assert router.gaps == 0


def test_what_is_missed_is_asked_for(new_host: NewHost, connect_to: Connect, place: EventPlace) -> None:
    """A connection that breaks loses what is published meanwhile."""
    client = connect_to(new_host(**place.settings))
    with Subscriber(place) as router:
        assert client.store(HASHES).done
        settled(router, HASHES)
        router.leave()
        assert client.store(MORE).done
        until(lambda: known_by(place).has(CPU) == as_ints([*HASHES, *MORE]), "it is published")
        router.come_back()
        settled(router, [*HASHES, *MORE])
        assert router.gaps == 1
        assert router.only.clears == 1, "the replay had what was missed, and nothing else"
