"""Everything that can happen to the core. Stimuli are frozen values, and their arrays are never changed after
they were handed in."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

from kvtierd.core import ids
from kvtierd.core.blocks.table import IndexPage


class Stimulus:
    """One thing that can happen to the core."""

    __slots__ = ()


class SessionRole(IntFlag):
    SCHEDULER = 1
    RANK = 2


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One group as one rank holds it. The layout fingerprint covers exactly these fields."""

    kind: int
    block_tokens: int
    window_tokens: int
    planes: tuple[tuple[int, str], ...]
    """(fragment bytes, description) of each plane, in slot order."""
    replicated: bool = False
    """Every rank holds the same bytes, so one shard is enough for all."""

    @property
    def slot_bytes(self) -> int:
        return sum(size for size, _ in self.planes)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who an instance belongs to: a process joins an instance of its own owner, or forms one. Instances of
    two owners have nothing to do with each other, even if they have the same name."""

    tenant: str = ""
    """Whose blocks its instances may use: namespaces of two tenants are different ones."""
    uid: int = 0
    """The user who runs the process, as the kernel says."""
    secret: bytes = b""
    """A digest of what only the processes of the instance know; empty if they know nothing of the kind."""


NOBODY = Owner()


@dataclass(frozen=True, slots=True)
class AttachSession(Stimulus):
    """A process says hello. The reply is `Attached`."""

    session: ids.SessionId
    instance: str
    role: SessionRole
    rank: ids.Rank
    world_size: int
    namespace_fields: bytes
    """The namespace's fields in a canonical serialisation: namespaces are equal if these bytes are."""
    hash_bytes: int
    model: str
    groups: tuple[GroupGeometry, ...]
    prefill_tokens_per_s: float = 0.0
    """How fast the engine says that it computes a prompt; 0 if that is not known."""
    namespace_facts: tuple[tuple[str, str], ...] = ()
    """Names and values of what `namespace_fields` was made of, for messages to people."""
    owner: Owner = NOBODY


@dataclass(frozen=True, slots=True)
class RegisterWords(Stimulus):
    """`worker` has mapped the session's shared words. The numbers of words bound every index that comes
    later."""

    session: ids.SessionId
    worker: ids.WorkerId
    doorbells: int
    parts: int


@dataclass(frozen=True, slots=True)
class RegisterMemory(Stimulus):
    """`worker` has mapped the rank's KV cache. The instance is ready when its last rank has registered."""

    session: ids.SessionId
    worker: ids.WorkerId
    registration: ids.RegistrationId
    num_blocks: tuple[int, ...]
    """Blocks of each group."""
    mapped_bytes: int


@dataclass(frozen=True, slots=True)
class UnregisterMemory(Stimulus):
    """The rank takes its memory back. The transfers of its epoch are cancelled, and `ReleaseSession`
    follows."""

    session: ids.SessionId


