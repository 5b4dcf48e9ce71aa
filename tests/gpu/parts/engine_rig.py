"""A real kvtierd, and an engine without torch: device memory of this process, given to the client as any
engine does."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvtier import Client, Group, Namespace, Outcome, Plane, Transfer
from kvtier.cuda import DeviceMemory
from kvtier_kernels import xxh3_64_rows

from tests.gpu.parts.device import Device
from tests.support.process import Daemon

DEADLINE_S = 60.0
SCRATCH_VARIABLE = "KVTIER_GPU_SCRATCH"
"""Folder in /dev/shm for pools; whoever set it removes it, also after a kill."""

STEP_BYTES = 64 << 20

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


@contextmanager
def place_for_a_daemon() -> Iterator[tuple[Path, Path]]:
    """Folders for sockets and for the pool."""
    run = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix="kvtier-test-gpu-", dir=os.environ.get(SCRATCH_VARIABLE, "/dev/shm")))
    try:
        yield run, pool / "pool"
    finally:
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(pool, ignore_errors=True)


@contextmanager
def running_daemon(
    run: Path, pool: Path, pool_bytes: int, extent_bytes: int, **more: str
) -> Iterator[Daemon]:
    """Serves until the end of the `with`, if it still lives then. `more`: further settings."""
    settings = more | {
        "pool__size": str(pool_bytes),
        "pool__extent_size": str(extent_bytes),
        "metrics__listen": "127.0.0.1:0",
    }
    daemon = Daemon(run, pool, **settings)
    try:
        yield daemon
    finally:
        if daemon.process.poll() is None:
            daemon.kill()


class EngineCache:
    """Device memory as an engine's paged cache: planes one after another, each with every block's
    fragment."""

    def __init__(
        self, device: Device, num_blocks: int, planes: int, fragment_bytes: int, address: int | None = None
    ) -> None:
        """In memory of its own, unless `address` says where as many bytes are."""
        self.num_blocks, self.planes, self.fragment_bytes = num_blocks, planes, fragment_bytes
        self.block_bytes = planes * fragment_bytes
        self.n = num_blocks * self.block_bytes
        self._device = device
        self.address = device.alloc(self.n) if address is None else address

    def group(self) -> Group:
        """What a client is told of it."""
        return Group(
            block_tokens=16,
            num_blocks=self.num_blocks,
            planes=tuple(
                Plane(
                    fragment_bytes=self.fragment_bytes,
                    base_offset=plane * self.num_blocks * self.fragment_bytes,
                    block_stride_bytes=self.fragment_bytes,
                )
                for plane in range(self.planes)
            ),
        )

    def fragment_address(self, plane: int, block: int) -> int:
        """Where this plane's part of a block lies."""
        return self.address + (plane * self.num_blocks + block) * self.fragment_bytes

    def write_block(self, block: int, content: U8) -> None:
        """`content` has the block's bytes, plane by plane."""
        for plane, part in enumerate(content.reshape(self.planes, self.fragment_bytes)):
            self._device.write(self.fragment_address(plane, block), part)

    def contents(self) -> U8:
        """The whole cache as it is now, of shape (planes, blocks, bytes of a fragment)."""
        return self._device.read(self.address, self.n).reshape(
            self.planes, self.num_blocks, self.fragment_bytes
        )

    def fill(self) -> U64:
        """New random content everywhere; returns each block's checksum."""
        self._device.fill(self.address, self.n)
        return self.checksums()

    def wipe(self, value: int = 0x5A) -> None:
        """Every byte becomes this one."""
        poison = np.full(min(STEP_BYTES, self.n), value, np.uint8)
        for offset in range(0, self.n, STEP_BYTES):
            self._device.write(self.address + offset, poison[: self.n - offset])

    def checksums(self) -> U64:
        """Of every block, over all its planes, as the device has it now."""
        total = np.zeros(self.num_blocks, np.uint64)
        for plane in self.contents():
            # Multiplied, so that two planes with exchanged contents do not give the same sum.
            total = total * np.uint64(0x9E3779B97F4A7C15) + xxh3_64_rows(np.ascontiguousarray(plane))
        return total

    def close(self) -> None:
        """Gives memory of its own back."""
        self._device.free(self.address)


@contextmanager
def connected(daemon: Daemon, cache: EngineCache, instance: str) -> Iterator[Client]:
    """A client that is ready, with this cache as its memory."""
    with Client(
        instance=instance,
        namespace=Namespace(model="gpu", kv_dtype="uint8", hash_scheme="sha256"),
        groups=[cache.group()],
        memory=DeviceMemory(cache.address, cache.n),
        socket=daemon.socket,
    ) as client:
        if not client.wait_ready(DEADLINE_S):
            raise TimeoutError(
                f"the client did not become ready: {client.status.why}\n{daemon.log()[-2_000:]}"
            )
        yield client


def hashes_of(family: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{family}/{number}".encode()).digest() for number in range(count)]


def finish(transfers: Sequence[Transfer]) -> list[Outcome]:
    """Waits for all of them. Raises AssertionError if one was not done."""
    outcomes = [transfer.wait(DEADLINE_S) for transfer in transfers]
    for outcome in outcomes:
        assert outcome.done, str(outcome)
    return outcomes
