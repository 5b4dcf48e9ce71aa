"""An engine whose KV cache is in a GPU's memory of either kind, filled by the host or by a stream."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvtier import Client, Group, Namespace, Plane
from kvtier.cuda import DeviceMemory
from kvtier_kernels import cuda

from tests.faults.campaigns.content import BLOCK_BYTES, FRAGMENT_BYTES, MODEL, PLANES, block_of

WIPED = 0x5A
OFFSET = 12_288
"""Where the cache begins in its allocation: no engine's begins at the base of what it allocated."""


class GpuEngine:
    """One instance with `num_blocks` engine blocks, in the same planes as `PlainEngine`, so that they share.

    A stream stands for the engine's kernels: `fill` and `wipe` may be queued on it, and the host sees them
    done only after `settle`. The process ends without closing anything, as engines do.
    """

    def __init__(
        self, socket: Path, instance: str, num_blocks: int, *, chunked: bool, by_stream: bool
    ) -> None:
        self.num_blocks = num_blocks
        self.by_stream = by_stream
        self._driver = cuda.load()
        self._context = self._driver.retain_primary(0)
        self._context.make_current()
        size_bytes = num_blocks * BLOCK_BYTES
        self._address = (
            self._chunks(OFFSET + size_bytes) if chunked else self._alloc(OFFSET + size_bytes)
        ) + OFFSET
        seen = (ctypes.c_uint8 * size_bytes).from_address(self._address)
        self._planes = np.ctypeslib.as_array(seen).reshape(PLANES, num_blocks, FRAGMENT_BYTES)
        self._planes[:] = WIPED
        # What kernels would produce lies here until the stream gets to it.
        self._staging_map = mmap.mmap(-1, 2 * size_bytes)
        staging = np.frombuffer(self._staging_map, np.uint8).reshape(2, PLANES, num_blocks, FRAGMENT_BYTES)
        self._staging: npt.NDArray[np.uint8] = staging
        self._staging[1] = WIPED
        self._driver.host_register(staging.ctypes.data, staging.nbytes)
        self.stream = self._driver.stream_create()
        planes = tuple(
            Plane(
                fragment_bytes=FRAGMENT_BYTES,
                base_offset=plane * num_blocks * FRAGMENT_BYTES,
                block_stride_bytes=FRAGMENT_BYTES,
            )
            for plane in range(PLANES)
        )
        self.client = Client(
            instance=instance,
            namespace=Namespace(model=MODEL, kv_dtype="uint8", hash_scheme="sha256"),
            groups=[Group(block_tokens=16, num_blocks=num_blocks, planes=planes)],
            memory=DeviceMemory(self._address, size_bytes),
            socket=socket,
        )

    def _alloc(self, size_bytes: int) -> int:
        return self._driver.alloc(size_bytes)

    def _chunks(self, size_bytes: int) -> int:
        """Chunks side by side, as expandable segments are."""
        grain = self._driver.chunk_granularity(0)
        size_bytes = -(-size_bytes // grain) * grain
        address = self._driver.reserve(size_bytes)
        for offset in range(0, size_bytes, grain):
            chunk = self._driver.chunk_create(grain, 0)
            self._driver.map_chunk(address + offset, grain, chunk)
            self._driver.chunk_release(chunk)
        self._driver.allow_access(address, size_bytes, 0)
        return address

    def fill(self, blocks: slice, hashes: list[bytes]) -> None:
        """Gives the blocks what the hashes say."""
        for block, block_hash in zip(range(blocks.start, blocks.stop), hashes, strict=True):
            self._staging[0, :, block] = block_of(block_hash).reshape(PLANES, FRAGMENT_BYTES)
        self._produce(0, blocks)

    def wipe(self, blocks: slice) -> None:
        """So that a load that does nothing shows, and one that comes too early is undone."""
        self._produce(1, blocks)

    def _produce(self, which: int, blocks: slice) -> None:
        if not self.by_stream:
            self._planes[:, blocks] = self._staging[which, :, blocks]
            return
        size_bytes = (blocks.stop - blocks.start) * FRAGMENT_BYTES
        for plane in range(PLANES):
            source = self._staging[which, plane, blocks].ctypes.data
            self._driver.copy_async(self._planes[plane, blocks].ctypes.data, source, size_bytes, self.stream)

    def ring(self, doorbell: int, value: int) -> None:
        """After what was produced before."""
        if self.by_stream:
            self.client.ring_on(self.stream, doorbell, value)
        else:
            self.client.ring(doorbell, value)

    def settle(self) -> None:
        """The host waits for its stream."""
        self._driver.stream_synchronize(self.stream)

    def read(self, blocks: slice) -> npt.NDArray[np.uint8]:
        """What the blocks hold, shape (n, BLOCK_BYTES)."""
        return np.ascontiguousarray(self._planes[:, blocks].transpose(1, 0, 2)).reshape(-1, BLOCK_BYTES)
