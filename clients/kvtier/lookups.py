"""What lookups answer: hits, misses, and the leases that keep the hits in place until they are loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Self

from kvtier.errors import KvtierError
from kvtier.queries import GroupQuery
from kvtier.v1 import cache_pb2

MISS, PENDING, HIT = 0, 1, 2
"""Bytes of `Lookup.states`, those of kvtier.v1.BlockState."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to load the blocks of one group that a lookup has found. It ends with the epoch at the
    latest."""

    lease_id: int
    epoch: int
    blocks: int
    first: int = 0
    """The first block that the lease holds, counted in the group's query. A window leases only its last."""


@dataclass(frozen=True, slots=True)
class GroupLookup:
    """The answer to a lookup for one group."""

    group: int
    hits: int = 0
    """How many blocks can be loaded now. In prefix mode this is the length of the leading run; of several
    groups, of the prefix that all of them can load. In exact mode it is how many of the hashes hit. If a
    lease was asked for, blocks that it does not hold are no hits."""
    states: bytes = field(default=b"", repr=False)
    """One byte for each hash: MISS, PENDING or HIT. In prefix mode the bytes end with the first that is not a
    hit. Of a window, or of several groups, there is one byte for each block of the prefix that can be loaded
    once the PENDING blocks have come; there, MISS means that the block is not there and not needed."""
    lease: Lease | None = None
    unleased: int = 0
    """How many blocks can be read but found no room in the lease; in prefix mode they are those right behind
    the hits. Load the hits and look the others up again: they have their turn once the load has ended. Always
    0 of a window, and of several groups."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer to a lookup. As a context manager it releases the leases that it still has.

    If there is no daemon, the client is not ready, or no answer came in time, this is a miss with `answered`
    False and the reason in `error`.
    """

    groups: tuple[GroupLookup, ...] = ()
    """One answer for each query, in order. `hits`, `states`, `lease` and `unleased` are the first's."""
    answered: bool = False
    error: KvtierError | None = None
    """Why there is no answer, or why a lease that was asked for holds fewer blocks than can be read."""
    _release: Callable[[Lease], None] | None = field(default=None, repr=False, compare=False)

    @property
    def hits(self) -> int:
        """How many blocks of the first group can be loaded now (see `GroupLookup.hits`)."""
        return self.groups[0].hits if self.groups else 0

    @property
    def states(self) -> bytes:
        """MISS, PENDING or HIT for each hash of the first group (see `GroupLookup.states`)."""
        return self.groups[0].states if self.groups else b""

    @property
    def lease(self) -> Lease | None:
        """The lease of the first group's blocks, or None."""
        return self.groups[0].lease if self.groups else None

    @property
    def unleased(self) -> int:
        """How many blocks of the first group can be read but found no room in the lease."""
        return self.groups[0].unleased if self.groups else 0

    @property
    def pending(self) -> bool:
        """Whether a lookup in a moment may find more. In prefix mode the run of hits ended at a block that is
        being stored, that is being promoted from a lower tier, or that finds no room in a lease until others
        have loaded. In exact mode some block is in this state."""
        return any(PENDING in each.states for each in self.groups)

    @property
    def leases(self) -> tuple[Lease, ...]:
        """All leases that the lookup was granted."""
        return tuple(each.lease for each in self.groups if each.lease is not None)

    def lease_of(self, group: int) -> Lease | None:
        """Returns the lease of this group's blocks, or None if there is none."""
        return next((each.lease for each in self.groups if each.group == group), None)

    def release(self) -> None:
        """Gives the leases back. Never waits. Safe to call twice, and after a load has consumed a lease."""
        for lease in self.leases:
            if self._release is not None:
                self._release(lease)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class LookupRecord:
    """One lookup or prefetch that was sent; the session keeps it up to date."""

    queries: Sequence[GroupQuery]
    event: Event
    """Set when the answer is known."""
    sent_s: float
    """When it was sent, by the session's clock."""
    counts: bool = True
    """Whether it is counted as a lookup; a prefetch is not."""
    answer: Lookup | None = None
    took_s: float | None = None
    """From when it was sent until the daemon's answer was there; None while there is none."""
    abandoned: bool = False
    """Whether nobody waits any more: a lease that still comes is then released at once."""

    def end(self, answer: Lookup) -> None:
        """Sets the answer and wakes those who wait for it."""
        self.answer = answer
        self.event.set()

    def end_without(self, error: KvtierError | None) -> Lookup:
        """Ends the lookup as a miss, and returns it. `error` says why nobody has answered; None means that
        there was nothing to ask."""
        answer = Lookup(tuple(GroupLookup(query.group) for query in self.queries), error is None, error)
        self.end(answer)
        return answer


def answer_of(
    response: cache_pb2.LookupResponse | cache_pb2.PrefetchResponse,
    queries: Sequence[GroupQuery],
    epoch: int,
    release: Callable[[Lease], None],
) -> Lookup:
    """Makes the answer to these queries out of the daemon's response."""
    lease_id, error = 0, None
    if isinstance(response, cache_pb2.LookupResponse):
        lease_id = response.lease_id  # the lease of a single query
        if response.HasField("lease_refused"):
            error = KvtierError.from_proto(response.lease_refused)
    groups = []
    for query, answer in zip(queries, response.answers, strict=True):
        hits, first, granted = answer.hits, answer.lease_first, answer.lease_id or lease_id
        lease = Lease(granted, epoch, hits - first, first) if granted else None
        groups.append(GroupLookup(query.group, hits, answer.states, lease, max(0, answer.readable - hits)))
    return Lookup(tuple(groups), True, error, release)
