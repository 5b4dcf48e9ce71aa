"""The fake machine, this process's use of it, and other processes."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.fake_cuda import FakeCuda
from tests.unit.fake_cuda.host import Host
from tests.unit.fake_cuda.peer import Peer
from tests.unit.fake_cuda.raw import Raw


@pytest.fixture(autouse=True)
def _host_memory_outlives_the_fake() -> Iterator[None]:
    yield
    Host.alive.clear()


@pytest.fixture
def raw(fake_cuda: FakeCuda) -> Raw:
    """This process, with a context."""
    return Raw(fake_cuda.library).start()


@pytest.fixture
def make_peer() -> Iterator[Callable[..., Peer]]:
    """`make_peer(fake, **settings)`."""
    made: list[Peer] = []

    def make(fake: FakeCuda, start: bool = True, **settings: object) -> Peer:
        made.append(Peer(fake, start, **settings))
        return made[-1]

    yield make
    for peer in made:
        peer.end()


@pytest.fixture
def peer(fake_cuda: FakeCuda, make_peer: Callable[..., Peer]) -> Peer:
    """Another process, with a context."""
    return make_peer(fake_cuda)
