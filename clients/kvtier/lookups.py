"""Lookups and what they answer: hits, misses, and the lease that keeps the hits in place until they are
loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtier.errors import KvtierError, Reason
from kvtier.transfers import EventLike
from kvtier.v1 import cache_pb2

Hashes = bytes | Sequence[bytes] | npt.NDArray[np.uint8]
"""Block hashes in sequence order: one after another, or a list of them, or an array of shape (n, hash_bytes).
"""

BlockIds = Sequence[int] | npt.NDArray[np.integer]
"""Numbers of the engine's blocks: a list, or an integer array of shape (n,)."""


class LookupMode(Enum):
    """Numbers of kvtier.v1.LookupMode."""

    PREFIX = 1
    """The leading run of blocks that are all readable."""
    EXACT = 3
    """Every block by itself."""


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
class Lookup:
    """The answer to a lookup; a context manager that releases its lease, if it still has one.

    No answer in time, no daemon, not ready: all of them are a miss with `answered` False and the reason in
    `error`.
    """

    hits: int = 0
    """Blocks that can be loaded now. Prefix mode: length of the leading run. Exact mode: how many. Joint:
    length of the prefix, in blocks of the group; of the first group, where it stands for all. If a lease was
    asked for, what it does not hold is no hit."""
    states: bytes = field(default=b"", repr=False)
    """MISS, PENDING or HIT for each hash. Prefix mode: up to and including the first that is not a hit.
    Joint: for each block of the prefix that there will be when what is PENDING has come; MISS is not there
    and not needed."""
    lease: Lease | None = None
    answered: bool = False
    error: KvtierError | None = None
    """Why there is no answer; or why a lease that was asked for holds fewer blocks than are readable."""
    _release: Callable[[Lease], None] | None = field(default=None, repr=False, compare=False)
    groups: "tuple[Lookup, ...]" = ()
    """Joint: the answer for each group, in the order of the queries, with its lease."""
    unleased: int = 0
    """Blocks that are readable and that the lease had no room for; in prefix mode those right behind the
    hits. Load the hits and look the others up again: they have their turn once the load has ended. Joint: 0.
    """

    @property
    def pending(self) -> bool:
        """Prefix mode: the run of hits ended at a block that somebody is storing right now, that is being
        promoted from a lower tier, or that finds no room in a lease before others have loaded: asked again in
        a moment, it may be longer. Joint: likewise. Exact mode: some block is so.
        """
        return PENDING in self.states or any(group.pending for group in self.groups)

    @property
    def epoch(self) -> int | None:
        """Of its leases; None if it has none."""
        holder = self.groups[0] if self.groups else self
        return None if holder.lease is None else holder.lease.epoch

    @property
    def leases(self) -> tuple[Lease, ...]:
        """All that it was granted."""
        return tuple(one.lease for one in self.groups or (self,) if one.lease is not None)

    def release(self) -> None:
        """Gives its leases back; never waits. Safe to call twice, and after a load has consumed one."""
        for lease in self.leases:
            if self._release is not None:
                self._release(lease)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def unanswered(reason: Reason, message: str) -> Lookup:
    """A miss, because nobody answered."""
    return Lookup(error=KvtierError(reason, message))


@dataclass(slots=True, eq=False)
class LookupRecord:
    """One lookup on its way; its session keeps it up to date."""

    event: EventLike
    """Set with the answer."""
    sent_s: float
    """Of the session's clock."""
    answer: Lookup | None = None
    abandoned: bool = False
    """Nobody waits any more: a lease that still comes is released at once."""
    counts: bool = True
    """As a lookup; a prefetch does not."""
    joint: int = 0
    """Queries that are answered together; 0: one by itself."""

    def end(self, answer: Lookup) -> None:
        """The answer is known."""
        self.answer = answer
        self.event.set()


