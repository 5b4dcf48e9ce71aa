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
    """The right to load the blocks of one lookup, of one group. It lives as long as this client's epoch at
    most."""

    lease_id: int
    epoch: int
    blocks: int
    first: int = 0
    """Block of the group's query that it begins with: a window leases its last blocks only."""


@dataclass(frozen=True, slots=True)
class GroupLookup:
    """What a lookup answers about one group."""

    group: int
    hits: int = 0
    """Blocks that can be loaded now. Prefix mode: length of the leading run; of several groups, of the prefix
    that all of them can load. Exact mode: how many. If a lease was asked for, what it does not hold is no
    hit."""
    states: bytes = field(default=b"", repr=False)
    """MISS, PENDING or HIT for each hash. Prefix mode: up to and including the first that is not a hit. Of a
    window, or of several groups: for each block of the prefix that there will be when what is PENDING has
    come; MISS is not there and not needed."""
    lease: Lease | None = None
    unleased: int = 0
    """Blocks that are readable and that the lease had no room for; in prefix mode those right behind the
    hits. Load the hits and look the others up again: they have their turn once the load has ended. Of a
    window, or of several groups: 0."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer to a lookup; a context manager that releases its leases, as far as it still has them.

    No answer in time, no daemon, not ready: all of them are a miss with `answered` False and the reason in
    `error`.
    """

    groups: tuple[GroupLookup, ...] = ()
    """For each group that was asked about, in the order of the queries. `hits`, `states`, `lease` and
    `unleased` are those of the first."""
    answered: bool = False
    error: KvtierError | None = None
    """Why there is no answer; or why a lease that was asked for holds fewer blocks than are readable."""
    _release: Callable[[Lease], None] | None = field(default=None, repr=False, compare=False)

    @property
    def hits(self) -> int:
        """See GroupLookup."""
        return self.groups[0].hits if self.groups else 0

    @property
    def states(self) -> bytes:
        """See GroupLookup."""
        return self.groups[0].states if self.groups else b""

    @property
    def lease(self) -> Lease | None:
        """See GroupLookup."""
        return self.groups[0].lease if self.groups else None

    @property
    def unleased(self) -> int:
        """See GroupLookup."""
        return self.groups[0].unleased if self.groups else 0

    @property
    def pending(self) -> bool:
        """Prefix mode: the run of hits ended at a block that somebody is storing right now, that is being
        promoted from a lower tier, or that finds no room in a lease before others have loaded: asked again in
        a moment, it may be longer. Exact mode: some block is so.
        """
        return any(PENDING in each.states for each in self.groups)

    @property
    def leases(self) -> tuple[Lease, ...]:
        """All that it was granted."""
        return tuple(each.lease for each in self.groups if each.lease is not None)

    def lease_of(self, group: int) -> Lease | None:
        """The lease of this group's blocks, None without one."""
        return next((each.lease for each in self.groups if each.group == group), None)

    def release(self) -> None:
        """Gives its leases back; never waits. Safe to call twice, and after a load has consumed one."""
        for lease in self.leases:
            if self._release is not None:
                self._release(lease)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class LookupRecord:
    """One lookup on its way; its session keeps it up to date."""

    queries: Sequence[GroupQuery]
    event: Event
    """Set with the answer."""
    sent_s: float
    """Of the session's clock."""
    counts: bool = True
    """As a lookup; a prefetch does not."""
    answer: Lookup | None = None
    abandoned: bool = False
    """Nobody waits any more: a lease that still comes is released at once."""

    def end(self, answer: Lookup) -> None:
        """The answer is known."""
        self.answer = answer
        self.event.set()

    def end_without(self, error: KvtierError | None) -> Lookup:
        """No block hits: nobody has answered, and why; None: there was nothing to ask."""
        answer = Lookup(tuple(GroupLookup(query.group) for query in self.queries), error is None, error)
        self.end(answer)
        return answer


def answer_of(
    response: cache_pb2.LookupResponse | cache_pb2.PrefetchResponse,
    queries: Sequence[GroupQuery],
    epoch: int,
    release: Callable[[Lease], None],
) -> Lookup:
    """What the daemon answers, to each of these queries."""
    lease_id, error = 0, None
    if isinstance(response, cache_pb2.LookupResponse):
        lease_id = response.lease_id  # of a query that is answered by itself
        if response.HasField("lease_refused"):
            error = KvtierError.from_proto(response.lease_refused)
    groups = []
    for query, answer in zip(queries, response.answers, strict=True):
        hits, first, granted = answer.hits, answer.lease_first, answer.lease_id or lease_id
        lease = Lease(granted, epoch, hits - first, first) if granted else None
        groups.append(GroupLookup(query.group, hits, answer.states, lease, max(0, answer.readable - hits)))
    return Lookup(tuple(groups), True, error, release)
