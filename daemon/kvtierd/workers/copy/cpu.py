"""The device "cpu": engines' memory in sealed memfds, which the lanes' own threads copy."""

import mmap
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from kvtier_kernels import CopyPlan, PoolRecords

from kvtierd.core.errors import Reason, Refusal
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.copy.checks import check_before_load
from kvtierd.workers.copy.device import Area, Blocks, Flight
from kvtierd.workers.copy.memfds import map_memfd, unmap
from kvtierd.workers.copy.memory import Chunk, MappedMemory
from kvtierd.workers.copy.parts import PartEnd, PartTask

CHUNK_BYTES = 4 * 1024 * 1024
"""Data of one copy call. It bounds how long a load waits for a store, and a dead engine's memory for a copy,
to about half a millisecond. What surrounds a call costs about a hundredth of that."""

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
        return CpuMemory(map_memfd(fds[0], message.mapping_bytes), message.mapping_bytes), 0

    def import_chunk(self, fd: int, size_bytes: int) -> Chunk:
        raise Refusal(
            Reason.DEVICE_MEMORY_INVALID,
            'chunks of a GPU for a session whose words name the device "cpu": '
            "name the GPU in RegisterWords.device",
            field="chunks",
            value=size_bytes,
        )

    def pool_areas(self) -> Iterable[Area]:
        return [(0, len(self._pool))]

    def pool_area_mapped(self, area: Area) -> None:
        pass


class CpuCopier:
    """Copies a chunk in one call, with its checks, so it has landed when `submit` returns."""

    depth = 1
    chunk_bytes = CHUNK_BYTES
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
        assert isinstance(part.plan, CopyPlan)
        copy = self._load if part.is_load else self._store
        return Flight(part, chunk, copy(part, part.plan, chunk))

    def land(self, flight: Flight) -> Blocks:
        return flight.good

    def settle(self, part: PartTask, end: PartEnd, over: Callable[[PartEnd], None]) -> None:
        over(end)

    def _store(self, part: PartTask, plan: CopyPlan, chunk: slice) -> Blocks:
        slots = part.slots[chunk]
        generations = part.generations[chunk]
        good = self._records.check_writing(slots, generations, plan.slot_bytes).astype(np.bool_)
        block_ids = part.block_ids[chunk]
        if not good.all():
            block_ids, slots, generations = block_ids[good], slots[good], generations[good]
        checksums = np.empty(len(slots), np.uint64)
        plan.gather(block_ids, self._pool, slots, checksums)
        self._maybe_fail()
        # This raises, and the part fails, if a slot is not WRITING any more, or is for another block.
        self._records.set_data_checksums(slots, generations, checksums)
        return good

    def _load(self, part: PartTask, plan: CopyPlan, chunk: slice) -> Blocks:
        slots = part.slots[chunk]
        generations = part.generations[chunk]
        good = check_before_load(self._records, part, chunk)
        if good.all():
            plan.scatter(part.block_ids[chunk], self._pool, slots)
        else:
            plan.scatter(part.block_ids[chunk][good], self._pool, slots[good])
        self._maybe_fail()
        # A slot that was given to another block during the copy has other bytes now.
        good &= self._records.check(slots, generations, plan.slot_bytes).astype(np.bool_)
        return good

    def _maybe_fail(self) -> None:
        if self._fault is not None:
            self._fault()


class CpuMemory:
    """A memfd that is mapped."""

    def __init__(self, mapping: mmap.mmap, mapping_bytes: int) -> None:
        self._mapping = mapping
        self._mapping_bytes = mapping_bytes

    def plan(self, group: wire.MappedGroup) -> CopyPlan:
        try:
            return CopyPlan(
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

    def unmap(self) -> None:
        unmap(self._mapping)
