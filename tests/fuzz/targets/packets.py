"""Messages to workers, whose numbers come from clients, with words that a client may overwrite at any
time."""

from __future__ import annotations

import functools
import itertools
import mmap
import os

import numpy as np
from kvtier_kernels import PART_DONE, PART_FAILED, PoolRecords, format_pool, xxh3_64
from kvtierd.core.errors import Refusal
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.channel.packets import ProtocolError
from kvtierd.workers.copy.cpu import CpuDevice
from kvtierd.workers.copy.parts import PartRefusedError, PartTask, read_part
from kvtierd.workers.copy.sessions import SEALED, MappedSession
from kvtierd.workers.disk.jobs import read_job

from tests.fuzz.messages import edited
from tests.fuzz.pool_bytes import MIB
from tests.fuzz.source import Source
from tests.fuzz.target import Target
from tests.fuzz.targets.hello import check_refusal
from tests.fuzz.targets.side import _memfd

STEPS_MAX = 24
DOORBELLS, PARTS = 2, 4
FRAGMENT, BLOCKS = 1024, 8
SLOT_BYTES = 2 * FRAGMENT
MEMORY_BYTES = 2 * FRAGMENT * BLOCKS
READY, WRITING = 4, 4
"""How many slots of the pool have a block, and how many are being written."""


@functools.cache
def _shared() -> tuple[int, int, mmap.mmap]:
    """Descriptors of words and of an engine's memory, and a mapping for a pool."""
    return _memfd(1 << 1, size_bytes=4096), _memfd(1 << 1, size_bytes=MEMORY_BYTES), mmap.mmap(-1, 3 * MIB)


