"""Everything that can happen to the core. Frozen values; arrays in them are never changed after they are
handed in."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

from kvtierd.core.blocks.table import IndexPage
from kvtierd.core.ids import (
    CheckId,
    DiskId,
    DiskJobId,
    Epoch,
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
    WorkerId,
)


class SessionRole(IntFlag):
    SCHEDULER = 1
    RANK = 2


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One group as one rank holds it; the layout fingerprint covers exactly these fields."""

    kind: int
    block_tokens: int
    window_tokens: int
    planes: tuple[tuple[int, str], ...]
    """(fragment bytes, description) of each plane, in slot order."""
    replicated: bool = False
    """Every rank holds the same bytes: one shard is enough for all."""

    @property
    def slot_bytes(self) -> int:
        return sum(size for size, _ in self.planes)


@dataclass(frozen=True, slots=True)
class AttachSession:
    """A process says hello. Reply: `Attached`."""

    session: SessionId
    instance: str
    role: SessionRole
    rank: Rank
    world_size: int
    namespace_fields: bytes
    """Canonical serialisation of the namespace's fields; equal bytes, equal namespace."""
    hash_bytes: int
    model: str
    groups: tuple[GroupGeometry, ...]
    prefill_tokens_per_s: float = 0.0
    """How fast the engine computes a prompt, as declared; 0: not known."""
    namespace_facts: tuple[tuple[str, str], ...] = ()
    """Names and values of what `namespace_fields` is made of, for messages to people."""


@dataclass(frozen=True, slots=True)
class RegisterWords:
    """The session's shared words are mapped by `worker`. Sizes bound every later index."""

    session: SessionId
    worker: WorkerId
    doorbells: int
    parts: int


@dataclass(frozen=True, slots=True)
class RegisterMemory:
    """The rank's cache is mapped by `worker`. The instance is ready when its last rank has registered."""

    session: SessionId
    worker: WorkerId
    registration: RegistrationId
    num_blocks: tuple[int, ...]
    """Per group."""
    mapped_bytes: int


