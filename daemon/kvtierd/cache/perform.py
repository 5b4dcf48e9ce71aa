"""Performs what the core decided, in order and at once: slot records in the pool and in disks' images, and
packets to workers."""

from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

import numpy as np
from kvtier_kernels import PoolRecords

from kvtierd.cache.disks import DiskFiles
from kvtierd.core.actions import (
    Action,
    AssignExtent,
    CheckSlots,
    CommitSlots,
    FreeSlots,
    Notify,
    OpenSlots,
    PostDiskJob,
    PostPart,
    QuarantineSlots,
    ReleaseSession,
    RevokePart,
    WithdrawPage,
)
from kvtierd.core.ids import DiskId, SpaceId, WorkerId
from kvtierd.memory import HostPool
from kvtierd.tiers.disk.image import WRITER
from kvtierd.workers.supervisor.supervisor import Supervisor


class Performer:
    """Performs actions on one pool, the disks' images and the workers. Any exception means a bug or a broken
    pool."""

    def __init__(
        self,
        pool: HostPool,
        workers: Supervisor,
        disks: DiskFiles,
        writers: Mapping[WorkerId, int],
        notify: Callable[[Notify], None],
        gate_deadline_ms: int,
        withdraw_page: Callable[[SpaceId], None],
    ) -> None:
        """`writers` has the pool's writer id of every worker that was ever live. `withdraw_page` closes an
        index page."""
        self._pool = pool
        self._workers = workers
        self._disks = disks
        self._writers = writers
        self._notify = notify
        self._gate_deadline_ms = gate_deadline_ms
        self._withdraw_page = withdraw_page

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case PostPart():
                generations = self._pool.records.generations(action.slots)
                self._workers.post(action, generations, self._gate_deadline_ms)
            case OpenSlots():
                self._open(action)
            case CommitSlots():
                self._commit(action)
            case FreeSlots():
                self._records(action.disk).free(np.ascontiguousarray(action.slots).reshape(-1))
            case QuarantineSlots():
                self._set_aside(action)
            case PostDiskJob():
                self._post_disk_job(action)
            case CheckSlots():
                self._workers.check_slots(action, self._pool.records.generations(action.slots))
            case Notify():
                self._notify(action)
            case RevokePart():
                self._workers.revoke(action.worker, action.part)
            case ReleaseSession():
                self._workers.release_session(action.worker, action.session)
            case WithdrawPage():
                self._withdraw_page(action.space)
            case AssignExtent():
                self._records(action.disk).format_extent(action.extent, action.slot_bytes)
            case _:
                assert_never(action)

    def _records(self, disk: DiskId | None) -> PoolRecords:
        return self._pool.records if disk is None else self._disks[disk].image.records

    def _set_aside(self, action: QuarantineSlots) -> None:
        if action.disk is None:
            self._pool.set_aside(action.slots)
            return
        disk = self._disks[action.disk]
        disk.image.set_aside(action.slots)
        self._workers.persist_records(disk.device, action.slots)

    def _post_disk_job(self, action: PostDiskJob) -> None:
        on_disk = self._records(action.disk).generations(action.disk_slots)
        on_host = self._pool.records.generations(action.host_slots)
        self._workers.post_disk_job(action, on_disk, on_host)

    def _open(self, action: OpenSlots) -> None:
        self._records(action.disk).open(
            action.slots,
            self._writers[action.worker] if action.disk is None else WRITER,
            self._pool.boot_nonce,
            action.store,
            action.namespace,
            action.group,
            action.shard,
            action.world_size,
            action.hashes,
            action.data_bytes,
        )

    def _commit(self, action: CommitSlots) -> None:
        blocks, world = action.slots.shape
        clocks = np.uint64(action.first_clock) - np.arange(blocks, dtype=np.uint64)
        self._pool.records.commit(action.slots.reshape(-1), np.repeat(clocks, world))
