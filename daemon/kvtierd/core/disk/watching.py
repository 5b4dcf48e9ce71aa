"""What a store's worker looks for: blocks that other hosts have put there for the namespaces in use here."""

from kvtierd.core.actions import UnwatchSpace, WatchSpace
from kvtierd.core.disk.disk_jobs import DiskJobs
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.disks import Disk
from kvtierd.core.state.transitions import InstanceState
from kvtierd.core.stimuli import PackFound

FINDS_HELD_MAX = 64
"""More than a worker tells of before it is answered."""


class Watching:
    def __init__(self, core: CoreState, jobs: DiskJobs) -> None:
        self._core = core
        self._jobs = jobs

    def tick(self, disk: Disk) -> None:
        """Has the worker of a store watch the spaces that instances use, and no others."""
        if disk.worker is None or not disk.recovered:
            return
        used = {
            plan.space: plan.domain
            for instance in self._core.instances.values()
            if instance.state is InstanceState.LIVE
            for plan in instance.plans
            if disk.fits(plan.domain) and disk.level.policy.may_write(plan.domain.tenant)
        }
        worker, actions = disk.worker.worker, self._core.blocks.actions
        for space in disk.watched.keys() - used.keys():
            actions.append(UnwatchSpace(worker, space))
        for space in used.keys() - disk.watched.keys():
            namespace, group = self._core.blocks.spaces.names[space]
            actions.append(WatchSpace(worker, space, namespace, group, used[space].sizes))
        disk.watched = used
        if disk.live:
            finds, disk.finds = disk.finds, []
            for found in finds:
                self._answer(disk, found)

    def pack_found(self, disk: Disk, stimulus: PackFound) -> None:
        """A worker has found a pack. Each one is answered, because the worker tells of a few at a time, and
        of each once: while the store is left alone, the answer waits."""
        if disk.worker is None or disk.worker.worker != stimulus.worker:
            self._core.tally.late_messages += 1
        elif disk.live or len(disk.finds) >= FINDS_HELD_MAX:
            self._answer(disk, stimulus)
        else:
            disk.finds.append(stimulus)

    def _answer(self, disk: Disk, stimulus: PackFound) -> None:
        domain = disk.watched.get(stimulus.space) if disk.live and not self._core.draining else None
        self._jobs.adopt(disk, stimulus.pack, stimulus.space, domain, stimulus.hashes)

    def worker_gone(self, disk: Disk) -> None:
        """Nobody knows any more where the store's blocks are: the next worker has to find them anew. Those
        that the worker may still be reading go with its jobs."""
        disk.watched, disk.finds = {}, []
        disk.level.forget_everything(disk)