@dataclass(frozen=True, slots=True)
class EndSession(Stimulus):
    """The session's process died or closed the session. Its instance's epoch ends."""

    session: ids.SessionId
    why: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What one engine found about one block that it both loaded and computed."""

    matched: bool
    error: float
    """How far the two differ, relative to their size."""
    threshold: float
    """The largest relative difference that rounding explains."""
    group: int
    block_hash: bytes
    detail: str


@dataclass(frozen=True, slots=True)
class RenewSession(Stimulus):
    """A heartbeat: the session lives, and the leases of its instance are renewed."""

    session: ids.SessionId
    prefill_tokens_per_s: float = 0.0
    """How fast the engine measured that it computes a prompt; 0 if there is nothing new."""
    index_lookups: int = 0
    """Lookups since the last heartbeat that the index page made unnecessary. All of them were misses."""
    index_hashes: int = 0
    """The hashes of these lookups."""
    audits: tuple[AuditReport, ...] = ()
    """What the engine has found in audits since the last heartbeat."""


@dataclass(frozen=True, slots=True)
class RetentionRequest:
    """How blocks are to be kept besides being stored (kvtier.v1.Retention). Times count from when they are
    READY."""

    hold_ms: int = 0
    """How long they are not to be evicted."""
    ttl_ms: int = 0
    """After how long they are to be dropped; 0 for never. Blocks with a time are kept on the host only."""
    host_only: bool = False
    """They are not to be written to disks."""


NO_RETENTION = RetentionRequest()


@dataclass(frozen=True, slots=True)
class BlockQuery:
    """What is asked about one group."""

    group: int
    hashes: ids.Hashes
    window_blocks: int = 0
    """Only this many last blocks of a prefix are needed; 0 if all of them are."""
    exact: bool = False
    """Each block is asked for by itself, not as part of a prefix."""


@dataclass(frozen=True, slots=True)
class LookupBlocks(Stimulus):
    """Asks for the longest prefix that all these groups can serve, or, with a single exact query, for each of
    its blocks. The reply is `LookupReply`."""

    session: ids.SessionId
    epoch: ids.Epoch
    queries: tuple[BlockQuery, ...]
    """At most one for each group; all of them begin at the same token."""
    lease: bool
    host_only: bool = False
    """Blocks that only disks have are misses, and are not promoted."""
    again: bool = False
    """The same request was looked up before, so this is no other use of its blocks."""


@dataclass(frozen=True, slots=True)
class TouchBlocks(Stimulus):
    """Makes READY blocks the most recent, the first of each query most of all: the leading run of a prefix,
    and every block of a window or an exact query by itself. Groups do not depend on each other."""

    session: ids.SessionId
    epoch: ids.Epoch
    queries: tuple[BlockQuery, ...]
    hold_ms: int = 0
    """They are also held for so long."""
    cold: bool = False
    """They become the least recent instead, so that they are the next to be evicted, the first of them
    last."""


@dataclass(frozen=True, slots=True)
class PrefetchBlocks(Stimulus):
    """Promotes what a lookup of the same queries would miss on the host and a disk has. The reply is
    `LookupReply`, without leases: what the lookup would say now, if it did not compare loading with
    computing. Hits are not counted, and become recent only where blocks beyond them are brought up. A lookup
    of the same instance and prompt within a minute is the same use of its blocks."""

    session: ids.SessionId
    epoch: ids.Epoch
    queries: tuple[BlockQuery, ...]


@dataclass(frozen=True, slots=True)
class Signals:
    """The shared words by which an engine and the copy workers settle one transfer."""

    ticket: ids.Ticket
    part_word: int
    gated: bool
    doorbell: int = 0
    doorbell_value: int = 0


@dataclass(frozen=True, slots=True)
class SubmittedChain:
    """Blocks of a store that follow each other in one prompt."""

    blocks: int
    previous: ids.Hashes | None = None
    """The hash of the block before the first, in one row; None if there is none or it is not known."""


@dataclass(frozen=True, slots=True)
class SubmitStore(Stimulus):
    """Stores blocks of one group from every rank. The reply is `SubmitReply`."""

    session: ids.SessionId
    epoch: ids.Epoch
    signals: Signals
    group: int
    hashes: ids.Hashes
    block_ids: npt.NDArray[np.uint32]
    retention: RetentionRequest = NO_RETENTION
    chains: tuple[SubmittedChain, ...] = ()
    """All of the blocks, one chain after the other; empty if it is not known how they belong together."""


@dataclass(frozen=True, slots=True)
class SubmitLoad(Stimulus):
    """Loads blocks of a lease, from its block `first` on, into every rank. The reply is `SubmitReply`."""

    session: ids.SessionId
    epoch: ids.Epoch
    signals: Signals
    group: int
    lease: ids.LeaseId
    first: int
    block_ids: npt.NDArray[np.uint32]
    keep_lease: bool


@dataclass(frozen=True, slots=True)
class ReleaseLeases(Stimulus):
    session: ids.SessionId
    epoch: ids.Epoch
    leases: tuple[ids.LeaseId, ...]


@dataclass(frozen=True, slots=True)
class CancelTransfers(Stimulus):
    session: ids.SessionId
    epoch: ids.Epoch
    tickets: tuple[ids.Ticket, ...]


@dataclass(frozen=True, slots=True)
class PublishPage(Stimulus):
    """Hands in an empty index page for one group of the instance for which a session schedules, as
    `Machine.page_wanted` asked for it."""

    session: ids.SessionId
    group: int
    page: IndexPage


class PartOutcome(IntEnum):
    """How a part ended; with each of these, none of its copies can still land. The numbers of
    `kvtierd.wire.Outcome`."""

    DONE = 1
    FAILED = 2
    REVOKED = 3
    GATE_DEADLINE = 4


@dataclass(frozen=True, slots=True)
class PartFinished(Stimulus):
    """A copy worker has ended a part."""

    worker: ids.WorkerId
    part: ids.PartId
    outcome: PartOutcome
    failed: npt.NDArray[np.uint32]
    """Positions in the part that failed. FAILED without any means all of them."""
    corrupt: bool = False
    message: str = ""
    copied_bytes: int = 0
    copy_s: float = 0.0
    """Time spent in copy calls."""


@dataclass(frozen=True, slots=True)
class SlotsChecked(Stimulus):
    """A copy worker has compared slots with their checksums, in the order in which it was asked to."""

    worker: ids.WorkerId
    check: ids.CheckId
    looked_at: int
    """How many of them it has compared. It leaves the rest out when its lanes have work."""
    corrupt: npt.NDArray[np.uint32]
    """Positions of those that still hold the same block, but whose record or data does not match."""


@dataclass(frozen=True, slots=True)
class SessionReleased(Stimulus):
    """A copy worker has fenced and unmapped everything of a session."""

    worker: ids.WorkerId
    session: ids.SessionId


@dataclass(frozen=True, slots=True)
class DiskJobFinished(Stimulus):
    """A disk's worker has ended a job, and nothing of it can still land. Positions that are neither in
    `failed` nor in `corrupt` went well: after a WRITE the record on the disk is READY; after a READ the bytes
    are checked, and their checksum is in the host's record."""

    worker: ids.WorkerId
    job: ids.DiskJobId
    failed: npt.NDArray[np.uint32]
    """Positions in the job's slots that were not copied, because the block had gone, or because reading or
    writing failed."""
    corrupt: npt.NDArray[np.uint32]
    """Positions of a READ or CHECK whose record or data on the disk does not match; they are not in
    `failed`."""
    error: str = ""
    """The device's error, if it had one, such as an input or output error or no space. Empty if only blocks
    had gone."""
    bytes: int = 0
    """Bytes that were read or written."""
    saved_bytes: int = 0
    """By so many fewer went to or from a store, because it has blocks compressed."""
    busy_s: float = 0.0
    """How long the device took for it, whether alone or beside other jobs."""
    gone: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """Positions of a READ or CHECK that a store does not have any more; they are not in `failed`."""
    refused: bool = False
    """Of a WRITE: the error is the answer of a store that does not take it, because it is full or forbids it,
    but may be well otherwise."""


