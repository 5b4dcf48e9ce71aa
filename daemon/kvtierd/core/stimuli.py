"""Everything that can happen to the core. Frozen values; arrays in them are never changed after they are
handed in."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

from kvtierd.core.ids import (
    CheckId,
    Epoch,
    Hashes,
    LeaseId,
    NamespaceDigest,
    PartId,
    Rank,
    RegistrationId,
    SessionId,
    Slots,
    Ticket,
    WorkerId,
)


class Role(IntFlag):
    SCHEDULER = 1
    RANK = 2


class LookupMode(Enum):
    PREFIX = "prefix"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One group as one rank holds it; the layout fingerprint covers exactly these fields."""

    kind: int
    block_tokens: int
    window_tokens: int
    planes: tuple[tuple[int, str], ...]
    """(fragment bytes, description) of each plane, in slot order."""

    @property
    def slot_bytes(self) -> int:
        return sum(size for size, _ in self.planes)


@dataclass(frozen=True, slots=True)
class AttachSession:
    """A process says hello. Reply: `Attached`."""

    session: SessionId
    instance: str
    role: Role
    rank: Rank
    world_size: int
    namespace_fields: bytes
    """Canonical serialisation of the namespace's fields; equal bytes, equal namespace."""
    hash_bytes: int
    model: str
    groups: tuple[GroupGeometry, ...]


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
class RenewSession:
    """Heartbeat: the session lives; the leases of its instance are renewed."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class LookupBlocks:
    """Reply: `LookupReply`."""

    session: SessionId
    epoch: Epoch
    group: int
    hashes: Hashes
    mode: LookupMode
    lease: bool


@dataclass(frozen=True, slots=True)
class TouchBlocks:
    """The blocks that a lookup would hit become the most recent, the first of them most of all."""

    session: SessionId
    epoch: Epoch
    group: int
    hashes: Hashes
    mode: LookupMode


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


class Outcome(IntEnum):
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
    outcome: Outcome
    failed: npt.NDArray[np.uint32]
    """Positions in the part that failed; with FAILED and none named, all of them."""
    corrupt: bool = False
    message: str = ""


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
class WorkerLive:
    worker: WorkerId
    device: str


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
    | SubmitStore
    | SubmitLoad
    | ReleaseLeases
    | CancelTransfers
    | PartFinished
    | SlotsChecked
    | SessionReleased
    | WorkerLive
    | WorkerLost
    | WorkerExited
    | Recovered
    | SlotsProven
    | Drain
    | Resume
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
    leased_fraction_max: float = 0.25
    """Of the pool's bytes, per instance."""
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