class _World:
    """One worker with a session and a small pool."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.words_fd, self.memory_fd, mapping = _shared()
        self.pool = np.frombuffer(mapping, np.uint8)
        self.pool[2 * MIB + PAGE_BYTES :] = 0
        format_pool(self.pool, MIB, 1, bytes(16))
        self.records = PoolRecords(self.pool)
        self.records.format_extent(0, SLOT_BYTES)
        info = self.records.extent_info(0)
        assert info is not None
        self.slots = (info[3] // PAGE_BYTES + np.arange(READY + WRITING + 1)).astype(np.uint32)
        os.pwrite(self.words_fd, bytes(8 * (DOORBELLS + PARTS)), 0)
        os.pwrite(self.memory_fd, b"\x11" * MEMORY_BYTES, 0)
        self._open()
        self.session = MappedSession(1)
        self.device = CpuDevice(mapping, self.records, None)
        self.tickets = itertools.count(1)
        self.posted: list[PartTask] = []
        self.is_as_mapped = True
        """Whether only the mapping that is meant was asked for; `planes` has those of all kinds."""

    def _open(self) -> None:
        count = READY + WRITING
        hashes = np.arange(32 * count, dtype=np.uint32).astype(np.uint8).reshape(count, 32)
        slots = self.slots[:count]
        generations = self.records.open(slots, 1, 9, 1, bytes(16), 0, 0, 1, hashes, SLOT_BYTES)
        sums = []
        for number, slot in enumerate(slots[:READY].tolist()):
            data = bytes([0x40 + number]) * SLOT_BYTES
            self.pool[slot * PAGE_BYTES : slot * PAGE_BYTES + SLOT_BYTES] = np.frombuffer(data, np.uint8)
            sums.append(xxh3_64(data))
        self.records.set_data_checksums(slots[:READY], generations[:READY], np.array(sums, np.uint64))
        self.records.commit(slots[:READY], np.arange(READY, dtype=np.uint64))
        self.generations = np.append(generations, np.uint64(0))

    def map(self) -> None:
        """Maps words and memory, as the front would have it, and what an input makes of that."""
        words = wire.MapWords(session=1, doorbells=DOORBELLS, parts=PARTS, tenant=1)
        memory = wire.MapMemory(session=1, registration=1, mapping_bytes=MEMORY_BYTES)
        memory.groups.add(
            num_blocks=BLOCKS,
            base_offsets=[0, FRAGMENT * BLOCKS],
            block_strides=[FRAGMENT] * 2,
            fragment_bytes=[FRAGMENT] * 2,
        )
        if self.source.one_in(4):
            self.is_as_mapped = False
            edited(words, self.source)
            edited(memory, self.source)
        try:
            self.session.map_words(self.words_fd, words.doorbells, words.parts)
            self.session.map_memory(self.device, [self.memory_fd], memory)
        except Refusal as refusal:
            check_refusal(refusal)

    def step(self) -> None:
        kind = self.source.below(8)
        if kind == 0:
            self.overwrite()
        elif kind == 1:
            self.disk_job()
        elif kind == 2:
            self.map()
        elif kind <= 5:
            self.post()
        elif self.posted:
            self.copy(self.posted.pop(self.source.below(len(self.posted))))

    def overwrite(self) -> None:
        """What a client that means harm does to its words page."""
        near = next(self.tickets) << 8 | self.source.below(8)
        value = self.source.choice((self.source.hostile(), SEALED, near, 0))
        os.pwrite(self.words_fd, value.to_bytes(8, "little"), 8 * self.source.below(DOORBELLS + PARTS))

    def post(self) -> None:
        source = self.source
        is_load = source.flag()
        first = source.below(READY) if is_load else READY + source.below(WRITING)
        rows = slice(first, first + source.below(4) + 1)
        count = len(self.slots[rows])
        block = source.below(BLOCKS - 4)
        part = wire.PostPart(
            part=len(self.posted),
            direction=wire.LOAD if is_load else wire.STORE,
            session=1,
            registration=1,
            ticket=next(self.tickets),
            part_word=source.below(PARTS),
            gate_deadline_ms=1000,
            block_ids=np.arange(block, block + count, dtype=np.uint32).tobytes(),
            slots=self.slots[rows].tobytes(),
            generations=self.generations[rows].tobytes(),
            verify=bytes([source.below(2)] * count) if is_load and source.flag() else b"",
        )
        if source.one_in(3):
            edited(part, source)
        if source.one_in(8):
            self._change_record(source)
        try:
            self.posted.append(read_part(part, self.session, 0.0))
        except PartRefusedError as error:
            assert str(error)
            self.session.revoke_word(part.part_word, part.ticket)

    def _change_record(self, source: Source) -> None:
        """The front gives a slot to another block."""
        slot = self.slots[source.below(READY + WRITING) :][:1]
        self.records.free(slot)
        self.generations[np.flatnonzero(self.slots == slot)] += source.below(3)

    def copy(self, part: PartTask) -> None:
        """Runs a part as a lane does, and compares all memory with what it may have changed."""
        if not self.session.try_start(part.word, part.ticket):
            self.session.revoke(part.word, part.ticket)
            return
        if self.source.one_in(4):
            self.overwrite()
        memory = np.frombuffer(os.pread(self.memory_fd, MEMORY_BYTES, 0), np.uint8)
        pool = self.pool.copy()
        whole = slice(0, len(part.block_ids))
        state = PART_FAILED
        good = np.zeros(0, bool)
        if part.plan is None:
            state = PART_DONE
        else:
            copier = self.device.load if part.is_load else self.device.store
            try:
                flight = copier.submit(part, whole)
            except (ValueError, Refusal):
                pass  # a lane lets the part fail
            else:
                good = copier.land(flight)
                state = PART_DONE if good.all() else PART_FAILED
        self.session.finish(part.word, part.ticket, state, is_load=part.is_load)
        after = np.frombuffer(os.pread(self.memory_fd, MEMORY_BYTES, 0), np.uint8)
        if part.is_load:
            assert (self.pool == pool).all(), "a load wrote to the pool"
            self._check_load(part, good, memory, after)
        else:
            assert (after == memory).all(), "a store wrote to the engine's memory"
            self._check_store(part, good, pool)

    def _check_load(self, part: PartTask, good: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """Only the part's blocks may have changed. A block that is good is exactly its slot's bytes."""
        if not self.is_as_mapped:
            return
        expected = before.copy()
        for at, ok in enumerate(good.tolist()):
            slot, block = int(part.slots[at]) * PAGE_BYTES, int(part.block_ids[at])
            for plane in range(2) if ok else ():
                begin = (plane * BLOCKS + block) * FRAGMENT
                source = slot + plane * FRAGMENT
                expected[begin : begin + FRAGMENT] = self.pool[source : source + FRAGMENT]
                assert 0x40 <= self.pool[slot] < 0x40 + READY, "a slot without a block was loaded"
        assert (after == expected).all(), "a load put other bytes in place than those of its slots"

    def _check_store(self, part: PartTask, good: np.ndarray, before: np.ndarray) -> None:
        """Only slots that are being written may have changed, and only with the generation of the part."""
        changed = np.flatnonzero(self.pool != before)
        pages = set((changed // PAGE_BYTES).tolist())
        table = {2 * MIB // PAGE_BYTES + 1}
        writing = set(self.slots[READY : READY + WRITING].tolist())
        assert pages <= table | (writing & set(part.slots.tolist())), "a store wrote outside of its slots"

    def disk_job(self) -> None:
        source = self.source
        count = source.below(4)
        job = wire.DiskJob(
            job=1,
            kind=source.choice((wire.DISK_WRITE, wire.DISK_READ, wire.DISK_CHECK)),
            disk_slots=np.arange(count, dtype=np.uint32).tobytes(),
            disk_generations=bytes(8 * count),
        )
        if job.kind != wire.DISK_CHECK:
            job.host_slots, job.host_generations = job.disk_slots, job.disk_generations
        if job.kind == wire.DISK_WRITE:
            job.clocks = bytes(8 * count)
        edited(job, source)
        try:
            found = read_job(job)
        except ProtocolError as error:
            assert str(error)
            return
        assert len(found.disk_slots) == len(found.disk_generations) == len(found)
        assert len(set(found.disk_slots.tolist())) == len(found)
        found.fail_rest("fuzz")
        assert len(found.report().failed) == 4 * len(found)

    def close(self) -> None:
        self.posted.clear()
        self.session.fence()
        self.session.unmap()


def run(data: bytes) -> None:
    world = _World(source := Source(data))
    try:
        world.map()
        for _ in range(STEPS_MAX):
            if source.is_empty:
                break
            world.step()
    finally:
        world.close()


TARGET = Target(
    run,
    (
        "kvtierd.workers.copy.parts",
        "kvtierd.workers.copy.sessions",
        "kvtierd.workers.copy.cpu",
        "kvtierd.workers.disk.jobs",
    ),
    bytes_max=500,
)
