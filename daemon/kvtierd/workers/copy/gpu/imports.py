"""Engines' memory on the GPU, imported from their processes."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from kvtier_kernels import DevicePlan
from kvtier_kernels.cuda import IPC_HANDLE_BYTES, CudaError, DeviceInfo, Driver, PointerInfo

from kvtierd.core.errors import Reason, Refusal
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.copy.gpu.fatal import context_guard, must_succeed
from kvtierd.workers.copy.gpu.refused_imports import explain, is_refused

RANGES_MAX = 4_096

ACCESS_CHUNKS = 1_024
"""Chunks that one call of the driver makes accessible; it writes all their page table entries."""

OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


class GpuChunk:
    """The handle of a chunk."""

    def __init__(self, driver: Driver, handle: int, size_bytes: int, step: Callable[[], None]) -> None:
        """`step()` is called before the chunk is released."""
        self._driver = driver
        self._step = step
        self.handle = handle
        self.size_bytes = size_bytes

    def release(self) -> None:
        self._step()
        with context_guard():
            self._driver.chunk_release(self.handle)


@dataclass(frozen=True, slots=True)
class _Range:
    """A range of a mapping, as this process sees it."""

    start: int
    """Its offset in the mapping."""
    size_bytes: int
    address: int


@dataclass(frozen=True, slots=True)
class _Handle:
    """One opening of a legacy handle."""

    handle: bytes
    base: int


@dataclass(frozen=True, slots=True)
class _Reservation:
    """An address range in which chunks are mapped one after another."""

    address: int
    size_bytes: int


@dataclass(slots=True)
class _Open:
    buffer_id: int
    times: int


class GpuMemory:
    """A registration's ranges. One after another, they are the mapping that offsets refer to."""

    def __init__(self, imports: Imports) -> None:
        self._imports = imports
        self._starts: list[int] = []
        self._ranges: list[_Range] = []
        self._pieces: list[_Handle | _Reservation] = []

    def plan(self, group: wire.MappedGroup) -> DevicePlan:
        planes = list(zip(group.base_offsets, group.block_strides, group.fragment_bytes, strict=False))
        if not len(group.base_offsets) == len(group.block_strides) == len(group.fragment_bytes) > 0:
            raise _beyond(
                group,
                f"{len(group.base_offsets)} base offsets, {len(group.block_strides)} block strides and "
                f"{len(group.fragment_bytes)} fragment sizes: use as many of each as there are planes",
            )
        addresses, indexes = [], []
        for plane, (offset, stride, fragment_bytes) in enumerate(planes):
            index = bisect_right(self._starts, offset) - 1
            inside = self._ranges[index]
            end = offset + stride * max(0, group.num_blocks - 1) + fragment_bytes
            if end > inside.start + inside.size_bytes:
                raise _beyond(
                    group,
                    f"plane {plane} takes bytes {offset} to {end} of the mapping, range {index} has "
                    f"{inside.start} to {inside.start + inside.size_bytes}: a plane lies wholly in one range",
                )
            addresses.append(inside.address + offset - inside.start)
            indexes.append(index)
        try:
            return DevicePlan(
                np.array(addresses, np.uint64),
                np.array(group.block_strides, np.uint64),
                np.array(group.fragment_bytes, np.uint64),
                group.num_blocks,
                np.array(indexes, np.uint32),
            )
        except (ValueError, OverflowError) as error:
            raise _beyond(group, str(error)) from None

    def unmap(self) -> None:
        while self._pieces:
            self._imports.let_go(self._pieces.pop())

    def add(self, size_bytes: int, address: int, piece: _Handle | _Reservation) -> None:
        """Adds the next range."""
        start = self._ranges[-1].start + self._ranges[-1].size_bytes if self._ranges else 0
        self._starts.append(start)
        self._ranges.append(_Range(start, size_bytes, address))
        self._pieces.append(piece)