def answer_of(
    response: cache_pb2.LookupResponse | cache_pb2.PrefetchResponse,
    epoch: int,
    release: Callable[[Lease], None],
    joint: int = 0,
) -> Lookup:
    """The daemon's answer. `joint`: to so many queries together."""
    if len(response.answers) != (joint or 1):
        said = f"the daemon sent {len(response.answers)} answers to {joint or 1} queries"
        return unanswered(Reason.MALFORMED, said)
    if joint:
        return _joint_answer_of(response, epoch, release)
    answer = response.answers[0]
    if isinstance(response, cache_pb2.PrefetchResponse):
        return Lookup(answer.hits, answer.states, answered=True)
    lease = Lease(response.lease_id, epoch, answer.hits) if response.lease_id else None
    error = KvtierError.from_proto(response.lease_refused) if response.HasField("lease_refused") else None
    unleased = max(0, answer.readable - answer.hits)
    return Lookup(answer.hits, answer.states, lease, True, error, release, unleased=unleased)


def _joint_answer_of(
    response: cache_pb2.LookupResponse | cache_pb2.PrefetchResponse,
    epoch: int,
    release: Callable[[Lease], None],
) -> Lookup:
    groups = []
    error: KvtierError | None = None
    lease_id = 0
    if isinstance(response, cache_pb2.LookupResponse):
        lease_id = response.lease_id  # one query in prefix mode is answered as it always was
        if response.HasField("lease_refused"):
            error = KvtierError.from_proto(response.lease_refused)
    for answer in response.answers:
        granted = answer.lease_id or lease_id
        lease: Lease | None = None
        if granted:
            lease = Lease(granted, epoch, answer.hits - answer.lease_first, answer.lease_first)
        groups.append(Lookup(answer.hits, answer.states, lease, True, None, release))
    return Lookup(groups[0].hits, answered=True, error=error, _release=release, groups=tuple(groups))


def join_hashes(hashes: Hashes, hash_bytes: int) -> bytes:
    """One after another, as they travel. Raises KvtierError HASH_LENGTH."""
    if isinstance(hashes, bytes):
        if len(hashes) % hash_bytes:
            raise KvtierError(
                Reason.HASH_LENGTH,
                f"concatenated hashes must be a multiple of {hash_bytes} bytes",
                field="hashes",
                value=f"{len(hashes)} bytes",
            )
        return hashes
    if isinstance(hashes, np.ndarray):
        if hashes.dtype != np.uint8 or hashes.ndim != 2 or hashes.shape[1] != hash_bytes:
            raise KvtierError(
                Reason.HASH_LENGTH,
                f"an array of hashes is uint8 of shape (n, {hash_bytes})",
                field="hashes",
                value=f"{hashes.dtype} {hashes.shape}",
            )
        return hashes.tobytes()
    for index, value in enumerate(hashes):
        if len(value) != hash_bytes:
            raise KvtierError(
                Reason.HASH_LENGTH,
                f"must be {hash_bytes} bytes, as the namespace says",
                field=f"hashes[{index}]",
                value=f"{len(value)} bytes",
            )
    return b"".join(hashes)


def list_block_ids(block_ids: BlockIds, count_max: int, *, distinct: bool) -> list[int]:
    """Checked block ids. Raises KvtierError BLOCK_ID_RANGE or BLOCK_ID_DUPLICATE."""
    ids: list[int] = block_ids.tolist() if isinstance(block_ids, np.ndarray) else list(block_ids)
    if ids and not (min(ids) >= 0 and max(ids) < count_max):
        index = next(index for index, value in enumerate(ids) if not 0 <= value < count_max)
        raise KvtierError(
            Reason.BLOCK_ID_RANGE,
            f"must be at least 0 and below {count_max}",
            field=f"block_ids[{index}]",
            value=ids[index],
        )
    if distinct and len(set(ids)) != len(ids):
        seen: set[int] = set()
        for index, value in enumerate(ids):
            if value in seen:
                raise KvtierError(
                    Reason.BLOCK_ID_DUPLICATE,
                    "two blocks cannot be loaded to one place",
                    field=f"block_ids[{index}]",
                    value=value,
                )
            seen.add(value)
    return ids
