"""The objects of the core: one for each session, instance, mapping, worker, lease, transfer, part, check and
disk job, and never one for each block."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtierd.core import ids
from kvtierd.core.actions import Direction, DiskJobKind, TransferEnded
from kvtierd.core.blocks.blocks import BlockSnapshot
from kvtierd.core.blocks.domains import Domain
from kvtierd.core.blocks.lease_budget import HeldBlocks
from kvtierd.core.errors import Refusal
from kvtierd.core.state import transitions
from kvtierd.core.state.waiting import Waiting
from kvtierd.core.status import TenantTally
from kvtierd.core.stimuli import NO_RETENTION, GroupGeometry, Owner, RetentionRequest

DISK_DEVICE_PREFIX = "disk-"
_NO_TICKET = ids.Ticket(0)
Mask = npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerRecord(transitions.Entity):
    """One worker process, of a copy device or of a disk."""

    state: transitions.State = transitions.WorkerState.LIVE
    worker: ids.WorkerId
    device: str
    mappings: "dict[ids.SessionId, WorkerMapping]" = field(default_factory=dict)

    @property
    def serves_disk(self) -> bool:
        return self.device.startswith(DISK_DEVICE_PREFIX)


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerMapping(transitions.Entity):
    """What a worker holds of a session, from the registration of its words until the worker has let go of
    it."""

    state: transitions.State = transitions.MappingState.MAPPED
    worker: WorkerRecord
    session: "Session"
    doorbells: int
    part_words: int
    registration: ids.RegistrationId | None = None
    """The rank's memory; None as long as only its words are registered."""
    num_blocks: tuple[int, ...] = ()
    mapped_bytes: int = 0
    parts: "dict[ids.PartId, TransferPart]" = field(default_factory=dict)
    """Parts that are open."""


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """One process that is attached for an instance."""

    session: ids.SessionId
    instance: "Instance"
    schedules: bool
    holds_rank: bool
    rank: ids.Rank
    fingerprint: ids.Fingerprint | None
    groups: tuple[GroupGeometry, ...]
    mapping: WorkerMapping | None = None
    """The current mapping, which is MAPPED."""
    lost: bool = False
    """Its copy worker was lost, and it has not registered again."""

    @property
    def registered(self) -> bool:
        return self.mapping is not None and self.mapping.registration is not None


@dataclass(slots=True, eq=False, kw_only=True)
class GroupPlan:
    """Where the blocks of one group of an instance live; known once all its ranks have attached."""

    space: ids.SpaceId
    domain: Domain
    block_tokens: int
    replicated: bool = False
    """A block is one shard, which any rank can store and every rank loads."""
    num_blocks: int = 0
    """Blocks that every rank has; valid while the instance is LIVE."""
    device_bytes: tuple[tuple[str, int], ...] = ()
    """Bytes of one block for each device whose worker loads them; valid while the instance is LIVE."""

    cut: "LeaseCut | None" = None
    """The latest lookup that found more than it could lease."""
    by_prefix: bool = True
    """No lookup has asked for a window of the group's blocks, or for any of them."""

    def shard(self, rank: ids.Rank) -> int:
        """Which shard of a block this rank loads."""
        return 0 if self.replicated else rank


@dataclass(frozen=True, slots=True)
class LeaseCut:
    """A lookup that found more than it could lease."""

    at: int
    """When, in units of `Blocks.now`."""
    leased: int
    readable: int
    """Blocks of one group that could be read, and of which `leased` were leased."""


@dataclass(slots=True, eq=False, kw_only=True)
class Instance(transitions.Entity):
    """One epoch of an engine instance."""

    state: transitions.State = transitions.InstanceState.FORMING
    name: str
    owner: Owner
    number: int
    """The lowest number, from 1, that no instance of another owner or name had when it began. Engines get a
    new name at each start, but there are never more numbers than there were instances at once."""
    epoch: ids.Epoch
    world_size: int
    namespace_fields: bytes
    namespace_facts: dict[str, str]
    hash_bytes: int
    model: str
    alive_at_s: float
    """When its scheduler last made itself heard."""
    held: HeldBlocks
    """Blocks that its leases and its running loads hold."""
    waiting: Waiting = field(default_factory=Waiting)
    """Its requests that were told to wait."""
    tally: TenantTally
    """That of its tenant."""
    sessions: dict[ids.SessionId, Session] = field(default_factory=dict)
    prefill_tokens_per_s: float = 0.0
    """How fast it computes a prompt; 0 if that is not known."""
    scheduler: Session | None = None
    ranks: dict[ids.Rank, Session] = field(default_factory=dict)
    digest: ids.NamespaceDigest | None = None
    plans: tuple[GroupPlan, ...] = ()
    mappings: dict[WorkerMapping, None] = field(default_factory=dict)
    """All mappings that are not GONE, in the order in which they came."""
    part_words: int = 0
    """Part words that every rank has; valid while the instance is LIVE."""
    doorbells: int = 0
    """Doorbells that every rank has; valid while the instance is LIVE."""
    leases: "dict[ids.LeaseId, LeaseGrant]" = field(default_factory=dict)
    expired: dict[ids.LeaseId, None] = field(default_factory=dict)
    """The latest leases that expired, so that their holder can be told what happened to them."""
    leased_blocks: int = 0
    leased_bytes: int = 0
    audits: int = 0
    audit_mismatches: int = 0
    """After the first one, the engine has left the namespace to others."""
    last_ticket: ids.Ticket = _NO_TICKET
    transfers: "dict[ids.Ticket, TransferJob]" = field(default_factory=dict)
    words_in_use: set[int] = field(default_factory=set)
    ended: dict[ids.Ticket, TransferEnded] = field(default_factory=dict)
    """The latest transfers that have ended; they have no more keys than could have been in flight at once."""
    ended_keys: int = 0

    @property
    def live(self) -> bool:
        return self.state is transitions.InstanceState.LIVE

    @property
    def over(self) -> bool:
        return self.state is transitions.InstanceState.FENCING or self.state is transitions.InstanceState.GONE


