"""What disks and their workers do, and what goes wrong with them."""

from __future__ import annotations

from kvtierd.core.actions import DiskJobKind
from kvtierd.core.errors import Reason
from kvtierd.core.ids import DiskId
from kvtierd.core.stimuli import StartScrub, WorkerExited, WorkerLost

from tests.simulation.disk import FakeDiskWorker
from tests.simulation.world import World


def worker_step(world: World) -> None:
    """Some disk's worker gets on, and the front hears of it; or a worker comes up."""
    if not world.slabs:
        return
    missing = [slab.disk for slab in world.slabs if world.disk_workers[slab.disk] is None]
    if missing and world.random.random() < 0.3:
        world.start_disk(world.random.choice(missing))
        return
    everyone = [worker for worker in world.disk_workers if worker is not None] + world.lost_disk_workers
    if not everyone:
        return
    worker = world.random.choice(everyone)
    if world.random.random() < 0.03:
        worker.hangs = worker.slab.broken = False
    for _ in range(world.random.randint(1, 5)):
        worker.step(world.random, world.faults, world.fault_rate)
    if world.random.random() < 0.7:
        world.deliver_disk(worker)


def worker_lost(world: World) -> None:
    workers = [worker for worker in world.disk_workers if worker is not None]
    if not workers:
        return
    worker = world.random.choice(workers)
    disk = world.machine.core.below.all[worker.slab.disk]
    world.faults["disk worker lost", disk.state.name] += 1
    for job in disk.jobs.values():
        if job.worker.worker == worker.worker:
            world.faults["disk worker lost", f"{job.kind.name} {worker.phase(job.job)}"] += 1
    world.disk_workers[worker.slab.disk] = None
    worker.lost = True
    world.lost_disk_workers.append(worker)
    if world.random.random() < 0.3:
        exit_worker(world, worker)
    else:
        world.do(WorkerLost(worker.worker, "stuck"))


def worker_exits(world: World) -> None:
    if world.lost_disk_workers:
        exit_worker(world, world.random.choice(world.lost_disk_workers))


def exit_worker(world: World, worker: FakeDiskWorker) -> None:
    """Its process is gone: it reads and writes no more."""
    world.lost_disk_workers.remove(worker)
    world.faults["disk worker exits", "with jobs" if worker.started else "without"] += 1
    world.do(WorkerExited(worker.worker))


def worker_hangs(world: World) -> None:
    for worker in world.disk_workers:
        if worker is not None:
            worker.hangs = not worker.hangs and world.random.random() < 0.3
            world.faults["disk hangs", str(worker.hangs)] += 1


def breaks(world: World) -> None:
    for slab in world.slabs:
        slab.broken = not slab.broken and world.random.random() < 0.3


def rots(world: World) -> None:
    for slab in world.slabs:
        if world.random.random() < 0.5 and slab.rot(world.random):
            world.faults["disk rots", "READY"] += 1


def scrub(world: World) -> None:
    number = DiskId(world.random.randrange(3))
    if number >= len(world.slabs) or world.machine.core.below.all[number].shared:
        world.refused(StartScrub(number), Reason.MODE_UNSUPPORTED)
        return
    disk = world.machine.core.below.all[number]
    if not disk.live:
        world.refused(StartScrub(number), Reason.WORKER_UNAVAILABLE)
    elif disk.scrub is not None and not disk.scrub.over:
        world.refused(StartScrub(number), Reason.QUEUE_FULL)
    else:
        world.do(StartScrub(number))
        checks = [job for job in disk.jobs.values() if job.kind is DiskJobKind.CHECK]
        world.faults["scrub", "begun" if checks else "nothing to do"] += 1
