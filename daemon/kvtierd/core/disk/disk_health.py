"""Whether disks are fit for use: their workers, errors in a row, slow jobs, and the read that decides."""

from kvtierd.core.actions import DiskJobKind
from kvtierd.core.blocks.blocks import BlockSnapshot
from kvtierd.core.blocks.domains import Domain
from kvtierd.core.disk.disk_jobs import DiskJobs
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.disks import LATE, Disk
from kvtierd.core.state.entities import DiskJob, WorkerRecord
from kvtierd.core.state.transitions import DiskJobState, DiskState, Event
from kvtierd.core.stimuli import DiskJobFinished

PROBE_HORIZON = 4_096
"""Among how many victims a block to probe with is looked for."""


class DiskHealth:
    def __init__(self, core: CoreState, jobs: DiskJobs) -> None:
        self._core = core
        self._jobs = jobs

    # --- workers ---

    def worker_live(self, disk: Disk, worker: WorkerRecord) -> None:
        """A disk has a worker. It is used from now on; with its first worker, as soon as it is known what it
        holds."""
        assert disk.worker is None, f"disk {disk.disk} has a worker"
        disk.worker = worker
        disk.ended_s = self._core.now_s
        if disk.state is DiskState.OFF:
            self._return(disk)

    def recovered(self, disk: Disk) -> None:
        """It is known what the disk holds."""
        self._core.step(disk, Event.RECOVER)
        if disk.worker is None:
            self._core.step(disk, Event.LOSE)

    def worker_lost(self, disk: Disk, worker: WorkerRecord, why: str) -> None:
        """The worker's jobs cannot succeed. Nothing is fenced before it has exited."""
        had_jobs = self._jobs.lose(disk, worker)
        if disk.worker is not worker:
            return
        disk.worker = None
        disk.probe = None
        disk.answered = False
        disk.why = f"its worker was lost: {why}"
        if disk.state is not DiskState.STARTING:
            self._core.step(disk, Event.LOSE)
        if had_jobs:
            self._error(disk, disk.why)

    def _return(self, disk: Disk) -> None:
        self._core.step(disk, Event.RETURN)
        if disk.errors_in_row >= disk.level.policy.errors_max:
            self._fail(disk)
        else:
            disk.level.readable(disk)

    # --- what jobs show ---

    def ended(self, disk: Disk, job: DiskJob, stimulus: DiskJobFinished) -> None:
        """A job of a worker that lives has ended."""
        slow = stimulus.busy_s > disk.level.policy.slow_deadline_s
        bad = bool(stimulus.error) or slow
        if job.kind is DiskJobKind.WRITE and job.good and not stimulus.error:
            disk.refusals_in_row = 0
        if bad or job.kind is not DiskJobKind.CHECK:
            disk.answered = not bad
        if stimulus.refused and job.kind is DiskJobKind.WRITE:
            self._refused(disk, stimulus.error)
        elif bad and not job.slow:
            self._error(disk, stimulus.error or f"a job took {stimulus.busy_s:.1f} s")
        elif not bad and not job.slow and disk.state is not DiskState.FAILING:
            disk.errors_in_row = 0
        if disk.probe == job.job:
            disk.probe = None
            if stimulus.error:
                disk.failed_s = self._core.now_s
                here = disk.blocks.are_still(BlockSnapshot(job.entries, job.generations, job.slots[0]))
                disk.level.unreadable(disk, job.domain, job.entries[here])
            elif disk.state is DiskState.FAILING:
                self._heal(disk, errors_in_row=0)

    def _refused(self, disk: Disk, why: str) -> None:
        """A store does not take what it is given. What it has may be read all the same, so this alone does
        not make it fail."""
        disk.tally.errors += 1
        disk.refusals_in_row += 1
        disk.refused_s = self._core.now_s
        disk.why = f"{disk.refusals_in_row} writes in a row were refused: {why}"

    def _error(self, disk: Disk, why: str) -> None:
        disk.tally.errors += 1
        disk.errors_in_row += 1
        disk.why = why
        if disk.live and disk.errors_in_row >= disk.level.policy.errors_max:
            self._fail(disk)

    def _fail(self, disk: Disk) -> None:
        self._core.step(disk, Event.FAIL)
        disk.failed_s = self._core.now_s
        disk.why = f"{disk.errors_in_row} errors in a row: {disk.why}"

    def _heal(self, disk: Disk, *, errors_in_row: int) -> None:
        self._core.step(disk, Event.HEAL)
        disk.errors_in_row = errors_in_row
        disk.level.readable(disk)

    # --- time ---

    def tick(self, disk: Disk) -> None:
        now_s, slow_s = self._core.now_s, disk.level.policy.slow_deadline_s
        for job in disk.jobs.values():
            if now_s - job.posted_s <= slow_s:
                break
            self._jobs.tell_late(job)
            # As long as other jobs end, this one has only been waiting for its turn.
            stuck = now_s - disk.ended_s > slow_s and job.state is DiskJobState.POSTED
            if stuck and not job.slow:
                job.slow = True
                self._error(disk, f"a job has not ended for {now_s - job.posted_s:.1f} s")
        over = now_s - disk.failed_s >= disk.level.policy.probe_after_s
        if disk.state is DiskState.FAILING and disk.probe is None and over:
            self._probe(disk)

    def _probe(self, disk: Disk) -> None:
        """Has one block read, which decides. A disk that holds nothing gets one more try instead."""
        found = self._some_block(disk)
        if found is None:
            self._heal(disk, errors_in_row=disk.level.policy.errors_max - 1)
            return
        disk.probe = self._jobs.check(disk, *found).job

    def _some_block(self, disk: Disk) -> tuple[Domain, BlockSnapshot] | None:
        for domain in disk.blocks.domains.by_id.values():
            entries = disk.blocks.table.coldest(domain.domain, 1, LATE, PROBE_HORIZON)
            if len(entries):
                return domain, disk.blocks.seen(domain, entries)
        return None
