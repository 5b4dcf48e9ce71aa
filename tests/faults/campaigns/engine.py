"""A plain client that behaves like an engine: a KV cache of several planes, its blocks all their own."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
from kvtier import Client, Group, Lookup, Namespace, Plane, SharedBuffer, Transfer

from tests.faults.campaigns.content import BLOCK_BYTES, FRAGMENT_BYTES, MODEL, PLANES, block_of
from tests.support.process import until

READY_S = 60.0


class PlainEngine:
    """One instance with `num_blocks` engine blocks. Close it, or use it as a context manager."""

    def __init__(self, socket: Path, instance: str, num_blocks: int = 512) -> None:
        self.num_blocks = num_blocks
        self.memory = SharedBuffer.create(num_blocks * BLOCK_BYTES)
        # Planes lie one after another, each with all blocks: a block is PLANES fragments far apart.
        self._planes = self.memory.array.reshape(PLANES, num_blocks, FRAGMENT_BYTES)
        group = Group(
            block_tokens=16,
            num_blocks=num_blocks,
            planes=tuple(
                Plane(
                    fragment_bytes=FRAGMENT_BYTES,
                    base_offset=plane * num_blocks * FRAGMENT_BYTES,
                    block_stride_bytes=FRAGMENT_BYTES,
                )
                for plane in range(PLANES)
            ),
        )
        namespace = Namespace(model=MODEL, kv_dtype="uint8", hash_scheme="sha256")
        self.client = Client(
            instance=instance, namespace=namespace, groups=[group], memory=self.memory, socket=socket
        )

    def wait_ready(self) -> None:
        assert self.client.wait_ready(READY_S), self.client.status

    def lookup(self, hashes: Sequence[bytes], *, lease: bool = False) -> Lookup:
        """What the daemon says, however long it takes: a client does not wait for one that has been silent
        for a second, and on a busy machine that is not what a campaign asks about."""
        answers: list[Lookup] = []

        def answered() -> bool:
            answers.append(self.client.lookup(hashes, lease=lease, timeout_s=READY_S))
            return answers[-1].answered

        until(answered, "the daemon answers")
        return answers[-1]

    def store(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> Transfer:
        """As soon as the daemon is there to be asked."""
        self.wait_ready()
        return self.client.store(hashes, block_ids)

    def load(self, found: Lookup, block_ids: Sequence[int]) -> Transfer:
        """Likewise."""
        self.wait_ready()
        return self.client.load(found, block_ids)

    def fill(self, block_ids: list[int], hashes: list[bytes]) -> None:
        """Writes what the hashes say into the engine's blocks."""
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            self._planes[:, block_id] = block_of(block_hash).reshape(PLANES, FRAGMENT_BYTES)

    def wipe(self, block_ids: list[int]) -> None:
        """So that a load that does nothing shows."""
        self._planes[:, block_ids] = 0x5A

    def read(self, block_ids: list[int]) -> npt.NDArray[np.uint8]:
        """Content of engine blocks, shape (n, BLOCK_BYTES)."""
        return np.ascontiguousarray(self._planes[:, block_ids].transpose(1, 0, 2)).reshape(-1, BLOCK_BYTES)

    def close(self) -> None:
        self.client.close()
        self._planes = np.empty((0, 0, 0), np.uint8)
        self.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
