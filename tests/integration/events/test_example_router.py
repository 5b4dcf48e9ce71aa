"""The example of a router follows two daemons, and chooses the one with more of a prompt."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.stores.conftest import Connect
from tests.support.daemon import until
from tests.support.events import EventPlace, event_place
from tests.support.hosts import NewHost
from tests.support.plain_client import NAMESPACE, block_hashes

PROGRAM = Path(__file__).parents[3] / "examples" / "events_router.py"
HASHES = block_hashes("prompt", range(10))


class Router:
    """The program, as it runs."""

    def __init__(self, *places: EventPlace) -> None:
        command = [sys.executable, str(PROGRAM), f"--model={NAMESPACE.model}"]
        command += [f"{place.endpoint},{place.replay_endpoint}" for place in places]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._hosts = len(places)

    def asked(self, hashes: list[bytes]) -> list[str]:
        """What it prints about a prompt."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(*(each.hex() for each in hashes), file=self.process.stdin, flush=True)
        return [self.process.stdout.readline().rstrip() for _ in range(self._hosts + 1)]

    def close(self) -> None:
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0


@pytest.fixture
def other_place() -> Iterator[EventPlace]:
    with event_place() as made:
        yield made


def test_it_chooses_the_host_with_more(
    new_host: NewHost, connect_to: Connect, place: EventPlace, other_place: EventPlace
) -> None:
    one, two = new_host(**place.settings), new_host(**other_place.settings)
    of_one, of_two = connect_to(one), connect_to(two, "two")
    assert of_one.store(HASHES[:3]).done
    until(lambda: one.status().events.stored_blocks == 3, "they are published")
    router = Router(place, other_place)
    assert router.asked(HASHES) == [
        f"{place.endpoint} has 3 blocks, 3 of them in memory",
        f"{other_place.endpoint} has 0 blocks, 0 of them in memory",
        f"send the request to {place.endpoint}",
    ]
    assert of_two.store(HASHES[:5]).done
    until(
        lambda: (
            router.asked(HASHES)[1:]
            == [
                f"{other_place.endpoint} has 5 blocks, 5 of them in memory",
                f"send the request to {other_place.endpoint}",
            ]
        ),
        "it has heard of it",
    )
    assert router.asked(HASHES[6:])[-1] == f"send the request to {place.endpoint}", "nobody has any"
    router.close()
