"""What the core decides about a disk is done in that disk's image, and in nothing else."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kvtier_kernels import PoolRecords, format_pool
from kvtierd.cache.disks import DiskFile
from kvtierd.cache.facade import Cache
from kvtierd.core.actions import Action, AssignExtent, FreeSlots, OpenSlots, QuarantineSlots, Reply
from kvtierd.core.ids import DiskId, NamespaceDigest, Rank, TransferNumber, WorkerId
from kvtierd.core.stimuli import CoreLimits, Stimulus, Tick
from kvtierd.memory.host_pool import HostPool
from kvtierd.memory.pool_file import config_digest
from kvtierd.memory.recovery import NOBODY
from kvtierd.tiers.disk.image import WRITER, DiskImage, disk_geometry
from kvtierd.workers.supervisor.supervisor import Supervisor

DISK = DiskId(1)


class Front:
    """A pool and two disks' images, empty, without any worker."""

    def __init__(self) -> None:
        self.pool = HostPool.open(None, 4 << 20, 1 << 20, lock_timeout_s=1)
        self.disks = [DiskFile(DiskId(number), f"/{number}", new_image()) for number in range(2)]
        workers = Supervisor(
            pool_fd=self.pool.fd,
            pool_bytes=self.pool.array.nbytes,
            register_writer=self.pool.register_writer,
            events=lambda _: None,
        )
        self._decided: list[Action] = []
        decider: Any = self
        self._cache = Cache(
            decider, self.pool, workers, CoreLimits(), disks=self.disks, pool_path=None, pages_max=8
        )
        for disk in self.disks:
            disk.image.recover(self.pool.boot_nonce)

    def perform(self, *actions: Action) -> None:
        self._decided = list(actions)
        self._cache.handle(Tick())

    def handle(self, stimulus: Stimulus) -> tuple[Reply, list[Action]]:
        """As the core's machine, which here decides what the test wants."""
        return None, self._decided

    def in_use(self) -> list[bool]:
        """Whether extent 0 is assigned: of the pool, and of each disk."""
        records = [self.pool.records, *(disk.image.records for disk in self.disks)]
        return [each.extent_info(0) is not None for each in records]

    @property
    def records(self) -> PoolRecords:
        return self.disks[DISK].image.records

    def close(self) -> None:
        for disk in self.disks:
            disk.image.close()
        self.pool.close()


def new_image() -> DiskImage:
    """As a disk's worker leaves it where there was no slab."""
    image = DiskImage(geometry := disk_geometry(4 << 20, 1 << 20))
    format_pool(image._array, geometry.extent_bytes, geometry.extents, config_digest(geometry))
    return image


@pytest.fixture
def front() -> Iterator[Front]:
    front = Front()
    yield front
    front.close()


def test_an_extent_of_a_disk_is_assigned_there_and_nowhere_else(front: Front) -> None:
    front.perform(AssignExtent(0, 8192, DISK))
    assert front.in_use() == [False, False, True]
    front.perform(AssignExtent(0, 4096))
    assert front.in_use() == [True, False, True]


def test_slots_of_a_disk_are_opened_freed_and_set_aside_in_its_image(front: Front) -> None:
    front.perform(AssignExtent(0, 8192, DISK))
    slots = front.disks[DISK].image.geometry.slots_of(0, 8192)[:3]
    front.perform(
        OpenSlots(
            slots=slots,
            worker=WorkerId(7),
            store=TransferNumber(9),
            namespace=NamespaceDigest(bytes(16)),
            group=0,
            shard=Rank(0),
            world_size=1,
            hashes=np.arange(96, dtype=np.uint8).reshape(3, 32),
            data_bytes=8000,
            disk=DISK,
        )
    )
    generations = front.records.generations(slots)
    assert front.records.check_writing(slots, generations, 8000).tolist() == [1, 1, 1]
    assert front.records.scan()["writers"].tolist() == [WRITER] * 3, "no process: recovery frees them"
    front.perform(FreeSlots(slots[:1], DISK), QuarantineSlots(slots[1:2], DISK))
    assert front.records.check_writing(slots, generations).tolist() == [0, 0, 1]
    found = front.records.scan()
    assert dict(zip(found["slots"].tolist(), found["writers"].tolist(), strict=True)) == {
        int(slots[1]): NOBODY,
        int(slots[2]): WRITER,
    }
    assert len(front.pool.records.scan()["slots"]) == 0
