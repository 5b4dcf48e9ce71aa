"""Chunks as DMA: described by a native plan, handed to the driver in batches, waited for by event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
from kvtier_kernels import DevicePlan, PoolRecords
from kvtier_kernels.cuda import Copies, CudaError, Driver

from kvtierd.core.ids import Slots
from kvtierd.workers.copy.device import Blocks, Flight
from kvtierd.workers.copy.gpu.fatal import context_guard, must_succeed
from kvtierd.workers.copy.gpu.registration import PoolRegistration
from kvtierd.workers.copy.gpu.sealing import Sealer
from kvtierd.workers.copy.parts import PartEnd, PartTask

LOAD_CHUNK_BYTES = 32 << 20
"""Above what a link needs to be busy, and 0.6 ms at 50 GB/s, which a dead engine's memory waits for."""

STORE_CHUNK_BYTES = 16 << 20
"""0.3 ms at 50 GB/s, which loads share the engine's memory with: long enough for this process's part in the
next chunk, about 0.1 ms."""

CHUNK_FRAGMENTS = 8_192
"""Two calls of the driver, about 4 ms of its time where nothing can be merged."""

DEPTH = 2
"""The next chunk is on the stream when one lands."""


class SlotTakenError(Exception):
    """A slot was taken back while it was stored to: the part keeps nothing."""


class Descriptors(Protocol):
    """How one direction's descriptors get to the driver."""

    @property
    def how(self) -> str:
        """For the log."""

    def submit(self, plan: DevicePlan, block_ids: npt.NDArray[np.uint32], slots: Slots) -> None:
        """Puts the copies on the stream. ValueError, and nothing was; CudaError, and some may have been."""


class Batches:
    """Batches of runs."""

    def __init__(self, copies: Copies, pool: PoolRegistration, stream: int, to_device: bool) -> None:
        self.how = copies.describe()
        self._copies = copies
        self._pool = pool
        self._stream = stream
        self._to_device = to_device

    def submit(self, plan: DevicePlan, block_ids: npt.NDArray[np.uint32], slots: Slots) -> None:
        pool = self._pool
        device, host, sizes = plan.describe(
            block_ids, pool.address, pool.pool_bytes, slots, self._to_device, pool.borders
        )
        if self._to_device:
            self._copies.to_device(device, host, sizes, self._stream)
        else:
            self._copies.to_host(host, device, sizes, self._stream)


class Rows:
    """Two-dimensional copies, one by one."""

    def __init__(self, copies: Copies, pool: PoolRegistration, stream: int, to_device: bool) -> None:
        self.how = "two-dimensional copies, one by one (as asked for)"
        self._copy = copies.rows_to_device if to_device else copies.rows_to_host
        self._pool = pool
        self._stream = stream
        self._to_device = to_device

    def submit(self, plan: DevicePlan, block_ids: npt.NDArray[np.uint32], slots: Slots) -> None:
        pool = self._pool
        rows = plan.describe_rows(
            block_ids, pool.address, pool.pool_bytes, slots, self._to_device, pool.borders
        )
        self._copy(*rows, self._stream)


class GpuCopier:
    """One direction: a stream, and an event for each flight."""

    depth = DEPTH
    chunk_fragments = CHUNK_FRAGMENTS

    def __init__(
        self,
        driver: Driver,
        stream: int,
        descriptors: Descriptors,
        records: PoolRecords,
        pool: PoolRegistration,
        sealer: Sealer | None,
        fault: Callable[[], None] | None,
    ) -> None:
        """`sealer` makes it a copier of stores. `fault` is called for every chunk, between its copy and what
        makes it count. CudaError."""
        self._driver = driver
        self._stream = stream
        self._descriptors = descriptors
        self._records = records
        self._pool = pool
        self._sealer = sealer
        self._fault = fault
        self._idle = [driver.event_create() for _ in range(DEPTH)]
        self._flying: deque[int] = deque()
        self.how = descriptors.how
        self.chunk_bytes = LOAD_CHUNK_BYTES if sealer is None else STORE_CHUNK_BYTES

    def is_full(self) -> bool:
        return self._sealer is not None and self._sealer.is_full()

    def prepare(self, part: PartTask, chunk: slice) -> bool:
        return self._pool.ensure_next(part.slots[chunk])

    def submit(self, part: PartTask, chunk: slice) -> Flight:
        assert isinstance(part.plan, DevicePlan)
        block_ids, slots = part.block_ids[chunk], part.slots[chunk]
        if part.is_load:
            good = part.loadable(self._records, chunk)
        else:
            good = self._check_writing(slots, part.generations[chunk], part.slot_bytes)
        if not good.all():
            block_ids, slots = block_ids[good], slots[good]
        self._pool.require(slots)
        event = self._idle.pop()
        try:
            with context_guard():
                self._descriptors.submit(part.plan, block_ids, slots)
                self._driver.event_record(event, self._stream)
        except BaseException as error:
            self._idle.append(event)
            if isinstance(error, CudaError):
                # Some of it may be on its way.
                with must_succeed("waiting for a copy that was submitted in part"):
                    self._driver.stream_synchronize(self._stream)
            raise
        self._flying.append(event)
        return Flight(part, chunk, good)

    def land(self, flight: Flight) -> Blocks:
        with must_succeed("waiting for a copy"):
            self._driver.event_synchronize(self._flying[0])
        self._idle.append(self._flying.popleft())
        if self._fault is not None:
            self._fault()
        part, good = flight.part, flight.good
        slots, generations = part.slots[flight.chunk], part.generations[flight.chunk]
        if self._sealer is None:
            # A slot that was given away during the copy held other bytes.
            return good & self._records.check(slots, generations, part.slot_bytes).astype(np.bool_)
        if not good.all():
            slots, generations = slots[good], generations[good]
        if not self._check_writing(slots, generations, part.slot_bytes).all():
            raise SlotTakenError("a slot was taken back while it was stored to")
        if len(slots):
            self._sealer.put(part, slots, generations, part.slot_bytes)
        return good

    def settle(self, part: PartTask, end: PartEnd, over: Callable[[PartEnd], None]) -> None:
        if self._sealer is None:
            over(end)
        else:
            self._sealer.settle(part, end, over)

    def _check_writing(self, slots: Slots, generations: npt.NDArray[np.uint64], slot_bytes: int) -> Blocks:
        return self._records.check_writing(slots, generations, slot_bytes).astype(np.bool_)