class Imports:
    """All memory of other processes that this one has open on its GPU.

    The 64 bytes of a legacy handle can come back after a re-allocation. As long as the old memory is open
    here, the driver would then return that. So open handles are remembered with their buffer ids.
    """

    def __init__(self, driver: Driver, gpu: DeviceInfo, step: Callable[[], None] = lambda: None) -> None:
        """A context of the GPU must be current. `step()` is called, in whichever thread, before each range or
        chunk is taken or released, of which there may be tens of thousands."""
        self._driver = driver
        self._gpu = gpu
        self._step = step
        self._granularity = driver.chunk_granularity(gpu.ordinal)
        self._open: dict[bytes, _Open] = {}
        self._lock = threading.Lock()

    def chunk(self, fd: int, size_bytes: int) -> GpuChunk:
        """Imports a chunk by its descriptor, which stays the caller's. Raises Refusal if it is not a
        chunk's."""
        if size_bytes <= 0 or size_bytes % self._granularity:
            raise Refusal(
                Reason.DEVICE_MEMORY_INVALID,
                f"a chunk's bytes are a multiple of {self._granularity}",
                field="bytes",
                value=size_bytes,
            )
        self._step()
        with _refused("chunks", fd, "is the descriptor that of a chunk of this GPU's memory?"):
            return GpuChunk(self._driver, self._driver.chunk_import(fd), size_bytes, self._step)

    def map(self, message: wire.MapMemory, chunks: Sequence[GpuChunk]) -> tuple[GpuMemory, int]:
        """Maps all ranges of a registration, and returns how many chunks they took. Raises Refusal, and then
        nothing has changed."""
        _check_ranges(message, len(chunks))
        memory = GpuMemory(self)
        used = 0
        try:
            for index, wanted in enumerate(message.ranges):
                self._step()
                if wanted.chunks:
                    mine = chunks[used : used + wanted.chunks]
                    used += wanted.chunks
                    self._map_chunks(memory, index, wanted, mine)
                else:
                    self._map_handle(memory, index, wanted)
        except BaseException:
            memory.unmap()
            raise
        return memory, used

    def let_go(self, piece: _Handle | _Reservation) -> None:
        """Unmaps a piece of memory. This must work; otherwise the process ends."""
        self._step()
        with must_succeed("letting go of an engine's memory"):
            if isinstance(piece, _Reservation):
                self._driver.unmap(piece.address, piece.size_bytes)
                self._driver.unreserve(piece.address, piece.size_bytes)
            else:
                self._driver.ipc_close(piece.base)
        if isinstance(piece, _Handle):
            self._forget(piece.handle)

    def _map_handle(self, memory: GpuMemory, index: int, wanted: wire.DeviceRange) -> None:
        handle, field = wanted.ipc_handle, f"ranges[{index}]"
        with self._lock:
            entry = self._open.setdefault(handle, _Open(wanted.buffer_id, 0))
            if entry.buffer_id != wanted.buffer_id:
                raise Refusal(
                    Reason.WORKER_UNAVAILABLE,
                    "its handle is stale here: memory that had the same handle is still being let go of; "
                    "try again in a second",
                    field=f"{field}.buffer_id",
                    value=wanted.buffer_id,
                )
            entry.times += 1
        try:
            base = self._open_handle(f"{field}.handle", handle)
        except BaseException:
            self._forget(handle)
            raise
        memory.add(wanted.bytes, base + wanted.offset, _Handle(handle, base))
        self._check_place(f"{field}.offset", base, wanted.offset, wanted.bytes)

    def _open_handle(self, field: str, handle: bytes) -> int:
        """Opens a legacy handle. Raises Refusal, IMPORT_REFUSED if a mirror would do."""
        with _refused(field, handle[:8].hex(), "is the engine's memory on this GPU, from cuMemAlloc?"):
            try:
                return self._driver.ipc_open(handle)
            except CudaError as error:
                if not is_refused(error):
                    raise
                raise Refusal(Reason.IMPORT_REFUSED, explain(error), field=field, value=error.name) from None

    def _map_chunks(
        self, memory: GpuMemory, index: int, wanted: wire.DeviceRange, chunks: Sequence[GpuChunk]
    ) -> None:
        field = f"ranges[{index}]"
        total = sum(chunk.size_bytes for chunk in chunks)
        if wanted.offset >= chunks[0].size_bytes or wanted.offset + wanted.bytes > total:
            raise Refusal(
                Reason.DEVICE_MEMORY_INVALID,
                f"its {len(chunks)} chunks have {total} bytes, the first of them {chunks[0].size_bytes}: "
                f"{wanted.bytes} bytes do not fit at this offset",
                field=f"{field}.offset",
                value=wanted.offset,
            )
        with _refused(f"{field}.chunks", len(chunks), "no addresses could be reserved"):
            address = self._driver.reserve(total)
        end = address
        try:
            with _refused(f"{field}.chunks", len(chunks), "are the chunks as large as AddChunks said?"):
                for first in range(0, len(chunks), ACCESS_CHUNKS):
                    begin = end
                    for chunk in chunks[first : first + ACCESS_CHUNKS]:
                        self._step()
                        self._driver.map_chunk(end, chunk.size_bytes, chunk.handle)
                        end += chunk.size_bytes
                    self._step()
                    self._driver.allow_access(begin, end - begin, self._gpu.ordinal)
        except BaseException:
            self._step()
            with must_succeed("letting go of chunks"):
                if end > address:
                    self._driver.unmap(address, end - address)
                self._driver.unreserve(address, total)
            raise
        memory.add(wanted.bytes, address + wanted.offset, _Reservation(address, total))
        for chunk in reversed(chunks):
            self._step()
            end -= chunk.size_bytes
            self._on_this_gpu(f"{field}.chunks", len(chunks), end)

    def _on_this_gpu(self, field: str, value: object, address: int) -> PointerInfo:
        with _refused(field, value, "the driver does not know what it has opened"):
            info = self._driver.pointer_info(address)
        if not info.is_device or info.ordinal != self._gpu.ordinal:
            raise Refusal(
                Reason.DEVICE_MEMORY_INVALID,
                f"this memory is not on {self._gpu.name}: name its own GPU in RegisterWords.device",
                field=field,
                value=value,
            )
        return info

    def _check_place(self, field: str, base: int, offset: int, size_bytes: int) -> None:
        """Raises Refusal unless the range is inside what its handle opened, and that is on this GPU."""
        info = self._on_this_gpu(field, offset, base)
        have = info.base + info.size - base
        if offset + size_bytes > have:
            raise Refusal(
                Reason.DEVICE_MEMORY_INVALID,
                f"the allocation has {have} bytes, the range takes {size_bytes} from this offset",
                field=field,
                value=offset,
            )

    def _forget(self, handle: bytes) -> None:
        with self._lock:
            entry = self._open[handle]
            entry.times -= 1
            if entry.times == 0:
                del self._open[handle]


