"""Peers of every role."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from kvtier import Role

from tests.unit.client.peer import Peer


@pytest.fixture
def make_peer() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def make(role: Role = Role.BOTH, **options: int) -> Peer:
        peers.append(Peer(role, **options))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def peer(make_peer: Callable[..., Peer]) -> Peer:
    """An attached, registered, ready client that is scheduler and rank."""
    made = make_peer()
    made.welcome()
    return made


@pytest.fixture
def scheduler(make_peer: Callable[..., Peer]) -> Peer:
    made = make_peer(Role.SCHEDULER)
    made.welcome()
    return made
