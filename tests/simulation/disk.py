"""Disks: a slab file that keeps what was really written, and a worker that writes, reads and checks in
visible steps.

Records are the image's, which front and worker share; the file has copies of them, as old as they happen to
be. Nothing that a worker has begun is undone when it is killed.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from kvtierd.core.actions import DiskJobKind, PostDiskJob
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.ids import PAGE_BYTES, DiskId, DiskJobId, WorkerId
from kvtierd.core.stimuli import DiskJobFinished, DiskRecovered, Recovered

from tests.simulation.pool import FREE, NOBODY, READY, TORN, WRITING, FakePool, Key, Slot

AT_ONCE = 2
ROTTEN = "rotten"
PRIORITY = (DiskJobKind.READ, DiskJobKind.WRITE, DiskJobKind.CHECK)


class FakeSlab:
    """One file. Survives daemons and workers."""

    def __init__(self, disk: DiskId, geometry: PoolGeometry) -> None:
        self.disk = disk
        self.geometry = geometry
        self.extents: dict[int, int] = {}
        self.records: dict[int, Slot] = {}
        self.data: dict[int, tuple[Any, int]] = {}
        """Content, and which page of it, by page."""
        self.image = FakePool(geometry, rots_below=True)
        self.broken = False
        """Every operation fails."""

    # --- what a worker does ---

    def persist_extent(self, extent: int) -> None:
        """Header and whole table of an extent, from the image."""
        old = self.extents.get(extent)
        if old is not None:
            for number in self.geometry.slots_of(extent, old).tolist():
                self.records.pop(number, None)
        self.extents[extent] = self.image.extents[extent]
        self.persist(self.geometry.slots_of(extent, self.image.extents[extent]).tolist())

    def persist(self, numbers: list[int]) -> None:
        """Records of slots, from the image; those of an extent that the file has otherwise are not
        written."""
        for number in numbers:
            extent = int(self.geometry.extent_of(np.array([number], np.uint32))[0])
            if self.extents.get(extent) == self.image.extents.get(extent) and number in self.image.slots:
                self.records[number] = copy.copy(self.image.slots[number])

    def write(self, number: int, slot_bytes: int, content: Any) -> None:
        for page in range(-(-slot_bytes // PAGE_BYTES)):
            self.data[number + page] = (content, page)

    def read(self, number: int, slot_bytes: int) -> Any:
        """The content, if it is one and whole."""
        pages = [self.data.get(number + page) for page in range(-(-slot_bytes // PAGE_BYTES))]
        if any(page is None for page in pages):
            return TORN
        contents = [page for page in pages if page is not None]
        whole = all(found == (contents[0][0], i) for i, found in enumerate(contents))
        return contents[0][0] if whole else TORN

    # --- what happens to it ---

    def rot(self, random: Random) -> bool:
        """Spoils the data of one READY slot."""
        ready = [number for number, slot in self.image.slots.items() if slot.state == READY]
        if not ready:
            return False
        number = random.choice(ready)
        self.data[number] = (ROTTEN, 0)
        return True

    def power_is_lost(self, random: Random) -> None:
        """Whatever was not synced may be lost, in any order: data, and records."""
        for page in random.sample(sorted(self.data), min(len(self.data), 3)):
            self.data[page] = (TORN, 0)
        for number in random.sample(sorted(self.records), min(len(self.records), 3)):
            del self.records[number]

    def recover(self, random: Random) -> DiskRecovered:
        """A new daemon's first worker loads the tables into a new image, and the front scans it."""
        boot = self.image.boot
        self.image = image = FakePool(self.geometry, rots_below=True)
        image.boot = boot
        for extent, size in self.extents.items():
            image.extents[extent] = size
            for number in self.geometry.slots_of(extent, size).tolist():
                image.slots[number] = copy.copy(self.records.get(number, Slot(size, 0)))
        youngest: dict[Key, tuple[int, int]] = {}
        for slot in image.slots.values():
            if slot.key is not None and slot.state == READY:
                youngest[slot.key] = max(youngest.get(slot.key, (0, 0)), slot.store)
        for number, slot in image.slots.items():
            image.states[number] = slot.state
            if slot.state == READY and slot.key is not None and youngest[slot.key] == slot.store:
                image.by_key.setdefault(slot.key, set()).add(number)
            elif slot.state == READY or (slot.state == WRITING and slot.writer != NOBODY):
                slot.key, slot.state = None, FREE
                slot.generation += 1
                image.states[number] = FREE
            elif slot.state == FREE:
                slot.key = None
        found: Recovered = image.recover(random)
        assert len(found.quarantined) == 0
        return DiskRecovered(self.disk, found)


