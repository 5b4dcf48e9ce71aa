"""What a tier below the host has to do, as the rest of the core sees it, and a tier that has nothing.

Every method returns at once: a tier answers from what it knows, and moves bytes by actions. For all methods:

Preconditions (guaranteed by the caller):
    - Calls come one after the other, between the beginning and the end of one stimulus.
    - Entries are the host's, and of one group's blocks. The head of their sequence comes first.
    - Arrays are contiguous, and are not changed after they were handed in.

The implementation is responsible for:
    - Never waiting, and never doing anything per block in Python.
    - Never touching a block of the host that is pinned, nor one that is WRITING and not its own.
    - Leaving no entry WRITING for ever: whatever it begins to bring up becomes READY or is removed, at the
      latest when the process that moves it has exited.
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
    """One tier below the host. The module's text has the conditions that all methods share."""

    # --- questions, which change nothing but counters ---

    @property
    def keeps_evicted(self) -> bool:
        """Whether blocks that the host evicts may come back from here. The answer never changes."""

    @property
    def reads(self) -> bool:
        """Whether anything can be brought up now. While it is False, `find` finds nothing."""

    @property
    def idles(self) -> bool:
        """Whether a queue of what is brought up has room for as much again as is in it."""

    def find(self, space: SpaceId, hashes: Hashes) -> Entries:
        """For each block the name of a copy that this tier can bring up now, or NO_ENTRY.

        The implementation is responsible for:
            - Naming only copies that are whole and believed to be sound, and whose device answers.
            - Keeping what it named until the stimulus ends, because `bring_up` may ask for it.
        """

    def in_time(self, entries: Entries) -> Mask:
        """Which of these WRITING blocks are worth waiting for: those that stores or other tiers write always
        are."""

    def load_loses(self, instance: Instance, wanted: Sequence[tuple[GroupPlan, int]], tokens: int) -> bool:
        """Whether computing `tokens` is faster than loading the blocks that make it unnecessary: `wanted` has
        how many of each group, and all are on the host. What is not known counts as fast to load."""

    def bringing_up_loses(
        self, instance: Instance, wanted: Sequence[tuple[GroupPlan, Hashes, Entries]], tokens: int
    ) -> bool:
        """Whether computing `tokens` is faster than bringing up these blocks of each group, and loading them.

        Preconditions (guaranteed by the caller):
            - There is one at least, and with the hashes comes what `find` has named for them in this
              stimulus.
        """

    def wants(self, plan: GroupPlan, entries: Entries) -> int:
        """How many of these new blocks, which are not worth their room on the host, the tier should have all
        the same, from the first on. They have no slots yet, and none of them is below."""
        return 0

    # --- the one command of lookups ---

    def bring_up(self, plan: GroupPlan, hashes: Hashes, copies: Entries, *, in_order: bool) -> Mask:
        """Begins to bring blocks up to the host, as far as the tier's queues and the host have room. Returns
        which of them will come: those that are on their way, and those that the queues have no room for yet,
        which have to be asked for again.

        Preconditions (guaranteed by the caller):
            - `copies` are what `find` has named for these hashes in this stimulus; none of them is on the
              host.
            - What must stay on the host is pinned.

        The implementation is responsible for:
            - Making a block WRITING on the host before any of its bytes move, so that one read serves all
              who wait, and READY only when its bytes have been compared with its key and checksum.
            - With `in_order`, beginning no block before those in front of it.
            - Evicting no more from the host than it needs, and leaving room for stores.
        """

    # --- what the tier is told, and may ignore ---

    def promise(self, plan: GroupPlan, blocks: int) -> None:
        """So many blocks get slots only because the tier `wants` them."""
        return

    def stored(self, plan: GroupPlan, entries: Entries) -> None:
        """A store has made blocks READY."""
        return

    def found(self, domain: Domain, entries: Entries) -> None:
        """A lookup has hit these blocks, and may have leased them."""
        return

    def part_finished(self, part: TransferPart, stimulus: PartFinished) -> None:
        """A copy worker has ended a part, which shows how fast loads are at present."""
        return

    def host_recovered(self) -> None:
        """The host has taken over what an earlier daemon left. Comes at most once, before any session."""
        return

    def worker_live(self, worker: WorkerRecord) -> None:
        """A worker has come up. This call and the next two come for all workers, and the tier ignores those
        that are not its own."""
        return

    def worker_lost(self, worker: WorkerRecord, why: str) -> None:
        """A worker is being killed or has hung up, and may still be writing. What it brings up is not in time
        any more, but its slots are not free either."""
        return

    def worker_exited(self, worker: WorkerRecord) -> None:
        """A worker's process is gone, whether it was lost before or not: none of its writes can land."""
        return

    def reconfigure(self, disks: CoreDisks, store: CoreDisks) -> None:
        """Goes on with other policies, as `Reconfigure` says."""
        return

    def tick(self) -> None:
        """Time has passed."""
        return


class NoTier(Tier):
    """A tier for hosts that have nothing below: it finds nothing, and ignores what it is told."""

    keeps_evicted = False
    reads = False
    idles = False

    def find(self, space: SpaceId, hashes: Hashes) -> Entries:
        return np.full(len(hashes), NO_ENTRY, np.uint32)

    def in_time(self, entries: Entries) -> Mask:
        return np.ones(len(entries), np.bool_)

    def load_loses(self, instance: Instance, wanted: Sequence[tuple[GroupPlan, int]], tokens: int) -> bool:
        return False

    def bringing_up_loses(
        self, instance: Instance, wanted: Sequence[tuple[GroupPlan, Hashes, Entries]], tokens: int
    ) -> bool:
        return False

    def bring_up(self, plan: GroupPlan, hashes: Hashes, copies: Entries, *, in_order: bool) -> Mask:
        return np.zeros(len(hashes), np.bool_)
