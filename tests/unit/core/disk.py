"""Disks of a machine under test, and short ways to say what their workers do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from kvtierd.core.actions import DiskJobKind, OpenSlots, PostDiskJob
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.blocks.table import BlockFlag, BlockState
from kvtierd.core.ids import DiskId, WorkerId
from kvtierd.core.state.disks import Disk as CoreDisk
from kvtierd.core.status import DiskStatus
from kvtierd.core.stimuli import (
    NOBODY,
    CoreDisks,
    DiskJobFinished,
    DiskRecovered,
    Recovered,
    WorkerExited,
    WorkerLive,
    WorkerLost,
    WriteMode,
)
from kvtierd.core.transfers.ahead import OpenPrompts

from tests.unit.core.host import NONE, Host, Instance, keys

SLAB = PoolGeometry(extents=4, extent_bytes=1 << 16, first_extent_offset=2 << 20)
"""As large as the pool of `host.GEOMETRY`: 56 slots of 4 KiB."""
READ, WRITE, CHECK = DiskJobKind.READ, DiskJobKind.WRITE, DiskJobKind.CHECK


class DiskHost(Host):
    """A machine with disks, which are live, and hold nothing, unless said otherwise."""

    def __init__(
        self,
        table: Any,
        *,
        disks: int = 1,
        slab: PoolGeometry = SLAB,
        start: bool = True,
        mode: WriteMode = WriteMode.THROUGH,
        policy: dict[str, Any] | None = None,
        store: WriteMode | None = None,
        **options: Any,
    ) -> None:
        """store: when blocks are put into a store below the disks; None: there is none."""
        policies = CoreDisks(mode=mode, **(policy or {}))
        super().__init__(
            table,
            disks=[slab] * disks,
            disk_policy=policies,
            store=None if store is None else slab,
            store_policy=None if store is None else replace(policies, mode=store),
            **options,
        )
        self.disks = [Disk(self, DiskId(number)) for number in range(disks + (store is not None))]
        """The store is the last."""
        for disk in self.disks if start else ():
            disk.start()

    @property
    def disk(self) -> Disk:
        """The first."""
        return self.disks[0]

    @property
    def ahead(self) -> OpenPrompts:
        """What goes on by itself."""
        return self.machine.lookups.ahead

    def stored_on_disk(self, instance: Instance, *numbers: int) -> None:
        """Stores blocks, and has them written to their disks."""
        instance.stored(*numbers)
        for disk in self.disks:
            disk.finish_all()

    def evict_all(self, instance: Instance, first: int = 10_000) -> None:
        """Fills the pool with other blocks, which no disk keeps, until none of the earlier is left."""
        for disk in self.disks:
            disk.pause()
        instance.fill_pool(first)
        for disk in self.disks:
            disk.resume()


class Disk:
    """One disk, and its worker."""

    def __init__(self, host: DiskHost, number: DiskId) -> None:
        self.host = host
        self.number = number
        self.worker = WorkerId(0)

    @property
    def core(self) -> CoreDisk:
        return self.host.machine.core.below.all[self.number]

    @property
    def status(self) -> DiskStatus:
        return self.host.machine.status().disks[self.number]

    @property
    def jobs(self) -> list[PostDiskJob]:
        """Of this disk, among the last actions."""
        return [job for job in self.host.of(PostDiskJob) if job.disk == self.number]

    @property
    def opened(self) -> list[OpenSlots]:
        """Slots of this disk, among the last actions."""
        return [opened for opened in self.host.of(OpenSlots) if opened.disk == self.number]

    def live(self) -> WorkerId:
        """A worker comes up."""
        self.worker = WorkerId(next(self.host.ids))
        self.host.do(WorkerLive(self.worker, f"disk-{self.number}"))
        return self.worker

    def start(self, found: Recovered | None = None) -> None:
        """The first worker comes up, and the slab is scanned."""
        self.live()
        self.host.do(DiskRecovered(self.number, found or nothing()))

    def lose(self) -> None:
        self.host.do(WorkerLost(self.worker, "stuck"))

    def exit(self, worker: WorkerId | None = None) -> None:
        self.host.do(WorkerExited(worker or self.worker))

    def pause(self) -> None:
        """Its worker ends, with nothing to do."""
        assert not self.core.jobs
        self.exit()

    def resume(self) -> None:
        self.live()

    def open_jobs(self, kind: DiskJobKind | None = None) -> list[int]:
        """Posted and not over, oldest first."""
        return [number for number, job in self.core.jobs.items() if kind in (None, job.kind)]

    def finish(
        self,
        job: int,
        *,
        failed: Sequence[int] = (),
        corrupt: Sequence[int] = (),
        gone: Sequence[int] = (),
        error: str = "",
        **options: Any,
    ) -> None:
        self.host.do(
            DiskJobFinished(
                self.core.jobs[job].worker.worker,  # type: ignore[index]
                job,  # type: ignore[arg-type]
                np.array(failed, np.uint32),
                np.array(corrupt, np.uint32),
                error,
                gone=np.array(gone, np.uint32),
                **options,
            )
        )

    def fail(self, job: int, error: str = "input/output error", **options: Any) -> None:
        """All of it."""
        count = self.core.jobs[job].slots.size  # type: ignore[index]
        self.finish(job, failed=range(count), error=error, **options)

    def finish_all(self) -> None:
        while self.core.jobs:
            self.finish(next(iter(self.core.jobs)))

    def holds(self, instance: Instance, *numbers: int, group: int = 0) -> list[int]:
        """Which of these keys it has READY."""
        space = self.host.machine.core.names[NOBODY, instance.name].plans[group].space
        _, states = self.core.blocks.table.lookup(space, keys(*numbers))
        return [number for number, state in zip(numbers, states, strict=True) if state == BlockState.READY]


def flagged(instance: Instance, flag: BlockFlag, *numbers: int, group: int = 0) -> list[int]:
    """Which of these blocks the host has, with this flag."""
    core = instance.host.machine.core
    table = core.blocks.table
    entries, states = table.lookup(core.names[NOBODY, instance.name].plans[group].space, keys(*numbers))
    there = [(n, e) for n, e, state in zip(numbers, entries, states, strict=True) if state]
    return [number for number, entry in there if table.flags(np.array([entry], np.uint32))[0] & flag]


def nothing() -> Recovered:
    """What a new slab holds."""
    return Recovered((), (), NONE, keys(), NONE, 0, NONE)
