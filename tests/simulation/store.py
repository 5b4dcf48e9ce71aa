"""A store that hosts share: packs that stay whatever happens to this host, and a worker that puts, finds and
reads in visible steps.

Other hosts are packs that appear by themselves: a copy of one that is there, under another name.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from kvtierd.core.actions import DiskJobKind, PostDiskJob, UnwatchSpace, WatchSpace
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.ids import PAGE_BYTES, DiskId, WorkerId
from kvtierd.core.stimuli import DiskJobFinished, DiskRecovered, PackFound

from tests.simulation.disk import ROTTEN, FakeDiskWorker, FakeSlab, Job
from tests.simulation.pool import READY, WRITING, FakePool, Key

UNANSWERED_MAX = 3
PACKS_MAX = 40
"""A lifecycle rule removes the oldest of more."""


@dataclass(slots=True, eq=False)
class FakePack:
    """One object: blocks of one group, each with what its shards hold."""

    namespace: bytes
    group: int
    blocks: dict[bytes, list[Any]]
    """By hash, in the order of the job, what there is by rank."""
    sums: dict[bytes, list[Any]]
    """By hash, what its head says that there is."""
    slot_bytes: tuple[int, ...]
    """Of the shards, by rank."""


class FakeStore(FakeSlab):
    """In place of a slab. The image has records only; the packs are the store."""

    def __init__(self, disk: DiskId, geometry: PoolGeometry) -> None:
        super().__init__(disk, geometry)
        self.packs: dict[int, FakePack] = {}
        self._numbers = itertools.count(1)

    def put(self, pack: FakePack) -> int:
        number = next(self._numbers)
        self.packs[number] = pack
        return number

    def lifecycle(self, random: Random) -> None:
        """The oldest packs go; now and then another host puts what is there once more."""
        while len(self.packs) > PACKS_MAX:
            del self.packs[next(iter(self.packs))]
        if self.packs and random.random() < 0.1:
            del self.packs[random.choice(list(self.packs))]
        if self.packs and random.random() < 0.3:
            old = self.packs[random.choice(list(self.packs))]
            again = {key: list(contents) for key, contents in old.blocks.items() if random.random() < 0.8}
            if again:
                sums = {key: old.sums[key] for key in again}
                self.put(FakePack(old.namespace, old.group, again, sums, old.slot_bytes))

    def rot(self, random: Random) -> bool:
        """Spoils one shard of one block."""
        self.lifecycle(random)
        if not self.packs:
            return False
        pack = random.choice(list(self.packs.values()))
        contents = random.choice(list(pack.blocks.values()))
        contents[random.randrange(len(contents))] = ROTTEN
        return True

    def power_is_lost(self, random: Random) -> None:
        """Not there."""

    def recover(self, random: Random) -> DiskRecovered:
        """A new daemon has a new image, in which nothing is known yet."""
        boot = self.image.boot
        self.image = FakePool(self.geometry, rots_below=True)
        self.image.boot = boot
        return DiskRecovered(self.disk, self.image.recover(random))


class FakeStoreWorker(FakeDiskWorker):
    """One worker process of a store."""

    slab: FakeStore

    def __init__(self, worker: WorkerId, slab: FakeStore, pool: FakePool) -> None:
        super().__init__(worker, slab, pool)
        self.watched: dict[int, WatchSpace] = {}
        self.told: set[int] = set()
        """Packs that the front was told of, or that are this worker's own."""
        self.finds: dict[int, tuple[int, list[bytes]]] = {}
        """By number, the pack, and its blocks that the front was told of."""
        self.found: list[PackFound] = []
        """What the front has still to be told."""
        self.locations: dict[int, tuple[int, int]] = {}
        """By slot: its pack, and the slot's generation then."""
        self._numbers = itertools.count(1)

    def idle(self) -> bool:
        return super().idle() and not self.found and not self.finds

    def watch(self, action: WatchSpace | UnwatchSpace) -> None:
        if isinstance(action, UnwatchSpace):
            assert action.space in self.watched, "a space is given up that was not watched"
            del self.watched[action.space]
        else:
            assert action.space not in self.watched, "a space is watched twice"
            self.watched[action.space] = action
            self.told.clear()

    def take(self, post: PostDiskJob, generations: list[int], host_generations: list[int]) -> None:
        if post.kind is DiskJobKind.ADOPT:
            pack, keys = self.finds.pop(post.pack)
            if len(post.disk_slots):
                self.outbox.append(self._adopt(Job(post, generations, host_generations), pack, keys))
            return
        super().take(post, generations, host_generations)

    def look(self, random: Random) -> None:
        """Finds a pack of a space that is watched."""
        if self.slab.broken or self.zombie or len(self.finds) >= UNANSWERED_MAX or not self.watched:
            return
        wanted = random.choice(list(self.watched.values()))
        new = [
            number
            for number, pack in self.slab.packs.items()
            if number not in self.told
            and (pack.namespace, pack.group, pack.slot_bytes)
            == (wanted.namespace, wanted.group, wanted.sizes)
        ]
        if not new:
            return
        number, find = new[0], next(self._numbers)
        self.told.add(number)
        keys = list(self.slab.packs[number].blocks)
        self.finds[find] = (number, keys)
        hashes = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
        self.found.append(PackFound(self.worker, find, wanted.space, hashes))

    def become_zombie(self, quarantined: set[int]) -> None:
        super().become_zombie(quarantined)
        self.found.clear()
        self.finds.clear()

    def step(self, random: Random, faults: Counter[tuple[str, str]], fault_rate: float) -> None:
        if not self.hangs and random.random() < 0.2:
            self.look(random)
        super().step(random, faults, fault_rate)

    # --- what a job comes to ---

    def _pack_of(self, number: int) -> FakePack | None:
        """Where the block of a READY slot is."""
        where = self.locations.get(number)
        if where is None or where[1] != self.slab.image.slots[number].generation:
            return None
        return self.slab.packs.get(where[0])

    def _adopt(self, job: Job, number: int, keys: list[bytes]) -> DiskJobFinished:
        image, failed = self.slab.image, set()
        pack = self.slab.packs.get(number)
        for i, (slot_number, position) in enumerate(
            zip(job.numbers, job.post.positions.tolist(), strict=True)
        ):
            slot = image.slots[slot_number]
            assert (slot.state, slot.generation) == (WRITING, job.generations[i]), "a slot was taken"
            assert slot.key is not None
            assert slot.key[2] == keys[position], "a slot is to stand for another block"
            if pack is None:  # its head is known all the same
                failed.add(i)
                continue
            slot.sum = pack.sums[slot.key[2]][slot.shard]
            self.locations[slot_number] = (number, slot.generation)
            image.make_ready([slot_number], [int(job.post.clocks[i])])
        self._tell(job, failed, set(), broken=False)
        return self.outbox.pop()

    def _write(self, job: Job, random: Random, broken: bool) -> Iterator[None]:
        image, numbers = self.slab.image, job.numbers
        failed: set[int] = set()
        copies: list[Any] = []
        for host in job.host_numbers:
            there = self.pool.slots.get(host)
            copies.append(None if there is None else there.content)
            yield
        for i, (number, host) in enumerate(zip(numbers, job.host_numbers, strict=True)):
            slot = image.slots[number]
            assert (slot.state, slot.generation) == (WRITING, job.generations[i]), "a slot was taken"
            there = self.pool.slots.get(host)
            same = there is not None and (there.state, there.generation) == (READY, job.host_generations[i])
            if not same or there is None or there.rot == "record":
                failed.add(i)
            else:
                slot.sum = there.sum
        yield
        blocks: dict[bytes, list[Any]] = {}
        sums: dict[bytes, list[Any]] = {}
        places: list[int] = []
        first = 0
        while first < len(numbers):
            world = image.slots[numbers[first]].world
            rows = range(first, first + world)
            key = image.slots[numbers[first]].key
            assert key is not None
            if failed.isdisjoint(rows):
                blocks[key[2]] = [copies[row] for row in rows]
                sums[key[2]] = [image.slots[numbers[row]].sum for row in rows]
                places += rows
            else:
                failed.update(rows)
            first += world
        if broken:
            failed = set(range(len(numbers)))
        elif blocks:
            slot = image.slots[numbers[places[0]]]
            assert slot.key is not None
            spaces = {_space(image.slots[numbers[place]].key) for place in places}
            assert len(spaces) == 1, "a pack has blocks of one space"
            sizes = tuple(image.slots[numbers[place]].slot_bytes for place in places[: slot.world])
            pack = self.slab.put(FakePack(slot.key[0], slot.key[1], blocks, sums, sizes))
            self.told.add(pack)
            yield
            for place in places:
                number = numbers[place]
                self.locations[number] = (pack, image.slots[number].generation)
                image.make_ready([number], [int(job.post.clocks[place])])
        yield
        self._tell(job, failed, set(), broken, refused=broken and random.random() < 0.5)

    def _get(self, number: int) -> tuple[bool, Any]:
        """Whether the store has the block of a slot, and what it has."""
        pack, slot = self._pack_of(number), self.slab.image.slots[number]
        if pack is None or slot.key is None or slot.key[2] not in pack.blocks:
            return False, None
        return True, pack.blocks[slot.key[2]][slot.shard]

    def _read(self, job: Job, random: Random, broken: bool) -> Iterator[None]:
        failed: set[int] = set()
        corrupt: set[int] = set()
        gone: set[int] = set()
        image, numbers, hosts = self.slab.image, job.numbers, job.host_numbers
        for i, (number, host) in enumerate(zip(numbers, hosts, strict=True)):
            there = self.pool.slots[host]
            if broken and random.random() < 0.5:
                failed.add(i)
                continue
            if self.zombie:
                continue
            slot = image.slots[number]
            assert (slot.state, slot.generation) == (READY, job.generations[i]), "a slot was taken"
            assert (slot.key, slot.shard) == (there.key, there.shard), "another block"
            assert (there.state, there.generation) == (WRITING, job.host_generations[i]), "another's slot"
            is_there, there.content = self._get(number)
            if not is_there:
                gone.add(i)
            yield
        if broken and not failed:
            failed = set(range(len(numbers)))
        if not self.zombie:
            for i, (number, host) in enumerate(zip(numbers, hosts, strict=True)):
                if i in failed or i in gone:
                    continue
                there = self.pool.slots[host]
                if there.content == image.slots[number].sum:
                    there.sum = there.content
                else:
                    corrupt.add(i)
        self._tell(job, failed, corrupt - gone, broken, gone - failed)

    def _check(self, job: Job, random: Random, broken: bool) -> Iterator[None]:
        image = self.slab.image
        failed: set[int] = set()
        corrupt: set[int] = set()
        gone: set[int] = set()
        for i, number in enumerate(job.numbers):
            slot = image.slots.get(number)
            if broken or slot is None or (slot.state, slot.generation) != (READY, job.generations[i]):
                failed.add(i)
                continue
            is_there, content = self._get(number)
            wanted = slot.sum
            yield
            if not is_there:
                gone.add(i)
            elif content != wanted:
                corrupt.add(i)
        yield
        self._tell(job, failed, corrupt, broken, gone)

    def _tell(
        self,
        job: Job,
        failed: set[int],
        corrupt: set[int],
        broken: bool,
        gone: set[int] | None = None,
        *,
        refused: bool = False,
    ) -> None:
        gone = gone or set()
        done = len(job.numbers) - len(failed) - len(gone)
        self.outbox.append(
            DiskJobFinished(
                self.worker,
                job.post.job,
                np.array(sorted(failed), np.uint32),
                np.array(sorted(corrupt - failed), np.uint32),
                "no answer in time" if broken else "",
                bytes=done * PAGE_BYTES,
                busy_s=0.001 * (1 + len(job.numbers)),
                gone=np.array(sorted(gone), np.uint32),
                refused=refused,
            )
        )


def _space(key: Key | None) -> tuple[bytes, int]:
    assert key is not None
    return key[0], key[1]
