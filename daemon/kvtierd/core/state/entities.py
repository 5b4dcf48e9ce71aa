"""The objects of the core: one per session, instance, mapping, worker, lease, transfer and part. Never one
per block."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtierd.core.actions import Direction, DiskJobKind, TransferEnded
from kvtierd.core.blocks.blocks import BlockSnapshot
from kvtierd.core.blocks.domains import Domain
from kvtierd.core.blocks.lease_budget import HeldBlocks
from kvtierd.core.errors import Refusal
from kvtierd.core.ids import (
    CheckId,
    DiskId,
    DiskJobId,
    Entries,
    Epoch,
    Fingerprint,
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
from kvtierd.core.state.transitions import (
    CheckState,
    DiskJobState,
    Entity,
    InstanceState,
    LeaseState,
    MappingState,
    State,
    TransferJobState,
    TransferPartState,
    WorkerState,
)
from kvtierd.core.stimuli import NO_RETENTION, GroupGeometry, RetentionRequest

DISK_DEVICE_PREFIX = "disk-"
_NO_TICKET = Ticket(0)
Mask = npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerRecord(Entity):
    """One worker process, of a copy device or of a disk."""

    state: State = WorkerState.LIVE
    worker: WorkerId
    device: str
    mappings: "dict[SessionId, WorkerMapping]" = field(default_factory=dict)

    @property
    def serves_disk(self) -> bool:
        return self.device.startswith(DISK_DEVICE_PREFIX)


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerMapping(Entity):
    """What a worker holds of a session, from its words on until the worker has let go of it."""

    state: State = MappingState.MAPPED
    worker: WorkerRecord
    session: "Session"
    doorbells: int
    part_words: int
    registration: RegistrationId | None = None
    """The rank's memory; its words come first."""
    num_blocks: tuple[int, ...] = ()
    mapped_bytes: int = 0
    parts: "dict[PartId, TransferPart]" = field(default_factory=dict)
    """Open ones."""


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    session: SessionId
    instance: "Instance"
    schedules: bool
    holds_rank: bool
    rank: Rank
    fingerprint: Fingerprint | None
    groups: tuple[GroupGeometry, ...]
    mapping: WorkerMapping | None = None
    """The current one, MAPPED."""
    lost: bool = False
    """Its copy worker was lost and it has not registered again."""

    @property
    def registered(self) -> bool:
        return self.mapping is not None and self.mapping.registration is not None


@dataclass(slots=True, eq=False, kw_only=True)
class GroupPlan:
    """Where the blocks of one group of an instance live; known once all its ranks have attached."""

    space: SpaceId
    domain: Domain
    block_tokens: int
    replicated: bool = False
    """A block is one shard, which any rank can store, and all load."""
    num_blocks: int = 0
    """Blocks that every rank has; valid while the instance is LIVE."""
    device_bytes: tuple[tuple[str, int], ...] = ()
    """Of one block, by the device whose worker loads them; likewise."""

    cut: "LeaseCut | None" = None
    """The latest."""

    def shard(self, rank: Rank) -> int:
        """Which shard of a block this rank loads."""
        return 0 if self.replicated else rank


@dataclass(frozen=True, slots=True)
class LeaseCut:
    """A lookup that found more than it could lease."""

    at: int
    """In the unit of `Blocks.now`."""
    leased: int
    readable: int
    """Blocks of one group."""


@dataclass(slots=True, eq=False, kw_only=True)
class Instance(Entity):
    """One epoch of an engine instance."""

    state: State = InstanceState.FORMING
    name: str
    number: int
    """The lowest, from 1, that no instance of another name had when it began. Names are new at each start of
    an engine; of numbers there are no more than there ever were instances at once."""
    epoch: Epoch
    world_size: int
    namespace_fields: bytes
    namespace_facts: dict[str, str]
    hash_bytes: int
    model: str
    alive_at_s: float
    """When its scheduler was last heard of."""
    held: HeldBlocks
    """By its leases, and by its loads that run."""
    sessions: dict[SessionId, Session] = field(default_factory=dict)
    prefill_tokens_per_s: float = 0.0
    """How fast it computes a prompt; 0: not known."""
    scheduler: Session | None = None
    ranks: dict[Rank, Session] = field(default_factory=dict)
    digest: NamespaceDigest | None = None
    plans: tuple[GroupPlan, ...] = ()
    mappings: dict[WorkerMapping, None] = field(default_factory=dict)
    """All that are not GONE, in the order they came."""
    part_words: int = 0
    doorbells: int = 0
    """Words that every rank has; valid while LIVE."""
    leases: "dict[LeaseId, LeaseGrant]" = field(default_factory=dict)
    expired: dict[LeaseId, None] = field(default_factory=dict)
    """The latest ones, so that their holder hears what happened."""
    leased_blocks: int = 0
    leased_bytes: int = 0
    audits: int = 0
    audit_mismatches: int = 0
    """Any at all: the engine has left the namespace to others."""
    last_ticket: Ticket = _NO_TICKET
    transfers: "dict[Ticket, TransferJob]" = field(default_factory=dict)
    words_in_use: set[int] = field(default_factory=set)
    ended: dict[Ticket, TransferEnded] = field(default_factory=dict)
    """The latest terminal transfers, and no more than could have been in flight at once by their keys."""
    ended_keys: int = 0

    @property
    def live(self) -> bool:
        return self.state is InstanceState.LIVE

    @property
    def over(self) -> bool:
        return self.state is InstanceState.FENCING or self.state is InstanceState.GONE


