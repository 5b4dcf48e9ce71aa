"""What tests of hosts that share a store do and look at."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvtier import PENDING

from tests.support.daemon import DaemonHost, until
from tests.support.hosts import below
from tests.support.plain_client import BLOCKS, PlainClient, block_hashes
from tests.support.seaweed import BUCKET, Seaweed

SLACK_S = 30.0
"""For anything that takes milliseconds on an idle machine."""
HASHES = block_hashes("shared", range(24))
SMALL_POOL = {"pool__size": "6MiB", "pool__extent_size": "1MiB"}
"""Room for about 250 blocks."""
FILLERS = 5
"""So many stores of BLOCKS blocks replace everything in such a pool."""


def bucket(server: Seaweed, folder: str, **changes: Any) -> dict[str, Any]:
    """Settings of a host that uses a folder of the server's; `changes` are to the options of its client."""
    options = ",".join(f"{name}={value}" for name, value in server.options(**changes).items())
    return {"store__url": f"s3://{BUCKET}/{folder}", "store__options": options}


def knows(host: DaemonHost, blocks: int) -> None:
    """Waits until a host knows of so many blocks in the store."""
    until(lambda: below(host).blocks >= blocks, f"the host knows of {blocks} blocks")


def loads(plain: PlainClient, hashes: Sequence[bytes] = HASHES) -> None:
    """All of these come up, and every byte is right."""
    until(lambda: plain.lookup(hashes).hits == len(hashes), "they come up")
    assert plain.load(hashes) == len(hashes)


def is_served_beside_it(plain: PlainClient, name: str = "own") -> None:
    """What the host has in memory is stored and loaded as ever."""
    own = block_hashes(name, range(8))
    assert plain.store(own).done
    assert plain.load(own) == len(own)


def misses_in_time(plain: PlainClient, deadline_s: float) -> None:
    """HASHES, which only the store has, are misses when two calls of the store have had their time, which is
    what a read may take."""
    began_s = time.monotonic()
    until(lambda: PENDING not in plain.lookup(HASHES).states, "nothing is waited for any more")
    assert plain.lookup(HASHES).hits == 0
    assert time.monotonic() - began_s < 2 * deadline_s + SLACK_S


def fill(plain: PlainClient, name: str = "filler") -> list[bytes]:
    """Stores so many others that a small pool keeps nothing of what it had. Returns them."""
    others = block_hashes(name, range(FILLERS * BLOCKS))
    for first in range(0, len(others), BLOCKS):
        assert plain.store(others[first : first + BLOCKS]).done
    return others


def of_store(host: DaemonHost, name: str) -> float:
    """A metric of the store, without the store's URL."""
    [found] = [value for key, value in host.metrics().items() if key.startswith(f"kvtier_disk_{name}.")]
    return found