@dataclass(slots=True, eq=False)
class Job:
    """A job as the worker has it."""

    post: PostDiskJob
    generations: list[int]
    host_generations: list[int]
    steps: Iterator[None] | None = None

    @property
    def numbers(self) -> list[int]:
        return list(self.post.disk_slots.tolist())

    @property
    def host_numbers(self) -> list[int]:
        return list(self.post.host_slots.tolist())


class FakeDiskWorker:
    """One worker process of a disk."""

    def __init__(self, worker: WorkerId, slab: FakeSlab, pool: FakePool) -> None:
        self.worker = worker
        self.slab = slab
        self.pool = pool
        self.lost = False
        self.hangs = False
        self.zombie = False
        self.queued: list[Job] = []
        self.started: list[Job] = []
        self.outbox: deque[DiskJobFinished] = deque()

    def idle(self) -> bool:
        return not (self.queued or self.started or self.outbox)

    def take(self, post: PostDiskJob, generations: list[int], host_generations: list[int]) -> None:
        self.queued.append(Job(post, generations, host_generations))

    def phase(self, job: DiskJobId) -> str:
        """Where a job is, for the coverage of faults."""
        if any(each.post.job == job for each in self.started):
            return "started"
        return "finished, not told" if any(told.job == job for told in self.outbox) else "waiting"

    def become_zombie(self, quarantined: set[int]) -> None:
        """Its front is dead, and the file another's. It reads on into slots that no later daemon may touch
        before it is proved gone."""
        self.zombie, self.hangs = True, False
        self.queued.clear()
        self.outbox.clear()
        self.started = [
            job
            for job in self.started
            if job.post.kind is DiskJobKind.READ and quarantined.issuperset(job.host_numbers)
        ]

    def step(self, random: Random, faults: Counter[tuple[str, str]], fault_rate: float) -> None:
        """One step of a job, or the beginning of the next one."""
        if self.hangs:
            return
        if self.queued and len(self.started) < AT_ONCE and random.random() < 0.5:
            job = min(self.queued, key=lambda job: PRIORITY.index(job.post.kind))
            self.queued.remove(job)
            self.started.append(job)
            broken = self.slab.broken or random.random() < fault_rate
            if broken:
                faults["disk fails", job.post.kind.name] += 1
            run = {
                DiskJobKind.READ: self._read,
                DiskJobKind.WRITE: self._write,
                DiskJobKind.CHECK: self._check,
            }
            job.steps = run[job.post.kind](job, random, broken)
        elif self.started:
            job = random.choice(self.started)
            assert job.steps is not None
            if next(job.steps, self) is self:
                self.started.remove(job)

    # --- what a job comes to ---

    def _write(self, job: Job, random: Random, broken: bool) -> Iterator[None]:
        image, slab, numbers = self.slab.image, self.slab, job.numbers
        for number in numbers:
            extent = int(slab.geometry.extent_of(np.array([number], np.uint32))[0])
            if slab.extents.get(extent) != image.extents[extent]:
                slab.persist_extent(extent)
                yield
        slab.persist(numbers)
        yield
        failed = set()
        for i, (number, host) in enumerate(zip(numbers, job.host_numbers, strict=True)):
            if broken and random.random() < 0.5:
                failed.add(i)
                slab.write(number, PAGE_BYTES, TORN)
                continue
            there = self.pool.slots.get(host)
            slab.write(number, image.slots[number].slot_bytes, TORN if there is None else there.content)
            yield
        if broken and not failed:
            failed = set(range(len(numbers)))
        for i, (number, host) in enumerate(zip(numbers, job.host_numbers, strict=True)):
            slot = image.slots[number]
            assert (slot.state, slot.generation) == (WRITING, job.generations[i]), "a slot was taken"
            there = self.pool.slots.get(host)
            if there is None or (there.state, there.generation) != (READY, job.host_generations[i]):
                failed.add(i)
                continue
            assert _block(slot) == _block(there), "another block"
            if there.rot == "record":
                failed.add(i)
            if i not in failed:
                slot.sum = there.sum
                image.make_ready([number], [int(job.post.clocks[i])])
        yield
        slab.persist(numbers)
        yield
        self._tell(job, failed, set(), broken)

    def _read(self, job: Job, random: Random, broken: bool) -> Iterator[None]:
        image, numbers, hosts = self.slab.image, job.numbers, job.host_numbers
        failed, corrupt = set(), set()
        for i, (number, host) in enumerate(zip(numbers, hosts, strict=True)):
            there = self.pool.slots[host]
            if not self.zombie:
                slot = image.slots[number]
                assert (slot.state, slot.generation) == (READY, job.generations[i]), "a slot was taken"
                assert _block(slot) == _block(there), "another block"
            assert (there.state, there.generation) == (WRITING, job.host_generations[i])
            there.content = TORN
            yield
        for i, (number, host) in enumerate(zip(numbers, hosts, strict=True)):
            if broken and random.random() < 0.5:
                failed.add(i)
                continue
            there = self.pool.slots[host]
            assert (there.state, there.generation) == (WRITING, job.host_generations[i]), "another's slot"
            there.content = self.slab.read(number, there.slot_bytes)
            yield
        if broken and not failed:
            failed = set(range(len(numbers)))
        if not self.zombie:
            for i, (number, host) in enumerate(zip(numbers, hosts, strict=True)):
                slot, there = image.slots[number], self.pool.slots[host]
                if i in failed:
                    continue
                assert (slot.state, slot.generation) == (READY, job.generations[i]), "a slot was taken"
                if there.content == slot.sum and not slot.rot:
                    there.sum = slot.sum
                else:
                    corrupt.add(i)
        self._tell(job, failed, corrupt, broken)

    def _check(self, job: Job, random: Random, broken: bool) -> Iterator[None]:
        image, numbers = self.slab.image, job.numbers
        failed, corrupt = set(), set()
        for i, number in enumerate(numbers):
            slot = image.slots.get(number)
            if broken or slot is None or (slot.state, slot.generation) != (READY, job.generations[i]):
                failed.add(i)
                continue
            wanted = slot.sum
            yield
            if self.slab.read(number, slot.slot_bytes) != wanted or slot.rot:
                corrupt.add(i)
        yield
        self._tell(job, failed, corrupt, broken)

    def _tell(self, job: Job, failed: set[int], corrupt: set[int], broken: bool) -> None:
        corrupt = corrupt - failed
        done = len(job.numbers) - len(failed)
        self.outbox.append(
            DiskJobFinished(
                self.worker,
                job.post.job,
                np.array(sorted(failed), np.uint32),
                np.array(sorted(corrupt), np.uint32),
                "input/output error" if broken else "",
                bytes=done * PAGE_BYTES,
                busy_s=0.001 * (1 + len(job.numbers)),
            )
        )


def _block(slot: Slot) -> tuple[Key | None, int, int]:
    return slot.key, slot.shard, slot.world
