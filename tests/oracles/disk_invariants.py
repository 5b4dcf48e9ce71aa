"""The invariants of the disk tier: of each disk by itself, and of what the host's flags say about it."""

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
from kvtierd.core.actions import DiskJobKind
from kvtierd.core.blocks.blocks import BlockSnapshot
from kvtierd.core.blocks.table import BlockFlag, BlockState
from kvtierd.core.disk.promotion import POOL_FRACTION_MAX
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.disks import JOB_SLOTS_MAX, UNREADABLE_KEPT, Disk, Level
from kvtierd.core.state.entities import DiskJob
from kvtierd.core.state.transitions import DiskJobState, DiskState, WorkerState

Dump = dict[str, npt.NDArray[Any]]
_NONE = np.empty(0, np.uint32)
LATE = int(BlockFlag.LATE)
HOST_ONLY = int(BlockFlag.HOST_ONLY)
READY, WRITING = int(BlockState.READY), int(BlockState.WRITING)


def jobs_of(core: CoreState, kind: DiskJobKind) -> list[DiskJob]:
    """All jobs of one kind that have not ended, of all disks."""
    return [job for disk in core.below.all for job in disk.jobs.values() if job.kind is kind]


def check_disk(core: CoreState, disk: Disk, dump: Dump) -> None:
    """Checks what concerns one disk alone. Its blocks and slots are checked in the same way as the host's."""
    _check_holds(disk, dump)
    _check_jobs(core, disk)
    _check_state(core, disk)
    own = (
        disk.level.place(dump["hashes"]) == disk.level.all.index(disk) if len(dump["hashes"]) else np.ones(0)
    )
    assert own.all(), "a disk has a block that nobody would look for there"
    late = dump["flags"] & LATE != 0
    assert (dump["states"][late] == READY).all() or disk.blocks.condemned, "what is not READY is unreadable"
    listed = [seen.entries[disk.blocks.are_still(seen)] for seen in disk.unreadable]
    assert set(dump["entries"][late].tolist()) <= set(np.concatenate([_NONE, *listed]).tolist()), "lost track"
    assert len(disk.unreadable) <= UNREADABLE_KEPT
    assert not disk.blocks.slots.quarantined, "somebody else writes a disk"


def _check_holds(disk: Disk, dump: Dump) -> None:
    """The pinned entries are those that reads hold, and the WRITING ones those that writes hold, each in
    exactly one job."""
    by_kind: dict[DiskJobKind, list[Any]] = {kind: [_NONE] for kind in DiskJobKind}
    for job in disk.jobs.values():
        by_kind[job.kind].append(job.entries)
    read = np.sort(np.concatenate(by_kind[DiskJobKind.READ]))
    pinned = np.repeat(dump["entries"], dump["pins"])
    assert np.array_equal(read, pinned), f"jobs read {read.tolist()}, {pinned.tolist()} are pinned"
    assert len(np.unique(read)) == len(read), "a block is read twice at once"
    written = np.sort(np.concatenate(by_kind[DiskJobKind.WRITE] + by_kind[DiskJobKind.ADOPT]))
    writing = dump["entries"][dump["states"] == WRITING]
    assert np.array_equal(written, writing), f"jobs write {written.tolist()}, {writing.tolist()} are WRITING"


def _check_jobs(core: CoreState, disk: Disk) -> None:
    counts: Counter[DiskJobKind] = Counter()
    sizes: Counter[DiskJobKind] = Counter()
    for number, job in disk.jobs.items():
        counts[job.kind] += 1
        sizes[job.kind] += job.bytes
        assert (job.job, job.disk) == (number, disk.disk)
        assert 0 < len(job.entries) * job.domain.world <= JOB_SLOTS_MAX
        assert job.slots.shape == (job.domain.world, len(job.entries))
        assert core.workers.get(job.worker.worker) is job.worker, "a job's worker is gone"
        state = DiskJobState.POSTED if job.worker.state is WorkerState.LIVE else DiskJobState.LOST
        assert job.state is state, job.describe()
        if job.kind is not DiskJobKind.CHECK:
            assert np.array_equal(job.slots, disk.blocks.slots_of(job.domain, job.entries)), "other slots"
            assert disk.blocks.domains.by_id.get(job.domain.domain) is job.domain, "a job's domain is gone"
        assert job.late or job.state is not DiskJobState.LOST or job.kind is not DiskJobKind.READ
    for kind in DiskJobKind:
        assert disk.counts[kind] == counts[kind], f"{kind.name} jobs are miscounted"
        counted = disk.bytes[kind]
        assert counted == sizes[kind], f"{sizes[kind]} bytes of {kind.name}, {counted} are counted"
    posted = [job.posted_s for job in disk.jobs.values()]
    assert posted == sorted(posted), "jobs are out of order"
    policy = disk.level.policy
    limits = {DiskJobKind.READ: policy.read_queue_bytes, DiskJobKind.WRITE: policy.write_queue_bytes}
    for kind, limit in limits.items():
        largest = max((job.domain.block_bytes for job in disk.jobs.values() if job.kind is kind), default=0)
        assert sizes[kind] <= max(limit, largest), f"{sizes[kind]} bytes of {kind.name} are on their way"
    if disk.probe is not None:
        assert disk.jobs[disk.probe].kind is DiskJobKind.CHECK
    if disk.scrub is not None and disk.scrub.job is not None:
        assert disk.jobs[disk.scrub.job].kind is DiskJobKind.CHECK, "a scrub waits for nothing"


