"""A plain client with a KV cache of its own. Contents follow from hashes, so that any wrong byte shows.

As a program it stores block after block until it is killed:
    python -m tests.support.plain_client SOCKET INSTANCE [BATCH MORE MOST]
With BATCH, it goes on for MORE batches after it was seen in the middle of batch BATCH or a later one, or
until batch MOST if it never was. Then it says OVER, and waits.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
from kvtier import (
    Client,
    ClientOptions,
    Group,
    Lookup,
    LookupMode,
    Namespace,
    Outcome,
    PartState,
    Plane,
    SharedBuffer,
)
from kvtier.layout import Settings

from tests.support.process import until

BLOCKS = 64
FRAGMENT_BYTES = 8_192
PLANES = 2
BLOCK_BYTES = FRAGMENT_BYTES * PLANES
NAMESPACE = Namespace(model="tests/plain", kv_dtype="uint8", hash_scheme="tests:name", hash_bytes=32)
READY_S = 60.0
TRANSFER_S = 60.0


def block_hashes(name: str, numbers: Iterable[int]) -> list[bytes]:
    """Returns the hashes of the blocks with these numbers in a family."""
    return [hashlib.sha256(f"{name}:{number}".encode()).digest() for number in numbers]


def content(value: bytes) -> npt.NDArray[np.uint8]:
    """Returns the bytes of the block with this hash, of all planes."""
    return np.random.default_rng(np.frombuffer(value, np.uint8)).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def group(blocks: int = BLOCKS) -> Group:
    """Makes a group of two planes, one after the other in memory."""
    return Group(
        block_tokens=16,
        num_blocks=blocks,
        planes=tuple(
            Plane(
                fragment_bytes=FRAGMENT_BYTES,
                base_offset=index * blocks * FRAGMENT_BYTES,
                block_stride_bytes=FRAGMENT_BYTES,
                description=f"plane {index}",
            )
            for index in range(PLANES)
        ),
    )


class Cache:
    """The memory of one rank."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self.memory = SharedBuffer.create(blocks * BLOCK_BYTES)
        self.planes = self.memory.array.reshape(PLANES, blocks, FRAGMENT_BYTES)
        self.group = group(blocks)

    def fill(self, block_id: int, value: bytes) -> None:
        """Gives the block the content of its hash."""
        self.planes[:, block_id] = content(value).reshape(PLANES, FRAGMENT_BYTES)

    def wipe(self) -> None:
        self.planes[:] = 0x3F

    def right(self, block_id: int, value: bytes) -> bool:
        """Whether the block has the content of this hash, every byte of it."""
        return bool((self.planes[:, block_id].reshape(-1) == content(value)).all())

    def close(self) -> None:
        self.planes = np.zeros((0, 0, 0), np.uint8)
        self.memory.close()


class PlainClient:
    """A client of world size 1 with a cache: `client` is the library's."""

    def __init__(
        self,
        socket: Path,
        instance: str,
        namespace: Namespace = NAMESPACE,
        configuration: Settings = (),
        prefill_tokens_per_s: float = 0.0,
    ) -> None:
        self.cache = Cache()
        self._configuration = configuration
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self.client = Client(**self._options(socket, instance, namespace))

    def _options(self, socket: Path, instance: str, namespace: Namespace) -> ClientOptions:
        return {
            "instance": instance,
            "namespace": namespace,
            "groups": [self.cache.group],
            "memory": self.cache.memory,
            "socket": socket,
            "program": "tests",
            "configuration": self._configuration,
            "prefill_tokens_per_s": self._prefill_tokens_per_s,
        }

    def ready(self) -> Self:
        assert self.client.wait_ready(READY_S), self.client.status
        return self

    def store(self, hashes: Sequence[bytes], first: int = 0) -> Outcome:
        """Fills blocks from `first` on and stores them."""
        for index, value in enumerate(hashes):
            self.cache.fill(first + index, value)
        return self.client.store(hashes, range(first, first + len(hashes))).wait(TRANSFER_S)

    def lookup(
        self, hashes: Sequence[bytes], mode: LookupMode = LookupMode.PREFIX, *, lease: bool = False
    ) -> Lookup:
        """Looks up, however long the daemon takes. On a busy machine an engine's patience would end before
        the answer comes, which is not what most tests are about."""
        answers: list[Lookup] = []

        def answered() -> bool:
            answers.append(self.client.lookup(hashes, mode=mode, lease=lease, timeout_s=READY_S))
            return answers[-1].answered

        until(answered, "the daemon answers")
        return answers[-1]

    def known_run(self, hashes: Sequence[bytes]) -> int:
        """Returns what the index page says, as soon as it can be read."""
        known: list[int | None] = []

        def told() -> bool:
            known.append(self.client.known_run(hashes))
            return known[-1] is not None

        until(told, "the index page can be believed")
        return known[-1] or 0

    def load(self, hashes: Sequence[bytes]) -> int:
        """Loads the prefix that hits to the blocks from 0 on, checks every byte, and returns its length."""
        self.cache.wipe()
        with self.lookup(hashes, lease=True) as hit:
            if not hit.hits:
                return 0
            outcome = self.client.load(hit, range(hit.hits)).wait(TRANSFER_S)
        assert outcome.done, outcome
        wrong = [index for index in range(hit.hits) if not self.cache.right(index, hashes[index])]
        assert not wrong, f"blocks {wrong} have wrong bytes"
        assert all(bool((self.cache.planes[:, block] == 0x3F).all()) for block in range(hit.hits, BLOCKS))
        return hit.hits

    def close(self) -> bool:
        fenced = self.client.close()
        self.cache.close()
        return fenced

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main(socket: Path, instance: str, wanted: int = 0, more: int = 0, most: float = math.inf) -> None:
    """Stores without end. Prints STARTED when a part of its store is being copied, and STORED when a store is
    done. With `most`, its last batch is `most`, or the one `more` after it has said STARTED of batch `wanted`
    or a later one."""
    plain = PlainClient(socket, instance).ready()
    last = most
    for batch in itertools.count():
        if batch > last:
            print("OVER", batch, flush=True)
            while True:
                signal.pause()
        hashes = block_hashes(instance, range(batch * BLOCKS, (batch + 1) * BLOCKS))
        for index, value in enumerate(hashes):
            plain.cache.fill(index, value)
        transfer = plain.client.store(hashes, range(BLOCKS))
        while transfer.part and not transfer.ended:
            if plain.client.part_state(transfer.part) is PartState.STARTED:
                print("STARTED", batch, flush=True)
                if last == most < math.inf and batch >= wanted:
                    last = min(most, batch + more)
                break
        if transfer.wait(TRANSFER_S).done:
            print("STORED", batch, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
