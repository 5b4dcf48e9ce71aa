"""What the core asks the front to do, in this order and before the next stimulus, and what it replies."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvtierd.core import ids
from kvtierd.core.blocks.namespaces import NamespaceAbout
from kvtierd.core.errors import Refusal
from kvtierd.core.stimuli import Signals


class Direction(Enum):
    STORE = 1
    LOAD = 2


@dataclass(frozen=True, slots=True)
class AssignExtent:
    """Write the header of a free extent, which holds slots of this size from now on."""

    extent: int
    slot_bytes: int
    disk: ids.DiskId | None = None
    """The disk whose extent it is; None for the host pool. It means the same in the actions below."""


@dataclass(frozen=True, slots=True)
class OpenSlots:
    """Mark free slots as WRITING for one shard of a batch of blocks. This happens before any part or job that
    writes them is posted."""

    slots: ids.Slots
    worker: ids.WorkerId
    store: ids.TransferNumber
    namespace: ids.NamespaceDigest
    group: int
    shard: ids.Rank
    world_size: int
    hashes: ids.Hashes
    data_bytes: int
    disk: ids.DiskId | None = None


@dataclass(frozen=True, slots=True)
class CommitSlots:
    """Make WRITING slots of the host pool READY and give them their recency: block i of `slots` (n, world)
    gets clock first_clock - i. The slots of a disk are made READY by its worker, before it reports."""

    slots: ids.Slots
    first_clock: int


@dataclass(frozen=True, slots=True)
class FreeSlots:
    """Raise the generation of slots and mark them free, before any of their bytes change."""

    slots: ids.Slots
    disk: ids.DiskId | None = None


@dataclass(frozen=True, slots=True)
class QuarantineSlots:
    """Set slots aside that have failed a check. Nothing is stored in them again while this file exists."""

    slots: ids.Slots
    disk: ids.DiskId | None = None


@dataclass(frozen=True, slots=True)
class CheckSlots:
    """Have a worker compare slots with their records and checksums when its lanes are idle. The front adds
    the slots' generations. The answer is `SlotsChecked`, or the end of the worker."""

    worker: ids.WorkerId
    check: ids.CheckId
    slots: ids.Slots


@dataclass(frozen=True, slots=True)
class PostPart:
    """Hand one part to its copy worker. The front adds the slots' generations."""

    worker: ids.WorkerId
    part: ids.PartId
    direction: Direction
    session: ids.SessionId
    registration: ids.RegistrationId
    group: int
    signals: Signals
    block_ids: npt.NDArray[np.uint32]
    slots: ids.Slots
    verify: npt.NDArray[np.uint8] | None
    """For a LOAD, 1 for each block whose checksum is to be checked first; None if there is none."""


class DiskJobKind(Enum):
    """What a disk's worker does with a batch of slots; the numbers of `kvtierd.wire.DiskJobKind`."""

    WRITE = 1
    """Copy from the host to the disk. The host slots are not held: a block fails if it is gone when its turn
    comes, or goes while it is copied."""
    READ = 2
    """Copy from the disk into WRITING host slots, and compare with key and checksum on the way."""
    CHECK = 3
    """Only read, and compare with the checksums."""
    ADOPT = 4
    """Only of a store: have slots stand for blocks of a pack that its worker has found there."""


@dataclass(frozen=True, slots=True)
class PostDiskJob:
    """Hand a batch of slots to a disk's worker, which does every READ before a WRITE, and every WRITE before
    a CHECK. The front adds the slots' generations. The answer is `DiskJobFinished`, or the end of the worker.
    `OpenSlots` comes first: for the disk's slots before a WRITE, for the host's before a READ."""

    worker: ids.WorkerId
    disk: ids.DiskId
    job: ids.DiskJobId
    kind: DiskJobKind
    disk_slots: ids.Slots
    """Shape (n,): shards of whole blocks, block after block in rank order."""
    host_slots: ids.Slots
    """The host's slots, parallel to `disk_slots`; empty for CHECK and ADOPT."""
    clocks: npt.NDArray[np.uint64]
    """For WRITE and ADOPT, the recency that each record gets, parallel to `disk_slots`; else empty."""
    pack: int = 0
    """ADOPT: the pack, by its number in `PackFound`."""
    positions: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """ADOPT: the position in the pack of the block that each slot is to stand for, parallel to `disk_slots`;
    else empty."""


@dataclass(frozen=True, slots=True)
class WatchSpace:
    """Have a store's worker look for packs with blocks of a space whose shards have these sizes. `PackFound`
    follows for each, until `UnwatchSpace` or the worker's end."""

    worker: ids.WorkerId
    space: ids.SpaceId
    namespace: ids.NamespaceDigest
    group: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnwatchSpace:
    """Have a store's worker look no further for packs of a space. Some may still be told of."""

    worker: ids.WorkerId
    space: ids.SpaceId


@dataclass(frozen=True, slots=True)
class RevokePart:
    """End a part that has not started. A part that has started runs on. In both cases `PartFinished`
    follows."""

    worker: ids.WorkerId
    part: ids.PartId


@dataclass(frozen=True, slots=True)
class ReleaseSession:
    """Have the worker revoke, fence and unmap everything that it holds of a session. `SessionReleased`
    follows."""

    worker: ids.WorkerId
    session: ids.SessionId


