"""The device "cpu": engines' memory in sealed memfds, which the lanes' own threads copy."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvtier_kernels import CopyPlan, PoolRecords

from kvtierd.core.errors import Reason, Refusal
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.copy.device import Area, Blocks, Flight
from kvtierd.workers.copy.memory import Chunk, MappedMemory
from kvtierd.workers.copy.parts import PartEnd, PartTask
from kvtierd.workers.copy.sessions import map_memfd, unmap

CHUNK_BYTES = 4 * 1024 * 1024
"""Data of one copy call. It bounds how long a load waits for a store, and a dead engine's memory for a copy,
to about half a millisecond. What surrounds a call costs about a hundredth of that."""

SHARED_CHUNK_BYTES = 1024 * 1024
"""The same while several tenants use a lane, and wait for each other's chunks. Where processor time is short,
a lane gets a quarter of a core and 4 MiB take 2 ms, as long as everything else of a small load. 1 MiB at a
time costs an eighth of what a lane copies in its processor time; 2 MiB cost less, but waits vary more."""

CHUNK_FRAGMENTS = 1 << 20
"""In effect no bound, because fragments cost nothing beyond their bytes."""


class CpuDevice:
    """A device that needs no preparation and has no threads of its own."""

    def __init__(self, pool: mmap.mmap, records: PoolRecords, fault: Callable[[], None] | None) -> None:
        """`fault` is called for every chunk, after its copy and before the step that makes it count."""
        self._pool = pool
        self.load = CpuCopier(pool, records, fault)
        self.store = CpuCopier(pool, records, fault)

    def enter_thread(self) -> None:
        pass

    def engine_stepped(self) -> None:
        pass  # its copies take turns by the operating system

    def start(self, on_room: Callable[[], None]) -> None:
        pass

    def stop(self) -> None:
        pass

    def join(self, timeout_s: float) -> bool:
        return True

    def map_memory(
        self, message: wire.MapMemory, fds: Sequence[int], chunks: Sequence[Chunk]
    ) -> tuple[MappedMemory, int]:
        if message.ranges or len(fds) != 1:
            raise Refusal(
                Reason.DEVICE_MEMORY_INVALID,
                'memory of a GPU for a session whose words name the device "cpu": '
                "name the GPU in RegisterWords.device",
                field="ranges",
                value=len(message.ranges),
            )
        return CpuMemory(fds[0], message.mapping_bytes), 0

    def import_chunk(self, fd: int, size_bytes: int) -> Chunk:
        raise Refusal(
            Reason.DEVICE_MEMORY_INVALID,
            'chunks of a GPU for a session whose words name the device "cpu": '
            "name the GPU in RegisterWords.device",
            field="chunks",
            value=size_bytes,
        )

    def pool_areas(self, start: int, end: int) -> Iterable[Area]:
        return [(start, end - start)]

    def pool_area_mapped(self, area: Area) -> None:
        pass


class CpuCopier:
    """Copies a chunk in one call, with its checks, so it has landed when `submit` returns."""

    depth = 1
    chunk_bytes = CHUNK_BYTES
    shared_chunk_bytes = SHARED_CHUNK_BYTES
    chunk_fragments = CHUNK_FRAGMENTS

    def __init__(self, pool: mmap.mmap, records: PoolRecords, fault: Callable[[], None] | None) -> None:
        self._pool = pool
        self._records = records
        self._fault = fault

    def is_full(self) -> bool:
        return False

    def prepare(self, part: PartTask, chunk: slice) -> bool:
        return False

    def submit(self, part: PartTask, chunk: slice) -> Flight:
        assert isinstance(part.plan, CpuPlan)
        copy = self._load if part.is_load else self._store
        return Flight(part, chunk, copy(part, part.plan, chunk))

    def land(self, flight: Flight) -> Blocks:
        return flight.good

    def settle(self, part: PartTask, end: PartEnd, over: Callable[[PartEnd], None]) -> None:
        over(end)

    def _store(self, part: PartTask, plan: CpuPlan, chunk: slice) -> Blocks:
        slots = part.slots[chunk]
        generations = part.generations[chunk]
        good = self._records.check_writing(slots, generations, plan.slot_bytes).astype(np.bool_)
        block_ids = part.block_ids[chunk]
        if not good.all():
            block_ids, slots, generations = block_ids[good], slots[good], generations[good]
        checksums = np.empty(len(slots), np.uint64)
        plan.require_allocated(block_ids)
        plan.copies.gather(block_ids, self._pool, slots, checksums)
        self._maybe_fail()
        # This raises, and the part fails, if a slot is not WRITING any more, or is for another block.
        self._records.set_data_checksums(slots, generations, checksums)
        return good

    def _load(self, part: PartTask, plan: CpuPlan, chunk: slice) -> Blocks:
        slots = part.slots[chunk]
        generations = part.generations[chunk]
        good = part.loadable(self._records, chunk)
        block_ids, sources = part.block_ids[chunk], slots
        if not good.all():
            block_ids, sources = block_ids[good], slots[good]
        plan.require_allocated(block_ids)
        plan.copies.scatter(block_ids, self._pool, sources)
        self._maybe_fail()
        # A slot that was given to another block during the copy has other bytes now.
        good &= self._records.check(slots, generations, plan.slot_bytes).astype(np.bool_)
        return good

    def _maybe_fail(self) -> None:
        if self._fault is not None:
            self._fault()


@dataclass(frozen=True, slots=True, eq=False)
class CpuPlan:
    """Where the fragments of a group's blocks lie in a memfd."""

    copies: CopyPlan
    fd: int
    """The memfd, under an offset of its own."""

    @property
    def slot_bytes(self) -> int:
        return self.copies.slot_bytes

    @property
    def planes(self) -> int:
        return self.copies.planes

    def require_allocated(self, block_ids: npt.NDArray[np.uint32]) -> None:
        """Raises Refusal if there is a hole in the memory of these blocks. A copy from or to it would have
        the system allocate it, as memory of this process."""
        status = os.fstat(self.fd)
        if status.st_blocks * 512 >= status.st_size:
            return  # there is no hole at all
        hole = self.copies.first_hole(block_ids, self.fd)
        if hole is not None:
            raise Refusal(
                Reason.MAPPING_INVALID,
                "a block lies in a hole of the memfd, and the daemon takes no memory for others: its owner "
                "has to write to it before it is copied, and to keep it",
                field="memfd offset",
                value=hole,
            )


