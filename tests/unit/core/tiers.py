"""What the contract of tiers (`test_tiers.py`) has to know of each kind of tier, and the kinds there are.

A new tier gets a class here and an entry in `KINDS`. The contract itself then holds for it as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from kvtierd.core.actions import DiskJobKind
from kvtierd.core.disk.tier import DiskTier
from kvtierd.core.ids import SpaceId
from kvtierd.core.stimuli import WorkerExited, WorkerLost
from kvtierd.core.tier import NoTier

from tests.unit.core.disk import DiskHost
from tests.unit.core.host import Host
from tests.unit.core.remote_tier import RemoteHost, RemoteTier
from tests.unit.core.store import StoreHost

BLOCK_BYTES = 4096
"""Of the blocks that the contract stores."""


class TierKind(ABC):
    """A host above a tier that holds nothing yet, and whose workers, if it has any, are live."""

    tier: ClassVar[type]
    """What the machine has to have chosen."""
    keeps: ClassVar[bool]
    """Whether what is stored can be brought up again."""
    host: Host

    @abstractmethod
    def __init__(self, table: Any, *, queue_blocks: int | None = None, **options: Any) -> None:
        """`queue_blocks`: how many blocks are on their way up at once, at most; None: 8 or more. `options`:
        the host's."""

    @abstractmethod
    def arrive(self) -> None:
        """Everything on its way, down or up, is there."""

    @abstractmethod
    def lose_workers(self) -> None:
        """They are being killed, and may still be writing."""

    @abstractmethod
    def exit_workers(self) -> None:
        """Their processes are gone, whether they were lost before or not."""

    @abstractmethod
    def start_workers(self) -> None:
        """New ones come up after the others have exited."""


class NothingBelow(TierKind):
    tier = NoTier
    keeps = False

    def __init__(self, table: Any, *, queue_blocks: int | None = None, **options: Any) -> None:
        self.host = Host(table, **options)

    def arrive(self) -> None:
        """Nothing is ever on its way."""

    def lose_workers(self) -> None:
        """There are none."""

    def exit_workers(self) -> None:
        """There are none."""

    def start_workers(self) -> None:
        """There are none."""


class DiskBelow(TierKind):
    tier = DiskTier
    keeps = True
    disks: ClassVar[int] = 1
    host: DiskHost

    def __init__(self, table: Any, *, queue_blocks: int | None = None, **options: Any) -> None:
        policy = {} if queue_blocks is None else {"read_queue_bytes": queue_blocks * BLOCK_BYTES}
        self.host = DiskHost(table, disks=self.disks, policy=policy, **options)

    def arrive(self) -> None:
        for disk in self.host.disks:
            disk.finish_all()

    def lose_workers(self) -> None:
        for disk in self.host.disks:
            disk.lose()

    def exit_workers(self) -> None:
        for disk in self.host.disks:
            disk.exit()

    def start_workers(self) -> None:
        for disk in self.host.disks:
            disk.live()


class TwoDisksBelow(DiskBelow):
    disks = 2


class StoreBelow(DiskBelow):
    """A store forgets where everything is when its worker ends, and the next one finds it again."""

    disks = 0
    host: StoreHost

    def __init__(self, table: Any, *, queue_blocks: int | None = None, **options: Any) -> None:
        policy = {} if queue_blocks is None else {"read_queue_bytes": queue_blocks * BLOCK_BYTES}
        self.host = StoreHost(table, disks=self.disks, policy=policy, **options)
        self._put: dict[SpaceId, list[np.ndarray]] = {}

    def arrive(self) -> None:
        store = self.host.store.core
        for job in store.jobs.values():
            if job.kind is DiskJobKind.WRITE:
                table = store.blocks.table
                [space] = set(table.spaces(job.entries).tolist())
                self._put.setdefault(SpaceId(space), []).append(table.hashes(job.entries))
        super().arrive()

    def start_workers(self) -> None:
        super().start_workers()
        self.host.watched()
        for space, packs in self._put.items():
            for hashes in packs:
                self.host.adopted(space, hashes)


class DiskAndStoreBelow(StoreBelow):
    disks = 1


class RemoteBelow(TierKind):
    tier = RemoteTier
    keeps = True
    host: RemoteHost

    def __init__(self, table: Any, *, queue_blocks: int | None = None, **options: Any) -> None:
        self.host = RemoteHost(table, queue_blocks=queue_blocks or 8, **options)

    def arrive(self) -> None:
        self.host.arrive()

    def lose_workers(self) -> None:
        self.host.do(WorkerLost(self.host.worker_of_tier, "stuck"))

    def exit_workers(self) -> None:
        self.host.do(WorkerExited(self.host.worker_of_tier))

    def start_workers(self) -> None:
        self.host.live()


KINDS: dict[str, type[TierKind]] = {
    "nothing": NothingBelow,
    "a disk": DiskBelow,
    "two disks": TwoDisksBelow,
    "a store": StoreBelow,
    "a disk and a store": DiskAndStoreBelow,
    "another machine": RemoteBelow,
}
