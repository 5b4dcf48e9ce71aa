"""What the core can be asked about itself: counters, and one picture of everything."""

from dataclasses import dataclass

from kvtierd.core.ids import DiskId, Epoch, NamespaceDigest, SessionId, TenantTag, WorkerId
from kvtierd.core.stimuli import CoreIntegrity, Owner


@dataclass(slots=True)
class Tally:
    """Counters since the start; they only grow. Updated per batch."""

    lookups: int = 0
    index_lookups: int = 0
    """Those of the lookups that a client did not send, because the index page showed that there was
    nothing."""
    lookup_hashes: int = 0
    lookup_hits: int = 0
    missed_absent: int = 0
    """Hashes that were not there. The `missed_` counters say why hashes of lookups were no hits; with the
    hits they add up to `lookup_hashes`."""
    missed_pending: int = 0
    """Hashes of blocks that were being stored or promoted."""
    missed_beyond: int = 0
    """Hashes of a prefix behind the first one that was no hit."""
    missed_recompute: int = 0
    """Hashes of blocks that were there, but that computing was faster than loading."""
    missed_lease_limit: int = 0
    """Hashes of readable blocks, beyond what could be leased just then."""
    missed_draining: int = 0
    """Hashes that were asked for while the daemon was draining."""
    missed_not_ready: int = 0
    """Hashes that were asked for while ranks of the instance were missing."""
    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    deduplicated_blocks: int = 0
    """Blocks that were submitted to be stored, but were there already or being written."""
    throttled_blocks: int = 0
    unwanted_blocks: int = 0
    """Blocks that were not stored because they were not worth their room."""
    evicted_blocks: int = 0
    evicted_age_s: float = 0.0
    """The sum, over all evicted blocks, of the time since each was last used."""
    cleared_blocks: int = 0
    """Blocks that operators dropped, from whatever tiers had them."""
    expired_blocks: int = 0
    """Blocks that were dropped because their time was over."""
    unheld_blocks: int = 0
    """Blocks that should have been held, but were not, or not for so long, for want of room."""
    reclaimed_extents: int = 0
    """Extents that were taken from one slot size for another."""
    store_transfers: int = 0
    """Stores that have ended, in whichever way."""
    store_transfer_s: float = 0.0
    """How long all of them took together, from being accepted to their end."""
    load_transfers: int = 0
    load_transfer_s: float = 0.0
    done_transfers: int = 0
    failed_transfers: int = 0
    cancelled_transfers: int = 0
    ended_leases: int = 0
    """Leases that have ended, in whichever way."""
    lease_held_s: float = 0.0
    """How long all of them were held together."""
    expired_leases: int = 0
    refused_leases: int = 0
    """Leases that covered fewer blocks than were readable, or none."""
    audits: int = 0
    """Blocks that engines computed although they could be loaded, to compare the two."""
    audit_mismatches: int = 0
    corrupt_on_load: int = 0
    """Blocks whose record or checksum did not match when they were to be loaded."""
    corrupt_after_restart: int = 0
    """Blocks that an earlier daemon had stored and that did not match on their first load."""
    corrupt_in_sample: int = 0
    """Blocks that did not match when sampling compared them."""
    sampled_slots: int = 0
    sampled_bytes: int = 0
    ended_epochs: int = 0
    late_messages: int = 0
    """Messages from workers about something that was already over."""
    promoted_blocks: int = 0
    """Blocks that were read from a disk to the host."""
    promoted_bytes: int = 0
    recompute_blocks: int = 0
    """Blocks that were there, but were reported as misses because computing them was faster."""
    evicted_unwritten_blocks: int = 0
    """Blocks that the host evicted before a disk had them, while there was a disk tier."""
    corrupt_on_disk: int = 0
    """Blocks that did not match when they were read from a disk."""

    @property
    def integrity_failures(self) -> int:
        """Blocks that did not match their checksum or record, however that was found."""
        on_host = self.corrupt_on_load + self.corrupt_after_restart + self.corrupt_in_sample
        return on_host + self.corrupt_on_disk


@dataclass(slots=True)
class TenantTally:
    """Counters of one tenant since the start; they only grow. They mean what those of `Tally` mean."""

    lookup_hashes: int = 0
    lookup_hits: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    evicted_blocks: int = 0
    """Its blocks that the host dropped, for whomever it needed the room."""


@dataclass(slots=True)
class DiskTally:
    """Counters of one disk since the start; they only grow."""

    written_blocks: int = 0
    written_bytes: int = 0
    written_saved_bytes: int = 0
    """By so many fewer than `written_bytes` a store was given, because they were compressed."""
    read_blocks: int = 0
    """Promoted blocks. Blocks that were only checked are not counted."""
    read_bytes: int = 0
    reads: int = 0
    """Jobs that promoted blocks, and how long they took from when they were asked for."""
    read_s: float = 0.0
    read_saved_bytes: int = 0
    """By so many fewer than `read_bytes` a store gave, because it has them compressed."""
    evicted_blocks: int = 0
    evicted_age_s: float = 0.0
    reclaimed_extents: int = 0
    """Extents that were taken from one slot size for another."""
    errors: int = 0
    """Jobs that failed or were too slow, and workers that were lost with jobs open."""
    corrupt_blocks: int = 0
    """Blocks that did not match when they were read or checked."""


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    name: str
    owner: Owner
    number: int
    """A number from 1 that no other instance has at this time; another name may get it once this instance is
    gone."""
    epoch: Epoch
    ready: bool
    world_size: int
    model: str
    namespace: NamespaceDigest | None
    sessions: tuple[SessionId, ...]
    mapped_bytes: int
    leases: int
    leased_blocks: int
    leased_bytes: int
    transfers_active: int
    fencing: bool
    """The instance has ended, and copy workers have not let go of it yet."""
    audits: int
    audit_mismatches: int


