"""Leases of the requests that wait in the engine's queue.

SGLang asks about a waiting request again each time that it looks at its queue, and says nothing when the
request goes away. So a request has one lease, which answers it again without a message, and which ends when
nobody has asked for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier import Client, GroupQuery, Lookup

LOOKUP_TIMEOUT_S = 0.2
"""How long the engine waits for one answer. After one that did not come, the client answers with misses until
the daemon speaks again."""
HELD_S = 5.0
"""How long a lease is kept after it was last asked for."""
HELD_MAX = 256
"""At most so many requests have a lease; others look up again when they load."""


@dataclass(slots=True)
class _Held:
    hashes: list[bytes]
    found: Lookup
    epoch: int
    asked_s: float

    @property
    def prefix(self) -> list[bytes]:
        """What all groups can load."""
        return self.hashes[: self.found.hits]


class HeldLookups:
    """What each request can load, and the lease that keeps it there."""

    def __init__(self, queries: Sequence[GroupQuery], clock: Callable[[], float]) -> None:
        """`queries`: one for each group, that of full attention first."""
        self._queries = queries
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._looked_s = 0.0

    def readable(self, client: Client, request: str, hashes: list[bytes]) -> int:
        """Returns how many pages the longest prefix has that can be loaded."""
        self.expire()
        held = self._held.get(request)
        if held is not None:
            if held.hashes == hashes and held.epoch == client.ready_epoch:
                held.asked_s = self._clock()
                return _readable(held.found)
            self.drop(request)
        epoch = client.ready_epoch
        if epoch is None or client.known_run(hashes) == 0:
            return 0
        found = self._ask(client, hashes, lease=len(self._held) < HELD_MAX)
        if found.leases:
            self._held[request] = _Held(hashes, found, epoch, self._clock())
        return _readable(found)

    def take(self, client: Client, request: str, hashes: list[bytes]) -> Lookup | None:
        """Returns the leases of the first of these pages, which the caller then has to load or release; None
        if they cannot be loaded."""
        held = self._held.pop(request, None)
        if held is not None:
            # A window's lease has the last pages of just this prefix.
            same = hashes == (held.hashes[: len(hashes)] if len(self._queries) == 1 else held.prefix)
            if same and held.epoch == client.ready_epoch:
                return held.found
            held.found.release()
        found = self._ask(client, hashes, lease=True)
        if not found.leases or not found.hits:
            found.release()
            return None
        return found

    def _ask(self, client: Client, hashes: list[bytes], *, lease: bool) -> Lookup:
        return client.lookup(hashes, self._queries, lease=lease, timeout_s=LOOKUP_TIMEOUT_S)

    def drop(self, request: str) -> None:
        """Ends the lease of a request, if it has one."""
        held = self._held.pop(request, None)
        if held is not None:
            held.found.release()

    def clear(self) -> None:
        """Ends all leases."""
        for request in list(self._held):
            self.drop(request)

    def expire(self) -> None:
        """Ends the leases that nobody has asked for lately."""
        now_s = self._clock()
        if now_s - self._looked_s < HELD_S / 8:
            return
        self._looked_s = now_s
        for request, held in list(self._held.items()):
            if now_s - held.asked_s > HELD_S:
                self.drop(request)


def _readable(found: Lookup) -> int:
    return found.hits + found.unleased
