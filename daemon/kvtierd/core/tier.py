"""What is below the host, as the rest of the core sees it: what a tier has to do, and the tier that has
nothing.

Every method returns at once: a tier answers from what it knows, and moves bytes by actions. In all of them,

Preconditions (guaranteed by the caller):
    - Calls come one after the other, between the beginning and the end of one stimulus.
    - Entries are the host's, and of one group's blocks. A batch has the head of its sequence first.
    - Arrays are not changed after they were handed in, and are contiguous.

The implementation is responsible for:
    - Never waiting, and never doing anything per block in Python.
    - Never touching a block of the host that is pinned, nor one that is WRITING and not its own.
    - Leaving no entry WRITING for ever: whatever it begins to bring up becomes READY or goes, at the latest
      when the process that moves it has exited.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvtierd.core.blocks.domains import Domain
from kvtierd.core.blocks.prefix import Mask
from kvtierd.core.ids import NO_ENTRY, Entries, Hashes, SpaceId
from kvtierd.core.state.entities import GroupPlan, Instance, TransferPart, WorkerRecord
from kvtierd.core.stimuli import CoreDisks, PartFinished


class Tier(Protocol):
    """What is below the host."""

    # --- questions; they change nothing but counters ---

    @property
    def keeps_evicted(self) -> bool:
        """Whether blocks that the host evicts may come back from here. Does not change."""
        ...

    @property
    def reads(self) -> bool:
        """Whether anything can be brought up now. While it is False, `find` finds nothing."""
        ...

    def find(self, space: SpaceId, hashes: Hashes) -> Entries:
        """For each block a name for its copy that this tier can bring up now, NO_ENTRY for the others.

        The implementation is responsible for:
            - Naming only copies that it has whole and believes to be sound, and whose device answers.
            - Forgetting nothing that was named before the stimulus ends: `bring_up` may ask for it.
        """
        ...

    def in_time(self, entries: Entries) -> Mask:
        """Which of these WRITING blocks are worth waiting for. Stores, and what other tiers bring up, are."""
        ...

    def load_loses(self, instance: Instance, wanted: Sequence[tuple[GroupPlan, int]], tokens: int) -> bool:
        """Whether computing `tokens` is faster than loading what spares it: so many blocks of each group, all
        on the host. What is not known counts as fast."""
        ...

    def bringing_up_loses(
        self, instance: Instance, wanted: Sequence[tuple[GroupPlan, Hashes]], tokens: int
    ) -> bool:
        """Whether computing `tokens` is faster than bringing up these blocks of each group, and loading them.

        Preconditions (guaranteed by the caller):
            - `find` has found all of them in this stimulus, and there is one at least.
        """
        ...

    # --- the one command of lookups ---

    def bring_up(self, plan: GroupPlan, hashes: Hashes, copies: Entries, *, in_order: bool) -> Mask:
        """Begins to bring blocks up to the host, as far as its queues and the host have room. Returns which
        of them come: those that are on their way, and those that will be when there is room in the queues,
        for which it is asked again.

        Preconditions (guaranteed by the caller):
            - `copies` are what `find` has named for these hashes in this stimulus; none of them is on the
              host.
            - What must stay on the host is pinned.

        The implementation is responsible for:
            - Making a block WRITING on the host before any byte of it moves, so that one read serves all who
              wait, and READY only when its bytes have been compared with its key and checksum.
            - With `in_order`, beginning no block before those in front of it.
            - Evicting no more from the host than it needs, and leaving stores room beside it.
        """
        ...

    # --- what it is told ---

    def stored(self, plan: GroupPlan, entries: Entries) -> None:
        """A store has made blocks READY."""
        ...

    def found(self, domain: Domain, entries: Entries) -> None:
        """A lookup has hit blocks; they may have been leased."""
        ...

    def part_finished(self, part: TransferPart, stimulus: PartFinished) -> None:
        """A copy worker has ended a part: so fast are loads at present."""
        ...

    def host_recovered(self) -> None:
        """The host has taken over what an earlier daemon left. Comes once at most, before any session."""
        ...

    def worker_live(self, worker: WorkerRecord) -> None:
        """A worker has come up. Like the next two, told of all workers: others than its own are ignored."""
        ...

    def worker_lost(self, worker: WorkerRecord, why: str) -> None:
        """A worker is being killed or hung up, and may still be writing: what it brings up is not in time any
        more, and not free either."""
        ...

    def worker_exited(self, worker: WorkerRecord) -> None:
        """A worker's process is gone, after it was lost or without: nothing of it can still land."""
        ...

    def reconfigure(self, policy: CoreDisks) -> None:
        """As `Reconfigure` says."""
        ...

    def tick(self) -> None:
        """Time has passed."""
        ...


class NoTier:
    """There is nothing below the host."""

    keeps_evicted = False
    reads = False

    def find(self, space: SpaceId, hashes: Hashes) -> Entries:
        return np.full(len(hashes), NO_ENTRY, np.uint32)

    def in_time(self, entries: Entries) -> Mask:
        return np.ones(len(entries), np.bool_)

    def load_loses(self, instance: Instance, wanted: Sequence[tuple[GroupPlan, int]], tokens: int) -> bool:
        return False

    def bringing_up_loses(
        self, instance: Instance, wanted: Sequence[tuple[GroupPlan, Hashes]], tokens: int
    ) -> bool:
        return False

    def bring_up(self, plan: GroupPlan, hashes: Hashes, copies: Entries, *, in_order: bool) -> Mask:
        return np.zeros(len(hashes), np.bool_)

    def stored(self, plan: GroupPlan, entries: Entries) -> None:
        pass

    def found(self, domain: Domain, entries: Entries) -> None:
        pass

    def part_finished(self, part: TransferPart, stimulus: PartFinished) -> None:
        pass

    def host_recovered(self) -> None:
        pass

    def worker_live(self, worker: WorkerRecord) -> None:
        pass

    def worker_lost(self, worker: WorkerRecord, why: str) -> None:
        pass

    def worker_exited(self, worker: WorkerRecord) -> None:
        pass

    def reconfigure(self, policy: CoreDisks) -> None:
        pass

    def tick(self) -> None:
        pass
