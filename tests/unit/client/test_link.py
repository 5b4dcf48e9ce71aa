"""The connector's link: code that finds no client there may rely on it that none is connected."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kvtier import ClientOptions
from kvtier_engine import link
from kvtier_engine.link import Link

DEADLINE_S = 60.0


class SlowClient:
    """Connects at once, and takes its time to be made."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.closed = False
        _connected.set()
        assert _go_on.wait(DEADLINE_S)

    def close(self, timeout_s: float) -> bool:
        self.closed = True
        return True


_known, _connected, _go_on = threading.Event(), threading.Event(), threading.Event()
OPTIONS: Any = {"instance": "engine"}


def slow_options() -> ClientOptions:
    assert _known.wait(DEADLINE_S)
    found: ClientOptions = OPTIONS
    return found


def refused(error: Exception) -> None:
    raise AssertionError("no client was refused") from error


@pytest.fixture(autouse=True)
def slow_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(link, "Client", SlowClient)
    _known.clear()
    _connected.clear()
    _go_on.clear()
    yield
    _go_on.set()


def join(made: Link) -> None:
    made._thread.join(DEADLINE_S)
    assert not made._thread.is_alive()


def test_a_client_that_is_connected_is_seen() -> None:
    """Else a part of it that the scheduler has submitted would be taken for one that nobody can start."""
    made = Link(lambda: OPTIONS, refused)
    assert _connected.wait(DEADLINE_S)
    seen: list[object] = []
    asks = threading.Thread(target=lambda: seen.append(made.client))
    asks.start()
    asks.join(0.2)
    _go_on.set()
    asks.join(DEADLINE_S)
    [client] = seen
    assert isinstance(client, SlowClient)
    assert client.options == OPTIONS


def test_nobody_waits_while_it_is_found_out_what_the_client_is_to_be() -> None:
    _go_on.set()
    made = Link(slow_options, refused)
    assert made.client is None
    _known.set()
    join(made)
    assert made.client is not None


def test_closed_before_it_is_made_it_never_connects() -> None:
    made = Link(slow_options, refused)
    assert made.close(0)
    _known.set()
    join(made)
    assert made.client is None
    assert not _connected.is_set()


def test_closed_while_it_is_made_it_is_closed() -> None:
    made = Link(lambda: OPTIONS, refused)
    assert _connected.wait(DEADLINE_S)
    closes = threading.Thread(target=made.close, args=(0,))
    closes.start()
    _go_on.set()
    closes.join(DEADLINE_S)
    join(made)
    client: Any = made.client
    assert client.closed


@pytest.mark.parametrize("who", ["options", "client"])
def test_a_refusal_is_told_and_may_close_the_link(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def fail(**_: object) -> Any:
        raise ValueError(who)

    def on_refused(error: Exception) -> None:
        told.append(str(error))
        assert made.close(0)

    if who == "client":
        monkeypatch.setattr(link, "Client", fail)
    started = threading.Event()

    def options() -> Any:
        assert started.wait(DEADLINE_S)
        return fail() if who == "options" else OPTIONS

    made = Link(options, on_refused)
    started.set()
    join(made)
    assert told == [who]
    assert made.client is None
