"""A tier that is no disk, to show that `Tier` and its contract do not need one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from kvtierd.core import machine
from kvtierd.core.blocks.domains import Domain
from kvtierd.core.blocks.prefix import Mask
from kvtierd.core.blocks.table import BlockFlag
from kvtierd.core.ids import NO_ENTRY, Entries, Hashes, Slots, SpaceId, WorkerId
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.entities import GroupPlan, Instance, WorkerRecord
from kvtierd.core.stimuli import WorkerLive
from kvtierd.core.tier import Tier

from tests.oracles.invariants import validate
from tests.unit.core.host import NONE, Host

DEVICE = "remote"
TABLE_FULL = 2
Key = tuple[int, bytes]


@dataclass
class RemoteRead:
    """Blocks of the host that the worker is writing."""

    domain: Domain
    entries: Entries
    slots: Slots


class RemoteTier(Tier):
    """Another machine keeps every block that is stored, and one worker here reaches it. Their names are in a
    dictionary, which is too slow for a daemon, and no action is posted, because nobody performs any here."""

    keeps_evicted = True

    def __init__(self, queue_blocks: int) -> None:
        self.core: CoreState
        """Set by whoever makes the machine."""
        self._queue_blocks = queue_blocks
        self._names: dict[Key, int] = {}
        self._sent: list[Key] = []
        self._reads: list[RemoteRead] = []
        self._worker: WorkerRecord | None = None
        self._late = False
        """Whether the worker is lost, and its process still there."""

    # --- questions ---

    @property
    def reads(self) -> bool:
        return self._worker is not None and not self._late

    @property
    def idles(self) -> bool:
        return 2 * len(self.writing) <= self._queue_blocks

    def find(self, space: SpaceId, hashes: Hashes) -> Entries:
        if not self.reads:
            return np.full(len(hashes), NO_ENTRY, np.uint32)
        names = [self._names.get((space, row.tobytes()), NO_ENTRY) for row in hashes]
        return np.array(names, np.uint32)

    def in_time(self, entries: Entries) -> Mask:
        late = self.writing if self._late else NONE
        return np.isin(entries, late, invert=True)

    def load_loses(self, instance: Instance, wanted: Sequence[tuple[GroupPlan, int]], tokens: int) -> bool:
        return False

    def bringing_up_loses(
        self, instance: Instance, wanted: Sequence[tuple[GroupPlan, Hashes, Entries]], tokens: int
    ) -> bool:
        return False

    @property
    def writing(self) -> Entries:
        """The host's entries that the worker is writing."""
        return np.concatenate([NONE, *(read.entries for read in self._reads)])

    # --- commands ---

    def bring_up(self, plan: GroupPlan, hashes: Hashes, copies: Entries, *, in_order: bool) -> Mask:
        coming = np.ones(len(hashes), np.bool_)
        begun = hashes[: max(0, self._queue_blocks - len(self.writing))]
        if len(begun) == 0:
            return coming
        host, room, domain = self.core.blocks, self.core.eviction, plan.domain
        room.for_entries(domain, len(begun))
        inserted = host.insert(plan.space, domain, begun)
        new = inserted.entries[inserted.created == 1]
        roomy = room.for_slots(domain, len(new)).blocks
        no_room = np.isin(inserted.entries, new[roomy:]) | (inserted.created == TABLE_FULL)
        coming[: len(begun)] = ~no_room
        host.discard(domain, new[roomy:], None)
        new = new[:roomy]
        self._reads.append(RemoteRead(domain, new, host.give_slots(domain, new)))
        return coming

    def stored(self, plan: GroupPlan, entries: Entries) -> None:
        table = self.core.blocks.table
        if self.reads:
            kept = entries[table.flags(entries) & BlockFlag.HOST_ONLY == 0]
            self._sent += [(plan.space, row.tobytes()) for row in table.hashes(kept)]

    # --- the worker ---

    def arrived(self) -> None:
        """The worker has done all that it was asked to."""
        for key in self._sent:
            self._names.setdefault(key, len(self._names))
        for read in self._reads:
            self.core.blocks.commit(read.domain, read.entries, read.slots)
            self.core.retention.made(read.domain, read.entries)
        self._sent, self._reads = [], []

    def worker_live(self, worker: WorkerRecord) -> None:
        if worker.device == DEVICE:
            self._worker = worker

    def worker_lost(self, worker: WorkerRecord, why: str) -> None:
        if worker is self._worker:
            self._late = True

    def worker_exited(self, worker: WorkerRecord) -> None:
        if worker is self._worker:
            for read in self._reads:
                self.core.blocks.discard(read.domain, read.entries, read.slots)
                self.core.blocks.domains.forget_idle(read.domain)
            self._sent, self._reads = [], []
            self._worker, self._late = None, False


class RemoteHost(Host):
    """A machine above a `RemoteTier`, whose worker is live."""

    def __init__(self, table: Any, *, queue_blocks: int = 8, **options: Any) -> None:
        self.below = RemoteTier(queue_blocks)
        with mock.patch.object(machine, "NoTier", return_value=self.below):  # the daemon knows no such tier
            super().__init__(table, **options)
        self.below.core = self.machine.core
        self.worker_of_tier = self.live()

    def live(self) -> WorkerId:
        """A worker comes up."""
        self.worker_of_tier = WorkerId(next(self.ids))
        self.do(WorkerLive(self.worker_of_tier, DEVICE))
        return self.worker_of_tier

    def arrive(self) -> None:
        self.machine.core.begin(self.now_s)
        self.below.arrived()
        self.validate()

    def validate(self) -> None:
        validate(self.machine, self.below.writing)
