"""The disks and the store, as the tier below the host."""

from dataclasses import replace

import numpy as np

from kvtierd.core.actions import DiskJobKind
from kvtierd.core.blocks.domains import Domain
from kvtierd.core.blocks.prefix import Mask
from kvtierd.core.disk.admission import Admission
from kvtierd.core.disk.disk_health import DiskHealth
from kvtierd.core.disk.disk_jobs import DiskJobs
from kvtierd.core.disk.promotion import Promotion
from kvtierd.core.disk.scrub import Scrubs
from kvtierd.core.disk.watching import Watching
from kvtierd.core.disk.writing import Writing
from kvtierd.core.ids import Entries
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.disks import LATE, Disk, Level
from kvtierd.core.state.entities import DISK_DEVICE_PREFIX, DiskJob, GroupPlan, WorkerRecord
from kvtierd.core.stimuli import CoreDisks, DiskJobFinished, DiskRecovered, PackFound


class DiskTier:
    """A `Tier` of disks and a store, with what only these have besides: jobs, scrubs and recovery."""

    keeps_evicted = True

    def __init__(self, core: CoreState) -> None:
        self._core = core
        self._below = core.below
        self._jobs = DiskJobs(core)
        self._health = DiskHealth(core, self._jobs)
        self._scrubs = Scrubs(core, self._jobs)
        self._writings = {level: Writing(core, level, self._jobs) for level in core.below.levels}
        self._wanted: dict[Level, int] = {}
        """How many of the blocks that were asked about last each level should have."""
        self._watching = Watching(core, self._jobs)
        admission = Admission(core)
        self.find = self._below.find
        self.bring_up = Promotion(core, self._jobs).begin
        self.load_loses = admission.load_loses
        self.bringing_up_loses = admission.promotion_loses
        self.part_finished = admission.part_finished
        self.start_scrub = self._scrubs.start

    # --- lookups ---

    @property
    def reads(self) -> bool:
        return self._below.any_live

    @property
    def idles(self) -> bool:
        return any(
            disk.live and 2 * disk.bytes[DiskJobKind.READ] <= disk.level.policy.read_queue_bytes
            for disk in self._below.all
        )

    def in_time(self, entries: Entries) -> Mask:
        if not self._below.late_jobs:
            return np.ones(len(entries), np.bool_)
        in_time: Mask = self._core.blocks.table.flags(entries) & LATE == 0
        return in_time

    # --- what becomes of blocks on the host ---

    def stored(self, plan: GroupPlan, entries: Entries) -> None:
        if len(entries):
            self._below.settle(plan.space, entries)
            for writing in self._writings.values():
                writing.stored(plan.domain, entries)

    def found(self, domain: Domain, entries: Entries) -> None:
        for writing in self._writings.values():
            writing.found(domain, entries)

    def host_recovered(self) -> None:
        for level in self._below.levels:
            level.host_recovered()

    def reconfigure(self, disks: CoreDisks, store: CoreDisks) -> None:
        for level, writing in self._writings.items():
            now = level.policy
            level.policy = replace(
                store if level.shared else disks,
                write_queue_bytes=now.write_queue_bytes,
                read_queue_bytes=now.read_queue_bytes,
                job_bytes=now.job_bytes,
                tenants=now.tenants,
            )
            writing.policy_changed()

    def wants(self, plan: GroupPlan, entries: Entries) -> int:
        if not self._core.blocks.ranks:
            return 0
        self._wanted = {
            level: writing.wants(plan.domain, entries) for level, writing in self._writings.items()
        }
        return max(self._wanted.values())

    def promise(self, plan: GroupPlan, blocks: int) -> None:
        for level, wanted in self._wanted.items():
            self._writings[level].promise(plan.domain, min(blocks, wanted))

    # --- stimuli ---

    def job_finished(self, stimulus: DiskJobFinished) -> bool:
        """A worker has ended a job. Returns False, and only counts the message, if that is told too late."""
        ended = self._jobs.finished(stimulus)
        if ended is None:
            return False
        disk, job = ended
        self._health.ended(disk, job, stimulus)
        self._scrubs.ended(disk, job, looked_at=True)
        self._writings[disk.level].job_ended(disk, job)
        if len(job.came_up):
            self._brought_up(disk, job)
        self._scrubs.go_on(disk)
        return True

    def _brought_up(self, disk: Disk, job: DiskJob) -> None:
        """Blocks have come up from one level: to the others they are new on the host, as if an engine had
        stored them."""
        assert job.host_domain is not None
        for level, writing in self._writings.items():
            if level is not disk.level:
                writing.stored(job.host_domain, job.came_up)

    def recovered(self, stimulus: DiskRecovered) -> None:
        """It is known now what a disk holds, so it may be used."""
        disk = self._below.all[stimulus.disk]
        assert not disk.recovered, "a disk is recovered once"
        disk.level.recover(disk, stimulus.found)
        self._health.recovered(disk)

    def pack_found(self, stimulus: PackFound) -> None:
        """The worker of the store has found blocks of other hosts."""
        store = self._below.store
        assert store is not None, "only a store's worker finds packs"
        self._watching.pack_found(store, stimulus)

    def worker_live(self, worker: WorkerRecord) -> None:
        disk = self._of(worker)
        if disk is not None:
            self._health.worker_live(disk, worker)

    def worker_lost(self, worker: WorkerRecord, why: str) -> None:
        disk = self._of(worker)
        if disk is not None:
            self._health.worker_lost(disk, worker, why)
            if disk.shared and disk.worker is None:
                self._watching.worker_gone(disk)

    def worker_exited(self, worker: WorkerRecord) -> None:
        disk = self._of(worker)
        if disk is not None:
            for job in self._jobs.exited(disk, worker):
                self._scrubs.ended(disk, job, looked_at=False)
                self._writings[disk.level].give_back(disk, job)

    def _of(self, worker: WorkerRecord) -> Disk | None:
        """The disk, or the store, that a worker serves."""
        if not worker.serves_disk:
            return None
        return self._below.all[int(worker.device.removeprefix(DISK_DEVICE_PREFIX))]

    def tick(self) -> None:
        for disk in self._below.all:
            self._health.tick(disk)
            self._scrubs.go_on(disk)
            if disk.shared:
                self._watching.tick(disk)
        for writing in self._writings.values():
            writing.tick()