def _check_state(core: CoreState, disk: Disk) -> None:
    if disk.worker is not None:
        assert core.workers.get(disk.worker.worker) is disk.worker
        assert disk.worker.state is WorkerState.LIVE, disk.worker.describe()
        assert disk.state is not DiskState.OFF, disk.describe()
    else:
        assert disk.state in (DiskState.STARTING, DiskState.OFF), disk.describe()
        assert disk.probe is None, "a probe outlived its worker"
    if disk.state is DiskState.STARTING:
        assert not disk.jobs, "a disk is used of which it is not known what it holds"
        assert disk.blocks.live == 0
    if disk.live:
        assert disk.errors_in_row < disk.level.policy.errors_max, "so many errors, and it is used on"


def check_host_flags(core: CoreState, dump: Dump) -> None:
    """For each level, clean: the block is READY here, and READY and readable on its disk. Queued: a write has
    it. LATE: a read that is late has it."""
    for level in core.below.levels:
        _check_marks(core, level, dump)
    flags, entries = dump["flags"], dump["entries"]
    late_jobs = [job for job in jobs_of(core, DiskJobKind.READ) if job.late]
    assert core.below.late_jobs == len(late_jobs), "late jobs are miscounted"
    late = np.sort(np.concatenate([_NONE, *(job.host_entries for job in late_jobs)]))
    assert np.array_equal(entries[flags & LATE != 0], late), "a block is told LATE, or not, against its job"


def _check_marks(core: CoreState, level: Level, dump: Dump) -> None:
    flags, states, entries, marks = dump["flags"], dump["states"], dump["entries"], level.marks
    ready = states == READY
    on_disk = np.zeros(len(entries), np.bool_)
    for space in np.unique(dump["spaces"][ready]).tolist():
        own = np.flatnonzero(ready & (dump["spaces"] == space))
        hashes = np.ascontiguousarray(dump["hashes"][own])
        for disk, chosen in level.by_disk(hashes):
            found = disk.find(space, np.ascontiguousarray(hashes[chosen]))
            on_disk[own[chosen]] = found != 0xFFFF_FFFF
    wrong = entries[ready & (on_disk != (flags & marks.clean != 0))]
    assert len(wrong) == 0, f"entries {wrong.tolist()} are told clean, or not, against what disks have"
    assert not (flags[states == WRITING] & (marks.clean | marks.queued)).any(), (
        "what is being written is no block yet"
    )

    both = marks.queued | HOST_ONLY
    assert not (flags & both == both).any(), "what is to stay on the host is being written to a disk"

    queued = [_NONE]
    for job in (job for job in jobs_of(core, DiskJobKind.WRITE) if core.below.all[job.disk].level is level):
        assert isinstance(job.host_seen, BlockSnapshot)
        queued.append(job.host_seen.entries[core.blocks.are_still(job.host_seen)])
    told = entries[flags & marks.queued != 0]
    expected = np.sort(np.concatenate(queued))
    assert np.array_equal(told, expected), f"{told.tolist()} are queued, jobs write {expected.tolist()}"


def check_promotions(core: CoreState) -> None:
    """The host slots that reads write are their blocks' own, and promotions hold no more of the host than
    they may."""
    reading = 0
    for job in jobs_of(core, DiskJobKind.READ):
        assert job.host_domain is not None
        slots = core.blocks.slots_of(job.host_domain, job.host_entries)
        assert np.array_equal(slots, job.host_slots), "a read writes to other slots than its blocks'"
        assert core.blocks.domains.by_id.get(job.host_domain.domain) is job.host_domain
        assert job.host_domain.sizes == job.domain.sizes, "a read is into slots of another size"
        reading += job.bytes
    jobs = jobs_of(core, DiskJobKind.READ)
    most = core.blocks.geometry.capacity_bytes * POOL_FRACTION_MAX
    assert reading <= most or len(jobs) == 1, f"promotions hold {reading} bytes of the host"
