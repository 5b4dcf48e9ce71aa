"""A mirror in host memory of device memory that no other process can map."""

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Self

import numpy as np
import numpy.typing as npt
from kvtier_kernels.cuda import Copies

from kvtier.cuda.doorbells import GpuDoorbells
from kvtier.cuda.gpu import Gpu, OnePerGpu, driver_errors
from kvtier.cuda.memory import DeviceMemory
from kvtier.errors import KvtierError, Reason
from kvtier.layout import Group, check_layout
from kvtier.memory import Ring, SharedBuffer
from kvtier.queries import BlockIds, list_block_ids

STAGING_BYTES = 16 << 20
"""The pinned memory that copies go through, once per GPU and process."""

U64 = npt.NDArray[np.uint64]


class MirrorMemory:
    """Host memory with the shape of a device memory, which a client is given as `memory=` in its place.

    The client's process copies between the two, block by block:
    - store: `copy_out(ids)`, then `client.store(..., ids)`; once that is fenced, `discard(ids)`;
    - load: `populate(ids)`, then `client.load(..., ids)`; once that is DONE, `copy_in(ids)`.

    The mirror is sparse: only blocks on their way take memory, all of it this process's. Copies run on a
    stream of their own, so they do not wait for the engine's work, and do not delay it. What produces a block
    must be done before `copy_out`, and what still uses it before `copy_in`; launch what will use it after
    `copy_in`.

    Calls wait for their copies, so make them in a helper thread, not in the engine's. Any thread may call;
    one copy per GPU runs at a time. Two calls at the same time must be for different blocks.
    """

    def __init__(self, memory: DeviceMemory, groups: Sequence[Group]) -> None:
        """`groups` are those of the client. Raises KvtierError if they do not fit, OSError without memory."""
        check_layout(groups, memory.size_bytes, memory.range_bytes)
        self._memory = memory
        self._groups = tuple(groups)
        self._buffer = SharedBuffer.create(memory.size_bytes, "kvtier-mirror", sparse=True)

    @property
    def size_bytes(self) -> int:
        """The size of the device memory."""
        return self._memory.size_bytes

    @property
    def is_sparse(self) -> bool:
        """True."""
        return self._buffer.is_sparse

    def fileno(self) -> int:
        """Returns the memfd, or -1 once the mirror is closed."""
        return self._buffer.fileno()

    @property
    def held_bytes(self) -> int:
        """How many bytes of host memory it takes now."""
        return self._buffer.held_bytes

    def stream_doorbells(self, ring: Ring) -> GpuDoorbells:
        """Returns what lets streams of the GPU ring doorbells."""
        return self._memory.stream_doorbells(ring)

    @property
    def context(self) -> AbstractContextManager[object]:
        """Makes the context of the device memory's GPU current in the caller's thread, for its own calls."""
        return self._memory.gpu.context

    def copy_out(self, block_ids: BlockIds, *, group: int = 0) -> None:
        """Copies blocks from the device to the mirror, and returns when the bytes are there. Raises
        KvtierError; then the content of these blocks in the mirror is unknown."""
        offsets, addresses, sizes = self._runs(block_ids, group)
        with driver_errors("block_ids", len(block_ids)), _staging_of(self._memory.gpu) as staging:
            for batch in staging.batches(offsets, addresses, sizes):
                staging.copy(batch, to_host=True)
                for offset, place, size in batch.rows():
                    self._buffer.array[offset : offset + size] = staging.array[place : place + size]

    def populate(self, block_ids: BlockIds, *, group: int = 0) -> None:
        """Takes memory for blocks that are to be loaded, because the daemon takes none for others. Raises
        OSError without memory."""
        offsets, _, sizes = self._runs(block_ids, group)
        for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
            self._buffer.populate(offset, size)

    def copy_in(self, block_ids: BlockIds, *, group: int = 0, discard: bool = True) -> None:
        """Copies blocks from the mirror to the device, and returns when the bytes are there. Then gives the
        mirror's memory back, unless `discard` is False. Raises KvtierError; then the content of these blocks
        on the device is unknown."""
        offsets, addresses, sizes = self._runs(block_ids, group)
        with driver_errors("block_ids", len(block_ids)), _staging_of(self._memory.gpu) as staging:
            for batch in staging.batches(offsets, addresses, sizes):
                for offset, place, size in batch.rows():
                    staging.array[place : place + size] = self._buffer.array[offset : offset + size]
                staging.copy(batch, to_host=False)
        if discard:
            self._discard(offsets, sizes)

    def discard(self, block_ids: BlockIds, *, group: int = 0) -> None:
        """Gives the memory of these blocks back to the system, except for pages shared with others."""
        offsets, _, sizes = self._runs(block_ids, group)
        self._discard(offsets, sizes)

    def close(self) -> None:
        """Gives all memory back. Call it after the clients that were given the mirror are closed."""
        self._buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _discard(self, offsets: U64, sizes: U64) -> None:
        for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
            self._buffer.discard(offset, size)

    def _runs(self, block_ids: BlockIds, group: int) -> tuple[U64, U64, U64]:
        """Returns offset, address and size of the pieces that are contiguous on both sides."""
        if not 0 <= group < len(self._groups):
            message = f"there are the groups 0 to {len(self._groups) - 1}"
            raise KvtierError(Reason.UNKNOWN_GROUP, message, field="group", value=group)
        shape = self._groups[group]
        ids = np.array(list_block_ids(block_ids, shape.num_blocks, distinct=True), np.uint64)
        strides = np.array([[plane.block_stride_bytes] for plane in shape.planes], np.uint64)
        bases = np.array([[plane.base_offset] for plane in shape.planes], np.uint64)
        offsets = (bases + strides * ids).reshape(-1)
        sizes = np.repeat(np.array([plane.fragment_bytes for plane in shape.planes], np.uint64), len(ids))
        order = np.argsort(offsets)
        return _merge(offsets[order], self._memory.addresses_of(offsets[order]), sizes[order])