@dataclass(frozen=True, slots=True)
class UnregisterMemory:
    """The rank takes its memory back. Its epoch's transfers are cancelled; `ReleaseSession` follows."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class EndSession:
    """The session's process died or closed. Its instance's epoch ends."""

    session: SessionId
    why: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """One block, as one engine has found it."""

    matched: bool
    error: float
    """Relative; and the most that rounding explains."""
    threshold: float
    group: int
    block_hash: bytes
    detail: str


@dataclass(frozen=True, slots=True)
class RenewSession:
    """Heartbeat: the session lives; the leases of its instance are renewed."""

    session: SessionId
    prefill_tokens_per_s: float = 0.0
    """As measured by the engine; 0: nothing new."""
    index_lookups: int = 0
    index_hashes: int = 0
    """Lookups that the index page has spared since the last heartbeat, all misses, and their hashes."""
    audits: tuple[AuditReport, ...] = ()
    """What the engine has found since then."""


@dataclass(frozen=True, slots=True)
class RetentionRequest:
    """What is asked of blocks besides being stored (kvtier.v1.Retention). Times count from when they are
    READY."""

    hold_ms: int = 0
    """Not to be evicted for so long."""
    ttl_ms: int = 0
    """To be dropped after so long; 0: no time. Then they are kept on the host only."""
    host_only: bool = False
    """Not to be written to disks."""


NO_RETENTION = RetentionRequest()


@dataclass(frozen=True, slots=True)
class BlockQuery:
    """What is asked of one group."""

    group: int
    hashes: Hashes
    window_blocks: int = 0
    """Only the last so many blocks of a prefix are needed; 0: all of them."""
    exact: bool = False
    """Every block is asked for by itself, and not a prefix."""


@dataclass(frozen=True, slots=True)
class LookupBlocks:
    """The longest prefix that all groups asked about can serve; or each block of an exact query, which is
    then the only one. Reply: `LookupReply`."""

    session: SessionId
    epoch: Epoch
    queries: tuple[BlockQuery, ...]
    """Each group once; all begin at the same token."""
    lease: bool
    host_only: bool = False
    """What only disks have is a miss, and not promoted."""


@dataclass(frozen=True, slots=True)
class TouchBlocks:
    """The blocks that are READY become the most recent, the first of each query most of all: of a prefix its
    leading run, of a window or an exact query every block by itself. Groups do not depend on each other."""

    session: SessionId
    epoch: Epoch
    queries: tuple[BlockQuery, ...]
    hold_ms: int = 0
    """They are held as well."""
    cold: bool = False
    """Instead they become the least recent, the first of them least of all."""


@dataclass(frozen=True, slots=True)
class PrefetchBlocks:
    """Promote what a lookup of the same queries would miss on the host and a disk has. Reply: `LookupReply`,
    without leases: as the lookup would say it now, were there no load to be compared with computing. Hits are
    not counted as hits, and made recent only where blocks beyond them are brought up."""

    session: SessionId
    epoch: Epoch
    queries: tuple[BlockQuery, ...]


@dataclass(frozen=True, slots=True)
class Signals:
    ticket: Ticket
    part_word: int
    gated: bool
    doorbell: int = 0
    doorbell_value: int = 0


@dataclass(frozen=True, slots=True)
class SubmitStore:
    """Reply: `SubmitReply`."""

    session: SessionId
    epoch: Epoch
    signals: Signals
    group: int
    hashes: Hashes
    block_ids: npt.NDArray[np.uint32]
    retention: RetentionRequest = NO_RETENTION


@dataclass(frozen=True, slots=True)
class SubmitLoad:
    """Reply: `SubmitReply`."""

    session: SessionId
    epoch: Epoch
    signals: Signals
    group: int
    lease: LeaseId
    first: int
    block_ids: npt.NDArray[np.uint32]
    keep_lease: bool


@dataclass(frozen=True, slots=True)
class ReleaseLeases:
    session: SessionId
    epoch: Epoch
    leases: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True)
class CancelTransfers:
    session: SessionId
    epoch: Epoch
    tickets: tuple[Ticket, ...]


@dataclass(frozen=True, slots=True)
class PublishPage:
    """An empty index page for one group of the instance for which a session schedules, as
    `Machine.page_wanted` asked for it."""

    session: SessionId
    group: int
    page: IndexPage


class PartOutcome(IntEnum):
    """How a part ended; each implies that no copy of it can still land. Numbers of `kvtierd.wire.Outcome`."""

    DONE = 1
    FAILED = 2
    REVOKED = 3
    GATE_DEADLINE = 4


@dataclass(frozen=True, slots=True)
class PartFinished:
    """A copy worker has ended a part."""

    worker: WorkerId
    part: PartId
    outcome: PartOutcome
    failed: npt.NDArray[np.uint32]
    """Positions in the part that failed; with FAILED and none named, all of them."""
    corrupt: bool = False
    message: str = ""
    copied_bytes: int = 0
    copy_s: float = 0.0
    """Time inside copy calls."""


@dataclass(frozen=True, slots=True)
class SlotsChecked:
    """A copy worker has looked at slots, in the order in which it was asked to."""

    worker: WorkerId
    check: CheckId
    looked_at: int
    """How many of them; it leaves the rest out when its lanes have work."""
    corrupt: npt.NDArray[np.uint32]
    """Positions of those whose record or data does not match, although they still hold the same block."""


@dataclass(frozen=True, slots=True)
class SessionReleased:
    """A copy worker has fenced and unmapped everything of a session."""

    worker: WorkerId
    session: SessionId


@dataclass(frozen=True, slots=True)
class DiskJobFinished:
    """A disk's worker has ended a job; nothing of it can still land. What is named nowhere below went well: a
    WRITE's record is READY on the disk, a READ's bytes are checked and their checksum is in the host's
    record."""

    worker: WorkerId
    job: DiskJobId
    failed: npt.NDArray[np.uint32]
    """Positions in the job's slots that did not happen: the block had gone, or reading or writing failed."""
    corrupt: npt.NDArray[np.uint32]
    """READ and CHECK: positions whose record or data on the disk does not match. Not in `failed`."""
    error: str = ""
    """Why the device failed, if it did: an input or output error, no space. Empty if blocks had gone only."""
    bytes: int = 0
    """Read or written."""
    busy_s: float = 0.0
    """How long the device took for it, by itself or beside others."""


@dataclass(frozen=True, slots=True)
class StartScrub:
    """Compare every block of a disk with its checksum, once, when the disk has nothing else to do."""

    disk: DiskId


@dataclass(frozen=True, slots=True)
class WorkerLive:
    worker: WorkerId
    device: str
    """"cpu", "GPU-" and a UUID, or "disk-" and a DiskId."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker is being killed or hung up: it takes no more parts, but may still be writing."""

    worker: WorkerId
    why: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The worker's process is gone: the fence of all its parts."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class RecoveredExtent:
    extent: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a scan of the pool found, handed in once, before any session. Whole blocks only, oldest first."""

    extents: tuple[RecoveredExtent, ...]
    namespaces: tuple[tuple[NamespaceDigest, int, int], ...]
    """(digest, group, world size); `spaces` below indexes it."""
    spaces: npt.NDArray[np.uint32]
    hashes: Hashes
    slots: npt.NDArray[np.uint32]
    """Slots of all shards, block after block in rank order: block i has world size of its namespace of
    them."""
    clock: int
    """Highest recency clock found."""
    quarantined: Slots
    """Slots whose writer is not proved gone; they stay out of use until `SlotsProven`."""
    corrupt: Slots = field(default_factory=lambda: np.empty(0, np.uint32))
    """Slots that an earlier daemon has set aside by `QuarantineSlots`."""


@dataclass(frozen=True, slots=True)
class DiskRecovered:
    """What a scan of a disk's records found: handed in once per disk, right after the `WorkerLive` of its
    first worker, before or after sessions have come. Its slots are the disk's; none are quarantined."""

    disk: DiskId
    found: Recovered