@dataclass(frozen=True, slots=True)
class PackFound(Stimulus):
    """A store's worker has found a pack with blocks of a space that it was told to watch. A job of kind ADOPT
    answers, with any of them or none."""

    worker: ids.WorkerId
    pack: int
    space: ids.SpaceId
    hashes: ids.Hashes
    """Its blocks, in the order of their prompts."""


@dataclass(frozen=True, slots=True)
class StartScrub(Stimulus):
    """Compare every block of a disk with its checksum, once, while the disk has nothing else to do."""

    disk: ids.DiskId


@dataclass(frozen=True, slots=True)
class WorkerLive(Stimulus):
    """A worker is ready for work."""

    worker: ids.WorkerId
    device: str
    """"cpu", "GPU-" and a UUID, or "disk-" and a DiskId."""


@dataclass(frozen=True, slots=True)
class WorkerLost(Stimulus):
    """The worker is being killed, or has hung up. It takes no more parts, but may still be writing."""

    worker: ids.WorkerId
    why: str


@dataclass(frozen=True, slots=True)
class WorkerExited(Stimulus):
    """The worker's process is gone, which is the fence of all its parts."""

    worker: ids.WorkerId


@dataclass(frozen=True, slots=True)
class RecoveredExtent:
    extent: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Recovered(Stimulus):
    """What a scan of the pool found. It is handed in once, before any session, and has whole blocks only, the
    oldest first."""

    extents: tuple[RecoveredExtent, ...]
    namespaces: tuple[tuple[ids.NamespaceDigest, int, int], ...]
    """(digest, group, world size) of each space; `spaces` are indexes into it."""
    spaces: npt.NDArray[np.uint32]
    hashes: ids.Hashes
    slots: npt.NDArray[np.uint32]
    """Slots of all shards, block after block, each in rank order: as many for a block as its namespace's
    world size."""
    clock: int
    """The highest recency clock that was found."""
    quarantined: ids.Slots
    """Slots whose writer may still live; they stay out of use until `SlotsProven`."""
    corrupt: ids.Slots = field(default_factory=lambda: np.empty(0, np.uint32))
    """Slots that an earlier daemon set aside by `QuarantineSlots`."""


