"""Compares every block of a disk with its checksum when an operator asks for it: extent by extent and one job
at a time, which the disk's worker does after everything else."""

from functools import partial

import numpy as np

from kvtierd.core.blocks.blocks import READY, owned
from kvtierd.core.disk.disk_jobs import DiskJobs
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.disks import Disk, Scrub
from kvtierd.core.state.entities import DiskJob
from kvtierd.core.stimuli import StartScrub

EXTENTS_AT_ONCE = 64
"""Extents that are searched for blocks before other stimuli get their turn."""


class Scrubs:
    def __init__(self, core: CoreState, jobs: DiskJobs) -> None:
        self._core = core
        self._jobs = jobs

    def start(self, stimulus: StartScrub) -> None:
        """Raises Refusal MODE_UNSUPPORTED if there is no such disk, WORKER_UNAVAILABLE if it is not live,
        QUEUE_FULL if a scrub of it is under way."""
        disks, refusal = self._core.below.all, partial(Refusal, field="disk", value=stimulus.disk)
        if not 0 <= stimulus.disk < len(disks):
            raise refusal(
                Reason.MODE_UNSUPPORTED,
                f"there are {len(disks)} disks: name directories in disk.paths to have more",
            )
        disk = disks[stimulus.disk]
        if disk.shared:
            raise refusal(
                Reason.MODE_UNSUPPORTED,
                "a store is not compared as a whole: each block is, when it is read",
            )
        if not disk.live:
            message = f"the disk is {disk.state.value}: try again when it is live"
            raise refusal(Reason.WORKER_UNAVAILABLE, message)
        if disk.scrub is not None and not disk.scrub.over:
            raise refusal(Reason.QUEUE_FULL, "a scrub of this disk is on its way: wait for it")
        disk.scrub = Scrub(blocks=disk.blocks.table.stats()["ready"])
        self.go_on(disk)

    def ended(self, disk: Disk, job: DiskJob, *, looked_at: bool) -> None:
        """A job is over. What a lost worker had to check is not checked again."""
        scrub = disk.scrub
        if scrub is not None and scrub.job == job.job:
            scrub.job = None
            if looked_at:
                scrub.done += len(job.entries)

    def go_on(self, disk: Disk) -> None:
        """Posts the next job, if the last one is over."""
        scrub = disk.scrub
        if scrub is None or scrub.over or scrub.job is not None or not disk.live or self._core.draining:
            return
        for _ in range(EXTENTS_AT_ONCE):
            while scrub.found:
                domain, seen = scrub.found.popleft()
                per_job = self._jobs.blocks_per_job(disk, domain)
                if len(seen) > per_job:
                    scrub.found.appendleft((domain, seen[per_job:]))
                seen = seen[:per_job]
                seen = seen[disk.blocks.are_still(seen)]
                seen = seen[disk.blocks.table.states(seen.entries) == READY]
                if len(seen):
                    scrub.job = self._jobs.check(disk, domain, seen).job
                    return
            if scrub.extent == disk.blocks.geometry.extents:
                scrub.over, scrub.blocks = True, scrub.done
                return
            self._look_through(disk, scrub)

    def _look_through(self, disk: Disk, scrub: Scrub) -> None:
        """Finds the blocks whose first shard lies in the next extent, in the order in which they lie
        there."""
        shelf = disk.blocks
        slots, extent = shelf.slots, scrub.extent
        scrub.extent += 1
        size = int(slots.extent_size[extent])
        if size == 0:
            return
        entries = owned(shelf.table.owners(slots.geometry.slots_of(extent, size)))
        entries = entries[shelf.table.states(entries) == READY]
        for domain, own in shelf.by_domain(entries):
            seen = shelf.seen(domain, own)
            seen = seen[slots.geometry.extent_of(seen.slots) == extent]
            scrub.found.append((domain, seen[np.argsort(seen.slots, kind="stable")]))