def _check_ranges(message: wire.MapMemory, chunks: int) -> None:
    """Checks what can be known without the driver. Raises Refusal."""
    if not 0 < len(message.ranges) <= RANGES_MAX:
        raise Refusal(
            Reason.DEVICE_MEMORY_INVALID,
            f"memory of a GPU comes in 1 to {RANGES_MAX} ranges",
            field="ranges",
            value=len(message.ranges),
        )
    for index, wanted in enumerate(message.ranges):
        if wanted.bytes == 0:
            raise Refusal(
                Reason.DEVICE_MEMORY_INVALID, "a range has no bytes", field=f"ranges[{index}].bytes", value=0
            )
        if len(wanted.ipc_handle) != (0 if wanted.chunks else IPC_HANDLE_BYTES):
            raise Refusal(
                Reason.DEVICE_MEMORY_INVALID,
                f"a range has either chunks or a handle of {IPC_HANDLE_BYTES} bytes",
                field=f"ranges[{index}].handle",
                value=len(wanted.ipc_handle),
            )
    total = sum(wanted.bytes for wanted in message.ranges)
    if total != message.mapping_bytes:
        raise Refusal(
            Reason.DEVICE_MEMORY_INVALID,
            f"the ranges have {total} bytes in all",
            field="mapping_bytes",
            value=message.mapping_bytes,
        )
    wanted_chunks = sum(wanted.chunks for wanted in message.ranges)
    if wanted_chunks > chunks:
        raise Refusal(
            Reason.DEVICE_MEMORY_INVALID,
            f"the ranges take {wanted_chunks} chunks: add as many before",
            field="chunks",
            value=chunks,
        )


@contextmanager
def _refused(field: str, value: object, advice: str) -> Iterator[None]:
    """Turns an error of the driver into a Refusal."""
    try:
        with context_guard():
            yield
    except CudaError as error:
        reason = Reason.DEVICE_OUT_OF_MEMORY if error.code == OUT_OF_MEMORY else Reason.DEVICE_MEMORY_INVALID
        raise Refusal(reason, f"{error}; {advice}", field=field, value=value) from None


def _beyond(group: wire.MappedGroup, why: str) -> Refusal:
    return Refusal(Reason.PLANE_BEYOND_MAPPING, why, field=f"groups[{group.group}]", value=group.num_blocks)