@dataclass(frozen=True, slots=True)
class PoolPopulated(Stimulus):
    """Extents of the pool have got memory, and can be used from now on."""

    extents: int
    """How many, from the first on, have memory: no fewer than before."""
    complete: bool = False
    """Whether it stays at that, because all have memory, or because no more is to be had."""


@dataclass(frozen=True, slots=True)
class DiskRecovered(Stimulus):
    """What a scan of a disk's records found. It is handed in once per disk, right after the `WorkerLive` of
    its first worker; sessions may have come before. The slots are the disk's, and none are quarantined."""

    disk: ids.DiskId
    found: Recovered


@dataclass(frozen=True, slots=True)
class SlotsProven(Stimulus):
    """The writers of these quarantined slots are proved to be gone."""

    slots: ids.Slots


@dataclass(frozen=True, slots=True)
class Drain(Stimulus):
    """Until `Resume`, new stores, loads and sessions are refused, and lookups return misses."""


@dataclass(frozen=True, slots=True)
class Resume(Stimulus):
    """Ends what `Drain` began."""


@dataclass(frozen=True, slots=True)
class ClearBlocks(Stimulus):
    """Drops those of these blocks that nothing holds, from every tier that has them. A block that is leased,
    or being loaded, stored, promoted or written to a disk, stays in all tiers. Hashes that are not there are
    ignored.

    The records in a disk's file follow later than the host's; to know when, ask the disk's worker.
    """

    space: ids.SpaceId
    hashes: ids.Hashes


@dataclass(frozen=True, slots=True)
class Reconfigure(Stimulus):
    """Goes on with another policy. Limits that clients were told, and everything that memory was reserved
    for, stay as they were at the start: from `disks` and `store`, the queue sizes and the size of a job are
    not taken over."""

    sample_bytes_per_s: int
    disks: "CoreDisks"
    policy: "PoolPolicy"
    store: "CoreDisks"


@dataclass(frozen=True, slots=True)
class ShowLookups(Stimulus):
    """Somebody wants to see every lookup, also those that index pages spare; or not any more."""

    every: bool


@dataclass(frozen=True, slots=True)
class ShowBlocks(Stimulus):
    """Somebody wants to be shown everything that a namespace has, as actions TellOfBlocks."""

    namespace: ids.NamespaceDigest


@dataclass(frozen=True, slots=True)
class TellAgain(Stimulus):
    """What was told of blocks lately has not reached anybody: all of it is told anew."""


