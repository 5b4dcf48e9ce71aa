"""The disk tier as the rest of the core sees it: what it is told, and what it does as time passes."""

from collections.abc import Sequence
from dataclasses import replace

from kvtierd.core.blocks.domains import Domain
from kvtierd.core.disk.admission import Admission
from kvtierd.core.disk.disk_health import DiskHealth
from kvtierd.core.disk.disk_jobs import DiskJobs
from kvtierd.core.disk.promotion import Promotion
from kvtierd.core.disk.scrub import Scrubs
from kvtierd.core.disk.writing import Writing
from kvtierd.core.ids import Entries
from kvtierd.core.state.asks import Ask
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.disks import Disk
from kvtierd.core.state.entities import DISK_DEVICE_PREFIX, GroupPlan, Instance, TransferPart, WorkerRecord
from kvtierd.core.stimuli import CoreDisks, DiskJobFinished, DiskRecovered, PartFinished, StartScrub


class DiskTier:
    """Does nothing, at no cost, if there are no disks."""

    def __init__(self, core: CoreState) -> None:
        self._core = core
        self._disks = core.disks
        self._jobs = DiskJobs(core)
        self._health = DiskHealth(core, self._jobs)
        self._scrubs = Scrubs(core, self._jobs)
        self._writing = Writing(core, self._jobs)
        self.admission = Admission(core)
        self.promotion = Promotion(core, self._jobs, self.admission)

    def __bool__(self) -> bool:
        return bool(self._disks)

    # --- what becomes of blocks on the host ---

    def stored(self, plan: GroupPlan, entries: Entries) -> None:
        """A store has made blocks READY; the head of a sequence first."""
        if self._disks and len(entries):
            self._disks.settle(plan.space, entries)
            self._writing.stored(plan.domain, entries)

    def found(self, domain: Domain, entries: Entries) -> None:
        """A lookup has hit blocks; the head of a sequence first."""
        if self._disks:
            self._writing.found(domain, entries)

    def reconfigure(self, policy: CoreDisks) -> None:
        """As `Reconfigure` says."""
        now = self._disks.policy
        self._disks.policy = replace(
            policy,
            write_queue_bytes=now.write_queue_bytes,
            read_queue_bytes=now.read_queue_bytes,
            job_bytes=now.job_bytes,
        )
        self._writing.policy_changed()

    def part_finished(self, part: TransferPart, stimulus: PartFinished) -> None:
        """A copy worker has ended a part."""
        if self._disks:
            self.admission.part_finished(part, stimulus)

    def recompute(self, instance: Instance, asks: Sequence[Ask], tokens: int) -> bool:
        """Whether computing the `tokens` that were found on the host is faster than loading them; counted."""
        if not self._disks or not instance.prefill_tokens_per_s:
            return False
        wanted = [(ask.plan, len(ask.found)) for ask in asks]
        if not self.admission.load_loses(instance, wanted, tokens):
            return False
        self._core.tally.recompute_blocks += sum(blocks for _, blocks in wanted)
        return True

    # --- stimuli ---

    def job_finished(self, stimulus: DiskJobFinished) -> None:
        ended = self._jobs.finished(stimulus)
        if ended is None:
            return
        disk, job = ended
        self._health.ended(disk, job, stimulus)
        self._scrubs.ended(disk, job, looked_at=True)
        self._writing.job_ended(disk, job)
        self._scrubs.go_on(disk)

    def start_scrub(self, stimulus: StartScrub) -> None:
        self._scrubs.start(stimulus)

    def recovered(self, stimulus: DiskRecovered) -> None:
        """It is known what a disk holds: it may be used."""
        disk = self._disks.all[stimulus.disk]
        assert not disk.recovered, "a disk is recovered once"
        self._disks.recover(disk, stimulus.found)
        self._health.recovered(disk)

    def host_recovered(self) -> None:
        if self._disks:
            self._disks.host_recovered()

    def worker_live(self, worker: WorkerRecord) -> None:
        disk = self._of(worker)
        if disk is not None:
            self._health.worker_live(disk, worker)

    def worker_lost(self, worker: WorkerRecord, why: str) -> None:
        disk = self._of(worker)
        if disk is not None:
            self._health.worker_lost(disk, worker, why)

    def worker_exited(self, worker: WorkerRecord) -> None:
        disk = self._of(worker)
        if disk is not None:
            for job in self._jobs.exited(disk, worker):
                self._scrubs.ended(disk, job, looked_at=False)
                self._writing.give_back(job)

    def _of(self, worker: WorkerRecord) -> Disk | None:
        """The disk that a worker serves."""
        if not worker.serves_disk:
            return None
        return self._disks.all[int(worker.device.removeprefix(DISK_DEVICE_PREFIX))]

    def tick(self) -> None:
        if not self._disks:
            return
        for disk in self._disks.all:
            self._health.tick(disk)
            self._scrubs.go_on(disk)
        self._writing.tick()