def _merge(offsets: U64, addresses: U64, sizes: U64) -> tuple[U64, U64, U64]:
    """Joins pieces, in the order of their offsets, where one ends at the start of the next on both sides."""
    if not len(offsets):
        return offsets, addresses, sizes
    apart = (offsets[:-1] + sizes[:-1] != offsets[1:]) | (addresses[:-1] + sizes[:-1] != addresses[1:])
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return offsets[first], addresses[first], np.add.reduceat(sizes, first)


class _Batch:
    """Pieces that fit the staging memory together."""

    def __init__(self, base: int, pieces: list[tuple[int, int, int]]) -> None:
        """`pieces` are offset, address and size in bytes; `base` is the address of the staging memory."""
        self._offsets = [offset for offset, _, _ in pieces]
        self.addresses = np.array([address for _, address, _ in pieces], np.uint64)
        self.sizes = np.array([size for _, _, size in pieces], np.uint64)
        self._starts = np.concatenate(([0], np.cumsum(self.sizes)[:-1])).astype(np.uint64)
        self.places = self._starts + np.uint64(base)

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yields each piece's offset in the mirror, position in the staging memory, and size in bytes."""
        return zip(self._offsets, self._starts.tolist(), self.sizes.tolist(), strict=True)


class _Staging:
    """Pinned memory and a stream for the copies of one GPU. Inside a `with` it belongs to one thread, in
    which the context is current."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._lock = threading.Lock()
        self._mapping: mmap.mmap | None = None
        self._stream: int | None = None

    def __enter__(self) -> "_Staging":
        self._lock.acquire()
        self._gpu.context.push()
        try:
            self._prepare()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._gpu.context.pop()
        finally:
            self._lock.release()

    def batches(self, offsets: U64, addresses: U64, sizes: U64) -> Iterator[_Batch]:
        """Yields the pieces, cut so that each batch fits."""
        pieces: list[tuple[int, int, int]] = []
        room = STAGING_BYTES
        for offset, address, left in zip(offsets.tolist(), addresses.tolist(), sizes.tolist(), strict=True):
            while left:
                size = min(left, room)
                pieces.append((offset, address, size))
                offset, address, left, room = offset + size, address + size, left - size, room - size
                if not room:
                    yield _Batch(self.address, pieces)
                    pieces, room = [], STAGING_BYTES
        if pieces:
            yield _Batch(self.address, pieces)

    def copy(self, batch: _Batch, *, to_host: bool) -> None:
        """Copies a batch. Returns when no copy is under way, also after a failure. Raises CudaError."""
        assert self._stream is not None
        try:
            if to_host:
                self._copies.to_host(batch.places, batch.addresses, batch.sizes, self._stream)
            else:
                self._copies.to_device(batch.addresses, batch.places, batch.sizes, self._stream)
        finally:
            self._gpu.driver.stream_synchronize(self._stream)

    def _prepare(self) -> None:
        if self._mapping is not None:
            return
        driver = self._gpu.driver
        if self._stream is None:
            self._stream = driver.stream_create()
        self._copies = Copies(driver)
        mapping = mmap.mmap(-1, STAGING_BYTES)
        array = np.frombuffer(mapping, np.uint8)
        # last, because what is registered must stay mapped
        driver.host_register(array.ctypes.data, STAGING_BYTES)
        self.array: npt.NDArray[np.uint8] = array
        self.address: int = array.ctypes.data
        self._mapping = mapping


_staging_of = OnePerGpu(_Staging)
