"""A plain client whose KV cache is memory of a GPU behind the fake driver."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvtier import Client, ClientOptions, Namespace
from kvtier.cuda import DeviceMemory

from tests.support.engine_gpu import Chunks, EngineGpu
from tests.support.plain_client import (
    BLOCK_BYTES,
    BLOCKS,
    FRAGMENT_BYTES,
    NAMESPACE,
    PLANES,
    READY_S,
    content,
    group,
)

SIZE_BYTES = BLOCKS * BLOCK_BYTES
SHIFT_BYTES = 4_096
"""The cache does not begin where its allocation does."""


class GpuCache:
    """The memory of one rank, from cuMemAlloc or made of chunks."""

    def __init__(self, gpu: EngineGpu, *, chunks: bool = False) -> None:
        self.gpu = gpu
        self.group = group()
        self._chunks: Chunks | None = None
        if chunks:
            chunk_bytes = gpu.driver.chunk_granularity(gpu.ordinal)
            self._chunks = gpu.alloc_chunks(-(-(SIZE_BYTES + SHIFT_BYTES) // chunk_bytes))
            self._base = self._chunks.address
        else:
            self._base = gpu.alloc(SIZE_BYTES + SHIFT_BYTES)
        self.memory = DeviceMemory(self._base + SHIFT_BYTES, SIZE_BYTES)

    def free(self) -> None:
        """Frees the memory, which nothing may use any more. Chunks keep their addresses."""
        if self._chunks is None:
            self.gpu.driver.free(self._base)
        else:
            self._chunks.unmap()

    def allocate(self) -> None:
        """Allocates other memory after `free`; new chunks get the same addresses."""
        if self._chunks is None:
            self._base = self.gpu.alloc(SIZE_BYTES + SHIFT_BYTES)
        else:
            self._chunks.map()
        self.memory = DeviceMemory(self._base + SHIFT_BYTES, SIZE_BYTES)

    @property
    def planes(self) -> npt.NDArray[np.uint8]:
        """The memory as the engine's kernels see it."""
        view = self.gpu.view(self._base + SHIFT_BYTES, SIZE_BYTES)
        return view.reshape(PLANES, BLOCKS, FRAGMENT_BYTES)

    def fill(self, block_id: int, value: bytes) -> None:
        """Gives the block the content of its hash."""
        self.planes[:, block_id] = content(value).reshape(PLANES, FRAGMENT_BYTES)

    def wipe(self) -> None:
        self.planes[:] = 0x3F

    def right(self, block_id: int, value: bytes) -> bool:
        """Whether the block has the content of this hash, every byte of it."""
        return bool((self.planes[:, block_id].reshape(-1) == content(value)).all())

    def check(self, hashes: Sequence[bytes]) -> None:
        """Checks that the first blocks have these contents, and the rest is as `wipe` left it."""
        wrong = [index for index, value in enumerate(hashes) if not self.right(index, value)]
        assert not wrong, f"blocks {wrong} have wrong bytes"
        assert bool((self.planes[:, len(hashes) :] == 0x3F).all())


def options(cache: GpuCache, socket: Path, instance: str, namespace: Namespace = NAMESPACE) -> ClientOptions:
    """Returns the options of a client that shares this cache."""
    return {
        "instance": instance,
        "namespace": namespace,
        "groups": [cache.group],
        "memory": cache.memory,
        "socket": socket,
        "program": "tests",
    }


def ready(client: Client) -> Client:
    assert client.wait_ready(READY_S), client.status
    return client