class PoolPolicy(Enum):
    """Which blocks of the host go first."""

    LRU = "lru"
    """Those that have not been used for longest; ends of prompts before their beginnings."""
    REUSE = "reuse"
    """Those that are least likely to come back soon, by what is learnt of blocks like them. What is not worth
    its room is not stored."""


@dataclass(frozen=True, slots=True)
class Tick(Stimulus):
    """Time has passed: leases and transfers past their deadlines end. Sent about every 100 ms, and every
    500 ms while the core is idle."""


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Bounds of the core; all positive."""

    lookup_hashes_max: int = 65_536
    transfer_blocks_max: int = 8_192
    transfers_max: int = 1_024
    """Transfers in flight, for each instance."""
    tenant_transfers_max: int = 4_096
    """Transfers in flight, for all instances of a tenant together."""
    tenant_blocks_max: int = 1 << 20
    """Blocks of these transfers. A copy worker keeps 16 bytes of each."""
    leases_max: int = 8_192
    """Leases held at once, for each instance."""
    leased_fraction_max: float = 0.95
    """The fraction of the pool that leases and running loads of all instances together may hold."""
    held_fraction_max: float = 0.25
    """The fraction of the pool's bytes whose blocks may be held for a time, for all instances together."""
    hold_s_max: float = 3_600.0
    """Blocks are held no longer than this at a time."""
    lease_ttl_s: float = 15.0
    """A lease ends this long after its instance's last heartbeat."""
    lease_lifetime_s: float = 600.0
    """A lease ends this long after it was granted, however often it is renewed."""
    gate_deadline_s: float = 30.0
    transfer_deadline_s: float = 120.0
    """A transfer that is older is cancelled; its fence is still waited for."""
    terminal_kept: int = field(default=4_096)
    """Ended transfers that are remembered for each epoch, for Wait."""


class Verify(Enum):
    """When a host block's data is compared with its checksum before a load."""

    RESTART = "restart"
    """Before the first load of a block that an earlier daemon has stored."""
    ALWAYS = "always"
    """Before every load."""


@dataclass(frozen=True, slots=True)
class CoreIntegrity:
    """How blocks are doubted, and how many of those that are gone are remembered."""

    verify: Verify = Verify.RESTART
    sample_bytes_per_s: int = 16 << 20
    """How many bytes of READY blocks, chosen at random, are compared with their checksums; 0 for none."""
    remembered_blocks: int = 1 << 17
    """Of how many blocks, the latest, it is remembered why they are gone; 44 bytes each."""


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
    """The policy of the disks, or of the store; numbers are positive where nothing else is said."""

    mode: WriteMode = WriteMode.BACK
    write_queue_bytes: int = 256 << 20
    """Bytes on their way to each disk at once."""
    read_queue_bytes: int = 1 << 30
    """Bytes on their way from each disk at once. What is beyond that of a prompt comes up after it."""
    job_bytes: int = 16 << 20
    """Bytes of one job; a job has at least one block, even if that is larger."""
    write_bytes_per_s: int = 0
    """Bytes written to each disk in a second, at most; 0: any number."""
    writes_per_day: float = 0.0
    """How often a disk may be written from end to end in a day; 0: any number."""
    clean_ahead_s: float = 10.0
    """With BACK, how long before its eviction a block is written, judged by how fast evictions are now."""
    slow_deadline_s: float = 10.0
    """A job older than this counts as an error of its disk, and the blocks it promotes are misses."""
    errors_max: int = 3
    """After this many errors in a row, the disk is not used for `probe_after_s`."""
    probe_after_s: float = 30.0
    """How long a disk that fails is left alone; then one read decides."""
    recompute_if_faster: bool = True
    """A promotion or load that would take longer than computing the prompt anew is reported as a miss."""
    tenants: frozenset[ids.TenantTag] | None = None
    """The tenants whose blocks may be written, because there is a key for them, or they are to be shared;
    None for all."""

    def may_write(self, tenant: ids.TenantTag) -> bool:
        return self.tenants is None or tenant in self.tenants
