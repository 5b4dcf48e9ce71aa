"""What the core asks the front to do, in order, before it handles anything else. And what it answers."""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvtierd.core.errors import Refusal
from kvtierd.core.ids import (
    CheckId,
    DiskId,
    DiskJobId,
    Epoch,
    Fingerprint,
    Hashes,
    LeaseId,
    NamespaceDigest,
    PartId,
    Rank,
    RegistrationId,
    SessionId,
    Slots,
    SpaceId,
    Ticket,
    TransferNumber,
    WorkerId,
)
from kvtierd.core.stimuli import Signals


class Direction(Enum):
    STORE = 1
    LOAD = 2


@dataclass(frozen=True, slots=True)
class AssignExtent:
    """Write the header of a free extent: from now on it holds slots of this size."""

    extent: int
    slot_bytes: int
    disk: DiskId | None = None
    """Of this disk; None: of the host pool. Likewise below."""


@dataclass(frozen=True, slots=True)
class OpenSlots:
    """Mark free slots as WRITING for one shard of a batch of blocks; done before any part of them is
    posted."""

    slots: Slots
    worker: WorkerId
    store: TransferNumber
    namespace: NamespaceDigest
    group: int
    shard: Rank
    world_size: int
    hashes: Hashes
    data_bytes: int
    disk: DiskId | None = None


@dataclass(frozen=True, slots=True)
class CommitSlots:
    """Make WRITING slots of the host pool READY, with their recency: block i of `slots` (n, world) gets clock
    first_clock - i. A disk's slots are made READY by its worker, before it reports."""

    slots: Slots
    first_clock: int


@dataclass(frozen=True, slots=True)
class FreeSlots:
    """Bump the generation of slots and mark them free: before any byte of them changes."""

    slots: Slots
    disk: DiskId | None = None


@dataclass(frozen=True, slots=True)
class QuarantineSlots:
    """Set slots aside that have failed a check: nothing is stored there again while this file lives."""

    slots: Slots
    disk: DiskId | None = None


@dataclass(frozen=True, slots=True)
class CheckSlots:
    """Have a worker compare slots with their records and checksums, when its lanes are idle. The front adds
    the slots' generations. `SlotsChecked` follows, or the worker's end."""

    worker: WorkerId
    check: CheckId
    slots: Slots


@dataclass(frozen=True, slots=True)
class PostPart:
    """Hand one part to its copy worker. The front adds the slots' generations."""

    worker: WorkerId
    part: PartId
    direction: Direction
    session: SessionId
    registration: RegistrationId
    group: int
    signals: Signals
    block_ids: npt.NDArray[np.uint32]
    slots: Slots
    verify: npt.NDArray[np.uint8] | None
    """LOAD: 1 for slots whose checksum must be checked first."""


class DiskJobKind(Enum):
    """Numbers of `kvtierd.wire.DiskJobKind`."""

    WRITE = 1
    """Host to disk. The host slots are not held: a block that has gone when its turn comes, or goes
    meanwhile, fails."""
    READ = 2
    """Disk to host, into slots that are WRITING; checked on the way."""
    CHECK = 3
    """Read and compare with the checksums only."""


@dataclass(frozen=True, slots=True)
class PostDiskJob:
    """Hand a batch of slots to a disk's worker, which does READ before WRITE before CHECK. The front adds the
    slots' generations. `DiskJobFinished` follows, or the worker's end. A disk's own slots are OpenSlots'
    before a WRITE of them, the host's before a READ."""

    worker: WorkerId
    disk: DiskId
    job: DiskJobId
    kind: DiskJobKind
    disk_slots: Slots
    """Shape (n,): shards of whole blocks, block after block in rank order."""
    host_slots: Slots
    """Parallel to `disk_slots`; empty for CHECK."""
    clocks: npt.NDArray[np.uint64]
    """WRITE: the recency that each record gets, parallel; empty otherwise."""


@dataclass(frozen=True, slots=True)
class RevokePart:
    """End a part that has not started; a started one runs on. Either way `PartFinished` follows."""

    worker: WorkerId
    part: PartId


