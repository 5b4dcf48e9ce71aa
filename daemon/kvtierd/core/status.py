"""What the core can be asked about itself: counters, and one picture of everything."""

from dataclasses import dataclass

from kvtierd.core.ids import Epoch, NamespaceDigest, SessionId, WorkerId
from kvtierd.core.stimuli import CoreIntegrity


@dataclass(slots=True)
class Tally:
    """Counters since the start; they only grow. Updated per batch."""

    lookups: int = 0
    lookup_hashes: int = 0
    lookup_hits: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    deduplicated_blocks: int = 0
    """Submitted to be stored, but there already or being written."""
    throttled_blocks: int = 0
    evicted_blocks: int = 0
    reclaimed_extents: int = 0
    """Taken from one slot size for another."""
    done_transfers: int = 0
    failed_transfers: int = 0
    cancelled_transfers: int = 0
    expired_leases: int = 0
    refused_leases: int = 0
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

    @property
    def integrity_failures(self) -> int:
        """Blocks that did not match, however they were found."""
        return self.corrupt_on_load + self.corrupt_after_restart + self.corrupt_in_sample


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    name: str
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


@dataclass(frozen=True, slots=True)
class SizeStatus:
    """Slots of one size."""

    slot_bytes: int
    extents: int
    slots: int
    free: int
    withheld: int
    """Quarantined or corrupt."""


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
class CoreStatus:
    leases: int
    leased_blocks: int
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
    expected_detection_s: float | None
    """How long sampling takes, on average, to find a slot that has rotted, if copies leave it its time; None
    if it is off."""
    sizes: tuple[SizeStatus, ...]
    instances: tuple[InstanceStatus, ...]
    workers: tuple[WorkerStatus, ...]
    counters: Tally
    """A copy."""
    draining: bool
