"""The copy itself: one started part, chunk by chunk, every slot checked."""

import mmap
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from kvtier_kernels import CopyPlan, PoolRecords

from kvtierd.transfer.status import StatusPage, StatusWord
from kvtierd.transfer.worker.parts import Part, PartEnd
from kvtierd.wire import worker_pb2 as wire

CHUNK_BYTES = 4 * 1024 * 1024
"""Data of one copy call. It bounds how long a load waits for a store and a dead engine's memory for a copy,
about half a millisecond; the calls around it cost about a hundredth of that."""

Blocks = npt.NDArray[np.bool_]


class Copier:
    """Copies parts between their sessions' memory and the pool. One per lane."""

    def __init__(
        self,
        pool: mmap.mmap,
        records: PoolRecords,
        status: StatusPage,
        word: StatusWord,
        fault: Callable[[], None] | None,
    ) -> None:
        """`fault` is called for every chunk, between its copy and what makes it count."""
        self._pool = pool
        self._records = records
        self._status = status
        self._word = word
        self._fault = fault

    def copy(self, part: Part, before_chunk: Callable[[], bool]) -> PartEnd:
        """Copies a started part and says how it went; its word is the caller's.

        `before_chunk` is asked before each chunk and ends the part early by False. Raises what the native
        calls raise.
        """
        good = np.zeros(len(part.block_ids), np.bool_)
        copy_ns = 0
        for chunk in _chunks(part):
            if not before_chunk():
                return PartEnd(wire.FAILED, "its session was released while it ran", copy_ns=copy_ns)
            started_ns = time.monotonic_ns()
            self._status.enter(self._word)
            try:
                assert part.plan is not None
                copy = self._load if part.is_load else self._store
                good[chunk] = copy(part, part.plan, chunk)
            finally:
                self._status.leave(self._word)
            copy_ns += time.monotonic_ns() - started_ns
        copied_bytes = int(np.count_nonzero(good)) * part.slot_bytes
        if good.all():
            return PartEnd(wire.DONE, copied_bytes=copied_bytes, copy_ns=copy_ns)
        failed = np.flatnonzero(~good).astype(np.uint32)
        return PartEnd(
            wire.FAILED,
            f"{len(failed)} of {len(good)} slots failed the check of their record or their data",
            failed,
            corrupt=part.is_load,
            copied_bytes=copied_bytes,
            copy_ns=copy_ns,
        )

    def _store(self, part: Part, plan: CopyPlan, chunk: slice) -> Blocks:
        slots = part.slots[chunk]
        generations = part.generations[chunk]
        good = self._records.check_writing(slots, generations, plan.slot_bytes).astype(np.bool_)
        block_ids = part.block_ids[chunk]
        if not good.all():
            block_ids, slots, generations = block_ids[good], slots[good], generations[good]
        checksums = np.empty(len(slots), np.uint64)
        plan.gather(block_ids, self._pool, slots, checksums)
        self._maybe_fail()
        # Fails if a slot is WRITING no longer, or for somebody else: then the part fails.
        self._records.set_data_checksums(slots, generations, checksums)
        return good

    def _load(self, part: Part, plan: CopyPlan, chunk: slice) -> Blocks:
        slots = part.slots[chunk]
        generations = part.generations[chunk]
        good = self._records.check(slots, generations, plan.slot_bytes).astype(np.bool_)
        if part.verify is not None:
            suspects = np.flatnonzero(good & part.verify[chunk])
            if len(suspects):
                intact = self._records.verify_data(slots[suspects], generations[suspects])
                good[suspects] = intact.astype(np.bool_)
        if good.all():
            plan.scatter(part.block_ids[chunk], self._pool, slots)
        else:
            plan.scatter(part.block_ids[chunk][good], self._pool, slots[good])
        self._maybe_fail()
        # A slot that was given away during the copy holds other bytes now.
        good &= self._records.check(slots, generations, plan.slot_bytes).astype(np.bool_)
        return good

    def _maybe_fail(self) -> None:
        if self._fault is not None:
            self._fault()


def _chunks(part: Part) -> Iterator[slice]:
    blocks = max(1, CHUNK_BYTES // max(1, part.slot_bytes))
    for first in range(0, len(part.block_ids), blocks):
        yield slice(first, first + blocks)