@dataclass(slots=True, eq=False, kw_only=True)
class LeaseGrant(Entity):
    """Pins on blocks, granted to an instance."""

    state: State = LeaseState.HELD
    lease: LeaseId
    instance: Instance
    group: int
    entries: Entries
    """In the order of the lookup, one pin for each."""
    ends_at_s: float
    """However often it is renewed."""


@dataclass(slots=True, eq=False, kw_only=True)
class TransferPart(Entity):
    """What one worker does of a transfer, for one rank."""

    state: State = TransferPartState.POSTED
    part: PartId
    transfer: "TransferJob"
    mapping: WorkerMapping
    blocks: int
    """All of the transfer's, or none: those of replicated groups are stored by one rank."""


@dataclass(slots=True, eq=False, kw_only=True)
class TransferJob(Entity):
    """One store or load of an instance."""

    state: State = TransferJobState.ACTIVE
    transfer: TransferNumber
    direction: Direction
    instance: Instance
    submitter: SessionId
    ticket: Ticket
    part_word: int
    group: int
    deadline_s: float
    keys: int
    """Submitted."""
    entries: Entries
    """STORE: what it writes, in order. LOAD: what it reads and pins, in order; an entry may come twice."""
    slots: Slots
    """Of the entries, shape (world, n)."""
    positions: npt.NDArray[np.intp] | None = None
    """Which submitted key each entry is; None: all of them."""
    existing: Entries
    """STORE: blocks that were there already, pinned so that the prefix stays whole."""
    existing_positions: npt.NDArray[np.intp]
    batch: Entries | None = None
    """STORE with existing blocks: both kinds, in the order of submission."""
    verified: Entries | None = None
    """LOAD: entries whose checksums are checked on the way."""
    failed: Mask | None = None
    """Entries that failed in some part; None: none so far."""
    retention: RetentionRequest = NO_RETENTION
    """STORE: of its blocks."""
    storing: Rank | None = None
    """STORE of a replicated group: who does it."""
    parts: tuple[TransferPart, ...] = ()
    open_parts: int = 0
    cause: Refusal | None = None
    """The first thing that spoiled it."""
    cancelled: bool = False
    """That was a cancellation or a revocation."""
    revoked: bool = False
    """All its parts have been asked to end."""
    abandoned: bool = False
    """Its epoch has ended: nothing of it is committed."""


@dataclass(slots=True, eq=False, kw_only=True)
class Check(Entity):
    """Slots of READY blocks that a worker compares with their checksums."""

    state: State = CheckState.OPEN
    check: CheckId
    worker: WorkerRecord
    slots: Slots
    sizes: npt.NDArray[np.int64]
    """Bytes of each slot."""
    entries: Entries
    """Whose slots they were when they were chosen; the blocks are not held."""
    generations: npt.NDArray[np.uint32]
    """Of the entries, to tell their blocks from later ones."""


@dataclass(slots=True, eq=False, kw_only=True)
class DiskJob(Entity):
    """Slots that a disk's worker writes, reads or checks: shards of whole blocks, the head of a sequence
    first."""

    state: State = DiskJobState.POSTED
    job: DiskJobId
    kind: DiskJobKind
    disk: DiskId
    worker: WorkerRecord
    posted_s: float
    domain: Domain
    """Of the disk."""
    entries: Entries
    """Of the disk. WRITE: they are WRITING, and this job's. READ: pinned. CHECK: as they were, and not
    held."""
    slots: Slots
    """Of the entries, shape (world, n)."""
    generations: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """CHECK: of the entries."""
    host_domain: Domain | None = None
    """READ."""
    host_entries: Entries = field(default_factory=lambda: np.empty(0, np.uint32))
    """READ: of the host, parallel to `entries`; they are WRITING, and this job's."""
    host_slots: Slots = field(default_factory=lambda: np.empty((0, 0), np.uint32))
    """READ: of these, shape (world, n)."""
    host_seen: BlockSnapshot | None = None
    """WRITE: of the host, parallel to `entries`; not held."""
    late: bool = False
    """READ: its blocks are told to be misses."""
    slow: bool = False
    """It was counted as an error."""
    good: int = 0
    """Once it is over: blocks that went well."""

    @property
    def bytes(self) -> int:
        return len(self.entries) * self.domain.block_bytes
