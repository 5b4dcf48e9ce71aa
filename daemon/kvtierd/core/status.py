"""What the core can be asked about itself: counters, and one picture of everything."""

from dataclasses import dataclass

from kvtierd.core.ids import DiskId, Epoch, NamespaceDigest, SessionId, WorkerId
from kvtierd.core.stimuli import CoreIntegrity


@dataclass(slots=True)
class Tally:
    """Counters since the start; they only grow. Updated per batch."""

    lookups: int = 0
    index_lookups: int = 0
    """Of them: clients saw in the index page that there was nothing, and did not ask."""
    lookup_hashes: int = 0
    lookup_hits: int = 0
    missed_absent: int = 0
    """Hashes of lookups that were no hits, by why; with the hits they come to `lookup_hashes`. Not there."""
    missed_pending: int = 0
    """Being stored or promoted."""
    missed_beyond: int = 0
    """Behind the first that was no hit, of a prefix."""
    missed_recompute: int = 0
    """There, and computing them is faster."""
    missed_lease_limit: int = 0
    """Readable, and more than could be leased just then."""
    missed_draining: int = 0
    missed_not_ready: int = 0
    """Ranks of the instance were missing."""
    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    deduplicated_blocks: int = 0
    """Submitted to be stored, but there already or being written."""
    throttled_blocks: int = 0
    evicted_blocks: int = 0
    evicted_age_s: float = 0.0
    """Of the evicted, all together: since each was last used."""
    cleared_blocks: int = 0
    """Dropped by operators, from whatever tiers had them."""
    expired_blocks: int = 0
    """Dropped because their time was over."""
    unheld_blocks: int = 0
    """That were to be held and are not, or not as long: there was no room to."""
    reclaimed_extents: int = 0
    """Taken from one slot size for another."""
    store_transfers: int = 0
    """That have ended, whichever way; and how long all of them took, from being accepted to their end."""
    store_transfer_s: float = 0.0
    load_transfers: int = 0
    load_transfer_s: float = 0.0
    done_transfers: int = 0
    failed_transfers: int = 0
    cancelled_transfers: int = 0
    ended_leases: int = 0
    """However they ended; and how long all of them were held."""
    lease_held_s: float = 0.0
    expired_leases: int = 0
    refused_leases: int = 0
    audits: int = 0
    """Blocks that engines have computed although they could be loaded, to compare the two."""
    audit_mismatches: int = 0
    """Leases on fewer blocks than were readable, or on none."""
    corrupt_on_load: int = 0
    """Blocks whose record or checksum did not match when they were to be loaded."""
    corrupt_after_restart: int = 0
    """Of those an earlier daemon has stored: likewise, on their first load."""
    corrupt_in_sample: int = 0
    """Blocks that sampling found."""
    sampled_slots: int = 0
    sampled_bytes: int = 0
    ended_epochs: int = 0
    late_messages: int = 0
    """From workers, about what was over already."""
    promoted_blocks: int = 0
    """Read from a disk to the host."""
    promoted_bytes: int = 0
    recompute_blocks: int = 0
    """There, and reported as misses because computing them was faster."""
    evicted_unwritten_blocks: int = 0
    """Evicted from the host before a disk had them, while there was a disk tier."""
    corrupt_on_disk: int = 0
    """Blocks that did not match when a disk read them."""

    @property
    def integrity_failures(self) -> int:
        """Blocks that did not match, however they were found."""
        on_host = self.corrupt_on_load + self.corrupt_after_restart + self.corrupt_in_sample
        return on_host + self.corrupt_on_disk


@dataclass(slots=True)
class DiskTally:
    """Counters of one disk since the start; they only grow."""

    written_blocks: int = 0
    written_bytes: int = 0
    read_blocks: int = 0
    """Promoted; what was only checked is not counted."""
    read_bytes: int = 0
    evicted_blocks: int = 0
    evicted_age_s: float = 0.0
    reclaimed_extents: int = 0
    """Taken from one slot size for another."""
    errors: int = 0
    """Jobs that failed or were too slow, and workers that were lost with jobs open."""
    corrupt_blocks: int = 0
    """That did not match when they were read or checked."""


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    name: str
    number: int
    """From 1; free for another name once this one is gone."""
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
    """It has ended, and copy workers have not let go of it yet."""
    audits: int
    audit_mismatches: int


@dataclass(frozen=True, slots=True)
class SizeStatus:
    """Slots of one size."""

    slot_bytes: int
    extents: int
    slots: int
    free: int
    withheld: int
    """Quarantined or corrupt."""

    @property
    def used_bytes(self) -> int:
        """In slots that hold a block."""
        return (self.slots - self.free - self.withheld) * self.slot_bytes


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    worker: WorkerId
    device: str
    lost: bool
    sessions: int
    parts_open: int
    mapped_bytes: int
    """Of engines' memory, until the worker has let go of it."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    writing: int
    ready: int
    evicting: int
    capacity: int


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """One disk of the disk tier."""

    disk: DiskId
    state: str
    """"starting", "live", "off" or "failing"."""
    why: str
    """Why it is not live, or what was the matter last; empty if nothing ever was."""
    used_bytes: int
    """In slots that hold a block."""
    capacity_bytes: int
    blocks: int
    """READY, whatever the state of the disk."""
    corrupt_slots: int
    extents: int
    extents_free: int
    sizes: tuple[SizeStatus, ...]
    jobs: int
    """On their way, or of lost workers that have not exited."""
    writing_bytes: int
    """Of them."""
    reading_bytes: int
    read_bytes_per_s: float
    """As measured lately; 0: not yet. Likewise below."""
    write_bytes_per_s: float
    scrub_blocks: int
    """Of the scrub that is on its way, or was last."""
    scrubbed_blocks: int
    """Of them, looked at so far."""
    scrubbing: bool
    counters: DiskTally
    """A copy."""


@dataclass(frozen=True, slots=True)
class CoreStatus:
    leases: int
    leased_blocks: int
    lease_oldest_s: float
    """Since the oldest lease was granted; 0 if there is none."""
    transfers_active: int
    blocks: BlockCounts
    used_bytes: int
    """In slots that hold a block."""
    extents: int
    extents_free: int
    quarantined_slots: int
    """Whose writers are not proved gone."""
    corrupt_slots: int
    """Set aside because they have failed a check, by this daemon or an earlier one."""
    integrity: CoreIntegrity
    held_blocks: int
    """For a time, as was asked."""
    held_bytes: int
    expected_detection_s: float | None
    """How long sampling takes, on average, to find a slot that has rotted, if copies leave it its time; None
    if it is off."""
    sizes: tuple[SizeStatus, ...]
    instances: tuple[InstanceStatus, ...]
    workers: tuple[WorkerStatus, ...]
    counters: Tally
    """A copy."""
    draining: bool
    disks: tuple[DiskStatus, ...] = ()