@dataclass(slots=True, eq=False, kw_only=True)
class LeaseGrant(transitions.Entity):
    """Pins on blocks, granted to an instance."""

    state: transitions.State = transitions.LeaseState.HELD
    lease: ids.LeaseId
    instance: Instance
    group: int
    entries: ids.Entries
    """Entries in the order of the lookup, each with one pin."""
    ends_at_s: float
    """When the lease ends, however often it is renewed."""


@dataclass(slots=True, eq=False, kw_only=True)
class TransferPart(transitions.Entity):
    """What one worker does of a transfer for one rank."""

    state: transitions.State = transitions.TransferPartState.POSTED
    part: ids.PartId
    transfer: "TransferJob"
    mapping: WorkerMapping
    blocks: int
    """All blocks of the transfer, or none: blocks of replicated groups are stored by one rank."""


@dataclass(slots=True, eq=False, kw_only=True)
class TransferJob(transitions.Entity):
    """One store or load of an instance."""

    state: transitions.State = transitions.TransferJobState.ACTIVE
    transfer: ids.TransferNumber
    direction: Direction
    instance: Instance
    submitter: ids.SessionId
    ticket: ids.Ticket
    part_word: int
    group: int
    deadline_s: float
    keys: int
    """Keys that were submitted."""
    entries: ids.Entries
    """Entries in order. STORE: what it writes. LOAD: what it reads and pins; an entry may come twice."""
    slots: ids.Slots
    """Slots of the entries, shape (world, n)."""
    positions: npt.NDArray[np.intp] | None = None
    """Which submitted key each entry is; None if the entries are all keys."""
    existing: ids.Entries
    """STORE: entries that were there already, pinned so that the prefix stays whole."""
    existing_positions: npt.NDArray[np.intp]
    """Which submitted key each of these is."""
    batch: ids.Entries | None = None
    """STORE with existing blocks: old and new entries, in the order of submission."""
    verified: ids.Entries | None = None
    """LOAD: entries whose checksums are checked on the way."""
    failed: Mask | None = None
    """Whether each entry failed in some part; None if none has so far."""
    retention: RetentionRequest = NO_RETENTION
    """STORE: how its blocks are to be kept."""
    storing: ids.Rank | None = None
    """STORE of a replicated group: the rank that stores."""
    parts: tuple[TransferPart, ...] = ()
    open_parts: int = 0
    cause: Refusal | None = None
    """The first reason why it cannot simply be DONE."""
    cancelled: bool = False
    """That reason was a cancellation or a revocation."""
    revoked: bool = False
    """All its parts have been asked to end."""
    abandoned: bool = False
    """Its epoch has ended, so none of it is committed."""


@dataclass(slots=True, eq=False, kw_only=True)
class Check(transitions.Entity):
    """Slots of READY blocks that a worker compares with their checksums."""

    state: transitions.State = transitions.CheckState.OPEN
    check: ids.CheckId
    worker: WorkerRecord
    slots: ids.Slots
    sizes: npt.NDArray[np.int64]
    """Bytes of each slot."""
    entries: ids.Entries
    """Entries whose slots they were when they were chosen; the blocks are not held."""
    generations: npt.NDArray[np.uint32]
    """Generations of the entries, which tell their blocks from later ones."""


@dataclass(slots=True, eq=False, kw_only=True)
class DiskJob(transitions.Entity):
    """Slots that a disk's worker writes, reads or checks. They are the shards of whole blocks, with the head
    of a sequence first."""

    state: transitions.State = transitions.DiskJobState.POSTED
    job: ids.DiskJobId
    kind: DiskJobKind
    disk: ids.DiskId
    worker: WorkerRecord
    posted_s: float
    domain: Domain
    """The disk's domain."""
    entries: ids.Entries
    """Entries of the disk. WRITE: they are WRITING and this job's. READ: they are pinned. CHECK: they are as
    they were when the job was posted, and not held."""
    slots: ids.Slots
    """The disk's slots of the entries, shape (world, n)."""
    generations: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """CHECK: generations of the entries."""
    host_domain: Domain | None = None
    """READ: the domain on the host."""
    host_entries: ids.Entries = field(default_factory=lambda: np.empty(0, np.uint32))
    """READ: entries of the host, parallel to `entries`; they are WRITING and this job's."""
    host_slots: ids.Slots = field(default_factory=lambda: np.empty((0, 0), np.uint32))
    """READ: their slots, shape (world, n)."""
    host_space: ids.SpaceId | None = None
    """READ: their space."""
    came_up: ids.Entries = field(default_factory=lambda: np.empty(0, np.uint32))
    """READ: those of `host_entries` that have become READY, once the job is over."""
    host_seen: BlockSnapshot | None = None
    """WRITE: the blocks on the host, parallel to `entries`; they are not held."""
    late: bool = False
    """READ: lookups are told that its blocks are misses."""
    slow: bool = False
    """The job was counted as an error of its disk."""
    good: int = 0
    """Once the job is over, how many blocks went well."""

    @property
    def bytes(self) -> int:
        return len(self.entries) * self.domain.block_bytes
