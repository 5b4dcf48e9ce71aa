"""A machine with a store that it shares with other hosts, and short ways to say what its worker does."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from kvtierd.core.actions import DiskJobKind, PostDiskJob, UnwatchSpace, WatchSpace
from kvtierd.core.ids import Hashes, SpaceId
from kvtierd.core.stimuli import CoreDisks, Drain, PackFound, PoolPolicy, Reconfigure, Resume, Tick, WriteMode

from tests.unit.core.disk import Disk, DiskHost
from tests.unit.core.host import Instance


class StoreHost(DiskHost):
    """A machine with a store, whose worker is live, and has found nothing yet; `disks` are above it.
    The store counts as one that answers."""

    def __init__(self, table: Any, **options: Any) -> None:
        mode = options.pop("mode", WriteMode.THROUGH)
        super().__init__(table, disks=options.pop("disks", 0), store=mode, **options)
        self.packs = itertools.count(1)
        self.store.core.answered = True

    @property
    def store(self) -> Disk:
        return self.disks[-1]

    def evict_host(self, instance: Instance) -> None:
        """Fills the pool with other blocks, which are written nowhere, until none of the earlier is left."""
        policies = [level.policy for level in self.machine.core.below.levels]
        self._reconfigure([replace(policy, mode=WriteMode.ON_REUSE) for policy in policies])
        instance.fill_pool(10_000)
        self._reconfigure(policies)

    def _reconfigure(self, policies: list[CoreDisks]) -> None:
        self.do(Reconfigure(0, policies[0], PoolPolicy.LRU, policies[-1]))

    def watched(self) -> list[WatchSpace | UnwatchSpace]:
        """A tick, and what the worker is told to look for. The host drains meanwhile, so that the tick puts
        nothing into the store."""
        self.do(Drain())
        self.do(Tick())
        told = [action for action in self.actions if isinstance(action, WatchSpace | UnwatchSpace)]
        self.do(Resume())
        return told

    def found(self, space: SpaceId, hashes: Hashes) -> PostDiskJob:
        """The worker has found a pack with these blocks. Returns the answer."""
        pack = next(self.packs)
        self.do(PackFound(self.store.worker, pack, space, hashes))
        [answer] = self.of(PostDiskJob)
        assert (answer.kind, answer.pack) == (DiskJobKind.ADOPT, pack)
        return answer

    def adopted(self, space: SpaceId, hashes: Hashes) -> list[int]:
        """As `found`, and all that is wanted is there. Returns which blocks these were."""
        answer = self.found(space, hashes)
        self.store.finish_all()
        return [int(each) for each in np.unique(answer.positions)]
