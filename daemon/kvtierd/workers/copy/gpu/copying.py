"""Copies chunks by DMA: a native plan describes them, the driver gets them in batches, and events tell when
they have landed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
from kvtier_kernels import DevicePlan, PoolRecords
from kvtier_kernels.cuda import Copies, CopyMethod, CudaError, Driver

from kvtierd.core.ids import Slots
from kvtierd.workers.copy.device import Blocks, Flight
from kvtierd.workers.copy.gpu.fatal import context_guard, must_succeed
from kvtierd.workers.copy.gpu.pacing import ChunkPace
from kvtierd.workers.copy.gpu.registration import PoolRegistration
from kvtierd.workers.copy.gpu.sealing import Sealer
from kvtierd.workers.copy.parts import PartEnd, PartTask

CHUNK_FRAGMENTS = 8_192
"""Two calls of the driver, which take about 4 ms where nothing can be merged."""


U64 = npt.NDArray[np.uint64]

Launch = Callable[[], None]
"""Puts planned copies on the stream. Raises CudaError, and then some may be there."""

FRAGMENTS_MIN_IN_BATCHES = 7
"""A two-dimensional copy is worth it from so many fragments on; one by one, from two."""

IN_COMMANDS_BYTES = 32 << 10
"""A driver puts smaller sources in host memory into its commands. Measured: 24 KiB it does, 32 KiB not."""


class SlotTakenError(Exception):
    """A slot was taken back while it was stored to, so the part keeps nothing."""


class Descriptors(Protocol):
    """How the copies of one direction get to the driver."""

    @property
    def how(self) -> str:
        """What the log says about it."""

    def planned(self, plan: DevicePlan, block_ids: npt.NDArray[np.uint32], slots: Slots) -> Launch:
        """Plans the copies. Raises ValueError."""


class Batches:
    """Copies in batches of runs."""

    def __init__(self, copies: Copies, pool: PoolRegistration, stream: int, to_device: bool) -> None:
        self.how = copies.describe()
        self._copies = copies
        self._pool = pool
        self._stream = stream
        self._to_device = to_device

    def planned(self, plan: DevicePlan, block_ids: npt.NDArray[np.uint32], slots: Slots) -> Launch:
        pool = self._pool
        device, host, sizes = plan.describe(
            block_ids, pool.address, pool.pool_bytes, slots, self._to_device, pool.borders
        )
        if self._to_device:
            return partial(self._copies.to_device, device, host, sizes, self._stream)
        return partial(self._copies.to_host, host, device, sizes, self._stream)


class Rows:
    """Two-dimensional copies, one by one."""

    def __init__(self, copies: Copies, pool: PoolRegistration, stream: int, to_device: bool) -> None:
        self.how = "two-dimensional copies, one by one"
        self._copy = copies.rows_to_device if to_device else copies.rows_to_host
        self._pool = pool
        self._stream = stream
        self._to_device = to_device

    def planned(self, plan: DevicePlan, block_ids: npt.NDArray[np.uint32], slots: Slots) -> Launch:
        return partial(self._copy, *self._described(plan, block_ids, slots), self._stream)

    def planned_if_worth_it(
        self, plan: DevicePlan, block_ids: npt.NDArray[np.uint32], slots: Slots, fragments_min: int
    ) -> Launch | None:
        """As `planned`, or None if a copy would take the place of fewer fragments than these on average."""
        arrays = self._described(plan, block_ids, slots)
        rows = arrays[3]
        worth_it = int(rows.sum()) >= fragments_min * len(rows)
        return partial(self._copy, *arrays, self._stream) if worth_it else None

    def _described(
        self, plan: DevicePlan, block_ids: npt.NDArray[np.uint32], slots: Slots
    ) -> tuple[U64, U64, U64, U64, U64, U64]:
        pool = self._pool
        return plan.describe_rows(
            block_ids, pool.address, pool.pool_bytes, slots, self._to_device, pool.borders
        )


class Cheapest:
    """Two-dimensional copies where one takes the place of several fragments, else batches.

    On an H200, beyond the time of its bytes, a two-dimensional copy costs 3.2 µs however many rows it has, a
    fragment in a batch 0.5 µs, and one in a loop 2.4 µs (tests/gpu/results, `shapes` and `batches`). Small
    fragments to the device are worse in batches and in loops: the driver puts their bytes into its commands,
    3 µs each, and such commands wait until the multiprocessors are this process's for a while: 2.4 ms beside
    a busy engine, which stands still meanwhile (`slices`).
    """

    def __init__(self, copies: Copies, pool: PoolRegistration, stream: int, to_device: bool) -> None:
        self._batches = Batches(copies, pool, stream, to_device)
        self._rows = Rows(copies, pool, stream, to_device)
        self._to_device = to_device
        self._fragments_min = 2 if copies.method is CopyMethod.LOOP else FRAGMENTS_MIN_IN_BATCHES
        self.how = f"{self._batches.how}; fragments at equal distances by {self._rows.how}"

    def planned(self, plan: DevicePlan, block_ids: npt.NDArray[np.uint32], slots: Slots) -> Launch:
        small = self._to_device and plan.slot_bytes < IN_COMMANDS_BYTES * plan.planes
        if plan.planes > 1 or small:
            fragments_min = 1 if small else self._fragments_min
            launch = self._rows.planned_if_worth_it(plan, block_ids, slots, fragments_min)
            if launch is not None:
                return launch
        return self._batches.planned(plan, block_ids, slots)


class GpuCopier:
    """Copies in one direction, with a stream and an event for each flight."""

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
        pace: ChunkPace,
        flights_max: int,
    ) -> None:
        """With a `sealer` it copies stores, else loads. `fault` is called for every chunk, after its copy and
        before the step that makes it count. While `pace` says so, a chunk begins when the one before it has
        landed. Raises CudaError."""
        self._driver = driver
        self._stream = stream
        self._descriptors = descriptors
        self._records = records
        self._pool = pool
        self._sealer = sealer
        self._fault = fault
        self._flights_max = flights_max
        self._idle = [driver.event_create() for _ in range(flights_max)]
        self._flying: deque[int] = deque()
        self.how = descriptors.how
        self._pace = pace

    @property
    def depth(self) -> int:
        return self._flights_max

    @property
    def chunk_bytes(self) -> int:
        return self._pace.bytes_of(load=self._sealer is None)

    @property
    def shared_chunk_bytes(self) -> int:
        return self._pace.bytes_of(load=self._sealer is None, shared=True)

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
                launch = self._descriptors.planned(part.plan, block_ids, slots)
                if self._flying and self._pace.paced:
                    # All that could be prepared is, so the engine's copies get little more than their turn.
                    with must_succeed("waiting for a copy"):
                        self._driver.event_synchronize(self._flying[-1])
                launch()
                self._driver.event_record(event, self._stream)
        except BaseException as error:
            self._idle.append(event)
            if isinstance(error, CudaError):
                # Some of its copies may be under way.
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
            # A slot that was given to another block during the copy had other bytes.
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
