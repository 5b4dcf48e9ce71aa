"""An engine whose KV cache is memory of a fake GPU of both kinds, and the copy worker that serves it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from kvtier import Client, Group, Namespace, Outcome, Plane
from kvtier.cuda import DeviceMemory

from tests.support.engine_gpu import EngineGpu
from tests.support.fake_cuda import FakeCuda
from tests.support.plain_client import content
from tests.support.process import Daemon, until

BLOCKS = 32
FRAGMENT_BYTES = 8_192
PLANE_BYTES = BLOCKS * FRAGMENT_BYTES
CHUNK_BYTES = PLANE_BYTES // 2
"""A fake machine's granularity, so that a plane takes two chunks."""
WIPED = 0x3F
DEADLINE_S = 60.0
NAMESPACE = Namespace(model="tests/gpu", kv_dtype="uint8", hash_scheme="tests:name", hash_bytes=32)
PLANES = tuple(
    Plane(fragment_bytes=FRAGMENT_BYTES, base_offset=index * PLANE_BYTES, block_stride_bytes=FRAGMENT_BYTES)
    for index in range(2)
)


class Device:
    """A GPU with memory for one engine: a plane of cuMemAlloc's and one of chunks. Engines come and go; the
    memory stays. For one thread at a time."""

    def __init__(self, fake: FakeCuda, daemon: Daemon, ordinal: int) -> None:
        self.fake, self.daemon, self.ordinal = fake, daemon, ordinal
        self.name = fake.device_name(ordinal)
        gpu = EngineGpu(fake, ordinal)
        legacy, chunks = gpu.alloc(PLANE_BYTES), gpu.alloc_chunks(2, CHUNK_BYTES)
        self.memory = DeviceMemory.join(
            [DeviceMemory(address, PLANE_BYTES, ordinal=ordinal) for address in (legacy, chunks.address)]
        )
        self._planes = [
            gpu.view(address, PLANE_BYTES).reshape(BLOCKS, FRAGMENT_BYTES)
            for address in (legacy, chunks.address)
        ]
        self._engines = 0

    def engine(self, socket: Path) -> Client:
        """A new client on this memory, on its way to be ready."""
        self._engines += 1
        return Client(
            instance=f"{self.name} {self._engines}",
            namespace=NAMESPACE,
            groups=[Group(block_tokens=16, num_blocks=BLOCKS, planes=PLANES)],
            memory=self.memory,
            socket=socket,
            program="tests",
        )

    def fill(self, first: int, hashes: Sequence[bytes]) -> None:
        """Gives blocks the content of these hashes."""
        for block, value in enumerate(hashes, first):
            for plane, data in zip(self._planes, content(value).reshape(2, FRAGMENT_BYTES), strict=True):
                plane[block] = data

    def wipe(self) -> None:
        for plane in self._planes:
            plane[:] = WIPED

    def check(self, first: int, hashes: Sequence[bytes]) -> None:
        """These blocks have the content of the hashes, every byte of it, and all others are wiped."""
        expected = np.full((2, BLOCKS, FRAGMENT_BYTES), WIPED, np.uint8)
        for block, value in enumerate(hashes, first):
            expected[:, block] = content(value).reshape(2, FRAGMENT_BYTES)
        wrong = sorted(
            {
                int(block)
                for plane, want in zip(self._planes, expected, strict=True)
                for block in np.nonzero((plane != want).any(axis=1))[0]
            }
        )
        assert not wrong, f"{self.name}: blocks {wrong} have wrong bytes"

    def check_outside(self, first: int, n: int) -> None:
        """Blocks other than these are wiped."""
        for plane in self._planes:
            assert (plane[:first] == WIPED).all()
            assert (plane[first + n :] == WIPED).all()

    def worker_pid(self) -> int | None:
        """Of its live worker."""
        for worker in self.daemon.status().workers:
            if worker.device == self.name and worker.state == "live":
                return int(worker.pid)
        return None

    def imports(self) -> int:
        """What living processes have open of its memory."""
        return sum(1 for one in self.fake.open_imports() if one.device == self.ordinal)

    def until_let_go(self) -> None:
        until(lambda: self.imports() == 0, f"{self.name}: the imports of an engine that has left are closed")


def ready(client: Client) -> None:
    assert client.wait_ready(DEADLINE_S), client.status


def ended(outcome: Outcome) -> Outcome:
    """A transfer's end: fenced, and if it is not done, with a reason."""
    assert outcome.fenced, outcome
    assert outcome.done or outcome.error is not None, outcome
    return outcome