@dataclass(frozen=True, slots=True)
class SlotsProven:
    """The writers of these quarantined slots are gone."""

    slots: Slots


@dataclass(frozen=True, slots=True)
class Drain:
    """Refuse new stores, loads and sessions, and let lookups miss, until `Resume`."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Take `Drain` back."""


@dataclass(frozen=True, slots=True)
class ClearBlocks:
    """Drop those of these blocks that nothing holds, from every tier that has them. What is leased, being
    loaded, stored, promoted or written to a disk stays, in all tiers. What is not there is no matter.

    A disk's file has to be told, and says so later than the host's: who wants that asks its worker.
    """

    space: SpaceId
    hashes: Hashes


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """Go on with another policy. Bounds that clients were told, and whatever memory was laid out for, stay as
    they were at the start: of `disks` the queues and the size of a job are not taken over."""

    sample_bytes_per_s: int
    disks: "CoreDisks"


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: leases and transfers past their deadlines end. Sent every 100 ms or so."""


Stimulus = (
    AttachSession
    | RegisterWords
    | RegisterMemory
    | UnregisterMemory
    | EndSession
    | RenewSession
    | LookupBlocks
    | TouchBlocks
    | PrefetchBlocks
    | SubmitStore
    | SubmitLoad
    | ReleaseLeases
    | CancelTransfers
    | PublishPage
    | PartFinished
    | SlotsChecked
    | DiskJobFinished
    | StartScrub
    | ClearBlocks
    | SessionReleased
    | WorkerLive
    | WorkerLost
    | WorkerExited
    | Recovered
    | DiskRecovered
    | SlotsProven
    | Drain
    | Resume
    | Reconfigure
    | Tick
)


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Bounds of the core; all positive."""

    lookup_hashes_max: int = 65_536
    transfer_blocks_max: int = 8_192
    transfers_max: int = 1_024
    """In flight, per instance."""
    leases_max: int = 8_192
    """Live at once, per instance."""
    leased_fraction_max: float = 0.95
    """Of the pool, that leases and running loads may hold, of all instances together."""
    held_fraction_max: float = 0.25
    """Of the pool's bytes, that blocks may be held in for a time, of all instances together."""
    hold_s_max: float = 3_600.0
    """Blocks are held no longer than this at a time."""
    lease_ttl_s: float = 10.0
    """After the instance's last heartbeat."""
    lease_lifetime_s: float = 600.0
    """However often it is renewed."""
    gate_deadline_s: float = 30.0
    transfer_deadline_s: float = 120.0
    """A transfer older than this is cancelled; its fence is still waited for."""
    terminal_kept: int = field(default=4_096)
    """Terminal transfers remembered per epoch for Wait."""


class Verify(Enum):
    """When a host block's data is compared with its checksum before a load."""

    RESTART = "restart"
    """Before the first load of a block that an earlier daemon has stored."""
    ALWAYS = "always"
    """Before every load."""


@dataclass(frozen=True, slots=True)
class CoreIntegrity:
    """How blocks are doubted, and how much is remembered of those that are gone."""

    verify: Verify = Verify.RESTART
    sample_bytes_per_s: int = 64 << 20
    """Of READY blocks chosen at random and compared with their checksums; 0: none."""
    remembered_blocks: int = 1 << 17
    """Of which it is remembered why they are gone, the latest; 44 bytes each."""


class WriteMode(Enum):
    """When a block of the host is written to a disk."""

    BACK = "back"
    """When it is among the next to be evicted."""
    THROUGH = "through"
    """As soon as it is stored."""
    ON_REUSE = "on-reuse"
    """When it is found or loaded for the first time after it was stored."""


@dataclass(frozen=True, slots=True)
class CoreDisks:
    """The disk tier's policy; all numbers positive."""

    mode: WriteMode = WriteMode.BACK
    write_queue_bytes: int = 256 << 20
    """Of each disk, on their way at once."""
    read_queue_bytes: int = 1 << 30
    """Likewise; a promotion beyond it begins when the block is asked for again."""
    job_bytes: int = 16 << 20
    """Of one job, or one block if that is larger."""
    clean_ahead_s: float = 10.0
    """BACK: how long before its eviction a block is written, as fast as evictions are now."""
    slow_deadline_s: float = 10.0
    """A job older than this counts as an error of its disk, and the blocks it promotes are misses."""
    errors_max: int = 3
    """So many errors in a row and the disk is not used for a while."""
    probe_after_s: float = 30.0
    """That while: then one read decides."""
    recompute_if_faster: bool = True
    """A promotion or load that would take longer than computing the prompt anew is reported as a miss."""
