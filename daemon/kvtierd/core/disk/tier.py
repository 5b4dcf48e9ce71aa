"""The disks, as the tier below the host."""

from dataclasses import replace

import numpy as np

from kvtierd.core.actions import DiskJobKind
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
from kvtierd.core.state.disks import LATE, Disk
from kvtierd.core.state.entities import DISK_DEVICE_PREFIX, GroupPlan, WorkerRecord
from kvtierd.core.stimuli import CoreDisks, DiskJobFinished, DiskRecovered, PackFound


class DiskTier:
    """A `Tier` of disks, with what only disks have besides: jobs, scrubs and recovery."""

    keeps_evicted = True

    def __init__(self, core: CoreState) -> None:
        self._core = core
        self._disks = core.disks
        self._jobs = DiskJobs(core)
        self._health = DiskHealth(core, self._jobs)
        self._scrubs = Scrubs(core, self._jobs)
        self._writing = Writing(core, self._jobs)
        self._watching = Watching(core, self._jobs)
        admission = Admission(core)
        self.find = self._disks.find
        self.bring_up = Promotion(core, self._jobs).begin
        self.load_loses = admission.load_loses
        self.bringing_up_loses = admission.promotion_loses
        self.part_finished = admission.part_finished
        self.found = self._writing.found
        self.host_recovered = self._disks.host_recovered
        self.start_scrub = self._scrubs.start

    # --- lookups ---

    @property
    def reads(self) -> bool:
        return self._disks.any_live

    @property
    def idles(self) -> bool:
        most = self._disks.policy.read_queue_bytes
        return any(disk.live and 2 * disk.bytes[DiskJobKind.READ] <= most for disk in self._disks.all)

    def in_time(self, entries: Entries) -> Mask:
        if not self._disks.late_jobs:
            return np.ones(len(entries), np.bool_)
        in_time: Mask = self._core.blocks.table.flags(entries) & LATE == 0
        return in_time

    # --- what becomes of blocks on the host ---

    def stored(self, plan: GroupPlan, entries: Entries) -> None:
        if len(entries):
            self._disks.settle(plan.space, entries)
            self._writing.stored(plan.domain, entries)

    def reconfigure(self, policy: CoreDisks) -> None:
        now = self._disks.policy
        self._disks.policy = replace(
            policy,
            write_queue_bytes=now.write_queue_bytes,
            read_queue_bytes=now.read_queue_bytes,
            job_bytes=now.job_bytes,
            tenants=now.tenants,
        )
        self._writing.policy_changed()

    def wants(self, plan: GroupPlan, entries: Entries) -> int:
        return self._writing.wants(plan.domain, entries) if self._core.blocks.ranks else 0

    def promise(self, plan: GroupPlan, blocks: int) -> None:
        self._writing.promise(plan.domain, blocks)

    # --- stimuli ---

    def job_finished(self, stimulus: DiskJobFinished) -> bool:
        """A worker has ended a job. Returns False, and only counts the message, if that is told too late."""
        ended = self._jobs.finished(stimulus)
        if ended is None:
            return False
        disk, job = ended
        self._health.ended(disk, job, stimulus)
        self._scrubs.ended(disk, job, looked_at=True)
        self._writing.job_ended(disk, job)
        self._scrubs.go_on(disk)
        return True

    def recovered(self, stimulus: DiskRecovered) -> None:
        """It is known now what a disk holds, so it may be used."""
        disk = self._disks.all[stimulus.disk]
        assert not disk.recovered, "a disk is recovered once"
        self._disks.recover(disk, stimulus.found)
        self._health.recovered(disk)

    def pack_found(self, stimulus: PackFound) -> None:
        """The worker of the store has found blocks of other hosts."""
        [store] = self._disks.all
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
                self._writing.give_back(disk, job)

    def _of(self, worker: WorkerRecord) -> Disk | None:
        """The disk that a worker serves."""
        if not worker.serves_disk:
            return None
        return self._disks.all[int(worker.device.removeprefix(DISK_DEVICE_PREFIX))]

    def tick(self) -> None:
        for disk in self._disks.all:
            self._health.tick(disk)
            self._scrubs.go_on(disk)
            if disk.shared:
                self._watching.tick(disk)
        self._writing.tick()
