"""One plain memcpy as the limit of stores and loads: it keeps nothing by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.benchmarks.peers.driver import Peer, PeerEngine, PeerShape, Prompt

MEMCPY = Peer(
    "memcpy",
    "one memcpy",
    "One thread copies as many bytes, in one piece, into memory that is there already: the limit.",
    "tests.benchmarks.peers.memcpy_peer:MemcpyEngine",
)


class MemcpyEngine(PeerEngine):
    """Two buffers. Nothing can be looked up."""

    def register(self, address: Mapping[str, Any], shape: PeerShape, blocks: int, instance: str) -> None:
        """Allocates both buffers, and touches every page of them. There is no room for block 0, which nobody
        uses: its place is that of the last block of the plane before."""
        used, size = blocks - 1, shape.fragment_bytes
        self._shape = shape
        flat = np.ones(size + used * shape.block_bytes, np.uint8)
        self._cache, self._store = flat[size:], np.ones(used * shape.block_bytes, np.uint8)
        self.memory = [
            flat[plane * used * size : (plane * used + blocks) * size].reshape(blocks, size)
            for plane in range(shape.planes)
        ]

    def names_of(self, prompt: Prompt) -> int:
        """How many blocks."""
        return prompt.blocks

    def store(self, names: int, block_ids: Sequence[int]) -> None:
        """`numpy.copyto` of as many bytes, from the cache's beginning."""
        size = names * self._shape.block_bytes
        np.copyto(self._store[:size], self._cache[:size])

    def lookup(self, names: int) -> tuple[int, Any]:
        """Not timed anywhere: everything is there."""
        return names, None

    def give_back(self, found: Any) -> None:
        """Nothing is held."""

    def load(self, names: int, found: Any, block_ids: Sequence[int]) -> None:
        """`numpy.copyto` of as many bytes, back to the cache's beginning."""
        size = names * self._shape.block_bytes
        np.copyto(self._cache[:size], self._store[:size])

    def clear(self) -> None:
        """Nothing is kept by name."""

    def held(self, names: int) -> int:
        """Nothing is held."""
        return 0

    def stats(self) -> dict[str, float]:
        """Nothing is counted."""
        return {}

    def close(self) -> None:
        """Gives the memory back."""
        self.memory = []
        self._cache = self._store = np.empty(0, np.uint8)