class CpuMemory:
    """A memfd that is mapped."""

    def __init__(self, fd: int, mapping_bytes: int) -> None:
        """The descriptor stays the caller's. Raises Refusal."""
        self._mapping = map_memfd(fd, mapping_bytes)
        self._mapping_bytes = mapping_bytes
        try:
            # Opened anew, because looking for holes moves the offset, which would be the client's too.
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            unmap(self._mapping)
            raise Refusal(
                Reason.MAPPING_INVALID,
                f"the memfd cannot be opened again ({error.strerror}): leave its mode as it was made",
                field="descriptor",
            ) from None

    def plan(self, group: wire.MappedGroup) -> CpuPlan:
        try:
            copies = CopyPlan(
                memoryview(self._mapping)[: self._mapping_bytes],
                np.array(group.base_offsets, np.uint64),
                np.array(group.block_strides, np.uint64),
                np.array(group.fragment_bytes, np.uint64),
                group.num_blocks,
            )
        except (ValueError, OverflowError) as error:
            raise Refusal(
                Reason.PLANE_BEYOND_MAPPING,
                str(error),
                field=f"groups[{group.group}]",
                value=group.num_blocks,
            ) from None
        return CpuPlan(copies, self._fd)

    def unmap(self) -> None:
        unmap(self._mapping)
        os.close(self._fd)