class TransferEnd(Enum):
    """How a transfer ended. FAILED: a copy failed, a block was corrupt or a worker was lost. CANCELLED: it
    was called off, revoked, or too late."""

    DONE = 2
    FAILED = 3
    CANCELLED = 4


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """What the submitter is told when the last part of a transfer is fenced."""

    transfer: ids.TransferNumber
    ticket: ids.Ticket
    end: TransferEnd
    succeeded: npt.NDArray[np.uint8]
    """For each submitted key 1 or 0. Store: 1 if the block is committed, by this transfer or before it and
    still there. Load: 1 if the block is in its place in the engine."""
    error: Refusal | None


@dataclass(frozen=True, slots=True)
class InstanceView:
    """How an instance is, for its sessions: whether it is ready, and which ranks it waits for."""

    ready: bool
    missing_ranks: tuple[ids.Rank, ...]
    namespace: ids.NamespaceDigest | None
    reregister_ranks: tuple[ids.Rank, ...]
    prefix_tokens_max: int = 0
    """Tokens of the longest prefix whose blocks of all groups fit into the pool at once. 0 if that is not
    known yet, or if disks keep what the pool cannot."""


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The epoch is over: close this session's stream and side socket."""

    why: Refusal


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell a session something. It is dropped if the session is gone."""

    session: ids.SessionId
    event: TransferEnded | InstanceView | SessionEnded


class NewsKind(Enum):
    """What is told of blocks to those who route by it."""

    CLEARED = "cleared"
    """Nothing of the namespace counts any more. What it has is told after this."""
    STORED = "stored"
    REMOVED = "removed"
    SHOWING = "showing"
    """Everything that the namespace has follows as SHOWN, for those who have asked."""
    SHOWN = "shown"
    SHOWN_ALL = "shown_all"


@dataclass(frozen=True, slots=True, eq=False)
class BlockNews:
    """Blocks of one group have come to a tier, or left it; or what `NewsKind` says of a namespace as a
    whole."""

    kind: NewsKind
    namespace: ids.NamespaceDigest
    hashes: ids.Hashes
    group: int = 0
    disk: ids.DiskId | None = None
    about: NamespaceAbout | None = None
    """Of CLEARED: what is known of the namespace."""


@dataclass(frozen=True, slots=True, eq=False)
class TellOfBlocks:
    """Tell routers all of this, in this order."""

    news: tuple[BlockNews, ...]


@dataclass(frozen=True, slots=True)
class WithdrawPage:
    """Nobody uses the space any more, so its index page may go."""

    space: ids.SpaceId


Action = (
    AssignExtent
    | OpenSlots
    | CommitSlots
    | FreeSlots
    | QuarantineSlots
    | CheckSlots
    | PostPart
    | PostDiskJob
    | WatchSpace
    | UnwatchSpace
    | RevokePart
    | ReleaseSession
    | WithdrawPage
    | TellOfBlocks
    | Notify
)


@dataclass(frozen=True, slots=True)
class Attached:
    """The reply to `AttachSession`. `fingerprint` is None for a session that holds no rank."""

    epoch: ids.Epoch
    fingerprint: ids.Fingerprint | None
    instance: InstanceView


@dataclass(slots=True)
class GroupHits:
    """What a lookup says of one group."""

    hits: int
    """Blocks of the prefix that can be loaded now, or READY blocks of an exact query. If a lease was asked
    for, only those that it covers."""
    states: npt.NDArray[np.uint8]
    """kvtier.v1.BlockState bytes (0 miss, 1 pending, 2 hit). For an exact query, one for each block.
    Otherwise one for each block of the prefix as it will be when everything pending has come; a block that is
    neither there nor needed is a miss."""
    readable: int = 0
    """Readable blocks: the hits, and those behind them that the lease does not cover."""
    lease: ids.LeaseId | None = None
    """The lease that holds the hits from block `lease_first` on, in the order of the query. A load's `first`
    counts from there."""
    lease_first: int = 0

    def up_to_first_miss(self, blocks: int) -> npt.NDArray[np.uint8]:
        """The states of the hits of a prefix of `blocks` blocks, and of the first block that is no hit."""
        if len(self.states) > self.hits or self.hits == blocks:
            return self.states[: self.hits + 1]
        return np.append(self.states, np.uint8(0))


@dataclass(slots=True)
class LookupReply:
    """The reply to `LookupBlocks` and `PrefetchBlocks`."""

    groups: tuple[GroupHits, ...]
    """One for each query, in the same order."""
    lease_refused: Refusal | None = None
    """Why the leases cover less than is readable, or why there is none."""
    again: bool = False
    """The same request was looked up before, so it is no other use of its blocks."""


@dataclass(frozen=True, slots=True)
class SubmitReply:
    """The reply to `SubmitStore` and `SubmitLoad`."""

    transfer: ids.TransferNumber
    results: npt.NDArray[np.uint8]
    """For a store, the kvtier.v1.StoreResult of each key (0 accepted, 1 exists, 2 pending, 3 throttled). For
    a load, empty."""


@dataclass(frozen=True, slots=True)
class ClearReply:
    """The reply to `ClearBlocks`."""

    cleared_blocks: int
    """Blocks that are in no tier any more."""
    host_bytes: int
    """Bytes of the slots that these blocks had in the host tier."""
    disk_bytes: int
    """Bytes of the slots that they had on disks."""
    held_blocks: int
    """Blocks that stay because they are leased or being loaded."""
    under_way_blocks: int
    """Blocks that stay because they are being stored, promoted or written to a disk."""


Reply = Attached | LookupReply | SubmitReply | ClearReply | InstanceView | None