@dataclass(frozen=True, slots=True)
class SizeStatus:
    """How many slots of one size there are, and how many of them can be used."""

    slot_bytes: int
    extents: int
    slots: int
    free: int
    withheld: int
    """Slots that are quarantined or corrupt."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that hold a block."""
        return (self.slots - self.free - self.withheld) * self.slot_bytes


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    worker: WorkerId
    device: str
    lost: bool
    sessions: int
    parts_open: int
    mapped_bytes: int
    """Bytes of engines' memory, counted until the worker has let go of it."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks in the host's table by state, and how many it has room for."""

    writing: int
    ready: int
    evicting: int
    capacity: int


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """One disk of the disk tier."""

    disk: DiskId
    state: str
    """"starting", "live", "refusing" (it is read, but takes nothing), "off" or "failing"."""
    why: str
    """Why the disk is not live, or what its latest problem was; empty if it never had one."""
    used_bytes: int
    """Bytes of the slots that hold a block."""
    capacity_bytes: int
    blocks: int
    """READY blocks, whatever state the disk is in."""
    corrupt_slots: int
    extents: int
    extents_free: int
    sizes: tuple[SizeStatus, ...]
    jobs: int
    """Jobs that have not ended, including those of lost workers that have not exited."""
    write_budget_bytes: int | None
    """How many bytes may be written to it now; None for any number."""
    writing_bytes: int
    """Bytes that the jobs write."""
    reading_bytes: int
    """Bytes that the jobs read into the host."""
    read_bytes_per_s: float
    """As measured lately; 0 if it was not."""
    write_bytes_per_s: float
    """As measured lately; 0 if it was not."""
    scrub_blocks: int
    """How many blocks the current or last scrub has to look at."""
    scrubbed_blocks: int
    """How many of them it has looked at."""
    scrubbing: bool
    counters: DiskTally
    """A copy."""


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """What one tenant has, and has done."""

    tag: TenantTag
    name: str
    """As in `Owner.tenant`. Empty if the tenant has only blocks of an earlier daemon, of which nothing but
    the tag is known."""
    host_blocks: int
    host_bytes: int
    """Bytes of the pool that its blocks take, including what is lost where slots do not fill their
    extents."""
    disk_blocks: int
    disk_bytes: int
    """The same, on all disks together."""
    leased_bytes: int
    """Bytes of the blocks that leases and loads hold. What two of its instances hold counts twice."""
    guaranteed_fraction: float
    """The fraction of each tier that is guaranteed to it now."""
    most_fraction: float
    """The fraction of each tier that it may have."""
    instances: int
    sessions: int
    counters: TenantTally
    """A copy."""


@dataclass(frozen=True, slots=True)
class ShadowStatus:
    """What the pool would have hit with other sizes under its policy, from a sample of the blocks that were
    asked for. Rates are of blocks that were looked up from the first of a prompt on, and count until the
    first one that is not there. What was asked for an hour ago weighs half."""

    known: bool
    """Whether enough was seen. If not, all rates are 0."""
    half: float
    """The hit rate of a pool of half the size."""
    now: float
    """That of a pool as large as this one, also by the sample."""
    twice: float
    actual: float
    """What the pool has hit of the same blocks."""
    asked: float
    """Blocks that were asked for."""
    share: float
    """The share of all blocks that the sample has."""


@dataclass(frozen=True, slots=True)
class CoreStatus:
    """A picture of everything in the core at one time."""

    leases: int
    leased_blocks: int
    lease_oldest_s: float
    """Time since the oldest lease was granted; 0 if there is none."""
    transfers_active: int
    blocks: BlockCounts
    used_bytes: int
    """Bytes of the slots that hold a block."""
    extents: int
    """Extents that have memory."""
    extents_free: int
    quarantined_slots: int
    """Slots whose writers may still live."""
    corrupt_slots: int
    """Slots set aside because they failed a check, by this daemon or an earlier one."""
    integrity: CoreIntegrity
    held_blocks: int
    """Blocks that are protected from eviction for a time."""
    held_bytes: int
    expected_detection_s: float | None
    """How long sampling takes on average to find a slot that has rotted, if copies leave it time; None if it
    is off."""
    sizes: tuple[SizeStatus, ...]
    instances: tuple[InstanceStatus, ...]
    workers: tuple[WorkerStatus, ...]
    counters: Tally
    """A copy."""
    draining: bool
    shadow: ShadowStatus
    disks: tuple[DiskStatus, ...] = ()
    tenants: tuple[TenantStatus, ...] = ()
    """Those that are configured first, then the others in the order in which they came."""
