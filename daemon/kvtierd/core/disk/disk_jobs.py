"""Jobs of disks, from their posting to their end: what is committed, what is freed, and what the flags say
afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvtierd.core.actions import DiskJobKind, OpenSlots, PostDiskJob
from kvtierd.core.blocks.blocks import READY, Blocks, BlockSnapshot
from kvtierd.core.blocks.domains import Domain
from kvtierd.core.blocks.table import U32
from kvtierd.core.ids import DiskJobId, Entries, Hashes, Rank, Slots, SpaceId, TransferNumber
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.disks import (
    JOB_SLOTS_MAX,
    LATE,
    READS_MAX,
    WRITES_MAX,
    Disk,
    Indexes,
    by_space,
    evict,
)
from kvtierd.core.state.entities import DiskJob, WorkerRecord
from kvtierd.core.state.transitions import DiskJobState, Event
from kvtierd.core.stimuli import DiskJobFinished

Mask = npt.NDArray[np.bool_]
_NO_SLOTS = np.empty(0, np.uint32)
_NO_CLOCKS = np.empty(0, np.uint64)


class DiskJobs:
    def __init__(self, core: CoreState) -> None:
        self._core = core
        self._host = core.blocks

    def blocks_per_job(self, disk: Disk, domain: Domain) -> int:
        """How many blocks of a domain go into one job, at least one."""
        return max(1, min(disk.level.policy.job_bytes // domain.block_bytes, JOB_SLOTS_MAX // domain.world))

    def may_read(self, disk: Disk) -> int:
        """How many more bytes may be promoted from a disk, beside those that are under way."""
        if not disk.live or disk.counts[DiskJobKind.READ] >= READS_MAX:
            return 0
        return max(0, disk.level.policy.read_queue_bytes - disk.bytes[DiskJobKind.READ])

    def may_write(self, disk: Disk) -> int:
        """How many more bytes may be written to a disk, beside those that are under way."""
        if not disk.live or disk.counts[DiskJobKind.WRITE] >= WRITES_MAX:
            return 0
        return max(0, disk.level.policy.write_queue_bytes - disk.bytes[DiskJobKind.WRITE])

    def worth(self, disk: Disk, host_domain: Domain, host_entries: Entries) -> int:
        """How many of these blocks of the host, of one domain and in their order, a disk that has none of
        them should have, rather than what would have to go for them."""
        shelf = disk.blocks
        if not shelf.ranks:
            return len(host_entries)
        domain = shelf.domains.of(host_domain.tenant, host_domain.sizes)
        worth = disk.eviction.worth_of(domain, self._host, host_entries)
        shelf.domains.forget_idle(domain)
        return worth

    # --- posting ---

    def read(
        self, disk: Disk, entries: Entries, space: SpaceId, host_domain: Domain, host_entries: Entries,
        host_slots: Slots, hashes: Hashes,
    ) -> None:  # fmt: skip
        """Has READY blocks of a LIVE disk read into WRITING ones of the host, all of one space. `host_slots`
        has shape (world, n). The job holds both."""
        shelf = disk.blocks
        domain = shelf.domain_of(entries)
        slots = shelf.slots_of(domain, entries)
        shelf.table.pin(entries)
        shelf.mark_used(entries, slots)
        job = self._begin(disk, DiskJobKind.READ, domain, entries, slots)
        job.host_domain, job.host_entries, job.host_slots = host_domain, host_entries, host_slots
        job.host_space = space
        self._open(job, self._host, host_domain, space, hashes, host_slots)
        self._post(job, host_slots, _NO_CLOCKS)

    def write(self, disk: Disk, host_domain: Domain, host_entries: Entries) -> int:
        """Has READY blocks of the host, of one domain, written to the LIVE disk that they belong to, which
        has none of them; the head of a sequence comes first. Holds nothing of the host. Returns for how many
        there was room."""
        host, shelf = self._host, disk.blocks
        hashes, spaces = host.table.hashes(host_entries), host.table.spaces(host_entries)
        with self._domain(disk, host_domain) as domain:
            entries, kept = self._insert(disk, domain, hashes, spaces)
            if shelf.ranks:
                shelf.table.same_as(entries[kept], host.table, host_entries[kept])
            kept = self._with_room(disk, domain, entries, kept)
            # A pack of a store has blocks of one space.
            parts = [own for _, own in by_space(spaces[kept])] if disk.shared else [np.arange(len(kept))]
            for part in parts if len(kept) else ():
                some = kept[part]
                self._write(
                    disk, domain, entries[some], host_domain, host_entries[some], hashes[some], spaces[some]
                )
        return len(kept)

    @contextmanager
    def _domain(self, disk: Disk, host_domain: Domain) -> Iterator[Domain]:
        """The disk's domain for blocks of one of the host. While room is made there, it may have no blocks,
        and is not forgotten."""
        domain = disk.blocks.domains.of(host_domain.tenant, host_domain.sizes)
        domain.users += 1
        yield domain
        domain.users -= 1
        disk.blocks.domains.forget_idle(domain)

    def _insert(self, disk: Disk, domain: Domain, hashes: Hashes, spaces: U32) -> tuple[Entries, Indexes]:
        """Entries, without slots, of those of these blocks that a disk has not, and has entries for. Returns
        an entry for each, and the indexes of those that are new."""
        disk.eviction.for_entries(domain, len(hashes))
        entries = np.zeros(len(hashes), np.uint32)
        created = np.zeros(len(hashes), np.bool_)
        for space, own in by_space(spaces):
            inserted = disk.blocks.insert(space, domain, np.ascontiguousarray(hashes[own]))
            entries[own], created[own] = inserted.entries, inserted.created == 1
        return entries, np.flatnonzero(created)

    def _with_room(self, disk: Disk, domain: Domain, entries: Entries, new: Indexes) -> Indexes:
        """Those of the new entries for which there are slots; the others are removed."""
        roomy = disk.eviction.for_slots(domain, len(new)).blocks
        disk.blocks.discard(domain, entries[new[roomy:]], None)
        return new[:roomy]

    def adopt(
        self, disk: Disk, pack: int, space: SpaceId, host_domain: Domain | None, hashes: Hashes
    ) -> None:
        """Has slots of a LIVE store stand for those blocks of a pack that are not known yet; for none
        without a domain. The job holds nothing of the host."""
        shelf = disk.blocks
        if host_domain is None or len(hashes) == 0:
            self._post_adopt_none(disk, pack)
            return
        hashes = hashes[: max(1, JOB_SLOTS_MAX // host_domain.world)]
        with self._domain(disk, host_domain) as domain:
            entries, kept = self._insert(disk, domain, hashes, np.full(len(hashes), space, np.uint32))
            kept = self._with_room(disk, domain, entries, kept)
            if len(kept) == 0:
                self._post_adopt_none(disk, pack)
                return
            slots = shelf.give_slots(domain, entries[kept])
            job = self._begin(disk, DiskJobKind.ADOPT, domain, entries[kept], slots)
            self._open(job, shelf, domain, space, np.ascontiguousarray(hashes[kept]), slots)
            positions = np.repeat(kept.astype(np.uint32), domain.world)
            self._post(job, None, self._clocks(disk, domain, len(kept)), pack, positions)

    @staticmethod
    def _clocks(disk: Disk, domain: Domain, blocks: int) -> npt.NDArray[np.uint64]:
        """Recencies for the slots of so many new blocks, the first the most recent."""
        disk.blocks.clock += blocks
        clocks = np.uint64(disk.blocks.clock) - np.arange(blocks, dtype=np.uint64)
        return np.repeat(clocks, domain.world)

    def _write(
        self, disk: Disk, domain: Domain, entries: Entries, host_domain: Domain, host_entries: Entries,
        hashes: Hashes, spaces: U32,
    ) -> None:  # fmt: skip
        host, shelf = self._host, disk.blocks
        slots = shelf.give_slots(domain, entries)
        job = self._begin(disk, DiskJobKind.WRITE, domain, entries, slots)
        job.host_seen = host.seen(host_domain, host_entries)
        for space, own in by_space(spaces):
            of_space = np.ascontiguousarray(slots[:, own])
            self._open(job, shelf, domain, space, np.ascontiguousarray(hashes[own]), of_space)
        host.table.set_flags(host_entries, disk.level.marks.queued)
        clocks = self._clocks(disk, domain, len(entries))
        self._post(job, host.slots_of(host_domain, host_entries), clocks)

    def check(self, disk: Disk, domain: Domain, seen: BlockSnapshot) -> DiskJob:
        """Has READY blocks of a LIVE or FAILING disk compared with their checksums. Holds nothing."""
        slots = disk.blocks.slots_of(domain, seen.entries)
        job = self._begin(disk, DiskJobKind.CHECK, domain, seen.entries, slots)
        job.generations = seen.generations
        self._post(job, None, _NO_CLOCKS)
        return job

    def _begin(
        self, disk: Disk, kind: DiskJobKind, domain: Domain, entries: Entries, slots: Slots
    ) -> DiskJob:
        assert disk.worker is not None
        job = DiskJob(
            job=DiskJobId(next(self._core.transfer_ids)),
            kind=kind,
            disk=disk.disk,
            worker=disk.worker,
            posted_s=self._core.now_s,
            domain=domain,
            entries=entries,
            slots=slots,
        )
        disk.jobs[job.job] = job
        disk.counts[kind] += 1
        disk.bytes[kind] += job.bytes
        return job

    def _open(
        self, job: DiskJob, tier: Blocks, domain: Domain, space: SpaceId, hashes: Hashes, slots: Slots
    ) -> None:
        namespace, group = self._host.spaces.names[space]
        for rank in range(domain.world):
            tier.actions.append(
                OpenSlots(
                    slots=slots[rank],
                    worker=job.worker.worker,
                    store=TransferNumber(job.job),
                    namespace=namespace,
                    group=group,
                    shard=Rank(rank),
                    world_size=domain.world,
                    hashes=hashes,
                    data_bytes=domain.sizes[rank],
                    disk=tier.disk,
                )
            )

    def _post(
        self,
        job: DiskJob,
        host_slots: Slots | None,
        clocks: npt.NDArray[np.uint64],
        pack: int = 0,
        positions: U32 = _NO_SLOTS,
    ) -> None:
        self._host.actions.append(
            PostDiskJob(
                worker=job.worker.worker,
                disk=job.disk,
                job=job.job,
                kind=job.kind,
                disk_slots=_by_block(job.slots),
                host_slots=_NO_SLOTS if host_slots is None else _by_block(host_slots),
                clocks=clocks,
                pack=pack,
                positions=positions,
            )
        )

    def _post_adopt_none(self, disk: Disk, pack: int) -> None:
        """Answers that nothing of a pack is to be remembered."""
        assert disk.worker is not None
        self._host.actions.append(
            PostDiskJob(
                worker=disk.worker.worker,
                disk=disk.disk,
                job=DiskJobId(next(self._core.transfer_ids)),
                kind=DiskJobKind.ADOPT,
                disk_slots=_NO_SLOTS,
                host_slots=_NO_SLOTS,
                clocks=_NO_CLOCKS,
                pack=pack,
            )
        )

    # --- ending ---

    def finished(self, stimulus: DiskJobFinished) -> tuple[Disk, DiskJob] | None:
        """A worker has ended a job. Returns None, and only counts the message, if the job is over or another
        worker's."""
        core = self._core
        disk, job = self._find(stimulus)
        if disk is None or job is None:
            core.tally.late_messages += 1
            return None
        disk.rates[READ_RATE.get(job.kind, job.kind)].measured(core.now_s, stimulus.bytes, stimulus.busy_s)
        n, world = len(job.entries), job.domain.world
        flat = np.ones(n * world, np.bool_)
        failed, corrupt, gone = stimulus.failed, stimulus.corrupt, stimulus.gone
        if max(map(_highest, (failed, corrupt, gone))) >= n * world:  # the report makes no sense
            failed, corrupt, gone = np.arange(n * world, dtype=np.uint32), _NO_SLOTS, _NO_SLOTS
        for bad in (failed, corrupt, gone):
            flat[bad] = False
        if job.kind in NEW:
            corrupt = gone = _NO_SLOTS
        good: Mask = np.logical_and.reduce(flat.reshape(n, world), axis=1)
        self._end(disk, job, Event.DONE, good, corrupt, gone, unreadable=not disk.shared)
        self._count_saved(disk, job, stimulus.saved_bytes)
        return disk, job

    @staticmethod
    def _count_saved(disk: Disk, job: DiskJob, saved_bytes: int) -> None:
        """So many bytes of a job did not go to or from a store, because it has them compressed."""
        saved_bytes = min(saved_bytes, job.good * job.domain.block_bytes)
        if job.kind is DiskJobKind.WRITE:
            disk.tally.written_saved_bytes += saved_bytes
            # Before a block is compressed, nobody knows how short it becomes.
            disk.budget.spend(-saved_bytes)
        elif job.kind is DiskJobKind.READ:
            disk.tally.read_saved_bytes += saved_bytes

    def _find(self, stimulus: DiskJobFinished) -> tuple[Disk | None, DiskJob | None]:
        for disk in self._core.below.all:
            job = disk.jobs.get(stimulus.job)
            if job is not None:
                posted = job.state is DiskJobState.POSTED and job.worker.worker == stimulus.worker
                return disk, job if posted else None
        return None, None

    def lose(self, disk: Disk, worker: WorkerRecord) -> int:
        """A worker is lost: its jobs cannot succeed, but may still be going on. What they promote is a miss
        from now on. Returns how many jobs there were."""
        count = 0
        for job in disk.jobs.values():
            if job.worker is worker:
                self._core.step(job, Event.LOSE)
                self.tell_late(job)
                count += 1
        return count

    def exited(self, disk: Disk, worker: WorkerRecord) -> list[DiskJob]:
        """The lost worker's process is gone, so nothing of its jobs can still land. Returns these jobs."""
        jobs = [job for job in disk.jobs.values() if job.worker is worker]
        for job in jobs:
            none = np.zeros(len(job.entries), np.bool_)
            self._end(disk, job, Event.EXIT, none, _NO_SLOTS, _NO_SLOTS, unreadable=False)
        return jobs

    def tell_late(self, job: DiskJob) -> None:
        """Whoever asks for what a job promotes is told that it is not there, until it is."""
        if job.kind is DiskJobKind.READ and not job.late:
            job.late = True
            self._host.table.set_flags(job.host_entries, LATE)
            self._core.below.late_jobs += 1

    def _end(
        self, disk: Disk, job: DiskJob, event: Event, good: Mask, corrupt: U32, gone: U32, *, unreadable: bool
    ) -> None:
        """`good`: blocks that went well; `corrupt` and `gone`: positions of shards. `unreadable`: what did
        not go well, and is to be read, cannot be."""
        self._core.step(job, event)
        del disk.jobs[job.job]
        disk.counts[job.kind] -= 1
        disk.bytes[job.kind] -= job.bytes
        disk.ended_s = self._core.now_s
        job.good = int(np.count_nonzero(good))
        if job.kind in NEW:
            self._new_ended(disk, job, good)
        elif job.kind is DiskJobKind.READ:
            self._read_ended(disk, job, good, corrupt, gone, unreadable=unreadable)
        else:
            seen = BlockSnapshot(job.entries, job.generations, job.slots[0])
            still = disk.blocks.are_still(seen)
            corrupt, gone = (bad[still[bad // job.domain.world]] for bad in (corrupt, gone))
            lost = self._condemn(disk, job, corrupt, gone)
            if disk.shared:
                self._forget(disk, lost)
            else:
                disk.blocks.reap(job.domain, lost)
        disk.blocks.domains.forget_idle(job.domain)

    def _new_ended(self, disk: Disk, job: DiskJob, good: Mask) -> None:
        shelf, host, tally = disk.blocks, self._host, disk.tally
        if job.host_seen is not None:
            there = job.host_seen.entries[host.are_still(job.host_seen)]
            host.table.clear_flags(there, disk.level.marks.queued)
        shelf.commit(job.domain, job.entries[good], job.slots[:, good])
        disk.level.written(disk, job.entries[good])
        shelf.discard(job.domain, job.entries[~good], job.slots[:, ~good])
        if job.kind is DiskJobKind.WRITE:
            tally.written_blocks += job.good
            tally.written_bytes += job.good * job.domain.block_bytes

    def _read_ended(
        self, disk: Disk, job: DiskJob, good: Mask, corrupt: U32, gone: U32, *, unreadable: bool
    ) -> None:
        shelf, host = disk.blocks, self._host
        domain, space = job.host_domain, job.host_space
        assert domain is not None
        assert space is not None
        lost = self._condemn(disk, job, corrupt, gone)
        ready = shelf.table.states(job.entries) == READY
        if unreadable:
            disk.level.unreadable(disk, job.domain, job.entries[ready & ~good])
        if job.late:
            self._core.below.late_jobs -= 1
            host.table.clear_flags(job.host_entries, LATE)
        job.came_up = job.host_entries[good]
        host.commit(domain, job.came_up, job.host_slots[:, good])
        self._core.retention.made(domain, job.came_up)
        host.table.set_flags(job.host_entries[good & ready], disk.level.marks.clean)
        self._core.below.settle(space, job.came_up, but=disk.level)
        host.discard(domain, job.host_entries[~good], job.host_slots[:, ~good])
        host.domains.forget_idle(domain)
        shelf.unpin(job.domain, job.entries)
        if disk.shared:
            # With its worker, what that knew of the job's blocks is gone as well.
            self._forget(disk, job.entries if job.state is DiskJobState.FAILED else lost)
        if job.good:
            disk.tally.reads += 1
            disk.tally.read_s += self._core.now_s - job.posted_s
        read_bytes = job.good * domain.block_bytes
        disk.tally.read_blocks += job.good
        disk.tally.read_bytes += read_bytes
        self._core.tally.promoted_blocks += job.good
        self._core.tally.promoted_bytes += read_bytes

    def _condemn(self, disk: Disk, job: DiskJob, corrupt: U32, gone: U32) -> Entries:
        """Condemns the blocks of a job whose shards at the `corrupt` positions did not match; a store's are
        only forgotten, by `_forget`, like those that are `gone`, because there is nothing wrong with the
        slots. Returns their entries."""
        world = job.domain.world
        entries = job.entries[corrupt // world]
        if disk.shared:
            bad = np.unique(entries)
            disk.tally.corrupt_blocks += len(bad)
            self._core.tally.corrupt_on_disk += len(bad)
            lost: Entries = np.union1d(bad, job.entries[gone // world]).astype(np.uint32)
            return lost
        if len(corrupt):
            condemned = disk.blocks.condemn(entries, _by_block(job.slots)[corrupt])
            disk.tally.corrupt_blocks += len(condemned)
            self._core.tally.corrupt_on_disk += len(condemned)
        return entries

    @staticmethod
    def _forget(disk: Disk, entries: Entries) -> None:
        """Forgets those of a store's blocks that nothing else reads."""
        table = disk.blocks.table
        evict(disk, entries[(table.states(entries) == READY) & (table.pins(entries) == 0)])


NEW = (DiskJobKind.WRITE, DiskJobKind.ADOPT)
"""The kinds of jobs after which there are blocks that were not there before."""
READ_RATE = {DiskJobKind.CHECK: DiskJobKind.READ}
"""A check shows how fast a disk reads as well."""


def _by_block(slots: Slots) -> Slots:
    """Slots of shape (world, n) as one row: block after block, shards in rank order."""
    return np.ascontiguousarray(slots.T).reshape(-1)


def _highest(positions: U32) -> int:
    return int(positions.max()) if len(positions) else -1