@dataclass(frozen=True, slots=True)
class ReleaseSession:
    """Have the worker revoke, fence and unmap all it holds of a session. `SessionReleased` follows."""

    worker: WorkerId
    session: SessionId


class TransferEnd(Enum):
    """FAILED: a copy failed, a block was corrupt or a worker was lost. CANCELLED: called off, revoked, or too
    late."""

    DONE = 2
    FAILED = 3
    CANCELLED = 4


@dataclass(frozen=True, slots=True)
class TransferEnded:
    transfer: TransferNumber
    ticket: Ticket
    end: TransferEnd
    succeeded: npt.NDArray[np.uint8]
    """Per submitted key: 1 if committed (store; also by somebody before, if it is still there) or in place
    (load)."""
    error: Refusal | None


@dataclass(frozen=True, slots=True)
class InstanceView:
    ready: bool
    missing_ranks: tuple[Rank, ...]
    namespace: NamespaceDigest | None
    reregister_ranks: tuple[Rank, ...]
    prefix_tokens_max: int = 0
    """Of the longest prefix that the pool can hold, in all groups; 0: not known yet, or longer ones can be
    kept on disks."""


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The epoch is over: close this session's stream and side socket."""

    why: Refusal


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell a session; dropped if it is gone."""

    session: SessionId
    event: TransferEnded | InstanceView | SessionEnded


@dataclass(frozen=True, slots=True)
class WithdrawPage:
    """Nobody uses a space any more: its index page may go."""

    space: SpaceId


Action = (
    AssignExtent
    | OpenSlots
    | CommitSlots
    | FreeSlots
    | QuarantineSlots
    | CheckSlots
    | PostPart
    | PostDiskJob
    | RevokePart
    | ReleaseSession
    | WithdrawPage
    | Notify
)


@dataclass(frozen=True, slots=True)
class Attached:
    epoch: Epoch
    fingerprint: Fingerprint | None
    instance: InstanceView


@dataclass(slots=True)
class GroupHits:
    """What is told of one group."""

    hits: int
    """Blocks of the prefix that can be loaded now, or READY blocks of an exact query; if a lease was asked
    for, those of them that it covers."""
    states: npt.NDArray[np.uint8]
    """kvtier.v1.BlockState bytes (0 miss, 1 pending, 2 hit). Of an exact query one for each block. Else of
    the prefix that there will be when what is pending has come; miss where a block is not there and not
    needed."""
    readable: int = 0
    """Blocks that are readable: the hits, and those behind them that the lease does not cover."""
    lease: LeaseId | None = None
    """Holds the hits from block `lease_first` on, in the order of the query: what a load's `first` counts
    in."""
    lease_first: int = 0

    def up_to_first_miss(self, blocks: int) -> npt.NDArray[np.uint8]:
        """The states of a prefix's hits and of the first of its `blocks` blocks that is none."""
        if len(self.states) > self.hits or self.hits == blocks:
            return self.states[: self.hits + 1]
        return np.append(self.states, np.uint8(0))


@dataclass(slots=True)
class LookupReply:
    groups: tuple[GroupHits, ...]
    """In the order of the queries."""
    lease_refused: Refusal | None = None
    """Why leases cover less than is readable, or why there is none."""


@dataclass(frozen=True, slots=True)
class SubmitReply:
    transfer: TransferNumber
    results: npt.NDArray[np.uint8]
    """Store: kvtier.v1.StoreResult per key (0 accepted, 1 exists, 2 pending, 3 throttled). Load: empty."""


@dataclass(frozen=True, slots=True)
class ClearReply:
    cleared_blocks: int
    """That are in no tier any more."""
    host_bytes: int
    """Of the slots they had in the host tier, and on disks."""
    disk_bytes: int
    held_blocks: int
    """That stay: leased, or being loaded."""
    under_way_blocks: int
    """That stay: being stored, promoted, or written to a disk."""


Reply = Attached | LookupReply | SubmitReply | ClearReply | InstanceView | None
